"""Symbols that are no digits: trained from four files, and served under their own names."""

import gzip
import struct
import subprocess
import sys

import httpx
import numpy as np
import pytest

from tests.service_process import PATIENCE_S, PROJECT, Service

NAMES = ("ring", "cross", "square", "bar")


def drawn(name, y, x, size):
    """A symbol at (y, x), `size` pixels to each side, on 28 x 28."""
    rows, columns = np.mgrid[:28, :28]
    down, right = np.abs(rows - y), np.abs(columns - x)
    distance = np.hypot(down, right)
    shape = {
        "ring": np.abs(distance - size) < 1.3,
        "cross": (np.minimum(down, right) < 1.3) & (np.maximum(down, right) <= size),
        "square": np.abs(np.maximum(down, right) - size) < 1.3,
        "bar": (down < 1.8) & (right <= size),
    }[name]
    return np.where(shape, 255, 0).astype(np.uint8)


def symbols(count, seed):
    random = np.random.default_rng(seed)
    labels = random.integers(0, len(NAMES), count).astype(np.uint8)
    places = zip(*random.uniform([[11], [11], [5]], [[17], [17], [9]], (3, count)), strict=True)
    images = [drawn(NAMES[label], *place) for label, place in zip(labels, places, strict=True)]
    return np.array(images), labels


def write(path, array):
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


@pytest.mark.process
def test_other_symbols_are_trained_and_served_with_their_names(tmp_path):
    data, weights = tmp_path / "symbols", tmp_path / "weights"
    data.mkdir()
    for part, count in (("train", 1200), ("test", 100)):
        images, labels = symbols(count, count)
        write(data / f"symbols-{part}-images-idx3-ubyte.gz", images)
        write(data / f"symbols-{part}-labels-idx1-ubyte.gz", labels)
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    command = [sys.executable, "-m", "trainer", "fit", "--model", "lenet-6-16", "--epochs", "3"]
    command += ["--batch", "20", "--rate", "0.05", "--validation-images", "100", "--device", "cpu"]
    command += ["--data", data, "--labels", tmp_path / "names.txt", "--out", weights]
    command += ["--checkpoints", tmp_path / "checkpoints", "--runs", tmp_path / "runs"]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
    service = Service(["--port", "0", "--grpc-port", "0", "--weights", str(weights)], tmp_path)
    try:
        service.ready()
        images, labels = symbols(50, 7)
        headers = {"Content-Type": "application/octet-stream"}
        url = f"http://127.0.0.1:{service.port}"
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            (model,) = client.get("/info").json()["models"]
            answer = client.post("/predict", content=images.tobytes(), headers=headers).json()
        assert model["labels"] == list(NAMES)
        assert model["accuracy"] > 0.95
        names = [prediction["name"] for prediction in answer["predictions"]]
        right = sum(name == NAMES[label] for name, label in zip(names, labels, strict=True))
        assert right >= 46
    finally:
        service.end()
