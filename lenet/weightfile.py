"""The weight file: safetensors with required metadata.

It holds canonical float32 tensors in NCHW order with batch norm folded in, and golden vectors: ten
images with the logits that the trainer computed, by which a server validates its own arithmetic.
Backends convert the tensors for their device. Files are valid only if they are, byte for byte, what
`to_bytes` writes.

Attacks and defects, and the check against each:

    a huge or sparse file               size limit before reading
    a header that is too long           limit before parsing
    overlapping tensors, holes          safetensors
    wrong name, dtype or shape          compared with the model in the metadata
    NaN, infinity                       checked
    contradictory metadata              checked
    a flipped bit                       sha256 of metadata and tensors
    a device file or FIFO               only regular files are read; symlinks are the caller's task
    a file replaced while it is read    read once; then only the bytes in memory are used
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from lenet.errors import InvalidModel, InvalidWeightFile
from lenet.files import write_atomically
from lenet.model import Model
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images, Logits

FORMAT_VERSION = 1
MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_HEADER_BYTES = 1024 * 1024
GOLDEN_IMAGES = 10
MAX_LABEL_CHARACTERS = 100

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "U8": np.dtype(np.uint8)}
_SHA256 = re.compile("[0-9a-f]{64}")

Float32 = NDArray[np.float32]


def is_label(name: object) -> bool:
    """Whether `name` can be that of a class: printable text, which no JSON or log can spoil."""
    return isinstance(name, str) and 0 < len(name) <= MAX_LABEL_CHARACTERS and name.isprintable()


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


@dataclass(frozen=True, slots=True)
class Training:
    """The origin of the weights.

    `accuracy` of the exported weights on the test set, 0 to 1, None if it was not measured;
    `dataset_sha256` of the uncompressed dataset files, "" if they are not known; `seed` and
    `epochs` None for weights that were trained elsewhere; `labels`: the names of the classes in
    order.
    """

    dataset_sha256: str
    seed: int | None
    command: str
    epochs: int | None
    accuracy: float | None
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        digest, accuracy = self.dataset_sha256, self.accuracy
        for name, good, expected in (
            (
                "dataset_sha256",
                type(digest) is str and (not digest or _SHA256.fullmatch(digest)),
                "64 hex digits or nothing",
            ),
            ("seed", _is_count(self.seed), "an integer >= 0, or null"),
            ("command", isinstance(self.command, str), "a string"),
            ("epochs", _is_count(self.epochs), "an integer >= 0, or null"),
            (
                "accuracy",
                accuracy is None or (type(accuracy) is float and 0 <= accuracy <= 1),
                "a number from 0.0 to 1.0, or null",
            ),
            (
                "labels",
                all(is_label(label) for label in self.labels)
                and len(set(self.labels)) == len(self.labels),
                f"different names of 1 to {MAX_LABEL_CHARACTERS} printable characters",
            ),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """The golden vectors: ten images with the logits that the trainer computed.

    `images` uint8 (10, 28, 28); `labels` uint8 (10,), the true classes; `logits` float32
    (10, classes) of the folded network.
    """

    images: Images
    labels: NDArray[np.uint8]
    logits: Logits


@dataclass(frozen=True, slots=True, eq=False)
class WeightFile:
    """A folded model, its tensors by the names of `Model.parameters`, and their origin."""

    model: Model
    tensors: Mapping[str, Float32]
    golden: Golden
    training: Training
    _sha256: str = field(default="", init=False, repr=False)  # of the bytes it was read from

    def to_bytes(self) -> bytes:
        """The content of the file; equal weights give equal bytes."""
        tensors = {name: np.ascontiguousarray(value) for name, value in self._all_tensors().items()}
        metadata = {
            "format_version": str(FORMAT_VERSION),
            "model": self.model.to_json(),
            "batch_norm": "folded",
            "training": json.dumps(asdict(self.training), sort_keys=True, separators=(",", ":")),
        }
        metadata["sha256"] = _digest(metadata, tensors)
        return _with_sorted_header(save(tensors, metadata))

    def digest(self) -> str:
        """SHA-256 in hex of `to_bytes`; identifies the weights in logs and metrics."""
        return self._sha256 or hashlib.sha256(self.to_bytes()).hexdigest()

    def write(self, path: Path) -> None:
        """Write atomically.

        Raises:
            OSError: the folder cannot be written.
        """
        write_atomically(path, self.to_bytes())

    @classmethod
    def read(cls, path: Path) -> WeightFile:
        """Read and validate a file.

        Raises:
            InvalidWeightFile: it is missing, unreadable or not exactly what `to_bytes` writes; the
                message names the file, the tensor or metadata key, and what was expected.
        """
        try:
            return cls._from_bytes(_read_bounded(path))
        except OSError as exc:
            raise InvalidWeightFile(f"{path}: cannot be read ({exc.strerror})") from exc
        except (_Invalid, InvalidModel) as exc:
            raise InvalidWeightFile(f"{path}: {exc}") from exc

    @classmethod
    def _from_bytes(cls, content: bytes) -> WeightFile:
        metadata, tensors = _parse(content)
        model, training = _read_metadata(metadata)
        golden_shape = (GOLDEN_IMAGES, HEIGHT, WIDTH)
        expected: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            name: (np.float32, shape) for name, shape in model.parameters().items()
        }
        expected["golden.images"] = (np.uint8, golden_shape)
        expected["golden.labels"] = (np.uint8, (GOLDEN_IMAGES,))
        expected["golden.logits"] = (np.float32, (GOLDEN_IMAGES, model.classes))
        for name in tensors.keys() - expected.keys():
            raise _Invalid(f"tensor {name!r}: unknown, model {model.name!r} has no such tensor")
        for name, (dtype, shape) in expected.items():
            _check_tensor(name, tensors.get(name), np.dtype(dtype), shape)
        if metadata["sha256"] != _digest(metadata, tensors):
            raise _Invalid(
                "metadata sha256 does not match the content: the file was damaged or edited"
            )
        if len(training.labels) != model.classes:
            raise _Invalid(
                f"metadata labels are {len(training.labels)}, expected {model.classes} "
                f"as model {model.name!r} has classes"
            )
        golden = Golden(*(tensors.pop(f"golden.{part.name}") for part in fields(Golden)))
        if int(golden.labels.max()) >= model.classes:
            raise _Invalid(
                f"tensor golden.labels: holds {int(golden.labels.max())}, "
                f"expected classes 0 to {model.classes - 1}"
            )
        ordered = {name: tensors[name] for name in model.parameters()}
        weights = cls(model, MappingProxyType(ordered), golden, training)
        if weights.to_bytes() != content:
            raise _Invalid("is not in the canonical form that lenet-train writes")
        object.__setattr__(weights, "_sha256", hashlib.sha256(content).hexdigest())
        return weights

    def _all_tensors(self) -> dict[str, NDArray[Any]]:
        golden = {f"golden.{part.name}": getattr(self.golden, part.name) for part in fields(Golden)}
        return {**self.tensors, **golden}


class _Invalid(Exception):
    """The content is invalid; `read` adds the path to the message."""


def _open_at_once(path: str, flags: int) -> int:
    # Otherwise opening a FIFO waits for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


def _read_bounded(path: Path) -> bytes:
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _Invalid("is not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise _Invalid(f"has {status.st_size} bytes, expected at most {MAX_FILE_BYTES}")
        return file.read(status.st_size)  # allocated before it is read


_IMPORT = "the trainer's import makes a file with all of it from weights of PyTorch or Keras"


def _advice(content: bytes) -> str:
    """Advice for a file of another kind."""
    if content.startswith(b"version https://git-lfs"):
        return "; it is a pointer of Git LFS: git lfs pull fetches the file"
    if content.startswith((b"PK\x03\x04", b"\x80", b"\x89HDF")):
        return f"; {_IMPORT}"
    return "; export it again"


def _parse(content: bytes) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    if not content:
        raise _Invalid("is empty, expected a safetensors file: copy or export it again")
    (length,) = struct.unpack("<Q", content[:8].ljust(8, b"\0"))
    if length > MAX_HEADER_BYTES or content[8:9] not in (b"{", b""):
        start = ascii(content[:16].decode("latin-1"))
        raise _Invalid(
            f"is not a safetensors file: it begins with {start}, expected the length of a JSON "
            f"header, at most {MAX_HEADER_BYTES} bytes, and the header{_advice(content)}"
        )
    if length > len(content) - 8:
        raise _Invalid(
            f"is truncated: it has {len(content)} bytes, its header alone {8 + length}; copy or "
            "export it again"
        )
    try:
        # safetensors rejects overlaps, holes, wrong sizes and trailing bytes.
        entries: list[tuple[str, dict[str, Any]]] = deserialize(content)  # type: ignore[no-untyped-call]
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__")
    except (SafetensorError, ValueError, RecursionError) as exc:
        raise _Invalid(
            f"is not a valid safetensors file, or truncated ({exc}); copy or export it again"
        ) from exc
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in entries:
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise _Invalid(f"tensor {name!r}: has dtype {entry['dtype']}, expected F32 or U8")
        try:
            tensors[name] = np.frombuffer(bytes(entry["data"]), dtype).reshape(entry["shape"])
        except ValueError as exc:  # more than 64 dimensions, or no values in a huge shape
            raise _Invalid(f"tensor {name!r}: has an impossible shape ({exc})") from exc
    return metadata or {}, tensors


def _read_metadata(metadata: dict[str, str]) -> tuple[Model, Training]:
    keys = ("format_version", "model", "batch_norm", "training", "sha256")
    for key in keys:
        if key not in metadata:
            raise _Invalid(f"metadata {key} is missing; {_IMPORT}")
    for key in metadata.keys() - set(keys):
        raise _Invalid(f"metadata {key!r} is unknown")
    for key, expected in (("format_version", str(FORMAT_VERSION)), ("batch_norm", "folded")):
        if metadata[key] != expected:
            raise _Invalid(f"metadata {key} is {metadata[key]!r}, expected {expected!r}")
    model = Model.from_json(metadata["model"])
    if model != model.folded:
        raise _Invalid("metadata model still has batch norm, expected it folded")
    if math.prod(model.input) != PIXELS:
        raise _Invalid(f"metadata model has input {model.input}, expected {PIXELS} pixels")
    try:
        training = json.loads(metadata["training"])
        labels = tuple(training.pop("labels"))
        return model, Training(**training, labels=labels)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise _Invalid(f"metadata training cannot be read ({exc})") from exc


def _check_tensor(
    name: str, value: NDArray[Any] | None, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    if value is None:
        raise _Invalid(f"tensor {name}: missing")
    if value.dtype != dtype:
        raise _Invalid(f"tensor {name}: has dtype {value.dtype}, expected {dtype}")
    if value.shape != shape:
        raise _Invalid(f"tensor {name}: has shape {value.shape}, expected {shape}")
    if not np.isfinite(value).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
        raise _Invalid(f"tensor {name}: holds {value[index]} at {index}, expected finite numbers")


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    signed = {key: value for key, value in metadata.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(signed, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _with_sorted_header(content: bytes) -> bytes:
    """Sort the keys of the header.

    safetensors 0.8.0 writes metadata in the random order of a Rust hash map.
    """
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(
        json.loads(content[8 : 8 + length]), sort_keys=True, separators=(",", ":")
    ).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]
