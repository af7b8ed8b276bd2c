"""The weight file: what it keeps, and every attack that its docstring names.

`signed` writes a file by the format's own description, not by `WeightFile.to_bytes`: an
attack is a wrong value with a true checksum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from lenet.context import ExecutionContext, Target, open_backend
from lenet.errors import InvalidWeightFile
from lenet.model import ARCHITECTURES, named
from lenet.weightfile import MAX_FILE_BYTES, WeightFile


@pytest.fixture(scope="module")
def weights(random_weights, tiny):
    return random_weights(tiny)


@pytest.fixture(scope="module")
def content(weights):
    return weights.to_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


def parts_of(content):
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def assembled(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def signed(content, *, metadata=(), tensors=(), drop=()):
    """A file with changed metadata and tensors, less those in `drop`, and a true sha256."""
    header, _ = parts_of(content)
    arrays = {
        name: value
        for name, value in {**load(content), **dict(tensors)}.items()
        if name not in drop
    }
    signed = {
        key: value
        for key, value in {**header["__metadata__"], **dict(metadata)}.items()
        if key not in drop
    }
    signed.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(signed, sort_keys=True).encode())
    for name in sorted(arrays):
        value = arrays[name]
        digest.update(f"{name} {value.dtype.str} {value.shape}\n".encode() + value.tobytes())
    return save(arrays, {**signed, "sha256": digest.hexdigest()})


def error(path: Path, content: bytes | None = None) -> str:
    """The error of `read` for a file of `content`, without the path at its start."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidWeightFile) as caught:
        WeightFile.read(path)
    start, _, rest = str(caught.value).partition(": ")
    assert start == str(path), "the message starts with the file"
    assert rest
    return rest


# --- what it keeps


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_everything_is_read_back_when_it_was_written(random_weights, tmp_path, name):
    weights = random_weights(name)
    path = tmp_path / "deep" / "folder" / "1.safetensors"
    weights.write(path)
    found = WeightFile.read(path)
    assert found.model == weights.model
    assert found.training == weights.training
    assert list(found.tensors) == list(weights.model.parameters())
    for key, tensor in weights.tensors.items():
        np.testing.assert_array_equal(found.tensors[key], tensor)
    for part in ("images", "labels", "logits"):
        stored, drawn = getattr(found.golden, part), getattr(weights.golden, part)
        np.testing.assert_array_equal(stored, drawn)
        assert stored.dtype == drawn.dtype
    assert found.to_bytes() == path.read_bytes()
    assert found.digest() == hashlib.sha256(path.read_bytes()).hexdigest() == weights.digest()
    other = dataclasses.replace(found, training=dataclasses.replace(found.training, epochs=77))
    assert other.digest() == hashlib.sha256(other.to_bytes()).hexdigest() != found.digest()


def test_a_file_is_rejected_when_it_says_the_same_in_another_form(content, folder):
    path = folder / "by-hand.safetensors"
    path.write_bytes(signed(content))
    assert path.read_bytes() != content
    with pytest.raises(InvalidWeightFile, match=r"by-hand\.safetensors: is not in the canonical"):
        WeightFile.read(path)


def test_tensors_cannot_be_exchanged_when_they_were_read(content, folder):
    path = folder / "frozen.safetensors"
    path.write_bytes(content)
    found = WeightFile.read(path)
    with pytest.raises(TypeError):
        found.tensors["dense1.bias"] = 0
    with pytest.raises(ValueError, match="read-only"):
        found.tensors["dense1.bias"][0] = 0


# --- what is no file, or no such file


def test_a_missing_file_is_rejected(folder):
    assert error(folder / "absent.safetensors") == "cannot be read (No such file or directory)"


def test_a_fifo_is_rejected_without_waiting_when_nobody_writes_to_it(folder):
    path = folder / "fifo.safetensors"
    os.mkfifo(path)
    assert error(path) == "is not a regular file"


def test_a_sparse_file_of_ten_gigabytes_is_rejected_unread(content, folder):
    path = folder / "sparse.safetensors"
    path.write_bytes(content)
    try:
        os.truncate(path, 10 * 2**30)
    except OSError as exc:
        pytest.skip(f"this filesystem holds no sparse files: {exc}")
    assert error(path) == f"has {10 * 2**30} bytes, expected at most {MAX_FILE_BYTES}"


# --- bytes that are no weight file


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty, expected a safetensors file: copy or export it again"),
        (
            b"weights go here\n",
            r"is not a safetensors file: it begins with 'weights go here\n', expected the length "
            "of a JSON header, at most 1048576 bytes, and the header; export it again",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is not a safetensors file: it begins with 'version https://', expected the length "
            "of a JSON header, at most 1048576 bytes, and the header; it is a pointer of Git LFS: "
            "git lfs pull fetches the file",
        ),
        (
            b"PK\x03\x04" + bytes(20),
            r"is not a safetensors file: it begins with 'PK\x03\x04\x00\x00\x00\x00\x00\x00\x00\x00"
            r"\x00\x00\x00\x00', expected the length of a JSON header, at most 1048576 bytes, and "
            "the header; the trainer's import makes a file with all of it from weights of PyTorch "
            "or Keras",
        ),
        (
            struct.pack("<Q", 1000) + b'{"a',
            "is truncated: it has 11 bytes, its header alone 1008; copy or export it again",
        ),
    ],
)
def test_the_message_says_what_is_wrong_and_what_to_do(folder, data, message):
    assert error(folder / "foreign.safetensors", data) == message


def test_a_pickle_is_not_run_when_it_is_disguised(folder, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "bang"),))

    assert "safetensors" in error(folder / "bomb.safetensors", pickle.dumps(Bomb()))
    assert not (tmp_path / "bang").exists()


def test_a_file_is_rejected_when_it_is_cut_off_anywhere(content, folder):
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    draw = random.Random(1)
    lengths = [*range(0, header_end, 7), *range(header_end - 3, header_end + 3), len(content) - 1]
    lengths += [draw.randrange(header_end, len(content)) for _ in range(100)]
    for length in lengths:
        error(folder / "cut.safetensors", content[:length])


def test_a_file_is_rejected_when_any_bit_is_flipped(content, folder):
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    draw = random.Random(2)
    places = [*range(header_end), *(draw.randrange(header_end, len(content)) for _ in range(400))]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        error(folder / "flipped.safetensors", bytes(flipped))


# --- tensors that are not the model's


@pytest.mark.parametrize(("name", "value"), [("dense1.weight", np.nan), ("golden.logits", -np.inf)])
def test_a_tensor_is_rejected_by_name_and_place_when_it_holds_no_number(
    content, folder, name, value
):
    tensor = load(content)[name].copy()
    place = tuple(side - 1 for side in tensor.shape)
    tensor[place] = value
    message = error(folder / "nan.safetensors", signed(content, tensors={name: tensor}))
    assert message == f"tensor {name}: holds {value} at {place}, expected finite numbers"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("dense1.bias", np.zeros(11, np.float32), r"has shape (11,), expected (10,)"),
        ("dense1.weight", np.zeros((784, 10), np.float32), "has shape (784, 10), expected (10, 7"),
        ("dense1.bias", np.zeros(10, np.uint8), "has dtype uint8, expected float32"),
        ("golden.images", np.zeros((10, 28, 28), np.float32), "has dtype float32, expected uint8"),
        ("golden.labels", np.full(10, 10, np.uint8), "holds 10, expected classes 0 to 9"),
        ("golden.logits", np.zeros((10, 9), np.float32), "has shape (10, 9), expected (10, 10)"),
    ],
)
def test_a_tensor_is_rejected_by_name_when_it_is_not_the_models(
    content, folder, name, tensor, message
):
    found = error(folder / "tensor.safetensors", signed(content, tensors={name: tensor}))
    assert found.startswith(f"tensor {name}: {message}")


@pytest.mark.parametrize("name", ["dense1.bias", "golden.images"])
def test_a_file_is_rejected_when_a_tensor_is_missing(content, folder, name):
    message = error(folder / "missing.safetensors", signed(content, drop=[name]))
    assert message == f"tensor {name}: missing"


# --- metadata that is missing, unknown or lies


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"extra": "1"}, "metadata 'extra' is unknown"),
        ({"format_version": "2"}, "metadata format_version is '2', expected '1'"),
        ({"batch_norm": "present"}, "metadata batch_norm is 'present', expected 'folded'"),
        ({"model": "{}"}, "model: blocks is missing"),
        ({"model": "[" * 50_000}, "model: the description is not JSON"),
        ({"training": "{}"}, "metadata training cannot be read"),
        ({"training": "[]"}, "metadata training cannot be read"),
        ({"training": "[" * 50_000}, "metadata training cannot be read"),
    ],
)
def test_metadata_is_rejected_when_it_is_not_the_formats(content, folder, metadata, message):
    assert error(folder / "metadata.safetensors", signed(content, metadata=metadata)).startswith(
        message
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dataset_sha256", "0" * 63, "dataset_sha256 is .* expected 64 hex digits"),
        ("seed", -1, "seed is -1, expected an integer >= 0"),
        ("seed", True, "seed is True"),
        ("command", None, "command is None, expected a string"),
        ("epochs", "3", "epochs is '3'"),
        ("accuracy", 1.01, "accuracy is 1.01, expected a number from 0.0 to 1.0"),
        ("accuracy", float("nan"), "accuracy is nan"),
        ("labels", list(range(10)), "labels is .*, expected different names of 1 to 100 printable"),
        ("labels", [*"01234567", "9", "9"], "expected different names"),
        ("labels", [*"012345678", "\n"], "expected different names"),
        ("labels", 10, "metadata training cannot be read"),
        (
            "labels",
            [*"012345678"],
            "metadata labels are 9, expected 10 as model 'tiny' has classes",
        ),
        ("extra", 1, "metadata training cannot be read"),
    ],
)
def test_training_metadata_are_rejected_when_a_value_is_invalid(
    content, weights, folder, key, value, message
):
    training = {**dataclasses.asdict(weights.training), key: value}
    changed = signed(content, metadata={"training": json.dumps(training)})
    path = folder / "training.safetensors"
    path.write_bytes(changed)
    with pytest.raises(InvalidWeightFile, match=message):
        WeightFile.read(path)


def test_a_file_is_rejected_when_its_model_still_has_batch_norm(random_weights, folder):
    lenet = random_weights("lenet")
    changed = signed(lenet.to_bytes(), metadata={"model": named("lenet").to_json()})
    message = error(folder / "unfolded.safetensors", changed)
    assert message == "metadata model still has batch norm, expected it folded"


def test_a_file_is_rejected_when_its_model_takes_other_images(content, weights, folder):
    model = {**json.loads(weights.model.to_json()), "input": [3, 28, 28]}
    tensors = {"dense1.weight": np.zeros((10, 3 * 784), np.float32)}
    changed = signed(content, metadata={"model": json.dumps(model)}, tensors=tensors)
    message = error(folder / "input.safetensors", changed)
    assert message == "metadata model has input (3, 28, 28), expected 784 pixels"


def test_a_file_is_rejected_when_content_was_edited_after_it_was_signed(content, folder):
    header, data = parts_of(content)
    changes = {"training": header["__metadata__"]["training"].replace("0.5", "0.9")}
    edited = {**header, "__metadata__": {**header["__metadata__"], **changes}}
    message = error(folder / "edited.safetensors", assembled(edited, data))
    assert message == "metadata sha256 does not match the content: the file was damaged or edited"


SHIPPED = sorted(Path(__file__).parents[2].glob("weights/*/*.safetensors"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_shipped_file_is_canonical_and_agrees_with_its_golden_logits(path):
    weights = WeightFile.read(path)
    assert weights.to_bytes() == path.read_bytes()
    assert weights.model.name == path.parent.name
    with ExecutionContext(open_backend(Target("cpu")), weights, 10) as context:
        context.warm_up()
