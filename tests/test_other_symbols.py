"""Symbols that are no digits: trained from four files, and served under their own names."""

import gzip
import subprocess
import sys

import httpx
import numpy as np
import pytest

from tests.service_process import PATIENCE_S, PROJECT, Service
from tests.trainer.conftest import idx_bytes, synthetic_digits

NAMES = ("top", "upper", "middle", "lower")


def symbols(count, seed):
    """Bars at as many heights as there are names, sorted by them."""
    digits = synthetic_digits(3 * count, seed)
    kept = np.flatnonzero(digits.labels < len(NAMES))[:count]
    order = kept[np.argsort(digits.labels[kept], kind="stable")]
    return digits.images[order], digits.labels[order]


@pytest.mark.process
def test_other_symbols_are_trained_and_served_with_their_names(tmp_path):
    data, weights = tmp_path / "symbols", tmp_path / "weights"
    data.mkdir()
    for part, count in (("train", 600), ("test", 100)):
        images, labels = symbols(count, count)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = data / f"symbols-{part}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(idx_bytes(array)))
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    command = [sys.executable, "-m", "trainer", "fit", "--model", "lenet-6-16", "--epochs", "3"]
    command += ["--batch", "20", "--rate", "0.05", "--validation-images", "100", "--device", "cpu"]
    command += ["--data", data, "--labels", tmp_path / "names.txt", "--out", weights]
    command += ["--checkpoints", tmp_path / "checkpoints", "--runs", tmp_path / "runs"]
    done = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True)
    assert "\n500 training, 100 validation, 100 test images\n" in done.stdout
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
