"""Files: weights and IDX datasets."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import random
import shutil
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from lenet.errors import InvalidWeightFile
from lenet.pixels import PIXELS
from lenet.weightfile import GOLDEN_IMAGES, WeightFile
from tests.fuzz.target import Finding, MutateBytes, Target, changed_json, mutate_list
from trainer import mnist
from trainer.errors import (
    DatasetUnavailable,
    InvalidDataset,
)


class _FileTarget(Target):
    max_bytes = 16 * 1024

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.undo.callback(shutil.rmtree, self.folder)


def _check_message(error: Exception, path: Path, data: bytes) -> None:
    """It names the file, and quotes at most what the file holds, escaped, and twice."""
    text = str(error)
    if not text.startswith(str(path)) or len(text) > 1000 + 10 * len(data):
        raise Finding(f"a message of {len(text)} characters: {text[:300]}")


# Weights

_TAIL_BYTES = GOLDEN_IMAGES * PIXELS + GOLDEN_IMAGES
"""Golden images and labels, at the end of a file. Where all are 0, the input leaves them away."""


class WeightsTarget(_FileTarget):
    """A weight file: a byte that says whether zeros for the golden images follow, and the file."""

    traced_bytes = 2 << 20

    def run(self, data: bytes) -> None:
        content = data[1:] + bytes(_TAIL_BYTES if data[:1] == b"Z" else 0)
        path = self.folder / "1.safetensors"
        path.write_bytes(content)
        try:
            weights = WeightFile.read(path)
        except InvalidWeightFile as exc:
            _check_message(exc, path, data)
            return
        if weights.to_bytes() != content or weights.digest() != hashlib.sha256(content).hexdigest():
            raise Finding("accepted a file that is not what it would write")
        expected = weights.model.parameters()
        found = {name: value.shape for name, value in weights.tensors.items()}
        if found != expected or list(found) != list(expected):
            raise Finding(f"tensors {found}, expected {expected}")
        golden = weights.golden
        arrays = (*weights.tensors.values(), golden.logits)
        if not all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays):
            raise Finding("another dtype, NaN or infinity")
        if int(golden.labels.max()) >= weights.model.classes or len(golden.images) != 10:
            raise Finding("golden vectors that do not fit")
        if weights.model != weights.model.folded or weights.model.classes < 1:
            raise Finding(f"accepted {weights.model}")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        parts = _safetensors(data[1:])
        if parts is None or rng.random() < 0.1:
            return mutate(data)
        header, tensors = parts
        metadata = header.get("__metadata__")
        metadata = metadata if isinstance(metadata, dict) else {}
        digest = rng.random() < 0.7
        match rng.randrange(4):
            case 0 if metadata.get("model"):
                metadata["model"] = _changed_text(metadata["model"], rng, mutate)
            case 1 if metadata.get("training"):
                metadata["training"] = _changed_text(metadata["training"], rng, mutate)
            case 2:
                tensors = mutate(tensors)
            case _:
                header = changed_json(header, rng, _VALUES)
        first = data[:1]
        if digest and isinstance(header, dict):
            header = _with_digest(header, tensors + bytes(_TAIL_BYTES if first == b"Z" else 0))
        return first + _joined(header, tensors)


def _safetensors(content: bytes) -> tuple[dict[str, Any], bytes] | None:
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    return (header, content[8 + length :]) if isinstance(header, dict) else None


def _joined(header: Any, tensors: bytes) -> bytes:
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tensors


def _with_digest(header: dict[str, Any], tensors: bytes) -> dict[str, Any]:
    """Add the right digest of the metadata and tensors, as far as they are valid."""
    try:
        metadata = {k: v for k, v in header["__metadata__"].items() if k != "sha256"}
        digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
        for name in sorted(header.keys() - {"__metadata__"}):
            entry = header[name]
            start, end = entry["data_offsets"]
            dtype = {"F32": "<f4", "U8": "|u1"}[entry["dtype"]]
            digest.update(f"{name} {dtype} {tuple(entry['shape'])}\n".encode())
            digest.update(tensors[start:end])
    except (AttributeError, KeyError, TypeError, ValueError):
        return header
    return {**header, "__metadata__": {**metadata, "sha256": digest.hexdigest()}}


def _changed_text(text: Any, rng: random.Random, mutate: MutateBytes) -> str:
    """JSON within JSON."""
    try:
        document = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return "{}"
    if rng.random() < 0.1:
        return mutate(str(text).encode()).decode("latin-1")
    return json.dumps(changed_json(document, rng, _VALUES), sort_keys=True, separators=(",", ":"))


_VALUES = (
    *(0, 1, 2, 3, 10, 28, 256, 784, -1, 2**31, 2**63, 10**18, 10**4000, 0.5, 1.0, -0.0),
    *(1e308, math.nan, math.inf, True, False, None, "", "a" * 300, "\ud800", "\x00", [], {}),
    *("relu", "identity", "max", "global_average", "dense", "conv", "F32", "U8", "BF16"),
    *("BOOL", "1", "folded", [1, 1], [1, 28, 28]),
)


# IDX

_SEPARATOR = b"\n--\n"


class IdxTarget(_FileTarget):
    """One file, or the four of a dataset with a separator between them, beside a plain reading."""

    traced_bytes = 4 << 20

    def __init__(self) -> None:
        super().__init__()
        # A small limit, so that what is decompressed beyond it shows.
        self.undo.callback(setattr, mnist, "MAX_FILE_BYTES", mnist.MAX_FILE_BYTES)
        mnist.MAX_FILE_BYTES = 1 << 20
        self._names = [file.name for file in mnist.FILES]

    def run(self, data: bytes) -> None:
        parts = data.split(_SEPARATOR)
        if len(parts) == 4:
            self._run_dataset(parts)
        else:
            self._run_file(data)

    def _run_file(self, data: bytes) -> None:
        path = self.folder / "file"
        path.write_bytes(data)
        expected = plain_idx(data)
        try:
            array, content = mnist.read_idx(path)
        except InvalidDataset as exc:
            _check_message(exc, path, data)
            if expected is not None:
                raise Finding(f"refused {expected.shape}: {exc}") from exc
            return
        if expected is None or not np.array_equal(array, expected):
            raise Finding(f"got {array.shape}, which a plain reading does not find")
        if array.dtype != np.uint8 or content[-array.size :] != array.tobytes():
            raise Finding(f"got {array.dtype}, and other bytes")

    def _run_dataset(self, parts: list[bytes]) -> None:
        for name, part in zip(self._names, parts, strict=True):
            (self.folder / name).write_bytes(part)
        arrays = [plain_idx(part) for part in parts]
        largest = max((int(array.max()) for array in arrays[1::2] if array is not None), default=0)
        classes = min(largest + 1, 10)
        try:
            dataset = mnist.load(self.folder, classes)
        except (InvalidDataset, DatasetUnavailable) as exc:
            _check_message(exc, self.folder, b"".join(parts))
            valid = all(
                images is not None
                and labels is not None
                and images.ndim == 3
                and images.shape[1:] == (28, 28)
                and labels.shape == images.shape[:1]
                and set(labels.tolist()) == set(range(classes))
                for images, labels in (arrays[:2], arrays[2:])
            )
            if valid:
                raise Finding(f"refused: {exc}") from exc
            return
        for part, images, labels in ((dataset.train, *arrays[:2]), (dataset.test, *arrays[2:])):
            if images is None or labels is None:
                raise Finding("accepted what a plain reading does not find")
            if not np.array_equal(part.images, images) or not np.array_equal(part.labels, labels):
                raise Finding("other images or labels")
            if part.labels.max() > 9 or part.images.shape != (len(part.labels), 28, 28):
                raise Finding("labels that do not fit")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        parts = data.split(_SEPARATOR)

        def change(part: bytes) -> bytes:
            packed = part.startswith(b"\x1f\x8b")
            if packed and rng.random() < 0.7:
                try:
                    part = gzip.decompress(part)[: self.max_bytes]
                except (OSError, EOFError, zlib.error):
                    return mutate(part)
            if rng.random() < 0.3 and len(part) > 4:
                sizes = [rng.choice((0, 1, 2, 28, 784, 1 << 31)) for _ in range(part[3] % 5)]
                part = (
                    part[:4] + struct.pack(f">{len(sizes)}I", *sizes) + part[4 + 4 * len(sizes) :]
                )
            else:
                part = mutate(part)
            return gzip.compress(part, mtime=0) if packed != (rng.random() < 0.2) else part

        return _SEPARATOR.join(mutate_list(parts, rng, change))


def plain_idx(content: bytes) -> np.ndarray[Any, Any] | None:
    """The array of an IDX file, gzip or not; None if it is none of unsigned bytes."""
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(mnist.MAX_FILE_BYTES + 1)
        except (OSError, EOFError, zlib.error):
            return None
    if len(content) > mnist.MAX_FILE_BYTES or content[:3] != b"\0\0\x08" or len(content) < 4:
        return None
    count = content[3]
    if count not in (1, 3) or len(content) < 4 + 4 * count:
        return None
    sizes = struct.unpack_from(f">{count}I", content, 4)
    rest = content[4 + 4 * count :]
    if not all(sizes) or len(rest) != math.prod(sizes):
        return None
    return np.frombuffer(rest, np.uint8).reshape(sizes)
