import gzip
import struct

import numpy as np
import pytest

from trainer.mnist import FILES, Dataset, Digits


def idx_bytes(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def synthetic_digits(count, seed):
    """Each class a bright bar at its own height, with noise: learnt in one epoch."""
    random = np.random.default_rng(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    random.shuffle(labels)
    images = random.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[3 + 2 * label : 5 + 2 * label, 6:22] = 230
    return Digits(images, labels)


@pytest.fixture
def digits():
    return synthetic_digits


@pytest.fixture
def tiny():
    """400 training and 60 test images."""
    return Dataset(synthetic_digits(400, 0), synthetic_digits(60, 1), "0" * 64)


@pytest.fixture
def write_idx(tmp_path):
    """Write a dataset's four files, gzip or not, into a folder of tmp_path, and return it."""

    def write(dataset, packed=False):
        folder = tmp_path / "digits"
        folder.mkdir(exist_ok=True)
        parts = (dataset.train.images, dataset.train.labels, dataset.test.images)
        for file, array in zip(FILES, (*parts, dataset.test.labels), strict=True):
            content = idx_bytes(array)
            if packed:
                (folder / f"{file.name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / file.name).write_bytes(content)
        return folder

    return write
