"""Models loaded and unloaded on a GPU that computes for others at the same time.

No other test may use the GPU at the same time.
"""

from __future__ import annotations

import contextlib
import json
import threading
from http.client import HTTPConnection

import cupy
import numpy as np
import pytest

from lenet import reference
from lenet.model import named
from service.errors import ExitCode

KEY, RAW = "a-key-of-an-administrator", "application/octet-stream"
TOLERANCE = 5e-3
"""Largest ||got - expected|| / ||expected|| of a request's probabilities in fp16."""
MIB = 1 << 20


def post(connection, path, body, headers):
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    return response.status, response.headers["X-Model-Version"], response.read()


@pytest.fixture
def images():
    """Images of a request of one, one that fills half a batch, and one that is split."""
    generator = np.random.default_rng()
    return {rows: generator.integers(0, 256, (rows, 28, 28), np.uint8) for rows in (1, 64, 200)}


@pytest.fixture
def write_named(folder, random_weights):
    """`write_named("mlp", 2, seed)` puts a version of an architecture into the folder."""

    def write(name, version, seed):
        weights = random_weights(named(name), seed)
        (folder / name).mkdir(exist_ok=True)
        weights.write(folder / name / f"{version}.safetensors")
        return weights

    return write


def probabilities(weights, images):
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    return reference.softmax(reference.logits(weights.model, tensors, images))


@pytest.mark.parametrize("workers", [1, 2])
def test_models_come_and_go_while_others_are_served(start, write_named, images, workers):
    """Answers of other models stay right, and the memory of unloaded ones is freed."""
    written = {
        (name, version): write_named(name, int(version), seed)
        for seed, (name, version) in enumerate(
            [("lenet", "1"), ("lenet", "2"), ("mlp", "3"), ("mlp", "4"), ("cnn-32-64", "1")]
        )
    }
    expected = {
        (*key, rows): probabilities(weights, some)
        for key, weights in written.items()
        for rows, some in images.items()
    }
    flags = ("--device", "cuda", "--versions", "latest:2", "--admin-keys", KEY)
    flags = (*flags, "--workers", str(workers), "--max-batch-rows", "128")
    service = start(*flags).ready(workers)
    over, wrong, answered = threading.Event(), [], dict.fromkeys(expected, 0)

    def ask(name, version):
        headers = {"Content-Type": RAW, "Accept": RAW}
        path = f"/predict?model={name}&version={version}"
        with contextlib.closing(HTTPConnection("127.0.0.1", service.port)) as connection:
            while not over.is_set():
                for rows, some in images.items():
                    status, by, body = post(connection, path, some.tobytes(), headers)
                    if status == 404 and name == "cnn-32-64":
                        continue
                    exact = expected[name, version, rows]
                    got = np.frombuffer(body, "<f4").reshape(-1, 10) if status == 200 else None
                    if got is None or by != version:
                        wrong.append((name, version, rows, status, by, body[:200]))
                        return
                    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
                    if not error <= TOLERANCE:
                        wrong.append((name, version, rows, error))
                        return
                    answered[name, version, rows] += 1

    def change(work):
        headers = {"Authorization": f"Bearer {KEY}"}
        with contextlib.closing(HTTPConnection("127.0.0.1", service.port)) as connection:
            path = f"/v2/repository/models/cnn-32-64/{work}"
            status, _, body = post(connection, path, json.dumps({}), headers)
            assert status == 200, body

    threads = [threading.Thread(target=ask, args=key) for key in written]
    for thread in threads:
        thread.start()
    free = []
    try:
        for _ in range(20):
            change("unload")
            free.append(cupy.cuda.runtime.memGetInfo()[0])
            change("load")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert min(answered.values()) > 0
    assert min(free[5:]) >= min(free[:5]) - 8 * MIB
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "ERROR" not in service.log
    assert "Traceback" not in service.log
