"""Reads a dataset in any of the forms that `--data` takes, with the names of its classes.

    FOLDER/CLASS/*.png               a folder of pictures for each class
    FOLDER/train, validation, test   such folders, or train.csv, train.npz, ...: the parts
    FOLDER/train-images-idx3-ubyte   and the three other files of MNIST's form, see `trainer.mnist`
    FILE.npz                         x_train, y_train, and x_test, y_test, x_validation,
                                     y_validation where they are; or images, labels
    FILE.csv                         a line for each image: its label, 784 pixels; with a header or
                                     without, as .csv.gz too

Sources: Keras' mnist.npz; Kaggle's "Digit Recognizer".
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from lenet.weightfile import GOLDEN_IMAGES, MAX_LABEL_CHARACTERS, is_label
from trainer import mnist
from trainer.errors import DatasetUnavailable, InvalidDataset, InvalidImport
from trainer.mnist import MAX_CLASSES, Dataset, Digits, label_names
from trainer.pictures import class_folders, read_pictures, visible
from trainer.tensor_files import read_npz

Part: TypeAlias = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
_TABLES = (".npz", ".csv", ".csv.gz")

TEST_SHARE = 0.2
"""The share of the images that are for testing, where the data has no test images of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What is in a path: the names of the classes, the parts, and a SHA-256 of all of it.

    Of data that is not divided, `parts` has "train" alone. `pixels` are the sizes of the pictures
    that the images were made of, empty where they were not made of pictures.
    """

    names: tuple[str, ...]
    parts: Mapping[Part, Digits]
    sha256: str
    pixels: NDArray[np.int64]

    def all(self) -> Digits:
        """The images of all parts."""
        parts = list(self.parts.values())
        files = [part.files for part in parts if part.files is not None]
        return Digits(
            np.concatenate([part.images for part in parts]),
            np.concatenate([part.labels for part in parts]),
            np.concatenate(files) if len(files) == len(parts) else None,
        )


def class_names(
    path: Path, labels: Path | None, before: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """The names of the classes of `path`, in order, without reading images.

    They are those of the file `labels`, else of folders of pictures, else `before` or the digits.
    `before` are the classes of the file that training starts from: folders with the same names are
    in its order.

    Raises:
        InvalidDataset: a name cannot be one, or stands there twice, or there are too many; or
            folders have some of the classes `before` and no other.
    """
    folder = _pictures(path)
    if labels is not None or folder is None:
        return label_names(labels) if labels is not None or before is None else before
    names = tuple(class_folders(folder))
    if not 2 <= len(names) <= MAX_CLASSES:
        found = f"the folder {names[0]} alone" if names else "no folder"
        raise InvalidDataset(
            f"{folder}: has {found if len(names) < 2 else f'{len(names)} folders'}, expected 2 to "
            f"{MAX_CLASSES}, a folder with pictures for each class"
        )
    for name in names:
        if not is_label(name):
            raise InvalidDataset(
                f"{folder}: has a folder {name[:40]!r}, expected a name of 1 to "
                f"{MAX_LABEL_CHARACTERS} printable characters"
            )
    if before is None or not set(names) <= set(before):
        return names
    # From 40 images each of 1 and 7, lenet-6-16 of 99.4 % had 85.9 % of all digits (CPU, 20 epochs,
    # 2026-11-27).
    if missing := [name for name in before if name not in names]:
        raise InvalidDataset(
            f"{folder}: has no folder {', '.join(missing[:12])}{', ...' if missing[12:] else ''}, "
            "expected pictures of each class of the file of --from, which forgets those that it is "
            "not trained on; --labels FILE with the names of the folders trains these alone"
        )
    return before


def read(
    path: Path,
    names: Sequence[str] | None = None,
    *,
    transposed: bool = False,
    complete: bool = True,
    report: Callable[[str], None] = print,
) -> Found:
    """Read `path`, whose classes are `names`; without them those of `class_names`.

    `transposed`: the images of files, not pictures, are stored column by column, as EMNIST's.
    `complete`: each part has to have every class; without it a class may be missing, as in images
    that a network is only asked about. `report` is called with a line for what takes long.

    Raises:
        DatasetUnavailable: nothing there has one of the forms.
        InvalidDataset: it is broken, or its classes are others; the message starts with the path.
    """
    names = class_names(path, None) if names is None else tuple(names)
    if path.is_dir() and any(file.find(path) for file in mnist.FILES):
        dataset = mnist.load(path, len(names), transposed=transposed, complete=complete)
        both: dict[Part, Digits] = {"train": dataset.train, "test": dataset.test}
        return Found(names, both, dataset.sha256, np.zeros(0, np.int64))
    parts: dict[Part, Digits] = {}
    pixels: list[NDArray[np.int64]] = []
    for part, place in _places(path).items():
        if place.is_dir():
            found, sizes = _read_pictures(place, names, complete, report)
            parts[part] = found
            pixels.append(sizes)
            continue
        arrays = _npz(place) if place.suffix == ".npz" else _csv(place)
        if place != path:  # a file for one part
            if list(arrays) != ["train"]:
                raise InvalidDataset(f"{place}: has parts of its own, expected one part")
            arrays = {part: arrays["train"]}
        for one, (images, labels) in arrays.items():
            _check_labels(place, labels, names, complete)
            if transposed:
                images = np.ascontiguousarray(images.transpose(0, 2, 1))
            parts[one] = Digits(images, labels)
    if complete and "train" not in parts:
        raise InvalidDataset(f"{path}: has no part train, expected the images to train on")
    digest = hashlib.sha256("\0".join(names).encode())
    for part in PARTS:
        if part in parts:
            digest.update(f"{part} {len(parts[part])}".encode())
            digest.update(parts[part].images.tobytes() + parts[part].labels.tobytes())
    sizes = np.concatenate(pixels) if pixels else np.zeros(0, np.int64)
    return Found(names, parts, digest.hexdigest(), sizes)


def load(
    path: Path,
    names: Sequence[str] | None = None,
    *,
    transposed: bool = False,
    report: Callable[[str], None] = print,
) -> Dataset:
    """Read `path` for training; where it has no test images, a fifth is set aside for testing.

    These are drawn from each class by a digest of the pixels: neither the seed nor the order of the
    files changes them, and equal images are all on one side.

    Raises:
        DatasetUnavailable, InvalidDataset: as `read`, or there are too few images to divide.
    """
    found = read(path, names, transposed=transposed, report=report)
    train, test = found.parts["train"], found.parts.get("test")
    if test is None:
        count = max(round(TEST_SHARE * len(train)), len(found.names), GOLDEN_IMAGES)
        train, test = mnist.divided(train, count, found.names, str(path))
    if len(test) < GOLDEN_IMAGES:
        raise InvalidDataset(
            f"{path}: has {len(test)} test images, expected at least {GOLDEN_IMAGES}, by which a "
            "weight file is verified"
        )
    pixels = (int(found.pixels.min()), int(found.pixels.max())) if len(found.pixels) else None
    return Dataset(train, test, found.sha256, found.names, found.parts.get("validation"), pixels)


_LISTED_CLASSES = 20
"""More classes are counted, with the one that has the fewest images and the one with the most."""
_ENOUGH = 10
"""Validation images of a class, below which the summary says so."""


def summary(dataset: Dataset, training: Digits, validation: Digits) -> list[str]:
    """What is trained on: lines about classes, sizes and parts, and of what may be wrong."""
    parts = {"training": training, "validation": validation, "test": dataset.test}
    names = dataset.names
    counts = {name: np.bincount(part.labels, minlength=len(names)) for name, part in parts.items()}
    total = np.sum(list(counts.values()), axis=0)
    if len(names) <= _LISTED_CLASSES:
        of_each = ", ".join(f"{name} {count}" for name, count in zip(names, total, strict=True))
    else:
        few, many = int(total.argmin()), int(total.argmax())
        of_each = f"from {total[few]} of {names[few]} to {total[many]} of {names[many]}"
    lines = [f"{total.sum()} images of {len(names)} classes: {of_each}"]
    if dataset.pixels is not None:
        low, high = dataset.pixels
        lines.append(f"made of pictures of {f'{low} to ' if low < high else ''}{high} pixels")
    lines.append(", ".join(f"{len(part)} {name}" for name, part in parts.items()) + " images")
    hashes = {name: mnist.image_hashes(part.images) for name, part in parts.items()}
    for name in ("validation", "test"):
        same = np.count_nonzero(np.isin(hashes[name], hashes["training"]))
        if same:
            lines.append(f"{same} of the {name} images are training images too")
    pairs = {
        pair
        for name, part in parts.items()
        for pair in zip(hashes[name].tolist(), part.labels.tolist(), strict=True)
    }
    if double := len(pairs) - len(np.unique(np.concatenate(list(hashes.values())))):
        lines.append(f"{double} images are there under two classes")
    fewest = int(counts["validation"].argmin())
    if (count := counts["validation"][fewest]) < _ENOUGH:
        lines.append(
            f"{count} validation images of {names[fewest]}, expected at least {_ENOUGH} of each "
            "class: the validation accuracy and the calibration are rough"
        )
    return lines


def _pictures(path: Path) -> Path | None:
    """The folder that has the folders of classes in it; None if `path` has another form."""
    if not path.is_dir() or any(file.find(path) for file in mnist.FILES):
        return None
    folders = [place for place in _places(path, missing=False).values() if place.is_dir()]
    return folders[0] if folders else None


def _places(path: Path, *, missing: bool = True) -> dict[Part, Path]:
    """The file or folder of each part, by the names in `path`; `train` is all of it without parts.

    Raises:
        DatasetUnavailable: there is nothing, unless `missing` is False.
        InvalidDataset: a part is there twice, or beside folders that are not parts.
    """
    if path.name.endswith(_TABLES) and path.is_file():
        return {"train": path}
    places: dict[Part, Path] = {}
    others: list[str] = []
    for one in visible(path) if path.is_dir() else ():
        part: Any = one.name.removesuffix(".gz").removesuffix(".npz").removesuffix(".csv")
        part = "validation" if part == "val" else part
        if part not in PARTS or not (one.is_dir() or one.name.endswith(_TABLES)):
            others += [one.name] if one.is_dir() else []
            continue
        if part in places:
            raise InvalidDataset(
                f"{path}: {places[part].name} and {one.name} are both {part}, expected one of them"
            )
        places[part] = one
    if others and places:
        raise InvalidDataset(
            f"{path}: has the folder {others[0]} beside {next(iter(places.values())).name}, "
            "expected train, validation and test, or a folder for each class"
        )
    if others:
        return {"train": path}
    if not places and missing:
        problem = "is a file" if path.is_file() else "no such folder"
        if path.is_dir():
            problem = "has none of the forms of a dataset"
        raise DatasetUnavailable(
            f"{path}: {problem}; expected a folder with pictures in a folder for each class, with "
            "MNIST's four files, or with train and test, or a file that ends with .npz or .csv"
        )
    return {part: places[part] for part in PARTS if part in places}


def _read_pictures(
    folder: Path, names: tuple[str, ...], complete: bool, report: Callable[[str], None]
) -> tuple[Digits, NDArray[np.int64]]:
    """The pictures of one part, and their sizes in pixels."""
    there = class_folders(folder)
    listed = f"{', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
    if unknown := [name for name in there if name not in names]:
        raise InvalidDataset(
            f"{folder}: has a folder {unknown[0]}, expected one for each class: {listed}"
        )
    absent = [name for name in names if name not in there]
    if absent and (complete or not there):
        raise InvalidDataset(
            f"{folder}: has no folder {absent[0]}, expected one for each class: {listed}"
        )
    present = [name for name in names if name in there]
    digits, pixels = read_pictures(folder, present, report)
    numbers = np.array([names.index(name) for name in present], np.uint8)
    return replace(digits, labels=numbers[digits.labels]), pixels


# Files of arrays

_Arrays: TypeAlias = tuple[Images, NDArray[np.uint8]]
_KEYS: tuple[tuple[Part, str, str], ...] = (
    ("train", "x_train", "y_train"),
    ("validation", "x_validation", "y_validation"),
    ("test", "x_test", "y_test"),
    ("train", "images", "labels"),
)


def _npz(path: Path) -> dict[Part, _Arrays]:
    """The parts of an npz file. Raises: InvalidDataset."""
    try:
        arrays = dict(read_npz(mnist.uncompressed(path)))
    except InvalidImport as exc:
        raise InvalidDataset(f"{path}: {exc}") from exc
    found = {
        part: (_images(path, x, arrays[x]), _labels(path, y, arrays[y], len(arrays[x])))
        for part, x, y in _KEYS
        if x in arrays and y in arrays
    }
    if not found:
        raise InvalidDataset(
            f"{path}: has {', '.join(sorted(arrays)[:8]) or 'no arrays'}, expected x_train, "
            "y_train, x_test and y_test, or images and labels"
        )
    return found


def _images(path: Path, name: str, array: NDArray[Any]) -> Images:
    shape = array.shape
    if not len(shape) or shape[1:] not in ((HEIGHT, WIDTH), (HEIGHT, WIDTH, 1), (PIXELS,)):
        raise InvalidDataset(
            f"{path}: {name} has shape {shape}, expected (n, {HEIGHT}, {WIDTH}) or (n, {PIXELS})"
        )
    if not len(array):
        raise InvalidDataset(f"{path}: {name} has no images")
    if array.dtype.kind not in "iu":
        raise InvalidDataset(
            f"{path}: {name} is {array.dtype}, expected whole numbers 0 to 255; of fractions 0 to "
            "1 save np.round(255 * x).astype(np.uint8)"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 255:
        raise InvalidDataset(f"{path}: {name} has values {low} to {high}, expected 0 to 255")
    return np.ascontiguousarray(array.reshape(-1, HEIGHT, WIDTH).astype(np.uint8))


def _labels(path: Path, name: str, array: NDArray[Any], count: int) -> NDArray[np.uint8]:
    if array.shape not in ((count,), (count, 1)) or array.dtype.kind not in "iu":
        raise InvalidDataset(
            f"{path}: {name} is {array.dtype} of shape {array.shape}, expected whole numbers, one "
            f"for each of {count} images"
        )
    if array.min() < 0 or array.max() >= MAX_CLASSES:
        raise InvalidDataset(
            f"{path}: {name} has values {array.min()} to {array.max()}, expected 0 to "
            f"{MAX_CLASSES - 1}"
        )
    return array.reshape(-1).astype(np.uint8)


def _csv(path: Path) -> dict[Part, _Arrays]:
    """The images and labels of a CSV file. Raises: InvalidDataset."""
    content = mnist.uncompressed(path)
    first = content[:20_000].split(b"\n", 1)[0].strip().decode("latin-1")
    columns = first.split(",")
    is_header = not columns[0].strip('" ').isdigit()
    if is_header and columns[0].strip('" \ufeff').lower() not in ("label", "\xef\xbb\xbflabel"):
        raise InvalidDataset(
            f"{path}: its first column is {columns[0][:40]!r}, expected label, then {PIXELS} "
            "pixels; Kaggle's test.csv has no labels"
        )
    if len(columns) != 1 + PIXELS:
        raise InvalidDataset(
            f"{path}: line 1 has {len(columns)} columns, expected {1 + PIXELS}: the label, then "
            f"{PIXELS} pixels"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = np.loadtxt(
                io.BytesIO(content),
                np.uint8,
                comments=None,
                delimiter=",",
                skiprows=int(is_header),
                ndmin=2,
            )
    except (ValueError, Warning) as exc:
        counted = ", counted behind the header" if is_header else ""
        raise InvalidDataset(
            f"{path}: {str(exc).rstrip('.')}; expected whole numbers 0 to 255, {1 + PIXELS} in a "
            f"row{counted}"
        ) from exc
    images = np.ascontiguousarray(rows[:, 1:]).reshape(-1, HEIGHT, WIDTH)
    return {"train": (images, rows[:, 0].copy())}


def _check_labels(
    path: Path, labels: NDArray[np.uint8], names: Sequence[str], complete: bool
) -> None:
    """Raises: InvalidDataset: a label beyond the classes, or a class without an image."""
    if labels.max() >= len(names):
        wrong = int((labels >= len(names)).argmax())
        raise InvalidDataset(
            f"{path}: image {wrong} has the label {labels[wrong]}, expected 0 to {len(names) - 1}; "
            "--labels FILE names more classes"
        )
    if complete and (absent := sorted(set(range(len(names))) - set(np.unique(labels).tolist()))):
        raise InvalidDataset(
            f"{path}: no image has the label {absent[0]}, expected each of 0 to {len(names) - 1}; "
            "--labels FILE names fewer classes"
        )
