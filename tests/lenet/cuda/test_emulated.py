"""Kernels run without a GPU: compiled for the host, with a thread for each of theirs.

This shows that they index and synchronise rightly, and nothing about their speed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lenet import reference
from lenet.cuda.convolutions import Convolutions, Split
from lenet.cuda.device import Limits
from lenet.cuda.kernels import FOLDER, storage_dtype
from lenet.cuda.packing import PIXEL_SCALE, padded, zero_pad_to
from lenet.model import ARCHITECTURES

pytestmark = [
    pytest.mark.process,  # runs a compiler
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]

EMULATED = Path(__file__).parent / "emulated"
HOPPER = Limits(90, 232_448, 132)
LARGEST = {"fp16": 1e-3, "tf32": 1e-3, "fp32": 1e-6}
"""Relative errors in norm."""


@pytest.fixture
def compiled(tmp_path):
    """`compiled("dense", macros)`: the library of a kernel."""

    def compile_(name, macros):
        for file in (*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh"), *EMULATED.iterdir()):
            shutil.copy(file, tmp_path)  # the stand-ins last
        defines = [f"-D{key}={value}" for key, value in macros.items()]
        options = ["-std=c++20", "-I.", "-O2", "-w", "-shared", "-fPIC", "-pthread"]
        line = ["g++", *options, *defines, f"{name}.cc", "-o", "kernel.so"]
        subprocess.run(line, cwd=tmp_path, check=True)
        return ctypes.CDLL(str(tmp_path / "kernel.so"))

    return compile_


def aligned(array):
    """A copy that begins at a multiple of 16 bytes, as device memory does."""
    room = np.zeros(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    found = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def addresses(*arrays):
    return [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]


@pytest.mark.parametrize(
    ("name", "precision", "split"),
    [
        ("lenet", "fp16", Split(2, 1, 2, 1)),
        ("lenet", "fp32", Split(1, 4, 1, 2)),
        ("lenet-classic", "tf32", Split(1, 2, 1, 1)),
        ("lenet-6-16", "fp32", Split(2, 1, 2, 1)),
        ("cnn-32-64", "fp16", Split(1, 4, 1, 2)),
    ],
)
def test_the_first_two_convolutions_are_those_of_float64(compiled, name, precision, split):
    model = ARCHITECTURES[name].folded
    both = Convolutions.of(model, precision, HOPPER)
    kernel = compiled("convolutions", both.macros(split))
    assert kernel.shared_bytes() == both.shared_bytes(split.teams)
    generator, dtype = np.random.default_rng(5), storage_dtype(precision)
    images = generator.integers(0, 256, (3, 28, 28), np.uint8)
    tensors = {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in model.parameters().items()
    }
    filters = {block: tensors[f"{block}.weight"] for block in ("conv1", "conv2")}
    biases = [zero_pad_to(tensors[f"conv{k}.bias"], (64,)) for k in (1, 2)]
    channels, oh, ow = model.shapes()[1].output
    y = aligned(np.full((len(images), oh, ow, padded(channels)), 7, dtype))
    given = map(
        aligned, (images, both.pack_first(filters["conv1"]), both.pack_second(filters["conv2"]))
    )
    kept = [*given, *map(aligned, biases), y]
    kernel.run(*addresses(*kept), len(images), 1)

    exact = {key: tensor.astype(float) for key, tensor in tensors.items()}
    if precision == "fp16":  # as they are stored
        scaled = (filters["conv1"] * np.float32(PIXEL_SCALE)).astype(np.float16)
        exact["conv1.weight"] = scaled / PIXEL_SCALE
        exact["conv2.weight"] = filters["conv2"].astype(np.float16).astype(float)
    (expected,) = (
        step.values
        for step in reference.steps(model, exact, images)
        if (step.name, step.kind) == ("conv2", "pooling")
    )
    found = y[..., :channels].transpose(0, 3, 1, 2)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < LARGEST[precision]
    assert not y[..., channels:].any()


@pytest.mark.parametrize(("dtype", "largest"), [(np.float32, 1e-6), (np.float16, 1e-3)])
def test_a_dense_layer_of_few_rows_is_that_of_float64(compiled, dtype, largest):
    rows, inputs, units = 5, 200, 13
    scalar = "float" if dtype == np.float32 else "__half"
    macros = {"SCALAR": scalar, "BIAS": scalar, "I": inputs, "U": 16, "UNITS": units, "ROWS": 2}
    kernel = compiled("dense", macros | {"ACTIVATION": "elu", "PARAMETER": "0.5f"})
    generator = np.random.default_rng(5)
    x, weight, bias = (
        aligned(generator.standard_normal(shape).astype(dtype))
        for shape in ((rows, inputs), (16, inputs), 16)
    )
    y = aligned(np.full((rows, 16), 7, dtype))
    kernel.run(*addresses(x, weight, bias, y), rows)
    z = x.astype(float) @ weight.astype(float).T + bias.astype(float)
    expected = np.where(z > 0, z, 0.5 * np.expm1(z))[:, :units]
    error = np.linalg.norm(y[:, :units] - expected) / np.linalg.norm(expected)
    assert error < largest
    assert not y[:, units:].any()
