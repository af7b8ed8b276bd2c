"""Weights of other makers: what is imported gives their probabilities."""

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lenet.cpu import CpuBackend
from lenet.weightfile import WeightFile
from trainer import importing, inspect, tensor_files
from trainer.commands import run
from trainer.errors import InvalidImport
from trainer.tensor_files import read_tensors

GOLDEN = Path(__file__).parent / "golden"
TORCH = {
    "name": "mine",
    "blocks": [
        {"type": "conv", "channels": 6, "kernel": [5, 5], "batch_norm": True, "pool": "max"},
        {
            "type": "conv",
            "channels": 8,
            "kernel": [3, 3],
            "stride": [2, 2],
            "padding": [1, 1],
            "batch_norm": True,
            "activation": "elu",
        },
        {"type": "dense", "units": 20, "batch_norm": True, "activation": "tanh"},
        {"type": "dense", "units": 10},
    ],
}
NORMALIZED = ["--input-mean", "0.1307", "--input-deviation", "0.3081"]


def main(*line):
    return run(["import", *map(str, line)], {})


@pytest.fixture
def described(tmp_path):
    """Write a description, and the arguments that name it."""

    def write(description):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(description))
        return ["--model", path, "--out", tmp_path / "out"]

    return write


def served(tmp_path, images, version=1):
    """The answers of the imported network, in float32 on the CPU."""
    weights = WeightFile.read(tmp_path / f"out/mine/{version}.safetensors")
    return CpuBackend().plan(weights, len(images)).run(images).probabilities


def torch_golden():
    with np.load(GOLDEN / "torch-import.npz") as file:
        return file["images"], file["probabilities"]


# PyTorch


@pytest.mark.parametrize("prefix", ["module.", "state_dict.model._orig_mod."])
def test_a_prefix_of_all_names_is_taken_off_and_said(tmp_path, described, capsys, prefix):
    arrays = load_file(GOLDEN / "torch-import.safetensors")
    file = tmp_path / "state.safetensors"
    save_file({f"{prefix}{name}": array for name, array in arrays.items()}, file)
    assert main(file, *described(TORCH), *NORMALIZED) == 0
    said = f"{file}: {prefix} is taken off the names, which all begin with it"
    assert said in capsys.readouterr().out.splitlines()
    images, probabilities = torch_golden()
    np.testing.assert_allclose(served(tmp_path, images), probabilities, atol=1e-5)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_a_state_dict_gives_the_probabilities_of_pytorch(tmp_path, described, capsys, kind):
    file = GOLDEN / "torch-import.safetensors"
    if kind == "npz":
        arrays = load_file(file)
        file = tmp_path / "state.npz"
        np.savez(file, **arrays)
    assert main(file, *described(TORCH), *NORMALIZED) == 0
    images, probabilities = torch_golden()
    np.testing.assert_allclose(served(tmp_path, images), probabilities, atol=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{file}, in the layout of torch:"
    assert "conv1.gamma      <- features.1.weight                (6,)" in lines
    assert "dense2.weight    <- classifier.3.weight              (10, 20)" in lines
    path = tmp_path / "out/mine/1.safetensors"
    assert lines[-2].startswith(
        f"{path}: accuracy not measured; --data FOLDER measures it, sha256 "
    )
    assert lines[-1].startswith(f"serve it: lenet-serve --weights {tmp_path / 'out'}")
    weights = WeightFile.read(path)
    training = weights.training
    assert (training.accuracy, training.dataset_sha256) == (None, "")
    assert (training.epochs, training.seed) == (None, None)
    assert "test accuracy not measured, trained elsewhere\n" in inspect.content(
        WeightFile.read(path)
    )
    assert training.command == (
        f"python -m trainer import --file {file.name} --model mine.json --layout torch "
        "--input-mean 0.1307 --input-deviation 0.3081"
    )


def test_a_tensor_of_bfloat16_is_read(tmp_path):
    values = np.array([[1.0, -2.5], [0.15625, 3.3895314e38]], np.float32)
    halves = (values.view(np.uint32) >> 16).astype("<u2")
    assert (values.view(np.uint16)[:, ::2] == 0).all()  # bfloat16 holds them exactly
    tensor = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}
    header = json.dumps({"a.weight": tensor}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + halves.tobytes())
    np.testing.assert_array_equal(read_tensors(path)["a.weight"], values)


def test_a_mapping_names_the_tensors(tmp_path, described):
    arrays = load_file(GOLDEN / "torch-import.safetensors")
    mapping = importing.matched(
        {name: value for name, value in arrays.items() if "num_batches" not in name},
        importing.read_source(json.dumps(TORCH)),
        "torch",
    )
    renamed = {f"x{number}": arrays[name] for number, name in enumerate(mapping.values())}
    save_file(renamed, tmp_path / "renamed.safetensors")
    names = {name: f"x{number}" for number, name in enumerate(mapping)}
    (tmp_path / "names.json").write_text(json.dumps(names))
    line = [*described(TORCH), *NORMALIZED, "--mapping", tmp_path / "names.json"]
    assert main(tmp_path / "renamed.safetensors", *line) == 0
    images, probabilities = torch_golden()
    np.testing.assert_allclose(served(tmp_path, images), probabilities, atol=1e-5)


def test_the_accuracy_is_measured_when_there_is_data(tmp_path, described, tiny, write_idx, capsys):
    line = [*described(TORCH), *NORMALIZED, "--data", write_idx(tiny)]
    assert main(GOLDEN / "torch-import.safetensors", *line) == 0
    training = WeightFile.read(tmp_path / "out/mine/1.safetensors").training
    wrong = round(60 * (1 - training.accuracy))
    assert f"test accuracy {training.accuracy:.2%} ({wrong} of 60 wrong)" in capsys.readouterr().out
    assert len(training.dataset_sha256) == 64


# Keras, whose arithmetic is written here once more: NHWC, and TensorFlow's "same"

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "identity": lambda x: x,
}


def conv2d(x, kernel, stride, padding):
    n, h, w, _ = x.shape
    r, s, _, k = kernel.shape
    if padding == "same":
        oh, ow = -(-h // stride), -(-w // stride)
        down, right = max((oh - 1) * stride + r - h, 0), max((ow - 1) * stride + s - w, 0)
        above, left = down // 2, right // 2
        x = np.pad(x, ((0, 0), (above, down - above), (left, right - left), (0, 0)))
    else:
        oh, ow = (h - r) // stride + 1, (w - s) // stride + 1
    y = np.zeros((n, oh, ow, k))
    for i in range(oh):
        for j in range(ow):
            window = x[:, i * stride : i * stride + r, j * stride : j * stride + s]
            y[:, i, j] = np.einsum("nrsc,rsck->nk", window, kernel)
    return y


def max_pool(x):
    n, h, w, c = x.shape
    return x[:, : h // 2 * 2, : w // 2 * 2].reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))


class Keras:
    """Layers in the manner of Keras' Sequential; `arrays` under the names that it gives them."""

    def __init__(self, blocks, norm_options=()):
        self.random, self.blocks, self.arrays = np.random.default_rng(9), blocks, {}
        self.norm_options = norm_options

    def draw(self, name, shape, positive=False):
        values = self.random.normal(0, 0.3, shape)
        self.arrays[name] = np.float32(1 + np.abs(values) if positive else values)
        return self.arrays[name].astype(np.float64)

    def __call__(self, images):
        x = images[..., None] / 255.0
        for number, block in enumerate(self.blocks):
            if block["type"] == "conv":
                kernel = self.draw(
                    f"conv2d_{number}/kernel:0", (*block["kernel"], x.shape[3], block["channels"])
                )
                x = conv2d(x, kernel, block.get("stride", [1])[0], block.get("padding", "valid"))
                x = x + self.draw(f"conv2d_{number}/bias:0", (block["channels"],))
            else:
                x = x.reshape(len(x), -1)
                kernel = self.draw(f"dense_{number}/kernel:0", (x.shape[1], block["units"]))
                x = x @ kernel
                x = x + self.draw(f"dense_{number}/bias:0", (block["units"],))
            if block.get("batch_norm"):
                x = self.norm(x, f"batch_normalization_{number}")
            last = number == len(self.blocks) - 1
            x = ACTIVATIONS[block.get("activation", "identity" if last else "relu")](x)
            if "pool" in block:
                x = max_pool(x)
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    def norm(self, x, name):
        k = x.shape[-1]
        gamma = beta = None
        if "no scale" not in self.norm_options:
            gamma = self.draw(f"{name}/gamma:0", (k,), positive=True)
        if "no center" not in self.norm_options:
            beta = self.draw(f"{name}/beta:0", (k,))
        mean = self.draw(f"{name}/moving_mean:0", (k,))
        variance = self.draw(f"{name}/moving_variance:0", (k,), positive=True)
        x = (x - mean) / np.sqrt(variance + 1e-3)
        return x * (1 if gamma is None else gamma) + (0 if beta is None else beta)


def dense(units, **options):
    return {"type": "dense", "units": units, **options}


def conv(channels, size, **options):
    return {"type": "conv", "channels": channels, "kernel": [size, size], **options}


@pytest.mark.parametrize(
    ("blocks", "norm"),
    [
        ([conv(4, 5, batch_norm=True, pool="max"), dense(12, batch_norm=True), dense(10)], ()),
        ([conv(4, 5, batch_norm=True), dense(10)], ("no scale", "no center")),
        # "same" with stride 2 on 28 and 14 rows pads one more below: 3 is padded (0, 1), 5 (1, 2)
        (
            [
                conv(4, 3, stride=[2, 2], padding="same"),
                conv(5, 5, stride=[2, 2], padding="same", activation="tanh"),
                dense(10),
            ],
            (),
        ),
        ([conv(4, 5, padding="same", pool="max"), conv(5, 2, padding="same"), dense(10)], ()),
    ],
    ids=["batch norm", "batch norm without gamma and beta", "stride", "even kernel"],
)
def test_arrays_of_keras_give_its_probabilities(tmp_path, described, blocks, norm):
    images = np.random.default_rng(1).integers(0, 256, (8, 28, 28), np.uint8)
    keras = Keras(blocks, norm)
    probabilities = keras(images)
    assert probabilities.max(1).min() < 0.999
    np.savez(tmp_path / "keras.npz", **keras.arrays)
    assert main(tmp_path / "keras.npz", *described({"name": "mine", "blocks": blocks})) == 0
    np.testing.assert_allclose(served(tmp_path, images), probabilities, atol=1e-5)


@pytest.mark.parametrize(
    ("norm", "lines"),
    [
        (False, ["dense1.bias      <- zeros: the file has none"]),
        (
            True,
            [
                "dense1.gamma     <- ones: the file has none",
                "dense1.beta      <- zeros: the file has none",
            ],
        ),
    ],
)
def test_what_the_file_lacks_is_said_and_replaced(tmp_path, described, capsys, norm, lines):
    arrays = arrays_of(fc1_bias=None)
    if norm:
        arrays |= {"norm.mean": np.zeros(30), "norm.variance": np.ones(30)}
    np.savez(tmp_path / "a.npz", **arrays)
    blocks = [dense(30, batch_norm=norm), dense(10)]
    assert main(tmp_path / "a.npz", *described({"name": "mine", "blocks": blocks})) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "has none" in line] == lines
    assert not WeightFile.read(tmp_path / "out/mine/1.safetensors").tensors["dense1.bias"].any()


# Files that do not fit

MLP = {"name": "mine", "blocks": [dense(30), dense(10)]}


def arrays_of(**changes):
    arrays = {
        "fc1.weight": np.ones((30, 784), np.float32),
        "fc1.bias": np.ones(30, np.float32),
        "fc2.weight": np.ones((10, 30), np.float32),
        "fc2.bias": np.ones(10, np.float32),
    }
    changed = {**arrays, **{name.replace("_", "."): value for name, value in changes.items()}}
    return {name: value for name, value in changed.items() if value is not None}


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (
            arrays_of(fc1_weight=np.ones((30, 783), np.float32)),
            "dense1.weight: fc1.weight has shape (30, 783), expected (30, 784)",
        ),
        (
            arrays_of(fc1_weight=np.ones((784, 30), np.float32)),
            "dense1.weight: fc1.weight has shape (784, 30), expected (30, 784); transposed by (1, "
            "0) it would fit: is the layout keras instead of torch?",
        ),
        (
            arrays_of(fc2_weight=None, fc2_bias=None),
            "the file has 1 dense layers, expected 2, as mine has; --model names another: fc1",
        ),
        (arrays_of(fc2_alpha=np.ones(3)), "fc2.alpha is no part of a layer that is known"),
        (
            arrays_of(fc2_bias=np.array([np.nan] * 10)),
            "fc2.bias holds nan, expected finite numbers",
        ),
        (arrays_of(fc2_bias=np.array(["a"] * 10)), "fc2.bias has dtype <U1, expected numbers"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, described, capsys, arrays, sentence):
    np.savez(tmp_path / "a.npz", **arrays)
    assert main(tmp_path / "a.npz", *described(MLP)) == 6
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# Files


def npy(header, data=b""):
    text = header.encode("latin-1").ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def npz(method=zipfile.ZIP_DEFLATED, **members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def archive(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        for name in names:
            members.writestr(name, b"")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b"",
            "is neither a safetensors nor an npz file; save a PyTorch state dict with safetensors",
        ),
        (pickle.dumps({"a": 1}), "is a pickled file, which is never read; save a PyTorch state"),
        (archive("m/data.pkl", "m/data/0"), "is a pickled PyTorch file, which is never read; save"),
        (archive("config.json", "model.weights.h5"), "is a Keras model; save its arrays with nump"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file; save its arrays with numpy.savez(FILE, **{"),
        (b"\x93NUMPY\x01\x00", "is a single array; save all of them in one file with numpy.savez"),
        (b"\x02\0\0\0\0\0\0\0{]", "is a broken safetensors file ("),
        (b"PK\x03\x04", "is not a valid npz file"),
        (npz(), "holds no arrays"),
        (npz(zipfile.ZIP_LZMA, a=b""), "a.npy is compressed as NumPy does not: method 14"),
        (
            npz(a=npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", bytes(8))),
            "a has dtype object",
        ),
        (
            npz(a=npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000,), }")),
            "a has 0 bytes, expected 4 x (1000000000,) as its header says",
        ),
        (
            npz(a=npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 40}, }}"[:110])),
            "a is not an array in npy format",
        ),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InvalidImport) as caught:
        read_tensors(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 10_000)
    path = tmp_path / "bomb.npz"
    path.write_bytes(npz(a=bytes(6_000), b=bytes(6_000)))
    with pytest.raises(InvalidImport, match=r"a is not an array|unpacks to more than 10000 bytes"):
        read_tensors(path)
    path.write_bytes(bytes(10_001))
    with pytest.raises(InvalidImport, match="has more than the 10000 bytes that are read"):
        read_tensors(path)


def test_equal_layers_of_a_safetensors_file_are_in_the_order_of_their_numbers(tmp_path):
    # The library gives them in an order that changes from one reading to the next.
    shapes = [(5, 784), *[(5, 5)] * 11, (10, 5)]
    arrays = {f"fc{n}.weight": np.zeros(shape, np.float32) for n, shape in enumerate(shapes)}
    save_file(arrays, tmp_path / "a.safetensors")
    source = importing.read_source(
        json.dumps({"name": "mine", "blocks": [*[dense(5)] * 12, dense(10)]})
    )
    tensors = read_tensors(tmp_path / "a.safetensors")
    assert list(tensors) == list(arrays)
    found = importing.matched(tensors, source, "torch")
    assert found == {f"dense{n + 1}.weight": f"fc{n}.weight" for n in range(13)}


@pytest.mark.parametrize(
    ("mapping", "sentence"),
    [
        (
            {"dense3.weight": "fc1.weight"},
            "the mapping names dense3.weight, expected some of dense1",
        ),
        (
            {"dense1.weight": "fc3.weight"},
            "from fc3.weight, which the file does not hold: it holds",
        ),
        ({"dense1.weight": "fc1.weight"}, "the mapping lacks dense2.weight"),
        (
            {"dense1.weight": "fc2.weight", "dense2.weight": "fc1.weight"},
            "dense1.weight: fc2.weight has shape (10, 30), expected (30, 784)",
        ),
    ],
)
def test_a_wrong_mapping_is_one_sentence(tmp_path, described, capsys, mapping, sentence):
    np.savez(tmp_path / "a.npz", **arrays_of())
    (tmp_path / "names.json").write_text(json.dumps(mapping))
    line = [*described(MLP), "--mapping", tmp_path / "names.json"]
    assert main(tmp_path / "a.npz", *line) == 6
    assert sentence in capsys.readouterr().err
