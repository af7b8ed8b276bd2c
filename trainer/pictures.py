"""Pictures in a folder for each class -> images, prepared by the service's own code.

So a network is trained on what it is asked later. What was prepared is kept below ~/.cache, and
read from there while names, sizes and times of the files and the code that prepares are the same.
That code is imported where there are pictures.
"""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import PIL
from numpy.typing import NDArray

from lenet.files import write_atomically
from lenet.pixels import HEIGHT, WIDTH, Images
from trainer.errors import InvalidDataset
from trainer.mnist import Digits

MAX_FILE_BYTES = 64 * 1024 * 1024

_REPORT_S = 10.0
"""Time between two lines about the pictures that are prepared."""

_NAMED = 3
"""Pictures that cannot be read and are named; the others are counted."""

_SYSTEMS_FILES = ("desktop.ini", "thumbs.db")
"""Files that Windows writes into folders of pictures, in lower case."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """A picture's path below the folder, its size and the time of its last change."""

    name: str
    size: int
    mtime_ns: int


def visible(folder: Path) -> list[Path]:
    """What is in `folder`, by name, without hidden files and those that systems write."""
    return sorted(
        path
        for path in folder.iterdir()
        if not path.name.startswith((".", "__MACOSX")) and path.name.lower() not in _SYSTEMS_FILES
    )


def class_folders(folder: Path) -> dict[str, Path]:
    """The folders in `folder` by the names of their classes, sorted: digits by their value.

    What no file system takes in a name is percent-encoded: `a%2Fb` has the class a/b.

    Raises:
        InvalidDataset: two folders have one class.
    """
    folders: dict[str, Path] = {}
    for path in visible(folder):
        if path.is_dir() and folders.setdefault(name := unquote(path.name), path) != path:
            raise InvalidDataset(
                f"{folder}: {folders[name].name} and {path.name} are both the class {name}, "
                "expected one of them"
            )
    if all(name.isascii() and name.isdigit() for name in folders):
        return dict(sorted(folders.items(), key=lambda item: (int(item[0]), item[0])))
    return folders


def read_pictures(
    folder: Path, classes: Sequence[str], report: Callable[[str], None]
) -> tuple[Digits, NDArray[np.int64]]:
    """The pictures of `folder/CLASS`, labelled by the numbers of `classes`; their sizes in pixels.

    They come in the order of classes and names. `report` is called with a line where they are
    prepared, not taken from the cache, and where the cache cannot be written.

    Raises:
        InvalidDataset: a picture cannot be read, a class has none, or the folder is changed
            meanwhile. The message starts with the path.
    """
    folders = class_folders(folder)
    listed = [_listing(folders[name], name) for name in classes]
    files = [file for of_class in listed for file in of_class]
    labels = np.repeat(np.arange(len(classes), dtype=np.uint8), [len(one) for one in listed])
    paths = np.array([str(folder / file.name) for file in files])
    key = _key(files)
    cache = _cache_folder() / f"{sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.npz"
    if (kept := _kept(cache, key, len(files))) is not None:
        return Digits(kept[0], labels, paths), kept[1]
    report(f"{folder}: preparing {len(files)} pictures")
    images, pixels, refused = _prepared(folder, files, report)
    try:
        is_changed = [_listing(folders[name], name) for name in classes] != listed
    except InvalidDataset:
        is_changed = True
    if is_changed:
        raise InvalidDataset(
            f"{folder}: its files changed while they were read, expected a complete folder; start "
            "again when nothing writes to it"
        )
    if refused:
        rest = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        raise InvalidDataset("; ".join(refused[:_NAMED]) + rest)
    content = io.BytesIO()
    np.savez_compressed(content, key=np.array(key), images=images, pixels=pixels)
    try:
        write_atomically(cache, content.getvalue())
    except OSError as exc:
        report(
            f"{cache}: not written ({exc.strerror}), so the next run prepares the pictures again"
        )
    return Digits(images, labels, paths), pixels


def _listing(folder: Path, name: str) -> list[_Listed]:
    """The pictures of the class `name`, which are in `folder`.

    Raises:
        InvalidDataset: there are none, or the folder holds another folder, or cannot be read.
    """
    try:
        found = visible(folder)
        if inner := [path.name for path in found if path.is_dir()]:
            raise InvalidDataset(
                f"{folder}: holds the folder {inner[0]}, expected the pictures of one class"
            )
        listed = []
        for path in found:
            stat = path.stat()
            listed.append(_Listed(f"{folder.name}/{path.name}", stat.st_size, stat.st_mtime_ns))
    except OSError as exc:
        raise InvalidDataset(f"{exc.filename}: cannot be read ({exc.strerror})") from exc
    if not listed:
        raise InvalidDataset(
            f"{folder}: is empty, expected pictures of the class {name}; remove the folder "
            "if there is no such class"
        )
    return listed


def _prepared(
    folder: Path, files: Sequence[_Listed], report: Callable[[str], None]
) -> tuple[Images, NDArray[np.int64], list[str]]:
    """The images and numbers of pixels of all files, and why some cannot be read."""
    from service.errors import InvalidInput, TooLarge

    images = np.empty((len(files), HEIGHT, WIDTH), np.uint8)
    pixels = np.empty(len(files), np.int64)
    refused: list[str] = []
    said = time.monotonic()
    for number, file in enumerate(files):
        if (now := time.monotonic()) - said >= _REPORT_S:
            said = now
            report(f"{folder}: {number} of {len(files)} prepared")
        path = folder / file.name
        try:
            images[number], pixels[number] = _picture(path, file.size)
        except (InvalidInput, TooLarge) as exc:
            refused.append(exc.message)
        except OSError as exc:
            refused.append(f"{path}: cannot be read ({exc.strerror})")
    return images, pixels, refused


def _picture(path: Path, size: int) -> tuple[NDArray[np.uint8], int]:
    """The image of a picture, and its pixels. Raises: InvalidInput, TooLarge, OSError."""
    from service.errors import InvalidInput, TooLarge
    from service.pictures.headers import MAX_PIXELS, describe, sniff
    from service.pictures.picture import prepare

    if size > MAX_FILE_BYTES:
        raise TooLarge(f"{path}: has {size} bytes, expected at most {MAX_FILE_BYTES}")
    body = path.read_bytes()
    kind = sniff(body)
    if kind is None:
        found = describe(body) if body else "nothing"
        raise InvalidInput(
            f"{path}: is {found}, expected a picture: PNG, JPEG, WebP, GIF, BMP, AVIF or TIFF"
        )
    prepared = prepare(
        body,
        kind,
        field=str(path),
        invert="auto",
        digits="one",
        max_pixels=MAX_PIXELS,
        used_pixels=0,
        between=lambda _: None,
    )
    return prepared.images[0], prepared.pixels


# The cache


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "lenet-serve" / "pictures"


def _key(files: Sequence[_Listed]) -> str:
    """The digest of the files' names, sizes and times, and of the code that prepares pictures."""
    import service.pictures

    digest = sha256(f"Pillow {PIL.__version__}, NumPy {np.__version__}".encode())
    (package,) = service.pictures.__path__
    for path in sorted((*Path(package).glob("*.py"), *Path(package).glob("*.safetensors"))):
        digest.update(path.read_bytes())
    listing = [(file.name, file.size, file.mtime_ns) for file in files]
    digest.update(json.dumps(listing).encode())
    return digest.hexdigest()


def _kept(path: Path, key: str, count: int) -> tuple[Images, NDArray[np.int64]] | None:
    """What was kept under `key`; None if nothing was, or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            if str(kept["key"]) != key:
                return None
            images, pixels = kept["images"], kept["pixels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    shapes = images.shape, pixels.shape
    return (images, pixels) if shapes == ((count, HEIGHT, WIDTH), (count,)) else None
