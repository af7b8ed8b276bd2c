"""Reads and checks the MNIST digits on disk.

Four files in IDX format, gzip or not: a magic number, the sizes, then bytes. Another dataset of the
same form is accepted, too: the digest of the files goes into the weight file.

Source of the format: Y. LeCun, C. Cortes, C. Burges, "The MNIST database".
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, WIDTH, Images
from trainer.errors import DatasetUnavailable, InvalidDataset

MAX_FILE_BYTES = 256 * 1024 * 1024
CLASSES = 10

_UNSIGNED_BYTE = 0x08


@dataclass(frozen=True, slots=True)
class IdxFile:
    """One of the four: its name without `.gz` and the SHA-256 of its uncompressed bytes."""

    name: str
    sha256: str

    def candidates(self) -> Iterator[str]:
        """The names that it may have in a folder."""
        dotted = self.name.replace("-idx", ".idx")
        for name in (self.name, dotted):
            yield from (name, f"{name}.gz")

    def find(self, folder: Path) -> Path | None:
        """Its path in `folder`, or None."""
        paths = (folder / name for name in self.candidates())
        return next((path for path in paths if path.is_file()), None)


FILES = (
    IdxFile(
        "train-images-idx3-ubyte",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
"""In the order in which `Dataset.sha256` hashes their uncompressed bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """`images` uint8 (n, 28, 28), ink high; `labels` uint8 (n,), 0 to 9."""

    images: Images
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """The two parts, and the SHA-256 of the uncompressed files in the order of `FILES`."""

    train: Digits
    test: Digits
    sha256: str

    def hold_out(self, count: int) -> tuple[Digits, Digits]:
        """(training, validation): the last `count` training images are for validation.

        They do not depend on the seed, so runs can be compared.

        Raises:
            InvalidDataset: no images would be left to train on.
        """
        images, labels = self.train.images, self.train.labels
        rest = len(images) - count
        if rest < 1:
            raise InvalidDataset(
                f"the training set has {len(images)} images, expected more than the {count} held "
                "out for validation; lower --validation-images"
            )
        return Digits(images[:rest], labels[:rest]), Digits(images[rest:], labels[rest:])


def read_idx(path: Path) -> tuple[NDArray[np.uint8], bytes]:
    """The array of an IDX file of unsigned bytes, and the file's uncompressed bytes.

    Raises:
        InvalidDataset: unreadable, or its size differs from its header.
    """
    content = uncompressed(path)
    zeros, kind, dimensions = struct.unpack(">HBB", content[:4].ljust(4, b"\xff"))
    if zeros != 0 or kind != _UNSIGNED_BYTE:
        raise InvalidDataset(
            f"{path}: starts with {content[:4].hex(' ') or 'nothing'}, expected 00 00 08 and the "
            "number of dimensions: it is not an IDX file of unsigned bytes"
        )
    if dimensions not in (1, 3):
        raise InvalidDataset(f"{path}: has {dimensions} dimensions, expected 1 or 3")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise InvalidDataset(f"{path}: ends within its header, expected {dimensions} sizes")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if 0 in shape:
        raise InvalidDataset(f"{path}: its header says {shape}, expected sizes above 0")
    expected = start + math.prod(shape)
    if len(content) != expected:
        raise InvalidDataset(
            f"{path}: has {len(content)} bytes uncompressed, expected {expected} as its header "
            f"says {shape}; delete it to have it downloaded again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape), content


def uncompressed(path: Path) -> bytes:
    """The content of a file, decompressed if it is gzip.

    Raises:
        InvalidDataset: unreadable, cut short, or larger than `MAX_FILE_BYTES`.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                with gzip.open(raw) as unpacked:
                    content = unpacked.read(MAX_FILE_BYTES + 1)
            else:
                content = raw.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as exc:
        raise InvalidDataset(
            f"{path}: cannot be read ({exc}); delete it to have it downloaded again"
        ) from exc
    if len(content) > MAX_FILE_BYTES:
        raise InvalidDataset(f"{path}: has more than the expected {MAX_FILE_BYTES} bytes")
    return content


def load(folder: Path, files: Sequence[IdxFile] = FILES) -> Dataset:
    """Read the four files of `folder`.

    Raises:
        DatasetUnavailable: some are missing; the message names them.
        InvalidDataset: a file is broken, or images and labels do not match.
    """
    missing = [file.name for file in files if file.find(folder) is None]
    if missing:
        raise DatasetUnavailable(missing_files_message(folder, missing))
    digest = hashlib.sha256()
    arrays: list[NDArray[np.uint8]] = []
    for file in files:
        path = file.find(folder)
        assert path is not None, f"bug: {file.name} was found a moment ago"
        array, content = read_idx(path)
        digest.update(content)
        arrays.append(array)
    train = _pair(folder, "train", arrays[0], arrays[1])
    test = _pair(folder, "t10k", arrays[2], arrays[3])
    return Dataset(train, test, digest.hexdigest())


def _pair(folder: Path, part: str, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Digits:
    if images.shape[1:] != (HEIGHT, WIDTH):
        raise InvalidDataset(
            f"{folder}: the {part} images are {images.shape}, expected (n, {HEIGHT}, {WIDTH})"
        )
    if labels.shape != images.shape[:1]:
        raise InvalidDataset(
            f"{folder}: the {part} labels are {labels.shape}, expected one for each of the "
            f"{len(images)} images"
        )
    if labels.max() >= CLASSES:
        raise InvalidDataset(
            f"{folder}: a {part} label is {labels.max()}, expected 0 to {CLASSES - 1}"
        )
    return Digits(images, labels)


def missing_files_message(folder: Path, names: Sequence[str], reason: str = "") -> str:
    """What to do about missing files; `reason` says why they were not downloaded."""
    missing = f"MNIST: {', '.join(names)} not in {folder} {reason}".rstrip()
    return (
        f"{missing}; put the files there, with or without .gz, or name the folder that holds them "
        "with --data FOLDER"
    )
