import json

import numpy as np
import pytest

from benchmarks.multi_gpu import Outcome, compared, overlap


def test_several_gpus_are_compared_with_one():
    def outcome(last, weight=1.0):
        tensors = {"w": np.full(3, weight, np.float32)}
        return Outcome(np.array([2.0, last], np.float32), 100.0, tensors)

    found = compared(outcome(0.5), [outcome(0.501), outcome(0.501)])
    assert found["relative_difference"] == pytest.approx(2e-3, rel=0.02)
    assert found["relative_difference_of_mean"] == pytest.approx(4e-4, rel=0.1)
    assert found["same_weights_on_every_rank"]
    assert not compared(outcome(0.5), [outcome(0.5), outcome(0.5, 2.0)])[
        "same_weights_on_every_rank"
    ]


def test_the_overlap_of_sums_counts_each_moment_once(tmp_path):
    def kernel(name, start_us, stop_us, device=0):
        times = {"ts": start_us, "dur": stop_us - start_us}
        return {"cat": "kernel", "name": name, "args": {"device": device}, **times}

    events = [
        *(kernel("ncclDevKernel", 10, 20), kernel("ncclDevKernel", 40, 50)),
        *(kernel("gemm", 0, 14), kernel("relu", 12, 15), kernel("late", 45, 60)),
        *(kernel("gemm", 10, 20, device=1), {"cat": "cpu_op", "name": "nccl"}),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert overlap(path) == {
        "nccl_kernels": 2,
        "nccl_us": 20,
        "overlapped_us": 10,
        "overlapped_share": 0.5,
        "beside": ["gemm", "late", "relu"],
    }
