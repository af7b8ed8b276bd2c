"""A real service on a real GPU whose kernels fail, hang, or whose memory others take.

No other test may use the GPU at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cupy
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lenet import reference
from lenet.weightfile import WeightFile
from service.errors import ExitCode

RAW = "application/octet-stream"
WEIGHTS = Path(__file__).parents[2] / "weights" / "lenet"
DEFAULT = max(WEIGHTS.glob("*.safetensors"), key=lambda path: int(path.stem))
POISON, HANG = signal.SIGUSR2, signal.SIGUSR1
ON_GPU = ("--device", "cuda", "--fault-injection", "--hang-timeout-s", "2")
MIB = 1 << 20


def answered(service):
    """The status of a prediction; None while nobody listens."""
    try:
        return service.predict()[0]
    except (OSError, http.client.HTTPException):
        return None


def metric(service, name):
    families = text_string_to_metric_families(service.get("/metrics")[1])
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


def strike(service, fault):
    """Inject `fault` into the newest worker, whose next batch gets it; the seconds to recovery."""
    workers = service.started_workers()
    before = len([line for line in service.lines if "injected fault" in line])
    os.kill(workers[-1], fault)
    service.wait_for("the next batch gets an injected fault", before + 1)
    began_s = time.monotonic()
    assert answered(service) == 503
    struck_s = time.monotonic() - began_s
    service.wait_for(f"worker {workers[-1]} ended with 7")
    service.wait_for("ready:", len(workers) + 1)
    assert answered(service) == 200
    return struck_s, time.monotonic() - began_s


@pytest.mark.parametrize("fault", [POISON, HANG])
def test_a_worker_whose_kernel_fails_or_never_ends_is_replaced(start, fault):
    service = start(*ON_GPU).ready()
    assert answered(service) == 200
    struck_s, recovered_s = strike(service, fault)
    # A hang is noticed in ten looks of 0.2 s, of which one may have just passed.
    assert struck_s < (1 if fault == POISON else 3)
    assert recovered_s < 40  # a start, on a machine that runs other tests
    assert metric(service, "lenet_device_losses_total") == 1
    assert "Traceback" not in service.log
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_a_third_loss_within_a_minute_ends_the_service(start):
    service = start(*ON_GPU).ready()
    for _ in range(2):
        strike(service, POISON)
    os.kill(service.started_workers()[-1], POISON)
    service.wait_for("the next batch gets an injected fault", 3)
    assert answered(service) == 503
    assert service.wait() == ExitCode.WORKERS
    assert "more than 2 deaths in 60 s: giving up" in service.log


def test_large_requests_that_arrive_at_once_get_their_own_answers(start):
    # More than there are page-locked buffers, of sizes below, at and above that of a batch.
    limits = ("--max-batch-rows", "1024", "--max-queue-rows", str(24 * 3000))
    committed = ("--weights", str(WEIGHTS.parent), "--default-model", "lenet")
    service = start("--device", "cuda", *limits, *committed).ready()
    images = np.random.default_rng(0).integers(0, 256, (3000, 28, 28), np.uint8)
    weights = WeightFile.read(DEFAULT)
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    exact = reference.softmax(reference.logits(weights.model, tensors, images))

    def ask(seed):
        draw, wrong = random.Random(seed), []
        connection = http.client.HTTPConnection("127.0.0.1", service.port)
        headers = {"Content-Type": RAW, "Accept": RAW}
        with contextlib.closing(connection):
            for _ in range(40):
                rows = draw.choice([1, 400, 1000, 1024, 1025, 3000])
                first = draw.randrange(3001 - rows)
                body = images[first : first + rows].tobytes()
                connection.request("POST", "/predict", body, headers)
                answer = connection.getresponse()
                content = answer.read()
                assert answer.status == 200, content
                got = np.frombuffer(content, "<f4").reshape(rows, 10)
                wrong.append(np.abs(got - exact[first : first + rows]).max())
        return max(wrong)

    with ThreadPoolExecutor(24) as clients:
        assert max(clients.map(ask, range(24))) <= 5e-3


def taken(left_bytes):
    """Memory of the GPU, of which about so many bytes are left to others."""
    gc.collect()  # contexts of earlier tests would be freed later
    cupy.get_default_memory_pool().free_all_blocks()
    blocks = []
    for size in (1024 * MIB, 64 * MIB, 2 * MIB):
        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
            while cupy.cuda.runtime.memGetInfo()[0] >= left_bytes + size:
                blocks.append(cupy.cuda.Memory(size))
    return blocks


def test_a_service_without_enough_gpu_memory_says_so_in_a_line_and_ends(start):
    with_less = taken(100 * MIB)
    try:
        service = start("--device", "cuda")
        code = service.wait()
    finally:
        del with_less
    assert code == ExitCode.BACKEND, service.log
    assert "Traceback" not in service.log
    errors = [line for line in service.lines if "ERROR" in line]
    assert len(errors) == 1, service.log


def test_a_neighbour_that_takes_all_gpu_memory_does_not_disturb_a_running_service(start):
    service = start("--device", "cuda", "--max-batch-rows", "1024").ready()
    neighbour = taken(0)
    try:
        for images in (1, 64, 1024, 5000):
            assert service.predict(images)[0] == 200, service.log
    finally:
        del neighbour
    assert "ERROR" not in service.log


def test_two_contexts_of_each_of_five_models_take_less_than_1_2_gb(start):
    """docs/benchmarks.md: 649 MiB on an H100."""
    free = cupy.cuda.runtime.memGetInfo()[0]  # the first call makes a context of this process
    committed = ("--weights", str(WEIGHTS.parent), "--default-model", "lenet")
    limits = ("--contexts", "2", "--max-batch-rows", "0")
    service = start("--device", "cuda", *committed, *limits).ready()
    assert service.predict(64)[0] == 200
    taken_bytes = free - cupy.cuda.runtime.memGetInfo()[0]
    assert len(json.loads(service.get("/info")[1])["models"]) == 5
    assert 0 < taken_bytes < 1_200_000_000


def test_reloads_do_not_take_gpu_memory(start, write):
    paths = [write("lenet/2", seed=1), write("lenet/3", seed=2)]
    aside = paths[1].with_suffix(".aside")
    service = start("--device", "cuda").ready()
    free = []
    for count in range(60):
        if count % 2:
            aside.rename(paths[1])
        else:
            paths[1].rename(aside)
        service.signal(signal.SIGHUP)
        service.wait_for("reload: 1 replaced", count + 1)
        assert answered(service) == 200
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert min(free[10:]) >= min(free[:10]) - 8 * MIB
    service.signal()
    assert service.wait() == ExitCode.STOPPED


BROKEN = """
from lenet.cuda import kernels

get, call = kernels.Kernels.get, kernels.Kernel.__call__
OURS = ("convolutions", "dense_softmax", "fused_network")


def get_broken(self, source, name, macros):
    planted = {"WARP": "1+"} if name in OURS else {}
    return get(self, source, name, {**macros, **planted})


def call_broken(self, grid, block, *arguments):
    call(self, grid, (2048,) if self._name in OURS else block, *arguments)
"""
PLANTED = {
    "compile": "kernels.Kernels.get = get_broken",
    "launch": "kernels.Kernel.__call__ = call_broken",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_service_whose_kernels_fail_starts_and_answers_by_the_libraries(
    start, fault, tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(f"{BROKEN}\n{PLANTED[fault]}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    committed = ("--weights", str(WEIGHTS.parent), "--models", "lenet")
    service = start("--device", "cuda", *committed).ready()
    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28), np.uint8)
    weights = WeightFile.read(DEFAULT)
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    exact = reference.softmax(reference.logits(weights.model, tensors, images))
    connection = http.client.HTTPConnection("127.0.0.1", service.port)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/predict", images.tobytes(), {"Content-Type": RAW, "Accept": RAW}
        )
        answer = connection.getresponse()
        got = np.frombuffer(answer.read(), np.float32).reshape(4, 10)
    assert answer.status == 200
    assert np.abs(got - exact).max() < 5e-3
    lines = [line for line in service.lines if "cuDNN and cuBLAS compute it instead" in line]
    assert len(lines) == 1, service.log  # for both contexts
    (model,) = json.loads(service.get("/info")[1])["models"]
    names = {"conv1": "cudnn", "conv2": "cudnn", "dense1": "cublas", "dense2": "cublas"}
    assert model["layers"] == dict.fromkeys(("1", "2", "4"), names)
