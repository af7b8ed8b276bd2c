"""Reads and checks a dataset on disk: MNIST, or another of the same form, and its label names.

Four files in IDX format, gzip or not: a magic number, the sizes, then bytes. Other datasets are
Fashion-MNIST, KMNIST, EMNIST digits and letters; the digest of the files goes into the weight file.

Source of the format: Y. LeCun, C. Cortes, C. Burges, "The MNIST database".
"""

from __future__ import annotations

import gzip
import hashlib
import math
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, WIDTH, Images
from lenet.weightfile import MAX_LABEL_CHARACTERS, is_label
from trainer.errors import DatasetUnavailable, InvalidDataset

MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_CLASSES = 256
"""A label is a byte."""

DIGITS = tuple("0123456789")
"""The label names of MNIST."""

_UNSIGNED_BYTE = 0x08


@dataclass(frozen=True, slots=True)
class IdxFile:
    """One of the four: MNIST's name without `.gz`, and the SHA-256 of its uncompressed bytes.

    `pattern` matches the name that it has in any dataset, as emnist-digits-test-images-idx3-ubyte.
    """

    name: str
    sha256: str
    pattern: str

    def candidates(self) -> Iterator[str]:
        """The names that it may have in a folder."""
        dotted = self.name.replace("-idx", ".idx")
        for name in (self.name, dotted):
            yield from (name, f"{name}.gz")

    def find(self, folder: Path) -> Path | None:
        """The file's path in `folder`, or None. MNIST's own names come first.

        Raises:
            InvalidDataset: several files could be it.
        """
        for name in self.candidates():
            if (folder / name).is_file():
                return folder / name
        if not folder.is_dir():
            return None
        names = sorted(
            path.name for path in folder.iterdir() if re.fullmatch(self.pattern, path.name)
        )
        if len(names) > 1:
            raise InvalidDataset(
                f"{folder}: {' and '.join(names)} could both be {self.name}, expected one of them; "
                "keep each dataset in a folder of its own"
            )
        return folder / names[0] if names else None


FILES = (
    IdxFile(
        "train-images-idx3-ubyte",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        r"(?:.*[-_.])?train[-_.]images[-_.]idx3[-_.]ubyte(?:\.gz)?",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        r"(?:.*[-_.])?train[-_.]labels[-_.]idx1[-_.]ubyte(?:\.gz)?",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        r"(?:.*[-_.])?(?:t10k|test)[-_.]images[-_.]idx3[-_.]ubyte(?:\.gz)?",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        r"(?:.*[-_.])?(?:t10k|test)[-_.]labels[-_.]idx1[-_.]ubyte(?:\.gz)?",
    ),
)
"""Files in the order in which `Dataset.sha256` hashes their uncompressed bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """`images` uint8 (n, 28, 28), ink high; `labels` uint8 (n,), the numbers of classes."""

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

        Where one part would lack a class, as of images that are sorted by class, they are the last
        of each class, in proportion, and the first of a class only when nothing else is left.
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
        if not self.is_held_out_by_class(count):
            return Digits(images[:rest], labels[:rest]), Digits(images[rest:], labels[rest:])
        share = np.empty(len(labels))  # of the class's images, counted from the last
        for label in np.unique(labels):
            own = np.flatnonzero(labels == label)[::-1]
            share[own] = (np.arange(len(own)) + 0.5) / len(own)
            share[own[-1]] = 1.0  # the first image stays in training
        held = np.zeros(len(labels), bool)
        held[np.argsort(share, kind="stable")[:count]] = True
        return Digits(images[~held], labels[~held]), Digits(images[held], labels[held])

    def is_held_out_by_class(self, count: int) -> bool:
        """Whether `hold_out` takes the last images of each class instead of the last of all."""
        labels = self.train.labels
        parts = labels[: len(labels) - count], labels[len(labels) - count :]
        return any(len(np.unique(part)) < len(np.unique(labels)) for part in parts)


def read_idx(path: Path) -> tuple[NDArray[np.uint8], bytes]:
    """The array of an IDX file of unsigned bytes, and the file's uncompressed bytes.

    Raises:
        InvalidDataset: unreadable, or its size differs from its header.
    """
    content = uncompressed(path)
    zeros, kind, dimensions = struct.unpack(">HBB", content[:4].ljust(4, b"\xff"))
    if zeros != 0 or kind != _UNSIGNED_BYTE:
        raise InvalidDataset(
            f"{path}: starts at byte 0 with {content[:4].hex(' ') or 'nothing'}, expected 00 00 08 "
            "and the number of dimensions: it is not an IDX file of unsigned bytes"
        )
    if dimensions not in (1, 3):
        raise InvalidDataset(f"{path}: byte 3 says {dimensions} dimensions, expected 1 or 3")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise InvalidDataset(
            f"{path}: ends at byte {len(content)}, within its header, expected {dimensions} sizes"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if 0 in shape:
        raise InvalidDataset(f"{path}: bytes 4 to {start - 1} say {shape}, expected sizes above 0")
    expected = start + math.prod(shape)
    if len(content) != expected:
        raise InvalidDataset(
            f"{path}: has {len(content)} bytes uncompressed, expected {expected} as bytes 4 to "
            f"{start - 1} say {shape}; delete it to have MNIST's downloaded again"
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


def load(folder: Path, classes: int = len(DIGITS), *, transposed: bool = False) -> Dataset:
    """Read the four files of `folder`, whose labels are 0 to `classes` - 1.

    `transposed`: the images are stored column by column, as EMNIST's.

    Raises:
        DatasetUnavailable: there is no such folder, or files are missing: the message names them.
        InvalidDataset: a file is broken, images and labels do not match, or a class has no image.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "no such folder"
        names = ", ".join(file.name for file in FILES)
        raise DatasetUnavailable(
            f"{folder}: {problem}; expected a folder with the four files {names}, each with or "
            "without .gz"
        )
    paths = [file.find(folder) for file in FILES]
    missing = [file.name for file, path in zip(FILES, paths, strict=True) if path is None]
    if missing:
        raise DatasetUnavailable(missing_files_message(folder, missing))
    digest = hashlib.sha256()
    found: list[tuple[Path, NDArray[np.uint8]]] = []
    for path in paths:
        assert path is not None, "bug: a missing file was not noticed"
        array, content = read_idx(path)
        digest.update(content)
        found.append((path, array))
    train = _pair(*found[0], *found[1], classes)
    test = _pair(*found[2], *found[3], classes)
    if transposed:
        train, test = (
            Digits(np.ascontiguousarray(part.images.transpose(0, 2, 1)), part.labels)
            for part in (train, test)
        )
    return Dataset(train, test, digest.hexdigest())


def _pair(
    images_path: Path,
    images: NDArray[np.uint8],
    labels_path: Path,
    labels: NDArray[np.uint8],
    classes: int,
) -> Digits:
    if images.shape[1:] != (HEIGHT, WIDTH):
        raise InvalidDataset(
            f"{images_path}: bytes 4 to 15 say that the images are {images.shape}, expected (n, "
            f"{HEIGHT}, {WIDTH})"
        )
    if labels.shape != images.shape[:1]:
        raise InvalidDataset(
            f"{labels_path}: bytes 4 to 7 say that the labels are {labels.shape}, expected one for "
            f"each of the {len(images)} images of {images_path.name}"
        )
    if labels.max() >= classes:
        wrong = int((labels >= classes).argmax())
        raise InvalidDataset(
            f"{labels_path}: byte {_LABELS_START + wrong} is the label {labels[wrong]}, expected 0 "
            f"to {classes - 1}; --labels FILE names more classes"
        )
    if absent := sorted(set(range(classes)) - set(np.unique(labels).tolist())):
        raise InvalidDataset(
            f"{labels_path}: from byte {_LABELS_START} on no label is {absent[0]}, expected each "
            f"of 0 to {classes - 1}; --labels FILE names fewer classes"
        )
    return Digits(images, labels)


_LABELS_START = 8


def label_names(path: Path | None) -> tuple[str, ...]:
    """The names of the classes in `path`: text in UTF-8, a line for each, in their order.

    Without a file, the digits.

    Raises:
        InvalidDataset: it cannot be read, or a line is no name, or stands there twice.
    """
    if path is None:
        return DIGITS
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CLASSES * (4 * MAX_LABEL_CHARACTERS + 2) + 1).decode("utf-8")
    except OSError as exc:
        raise InvalidDataset(f"{path}: cannot be read ({exc.strerror})") from exc
    except UnicodeDecodeError as exc:
        raise InvalidDataset(f"{path}: byte {exc.start} is not UTF-8, expected text") from exc
    names = tuple(text.splitlines())
    if not 2 <= len(names) <= MAX_CLASSES:
        raise InvalidDataset(
            f"{path}: has {len(names)} lines, expected 2 to {MAX_CLASSES}, a label name in each"
        )
    for number, name in enumerate(names, 1):
        if not is_label(name):
            raise InvalidDataset(
                f"{path}: line {number} is {name[:40]!r}, expected a name of 1 to "
                f"{MAX_LABEL_CHARACTERS} printable characters"
            )
        if (first := names.index(name) + 1) < number:
            raise InvalidDataset(
                f"{path}: line {number} is {name!r}, as is line {first}; expected different names"
            )
    return names


def missing_files_message(folder: Path, names: Sequence[str], reason: str = "") -> str:
    """The message for missing files; `reason` says why they were not downloaded."""
    return (
        f"{folder}: lacks {', '.join(names)}{reason}; put the files there, with or without .gz, or "
        "name the folder that holds them with --data FOLDER"
    )
