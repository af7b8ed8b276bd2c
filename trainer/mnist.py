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

MAX_FILE_BYTES = 1024 * 1024 * 1024
MAX_CLASSES = 256
"""A label is a byte."""

DIGITS = tuple("0123456789")
"""The label names of MNIST."""

_UNSIGNED_BYTE = 0x08


MOST_HELD_OUT = 5_000
"""Maximum validation images, unless --validation-images says more."""


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
    """`images` uint8 (n, 28, 28), ink high; `labels` uint8 (n,), the numbers of classes.

    `files`: the picture that each image was made of, None where images were not made of pictures.
    """

    images: Images
    labels: NDArray[np.uint8]
    files: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Digits:
        """Some of the images, with their labels and files."""
        files = None if self.files is None else self.files[chosen]
        return Digits(self.images[chosen], self.labels[chosen], files)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """The parts to train and to test on, a digest of the data, and the names of its classes.

    Of files in IDX format `sha256` is that of the uncompressed bytes in the order of `FILES`.
    `validation`: the images for it, where the data has some of its own. `pixels`: the fewest and
    the most of a picture, where images were made of pictures.
    """

    train: Digits
    test: Digits
    sha256: str
    names: tuple[str, ...] = DIGITS
    validation: Digits | None = None
    pixels: tuple[int, int] | None = None

    def hold_out(self, count: int = 0) -> tuple[Digits, Digits]:
        """(training, validation): `count` training images, 0 for a tenth, are for validation.

        A tenth is at most `MOST_HELD_OUT`. Of MNIST they are the last ones, of other data those
        that `divided` draws. Data with validation images of its own is divided already. They do not
        depend on the seed, so runs can be compared.

        Raises:
            InvalidDataset: no images would be left to train on, or none of a class; or the data has
                another number of validation images.
        """
        if self.validation is not None:
            if count not in (0, len(self.validation)):
                raise InvalidDataset(
                    f"the data has {len(self.validation)} validation images of its own, and "
                    f"--validation-images is {count}; remove it"
                )
            return self.train, self.validation
        labels, images = self.train.labels, len(self.train)
        classes = len(np.unique(labels))
        count = count or max(classes, min(MOST_HELD_OUT, images // 10))
        rest = images - count
        if rest < 1:
            raise InvalidDataset(
                f"the training set has {images} images, expected more than the {count} held "
                "out for validation; lower --validation-images"
            )
        if self.sha256 == _SHA256 and len(np.unique(labels[rest:])) == classes:
            return self.train[:rest], self.train[rest:]
        return divided(self.train, count, self.names, "the training set")


_SHA256 = "b2d8f5bf39174ee5ffeefa97e42d673c35432b411bb5d1f74fbbeddae7f1690a"
"""Of MNIST: `Dataset.sha256`."""


def divided(digits: Digits, count: int, names: Sequence[str], where: str) -> tuple[Digits, Digits]:
    """The rest, and about `count` images: of each class the same share, at least one.

    They are drawn by a digest of the pixels, so neither their order nor a seed changes them, and
    equal images are on one side. `where` begins the message of an error.

    Raises:
        InvalidDataset: `count` is less than one of each class, or a class has too few images.
    """
    labels, hashes = digits.labels, image_hashes(digits.images)
    share = np.empty(len(labels))  # of the class's different images
    classes = np.unique(labels)
    if count < len(classes):
        raise InvalidDataset(
            f"{where}: got {count} images to hold out, expected at least one of each of "
            f"{len(classes)} classes"
        )
    for label in classes:
        own = np.flatnonzero(labels == label)
        different, rank = np.unique(hashes[own], return_inverse=True)
        if len(different) < 2:
            raise InvalidDataset(
                f"{where}: of the class {names[label]} it has one image{_REPEATED[len(own) > 1]}, "
                "expected at least 3: to train, validate and test on"
            )
        places = (np.arange(len(different)) + 0.5) / len(different)
        places[0], places[-1] = 0, 1
        share[own] = places[rank]
    held = np.isin(hashes, hashes[np.argsort(share, kind="stable")[:count]])
    if lost := sorted(set(classes) - set(labels[~held])):
        raise InvalidDataset(
            f"{where}: no image of the class {names[lost[0]]} would be left to train on, expected "
            "more images of it that differ from those of other classes"
        )
    return digits[~held], digits[held]


_REPEATED = ("", " that is repeated")


def image_hashes(images: Images) -> NDArray[np.uint64]:
    """A number (n,) of each image: of equal images the same, of others by chance in 2^64."""
    digests = b"".join(hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images)
    return np.frombuffer(digests, np.uint64)


def read_idx(path: Path) -> tuple[NDArray[np.uint8], bytes]:
    """The array of an IDX file of unsigned bytes, and the file's uncompressed bytes.

    Raises:
        InvalidDataset: unreadable, or its size differs from its header.
    """
    content = uncompressed(path, "; delete it to have MNIST's downloaded again")
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


def uncompressed(path: Path, advice: str = "") -> bytes:
    """The content of a file, decompressed if it is gzip; `advice` ends the message of an error.

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
        raise InvalidDataset(f"{path}: cannot be read ({exc}){advice}") from exc
    if len(content) > MAX_FILE_BYTES:
        raise InvalidDataset(f"{path}: has more than the expected {MAX_FILE_BYTES} bytes")
    return content


def load(
    folder: Path,
    classes: int = len(DIGITS),
    *,
    transposed: bool = False,
    complete: bool = True,
) -> Dataset:
    """Read the four files of `folder`, whose labels are 0 to `classes` - 1.

    `transposed`: the images are stored column by column, as EMNIST's. `complete`: each class has to
    have an image.

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
    train = _pair(*found[0], *found[1], classes, complete)
    test = _pair(*found[2], *found[3], classes, complete)
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
    complete: bool,
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
    if complete and (absent := sorted(set(range(classes)) - set(np.unique(labels).tolist()))):
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
