"""Files: weights, IDX datasets, weights of other makers, the engine cache and checkpoints."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import random
import re
import shutil
import struct
import tempfile
import zipfile
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from lenet.cuda.engine_cache import Choice, EngineCache
from lenet.errors import InvalidWeightFile
from lenet.model import IDENTITY, ConvBlock, DenseBlock, Model, Pool
from lenet.pixels import PIXELS
from lenet.weightfile import GOLDEN_IMAGES, Golden, Training, WeightFile
from tests.fuzz.target import Finding, MutateBytes, Target, mutate_list, quiet
from trainer import importing, mnist, tensor_files
from trainer.checkpoint import Checkpoint, Epoch
from trainer.errors import (
    DatasetUnavailable,
    InvalidCheckpoint,
    InvalidDataset,
    InvalidImport,
)
from trainer.settings import Recipe


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

    def seeds(self) -> dict[str, bytes]:
        return _weight_files()

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
                header = changed_json(header, rng)
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
    """With the digest that belongs to the metadata and tensors, as far as they make sense."""
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
    return json.dumps(changed_json(document, rng), sort_keys=True, separators=(",", ":"))


def changed_json(value: Any, rng: random.Random) -> Any:
    """`value` with one change somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: content for name, content in value.items() if name != key}
        if rng.random() < 0.05:
            return {**value, key + "x": value[key]}
        return {**value, key: changed_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * rng.choice((2, 2, 100)) + value[at + 1 :]
            case _:
                return [*value[:at], changed_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(
        (
            *(0, 1, 2, 3, 10, 28, 256, 784, -1, 2**31, 2**63, 10**18, 10**4000, 0.5, 1.0, -0.0),
            *(
                1e308,
                math.nan,
                math.inf,
                True,
                False,
                None,
                "",
                "a" * 300,
                "\ud800",
                "\x00",
                [],
                {},
            ),
            *("relu", "identity", "max", "global_average", "dense", "conv", "F32", "U8", "BF16"),
            *("BOOL", "1", "folded", [1, 1], [1, 28, 28], [[value]], {"a": value}, [value] * 2),
        )
    )


def _weights(model: Model, labels: Any = None, **changes: Any) -> WeightFile:
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in model.parameters().items()}
    logits = np.zeros((GOLDEN_IMAGES, model.classes), np.float32)
    images = np.zeros((GOLDEN_IMAGES, 28, 28), np.uint8)
    golden = Golden(images, np.zeros(GOLDEN_IMAGES, np.uint8), logits)
    training = {
        "dataset_sha256": "0" * 64,
        "seed": 1,
        "command": "python -m trainer",
        "epochs": 1,
        "accuracy": 0.5,
        "labels": tuple("abcdefgh"[: model.classes] if labels is None else labels),
    }
    return WeightFile(model, tensors, golden, Training(**{**training, **changes}))


def _weight_files() -> dict[str, bytes]:
    logits = DenseBlock(2, activation=IDENTITY)
    pooled = ConvBlock(1, kernel=(1, 1), pool=Pool("global_average"))
    model = Model("tiny", (pooled, logits))
    whole = _weights(model).to_bytes()
    header, tensors = _safetensors(whole) or ({}, b"")
    kept = tensors[:-_TAIL_BYTES]
    metadata = header["__metadata__"]
    description = json.loads(metadata["model"])
    training = json.loads(metadata["training"])

    def changed(offset: int = 0, digest: bool = True, **entries: Any) -> bytes:
        new = {**metadata, **entries}
        new = {key: value for key, value in new.items() if value is not None}
        found = {**header, "__metadata__": new}
        if digest:
            found = _with_digest(found, tensors)
        return b"Z" + _joined(found, kept)

    def entry(name: str, **fields: Any) -> bytes:
        found = {**header, name: {**header[name], **fields}}
        return b"Z" + _joined(_with_digest(found, tensors), kept)

    def block(**fields: Any) -> bytes:
        blocks = [{**description["blocks"][0], **fields}, description["blocks"][1]]
        return changed(model=json.dumps({**description, "blocks": blocks}, sort_keys=True))

    def trained(**fields: Any) -> bytes:
        return changed(training=json.dumps({**training, **fields}, sort_keys=True))

    first = next(name for name in header if name.endswith("weight"))
    nan = struct.pack("<f", math.nan) + kept[4:]
    return {
        "valid": b"Z" + whole[:-_TAIL_BYTES],
        "valid-of-pooling": b"Z"
        + _weights(
            Model(
                "b",
                (
                    ConvBlock(
                        2, (3, 3), stride=(3, 3), padding=(1, 1), pool=Pool("average", (4, 4))
                    ),
                    logits,
                ),
            )
        ).to_bytes()[:-_TAIL_BYTES],
        "empty": b"-",
        "a-pickle": b"-\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\2os",
        "a-header-alone": b"-" + whole[: 8 + int.from_bytes(whole[:8], "little")],
        "cut": b"-" + whole[:-_TAIL_BYTES],
        "a-byte-more": b"Z\0" + whole[:-_TAIL_BYTES],
        "a-header-of-2-to-63": b"-" + struct.pack("<Q", 1 << 63) + b"{}",
        "a-header-longer-than-the-file": b"-" + struct.pack("<Q", 1000) + b"{}",
        "no-metadata": b"-" + _joined({}, b""),
        "metadata-null": b"-" + _joined({"__metadata__": None}, b""),
        "a-deep-header": b"-" + struct.pack("<Q", 4000) + b'{"a":' + b"[" * 3995,
        "a-space-in-the-header": b"Z" + _joined(header, kept).replace(b'":', b'": ', 1),
        "a-wrong-digest": changed(digest=False, sha256="0" * 64),
        "no-digest": changed(digest=False, sha256=None),
        "another-format-version": changed(format_version="2"),
        "batch-norm-not-folded": changed(batch_norm="no"),
        "an-unknown-key": changed(extra="1"),
        "a-tensor-missing": b"Z"
        + _joined({name: value for name, value in header.items() if name != first}, kept),
        "an-unknown-tensor": b"Z"
        + _joined({**header, "x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, kept),
        "another-dtype": entry(first, dtype="I32"),
        "another-shape": entry(first, shape=[*header[first]["shape"], 1]),
        "65-dimensions": entry(first, shape=[*header[first]["shape"], *[1] * 61]),
        "no-values-in-a-huge-shape": b"-"
        + _joined({"x": {"dtype": "U8", "shape": [0, 2**62], "data_offsets": [0, 0]}}, b""),
        "overlapping": entry(first, data_offsets=[0, 8]),
        "nan": b"Z" + _joined(_with_digest(header, nan + bytes(_TAIL_BYTES)), nan),
        "a-label-of-9": b"-"
        + _joined(_with_digest(header, tensors[:-1] + b"\x09"), tensors[:-1] + b"\x09"),
        "model-not-json": changed(model="{"),
        "model-a-list": changed(model="[]"),
        "model-deep": changed(model="[" * 3000),
        "model-without-blocks": changed(model=json.dumps({**description, "blocks": []})),
        "model-with-batch-norm": block(batch_norm=True),
        "model-with-a-huge-kernel": block(kernel=[10**9, 10**9], padding=[10**9, 10**9]),
        "model-with-huge-padding": block(padding=[10**3000, 10**3000]),
        "model-with-a-zero-stride": block(stride=[0, 1]),
        "model-with-a-fraction": block(channels=1.5),
        "model-with-an-unknown-activation": block(activation={"kind": "swish", "value": 1.0}),
        "model-of-another-input": changed(model=json.dumps({**description, "input": [1, 27, 29]})),
        "labels-too-few": trained(labels=["a"]),
        "labels-null": trained(labels=None),
        "accuracy-nan": trained(accuracy=math.nan),
        "seed-negative": trained(seed=-1),
        "training-not-json": changed(training="x"),
        "command-a-lone-surrogate": trained(command="\ud800"),
    }


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

    def seeds(self) -> dict[str, bytes]:
        return _idx_files()

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


def _idx(*sizes: int, value: int = 0, kind: int = 8) -> bytes:
    header = struct.pack(f">HBB{len(sizes)}I", 0, kind, len(sizes), *sizes)
    return header + bytes([value]) * math.prod(sizes)


def _idx_files() -> dict[str, bytes]:
    images, labels = _idx(2, 28, 28), _idx(2)[:-1] + b"\x01"
    packed = gzip.compress(images, mtime=0)

    def dataset(*parts: bytes) -> bytes:
        whole = (images, labels, packed, gzip.compress(labels, mtime=0))
        return _SEPARATOR.join((*parts, *whole[len(parts) :]))

    return {
        "images": images,
        "labels": labels,
        "packed": packed,
        "packed-twice": gzip.compress(packed, mtime=0),
        "packed-in-two-members": gzip.compress(images[:99], mtime=0)
        + gzip.compress(images[99:], mtime=0),
        "packed-and-cut": packed[:-9],
        "packed-with-a-wrong-checksum": packed[:-8] + b"abcd" + packed[-4:],
        "packed-with-damage": packed[:20] + b"\xff" * 9 + packed[29:],
        "a-bomb": gzip.compress(bytes(2 << 20), mtime=0),
        "empty": b"",
        "magic-cut": b"\0\0\x08",
        "floats": _idx(2, kind=0x0D),
        "two-sizes": _idx(2, 3),
        "255-sizes": b"\0\0\x08\xff" + b"\0\0\0\1" * 255,
        "a-size-of-0": _idx(0, 28, 28),
        "sizes-of-2-to-31": b"\0\0\x08\3" + b"\x80\0\0\0" * 3,
        "header-cut": images[:10],
        "a-byte-missing": images[:-1],
        "a-byte-more": images + b"\0",
        "dataset": dataset(),
        "dataset-of-other-images": dataset(_idx(2, 28, 27)),
        "dataset-with-a-label-missing": dataset(images, _idx(1)),
        "dataset-with-a-label-of-10": dataset(images, _idx(2, value=10)),
        "dataset-with-images-for-labels": dataset(images, images),
        "dataset-without-a-class": dataset(images, _idx(2, value=1)),
    }


# Weights of other makers


class ImportTarget(_FileTarget):
    """safetensors or npz: finite float64 arrays, which are imported or refused in a sentence."""

    traced_bytes = 6 << 20

    def __init__(self) -> None:
        super().__init__()
        self.undo.callback(setattr, tensor_files, "MAX_FILE_BYTES", tensor_files.MAX_FILE_BYTES)
        tensor_files.MAX_FILE_BYTES = 1 << 20
        blocks = (ConvBlock(2, (3, 3), batch_norm=True), DenseBlock(3, activation=IDENTITY))
        self._source = importing.Source(Model("mine", blocks, (1, 4, 4)), {})

    def run(self, data: bytes) -> None:
        path = self.folder / "file"
        path.write_bytes(data)
        try:
            tensors = tensor_files.read_tensors(path)
        except InvalidImport as exc:
            _check_message(exc, path, data)
            return
        for name, value in tensors.items():
            if value.dtype.kind not in "fiu" or not np.isfinite(value).all():
                raise Finding(f"{name} is {value.dtype}, or not finite")
        try:
            layout = importing.layout_of(tensors)
            found = importing.matched(tensors, self._source, layout)
            importing.table(tensors, found, layout)
            with np.errstate(all="ignore"):
                folded = importing.converted(tensors, found, self._source, layout, 1e-5)
        except InvalidImport as exc:
            if len(str(exc)) > 1000 + 20 * len(data):
                raise Finding(f"a message of {len(str(exc))} characters") from exc
            return
        expected = self._source.model.folded.parameters()
        if {name: value.shape for name, value in folded.items()} != expected:
            raise Finding(f"made {[(name, value.shape) for name, value in folded.items()]}")
        if not all(np.isfinite(value).all() for value in folded.values()):
            raise Finding("weights that are not finite")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.1:
            return mutate(data)
        if (parts := _safetensors(data)) is not None:
            return _joined(changed_json(parts[0], rng), parts[1])
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
        except Exception:  # noqa: BLE001 - whatever zipfile raises for a broken archive
            return mutate(data)
        if members:
            name = rng.choice(list(members))
            members[name] = mutate(members[name])
        return _zipped(members)

    def seeds(self) -> dict[str, bytes]:
        return _import_files()


def _zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def _import_files() -> dict[str, bytes]:
    torch = {
        "features.0.weight": np.ones((2, 1, 3, 3), np.float32),
        "features.1.weight": np.ones(2, np.float32),
        "features.1.bias": np.ones(2, np.float32),
        "features.1.running_mean": np.ones(2, np.float32),
        "features.1.running_var": np.ones(2, np.float32),
        "features.1.num_batches_tracked": np.array(3),
        "classifier.weight": np.ones((3, 8), np.float32),
        "classifier.bias": np.ones(3, np.float32),
    }
    keras = {
        "conv/kernel:0": np.ones((3, 3, 1, 2), np.float32),
        "conv/bias:0": np.ones(2),
        "norm/gamma:0": np.ones(2),
        "norm/moving_mean:0": np.ones(2),
        "norm/moving_variance:0": np.ones(2, np.float16),
        "dense/kernel:0": np.asfortranarray(np.ones((8, 3))),
    }

    def npz(arrays: dict[str, Any], **changes: Any) -> bytes:
        members = {}
        for name, array in {**arrays, **changes}.items():
            file = io.BytesIO()
            np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
            members[f"{name}.npy"] = file.getvalue()
        return _zipped(members)

    packed = io.BytesIO()
    np.savez_compressed(packed, a=np.zeros(1 << 18))
    return {
        "torch": save(torch),
        "torch-npz": npz(torch),
        "keras": npz(keras),
        "empty": b"",
        "an-empty-npz": _zipped({}),
        "a-pickle": b"\x80\x04K\x01.",
        "a-bomb": packed.getvalue(),
        "a-cut-npz": npz(keras)[:-9],
        "no-array": _zipped({"a.npy": b"hello"}),
        "objects": _zipped({"a.npy": _npy("|O", "(1,)")}),
        "a-huge-shape": _zipped({"a.npy": _npy("<f4", f"({1 << 40},)")}),
        "a-negative-shape": _zipped({"a.npy": _npy("<f4", "(-1,)")}),
        "nan": npz(keras, **{"conv/bias:0": np.array([np.nan, 1])}),
        "a-negative-variance": npz(keras, **{"norm/moving_variance:0": np.array([-1.0, -1.0])}),
        "beyond-float32": npz(keras, **{"conv/kernel:0": np.full((3, 3, 1, 2), 1e300)}),
        "too-few-layers": npz({"conv/kernel:0": np.ones((3, 3, 1, 2))}),
        "another-shape": npz(keras, **{"dense/kernel:0": np.ones((3, 8))}),
        "an-unknown-part": npz(keras, **{"dense/alpha": np.ones(1)}),
    }


def _npy(kind: str, shape: str) -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text = text.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(8)


# The engine cache

_KEY = "conv1 H200 cuDNN 9.10"


class EngineCacheTarget(_FileTarget):
    """A cached choice: read if and only if its digest fits, and never an error."""

    def __init__(self) -> None:
        super().__init__()
        quiet("lenet.cuda.engine_cache", self.undo)
        self._cache = EngineCache(self.folder)
        self._path = self.folder / sha256(_KEY.encode()).hexdigest()

    def run(self, data: bytes) -> None:
        self._path.write_bytes(data)
        found = self._cache.get(_KEY)
        expected = None
        header, _, engine = data.partition(b"\n")
        match = re.fullmatch(
            rb'[ \t\r]*\{"key": "%b", "name": "([a-z0-9_ ]*)", "sha256": "([0-9a-f]{64})"\}[ \t\r]*'
            % re.escape(_KEY.encode()),
            header,
        )
        if match and b"\n" in data:
            name = match[1]
            digest = sha256(_KEY.encode() + b"\n" + name + b"\n" + engine).hexdigest()
            if digest.encode() == match[2]:
                expected = Choice(name.decode(), engine)
        if expected is not None and found != expected:
            raise Finding(f"got {found}, expected {expected}")
        if found is not None:
            if type(found.name) is not str or found.engine != engine:
                raise Finding(f"got {found}")
            digest = sha256(f"{_KEY}\n{found.name}\n".encode() + engine).hexdigest()
            if digest.encode() not in header:
                raise Finding("accepted what does not have its digest")

    def seeds(self) -> dict[str, bytes]:
        return {
            "with-an-engine": _choice("engine 7", b"\0\1\2"),
            "with-an-empty-engine": _choice("fused_network", b""),
            "empty": b"",
            "no-line-end": _choice("a", b"")[:-1],
            "not-json": b"{\n",
            "not-utf-8": b"\xff\n",
            "a-list": b"[]\n",
            "a-number": b"1\n",
            "deep": b"[" * 3000 + b"\n",
            "no-name": b"{}\n",
            "name-null": b'{"name": null}\n',
            "name-a-list": b'{"name": []}\n',
            "name-a-lone-surrogate": b'{"name": "\\ud800"}\n',
            "another-key": _choice("a", b"", key="b"),
            "a-wrong-digest": _choice("a", b"x") + b"y",
            "many-digits": b'{"name": ' + b"1" * 5000 + b"}\n",
        }

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        header, newline, engine = data.partition(b"\n")
        try:
            entry = json.loads(header)
        except (ValueError, RecursionError):
            return mutate(data)
        if rng.random() < 0.3:
            return header + newline + mutate(engine)
        if isinstance(entry, dict) and rng.random() < 0.3:
            return _choice(rng.choice(("a", "engine 1", "", "\ud800")), engine)
        entry = changed_json(entry, rng)
        return json.dumps(entry).encode() + newline + engine


def _choice(name: str, engine: bytes, key: str = _KEY) -> bytes:
    text = f"{key}\n{name}\n".encode("utf-8", "surrogatepass")
    entry = {"key": key, "name": name, "sha256": sha256(text + engine).hexdigest()}
    return json.dumps(entry).encode() + b"\n" + engine


# Checkpoints


class _Snapshot:
    """Of one tensor; keeps what is written."""

    epochs: tuple[Epoch, ...] = ()
    tensors: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        return {"dense1.weight": np.ones((2, 3), np.float32)}

    def write(self, tensors: dict[str, Any], epochs: Any) -> None:
        self.tensors, self.epochs = tensors, tuple(epochs)


class CheckpointTarget(_FileTarget):
    """A checkpoint: all tensors of the network, or an error and nothing is written."""

    def __init__(self) -> None:
        super().__init__()
        self._checkpoint = Checkpoint(self.folder, Recipe(), "0" * 64)
        self._checkpoint._run = "run"  # the corpus must not depend on the settings that there are

    def run(self, data: bytes) -> None:
        self._checkpoint.path.write_bytes(data)
        snapshot = _Snapshot()
        try:
            self._checkpoint.resume(snapshot)  # type: ignore[arg-type]
        except InvalidCheckpoint as exc:
            _check_message(exc, self._checkpoint.path, data)
            if snapshot.tensors is not None:
                raise Finding("wrote an invalid checkpoint") from exc
            return
        (tensor,) = (snapshot.tensors or {}).values()
        if tensor.shape != (2, 3) or tensor.dtype != np.float32:
            raise Finding(f"wrote {tensor.dtype} {tensor.shape}")
        for epoch in snapshot.epochs:
            if not all(type(number) is float for number in (epoch.loss, epoch.accuracy)):
                raise Finding(f"wrote {epoch}")

    def seeds(self) -> dict[str, bytes]:
        return self._files()

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        parts = _safetensors(data)
        if parts is None or rng.random() < 0.2:
            return mutate(data)
        header, tensors = parts
        metadata = header.get("__metadata__")
        if isinstance(metadata, dict) and "epochs" in metadata and rng.random() < 0.4:
            metadata["epochs"] = _changed_text(metadata["epochs"], rng, mutate)
        else:
            header = changed_json(header, rng)
        return _joined(header, tensors)

    def _files(self) -> dict[str, bytes]:
        run = self._checkpoint._run

        def file(tensor: Any = None, name: str = "dense1.weight", **metadata: Any) -> bytes:
            tensor = np.zeros((2, 3), np.float32) if tensor is None else tensor
            return save({name: tensor}, {"run": run, "epochs": "[[1, 0.5, 0.25]]", **metadata})

        return {
            "valid": file(),
            "empty": b"",
            "cut": file()[:-1],
            "another-run": file(run="x"),
            "another-name": file(name="x"),
            "another-dtype": file(np.zeros((2, 3))),
            "another-shape": file(np.zeros((3, 2), np.float32)),
            "no-metadata": save({"dense1.weight": np.zeros((2, 3), np.float32)}),
            "epochs-not-json": file(epochs="x"),
            "epochs-of-two-numbers": file(epochs="[[1, 2]]"),
            "epochs-of-words": file(epochs='[["a", "b", "c"]]'),
            "epochs-null": file(epochs="null"),
            "epochs-deep": file(epochs="[" * 3000),
            "epochs-beyond-float": file(epochs=f"[[{10**400}, 1, 1]]"),
        }
