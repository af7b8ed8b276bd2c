"""The arithmetic of the engine benchmark, and its contexts over the CPU backend."""

import json
import multiprocessing
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.engine import (
    ContextFailed,
    digits,
    exact,
    main,
    measure_gpus,
    measure_pool,
    operations,
    rates,
)
from benchmarks.engine_report import (
    Document,
    FigureUnavailable,
    draw,
    gpus_line,
    limits_line,
    line,
    merged,
    pool_line,
)
from lenet import reference
from lenet.cpu import CpuBackend
from lenet.errors import BackendUnavailable
from lenet.model import named

SHORT_S = 1e-6  # one batch
LIMITS = {
    "copy_gb_s": 55.0,
    "matmul_tflops": 790.0,
    "copy_images_per_s": 70e6,
    "matmul_images_per_s": 172e6,
}


class PlanInPlace:
    """The CPU backend's plan, which keeps its images as the CUDA one does."""

    def __init__(self, plan):
        self._plan, self._images = plan, None

    def run(self, images):
        self._images = images
        return self._plan.run(images)

    def run_in_place(self, rows):
        return self._plan.run(self._images[:rows])


class CpuInPlace(CpuBackend):
    def plan(self, weights, rows):
        return PlanInPlace(super().plan(weights, rows))


@contextmanager
def open_cpu(device):
    yield CpuInPlace()


@contextmanager
def open_nothing(device):
    raise BackendUnavailable("there is no such device")
    yield


def bucket(rows, precision="fp16", device_us=10.0, compile_us=None):
    return {
        "rows": rows,
        "precision": precision,
        "device_us": device_us,
        "device_spread_us": [9.0, 12.0],
        "host_us": 20.0,
        "host_p99_us": 30.0,
        "images_per_s": 1e6 * rows / device_us,
        "max_error": 3e-4,
        "way": "fused_network",
        "torch": {"eager_us": 110.0, "graph_us": 47.0, "compile_us": compile_us},
    }


def test_operations_are_those_of_convolutions_and_products():
    # 2 (20 x 24 x 24 x 25 + 50 x 8 x 8 x 500 + 500 x 800 + 10 x 500)
    assert operations(named("lenet")) == 4_586_000


def test_limits_follow_from_the_times_of_a_copy_and_a_product():
    found = rates(named("lenet"), copy_us=2**28 / 50e3, product_us=2 * 8192**3 / 700e6)
    assert found["copy_gb_s"] == pytest.approx(50)
    assert found["matmul_tflops"] == pytest.approx(700)
    assert found["copy_images_per_s"] == pytest.approx(50e9 / 784)
    assert found["matmul_images_per_s"] == pytest.approx(700e12 / 4_586_000)


def test_digits_differ_and_exact_is_the_reference(random_weights):
    weights = random_weights("mlp")
    images = digits(weights, 5)
    assert (images.shape, images.dtype) == ((5, 28, 28), np.uint8)
    assert len({image.tobytes() for image in images}) == 5
    expected = reference.softmax(reference.logits(weights.model, weights.tensors, images))
    np.testing.assert_allclose(exact(weights, images), expected, atol=1e-5)


def test_a_pool_is_measured_for_every_number_of_contexts_and_batch_size(random_weights, tiny):
    weights = random_weights(tiny)
    found = measure_pool(open_cpu, weights, rows=(1, 4), counts=(1, 2), duration_s=SHORT_S)
    assert [(one["contexts"], one["rows"]) for one in found] == [(1, 1), (2, 1), (1, 4), (2, 4)]
    assert all(one["images_per_s"] > 0 for one in found)


def test_several_devices_are_compared_with_one_in_threads_and_in_processes(tiny_file):
    found = measure_gpus(open_cpu, tiny_file, gpus=2, count=1, rows=2, duration_s=SHORT_S)
    assert (found["n"], found["contexts"], found["rows"]) == (2, 1, 2)
    for kind in ("threads", "processes"):
        rates = found[kind]
        assert rates["ratio"] == rates["images_per_s"] / rates["one_gpu_images_per_s"] > 0


@contextmanager
def open_in_parent(device):
    if multiprocessing.parent_process() is not None:
        raise BackendUnavailable("no such device in a process")
    yield CpuInPlace()


def test_a_process_that_fails_reports_its_error(tiny_file):
    with pytest.raises(ContextFailed, match="no such device in a process"):
        measure_gpus(open_in_parent, tiny_file, gpus=1, count=1, rows=2, duration_s=SHORT_S)


def test_buckets_are_replaced_by_rows_and_precision_and_other_keys_as_a_whole():
    before = {"buckets": [bucket(1), bucket(2), bucket(1, "fp32")], "pool": {"rows": 256}}
    after = merged(before, {"buckets": [bucket(16), bucket(2, device_us=5.0)], "pool": {}})
    assert [(one["precision"], one["rows"], one["device_us"]) for one in after["buckets"]] == [
        *(("fp16", 1, 10.0), ("fp16", 2, 5.0), ("fp16", 16, 10.0)),
        ("fp32", 1, 10.0),
    ]
    assert after["pool"] == {}


def test_results_of_another_benchmark_in_the_same_file_are_kept(tmp_path):
    path = tmp_path / "new" / "engine.json"
    document = Document(path)
    assert not list(tmp_path.iterdir())
    document.add({"device": "NVIDIA H200"})
    path.write_text(json.dumps({**json.loads(path.read_text()), "workers": [1, 2]}))
    document.add({"buckets": [bucket(1)]})
    written = json.loads(path.read_text())
    assert written == document.content
    assert (written["device"], written["workers"], len(written["buckets"])) == (
        *("NVIDIA H200", [1, 2]),
        1,
    )


def test_a_line_compares_with_the_best_of_pytorch():
    assert line(bucket(1)).split()[-3] == "4.7"  # 47 us of a CUDA graph over 10 us
    alone = bucket(1) | {"torch": {"eager_us": None, "graph_us": None, "compile_us": None}}
    assert line(alone).split()[-3] == "-"


def test_rates_are_printed_with_their_limits():
    assert "55.0 GB/s (70 M images/s)" in limits_line(LIMITS)
    found = {"contexts": 2, "rows": 4096, "images_per_s": 21e6}
    assert pool_line(found, LIMITS).endswith("21.00 M images/s, 0.30 of the copy limit")
    assert pool_line(found, {}).endswith("21.00 M images/s")
    rates = {"one_gpu_images_per_s": 20e6, "images_per_s": 39e6, "ratio": 1.95}
    found = {"n": 2, "contexts": 2, "rows": 4096, "threads": rates}
    assert "39.00 M images/s, 1.95 times one GPU's 20.00 M" in gpus_line(found, "threads")


def test_a_figure_is_drawn_of_the_file(tiny_file, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `figure` is not installed")
    path, png = tmp_path / "engine.json", tmp_path / "new" / "engine.png"
    content = {"buckets": [bucket(1, compile_us=40.0), bucket(4, "fp32")], "limits": LIMITS}
    path.write_text(json.dumps(content))
    command = [f"--weights={tiny_file}", f"--json={path}", "--only=figure", f"--figure={png}"]
    assert main(command) == 0
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert json.loads(path.read_text()) == content
    with pytest.raises(FigureUnavailable, match="--only buckets"):
        draw({}, png)
