"""The weight files that the repository carries are what their card says."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from lenet.cpu import CpuBackend
from lenet.weightfile import WeightFile
from trainer.mnist import load

pytestmark = pytest.mark.process  # computes the 10,000 test images

WEIGHTS = Path(__file__).parents[2] / "weights"
CARD = (WEIGHTS / "README.md").read_text()
# Those that the card names; other files in the folder may be somebody's own.
FILES = [WEIGHTS / name for name in re.findall(r"`([\w-]+/\d+\.safetensors)`", CARD)]

LEAST = {
    "lenet": 0.995,
    "lenet-classic": 0.99,
    "lenet-6-16": 0.99,
    "cnn-32-64": 0.992,
    "mlp": 0.983,
}
"""The accuracy below which a file of an architecture is not worth shipping."""


@pytest.mark.states(
    "documents",
    "weights/README.md: accuracy, wrong images, digests, commands; the accuracy in each file, "
    "which is that of `/info`",
    found="the 10,000 MNIST test images, classified by the file; the digest of its bytes",
)
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(WEIGHTS)))
def test_a_weight_file_is_as_accurate_as_it_and_its_card_say(path, mnist_folder):
    weights, dataset = WeightFile.read(path), load(mnist_folder)
    plan = CpuBackend().plan(weights, 500)
    starts = range(0, len(dataset.test), 500)
    answers = [plan.logits(dataset.test.images[at : at + 500]).argmax(axis=1) for at in starts]
    right = int(np.count_nonzero(np.concatenate(answers) == dataset.test.labels))
    assert weights.training.accuracy == right / len(dataset.test)
    assert weights.training.accuracy >= LEAST[path.parent.name]
    assert weights.training.dataset_sha256 == dataset.sha256
    for fact in (
        hashlib.sha256(path.read_bytes()).hexdigest(),
        weights.training.command,
        weights.training.dataset_sha256,
        f"{weights.training.accuracy:.2%} ({len(dataset.test) - right} of 10,000 wrong)",
    ):
        assert fact in CARD
