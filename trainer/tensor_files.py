"""The arrays of files that other programs wrote: safetensors, and npz without pickled objects."""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from trainer.errors import InvalidImport

MAX_FILE_BYTES = 1024 * 1024 * 1024
"""Limit of a file, and of the unpacked size of an npz."""

MAX_TENSORS = 10_000
IGNORED = ("num_batches_tracked",)
"""Names of PyTorch's counters, which are no weights."""

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""How the bytes of each type are read; a bfloat16 is the upper half of a float32."""


_TORCH = "save a PyTorch state dict with safetensors.torch.save_file"
_KERAS = (
    "save its arrays with numpy.savez(FILE, **{one.path: one.numpy() for one in model.weights})"
)
_OTHERS: dict[bytes, str] = {
    **{
        b"\x80" + bytes([protocol]): f"is a pickled file, which is never read; {_TORCH}"
        for protocol in range(2, 6)
    },
    b"\x89HDF": f"is an HDF5 file; {_KERAS}",
    b"\x93NUMPY": "is a single array; save all of them in one file with numpy.savez",
}
"""Signatures of other formats."""

_MAX_HEADER_BYTES = 1024
"""Limit of an array's header in an npz file (about 120): NumPy's time is quadratic in it."""


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors or npz file: in the order of an npz file, or sorted by name.

    A safetensors file keeps no order of its layers.

    Raises:
        InvalidImport: it is neither, too large, or holds something else than numbers.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise InvalidImport(f"{path}: cannot be read ({exc.strerror})") from exc
    if len(content) > MAX_FILE_BYTES:
        raise InvalidImport(f"{path}: has more than the {MAX_FILE_BYTES} bytes that are read")
    read = read_npz if content[:2] == b"PK" else _read_safetensors
    try:
        found = {
            name: value for name, value in read(content) if name.rpartition(".")[2] not in IGNORED
        }
    except InvalidImport as exc:
        raise InvalidImport(f"{path}: {exc}") from exc
    for name, value in found.items():
        if not np.isfinite(value).all():
            raise InvalidImport(
                f"{path}: {name} holds {value[~np.isfinite(value)][0]}, expected finite numbers"
            )
    if not found:
        raise InvalidImport(f"{path}: holds no arrays")
    return found


def by_number(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by value: fc2 before fc10."""
    pieces = re.split(r"0*(\d+)", name)
    return [(len(piece) if piece.isdecimal() else -1, piece) for piece in pieces]


def _read_safetensors(content: bytes) -> Iterator[tuple[str, NDArray[Any]]]:
    try:
        entries: list[tuple[str, dict[str, Any]]] = deserialize(content)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError, RecursionError) as exc:
        if content[8:9] == b"{":
            raise InvalidImport(f"is a broken safetensors file ({exc})") from exc
        problem = f"is neither a safetensors nor an npz file; {_TORCH}"
        for beginning, sentence in _OTHERS.items():
            if content.startswith(beginning):
                problem = sentence
        raise InvalidImport(problem) from exc
    if any(name == "golden.images" for name, _ in entries):
        raise InvalidImport("is a weight file already; serve it, or train on from it by fit --from")
    for name, entry in sorted(entries, key=lambda entry: by_number(entry[0])):
        if name.rpartition(".")[2] in IGNORED:
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise InvalidImport(
                f"{name} has dtype {entry['dtype']}, expected one of {', '.join(_DTYPES)}"
            )
        try:
            value = np.frombuffer(bytes(entry["data"]), dtype).reshape(entry["shape"])
        except ValueError as exc:
            raise InvalidImport(f"{name} has an impossible shape ({exc})") from exc
        if entry["dtype"] == "BF16":
            value = (value.astype(np.uint32) << 16).view(np.float32)
        yield name, value


def read_npz(content: bytes) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of an npz file, by name. Raises: InvalidImport: it is broken, or too large."""
    left = MAX_FILE_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            names = {member.filename.rpartition("/")[2] for member in members}
            if "data.pkl" in names:
                raise InvalidImport(f"is a pickled PyTorch file, which is never read; {_TORCH}")
            if "model.weights.h5" in names:
                raise InvalidImport(f"is a Keras model; {_KERAS}")
            if len(members) > MAX_TENSORS:
                raise InvalidImport(f"holds {len(members)} files, expected at most {MAX_TENSORS}")
            for member in members:
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise InvalidImport(
                        f"{member.filename} is compressed as NumPy does not: method "
                        f"{member.compress_type}, expected 0 or 8"
                    )
                with archive.open(member) as file:
                    data = file.read(left + 1)  # not what the directory says, which may lie
                left -= len(data)
                if left < 0:
                    raise InvalidImport(f"unpacks to more than {MAX_FILE_BYTES} bytes")
                name = member.filename.removesuffix(".npy")
                yield name, _read_npy(name, data)
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
        RuntimeError,
        ValueError,  # zipfile's, of offsets before the file's beginning
        struct.error,
        OSError,
        EOFError,
        zlib.error,
    ) as exc:
        raise InvalidImport(f"is not a valid npz file ({exc})") from exc


def _read_npy(name: str, data: bytes) -> NDArray[Any]:
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        with warnings.catch_warnings(action="ignore"):  # of files that Python 2 wrote
            shape, fortran, dtype = read(file, max_header_size=_MAX_HEADER_BYTES)
    except (
        ValueError,
        KeyError,
        SyntaxError,
        TypeError,
        RecursionError,
        MemoryError,
        TokenError,
    ) as exc:
        raise InvalidImport(f"{name} is not an array in npy format ({exc!r})") from exc
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise InvalidImport(f"{name} has dtype {dtype}, expected numbers of at most 8 bytes")
    rest = data[file.tell() :]
    if any(type(size) is not int or size < 0 for size in shape) or len(
        rest
    ) != dtype.itemsize * math.prod(shape):
        raise InvalidImport(
            f"{name} has {len(rest)} bytes, expected {dtype.itemsize} x {shape} as its header says"
        )
    try:
        return np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran else "C")
    except ValueError as exc:  # more dimensions than NumPy has
        raise InvalidImport(f"{name} has an impossible shape ({exc})") from exc
