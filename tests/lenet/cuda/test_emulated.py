"""Kernels run without a GPU: compiled for the host, with a coroutine for each of their threads.

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
from lenet.cuda import conv1, dense_halves
from lenet.cuda.convolutions import Convolutions, Split
from lenet.cuda.device import Limits
from lenet.cuda.kernels import FOLDER, scalar, storage_dtype
from lenet.cuda.packing import PIXEL_SCALE, padded, zero_pad_to
from lenet.model import ARCHITECTURES, IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool

pytestmark = [
    pytest.mark.process,  # runs a compiler
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]

EMULATED = Path(__file__).parent / "emulated"
TRAINING = Path(__file__).parents[3] / "trainer" / "ops_cuda"
HOPPER = Limits(90, 232_448, 132)
LAST = DenseBlock(10, activation=IDENTITY)
NETWORKS = {name: model.folded for name, model in ARCHITECTURES.items()} | {
    "wide": Model(  # more channels of the first than threads
        "wide",
        (ConvBlock(40, (3, 3), pool=Pool("max")), ConvBlock(16, (1, 1), pool=Pool("max")), LAST),
    ),
    "odd": Model(  # odd sizes, padding, a last tile alone; zeros do not stay zeros
        "odd",
        (
            ConvBlock(9, (4, 3), (1, 1), (1, 2), (1, 1), False, Activation("sigmoid"), Pool("max")),
            ConvBlock(
                18, (3, 2), (1, 1), (1, 0), (1, 1), False, Activation("elu", 0.5), Pool("average")
            ),
            LAST,
        ),
    ),
}
LARGEST = {"fp16": 1e-3, "tf32": 1e-3, "fp32": 1e-6}
"""Relative errors in norm."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled("dense", macros)`: the library of a kernel."""
    folder, libraries = tmp_path_factory.mktemp("emulated"), {}
    sources = [*FOLDER.glob("*.cu*"), *TRAINING.glob("*.cu*")]
    for file in (*sources, *EMULATED.iterdir()):  # the stand-ins last
        shutil.copy(file, folder)

    def compile_(name, macros):
        line = f"{name}.cc", *(f"-D{key}={value}" for key, value in macros.items())
        if line not in libraries:
            library = folder / f"{len(libraries)}.so"
            options = ["-std=c++20", "-I.", "-O2", "-w", "-shared", "-fPIC", "-o", library]
            subprocess.run(["g++", *line, *options], cwd=folder, check=True)
            libraries[line] = ctypes.CDLL(str(library))
        return libraries[line]

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
        ("lenet", "fp16", Split(2, 2)),
        ("lenet", "fp16", Split(1, 4, slices=3, parts=1, depths=2)),
        ("lenet", "fp32", Split(1, 4, parts=2)),
        ("lenet-classic", "tf32", Split(1, 8, slices=2, parts=2, depths=2)),
        ("lenet-6-16", "fp32", Split(2, 1)),
        ("cnn-32-64", "fp16", Split(1, 4, parts=2)),
        ("wide", "fp16", Split(1, 1)),
        ("odd", "fp32", Split(2, 2)),
        ("odd", "fp16", Split(1, 4, slices=2)),
    ],
)
def test_the_first_two_convolutions_are_those_of_float64(compiled, name, precision, split):
    model = NETWORKS[name]
    found, expected = both_convolutions(compiled, model, precision, split, normal(model))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < LARGEST[precision]


@pytest.mark.parametrize("name", ["lenet", "odd"])
@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e12, 1e25])
def test_float32_of_halves_takes_filters_of_any_size(compiled, name, factor):
    """Far beyond what halves hold, 6e-8 to 65,504; each output channel has a size of its own."""
    model = NETWORKS[name]
    tensors = normal(model)
    if name == "lenet":  # the activation of "odd" gives 0 to 1
        for kind in ("weight", "bias"):
            tensors[f"conv1.{kind}"] *= np.float32(factor)
    sizes = np.geomspace(1, 1e6, len(tensors["conv2.bias"])).astype(np.float32)
    tensors["conv2.weight"] *= sizes[:, None, None, None] / np.float32(factor)
    tensors["conv2.bias"] *= sizes / np.float32(1 if name == "lenet" else factor)
    found, expected = both_convolutions(compiled, model, "fp32", Split(2, 2), tensors)
    found, expected = (y / sizes[:, None, None] for y in (found, expected))
    assert np.linalg.norm(found - expected) < LARGEST["fp32"] * np.linalg.norm(expected)


def normal(model):
    """Normal tensors of `model`."""
    generator = np.random.default_rng(5)
    return {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in model.parameters().items()
    }


def both_convolutions(compiled, model, precision, split, tensors):
    """The second pooled image by the kernel and in float64, (n, k, oh, ow)."""
    both = Convolutions.of(model, precision, HOPPER)
    kernel = compiled("convolutions", both.macros(split))
    assert kernel.shared_bytes() == both.shared_bytes(split)
    images = np.random.default_rng(6).integers(0, 256, (3, 28, 28), np.uint8)
    filters = {block: tensors[f"{block}.weight"] for block in ("conv1", "conv2")}
    biases = [zero_pad_to(tensors[f"conv{k}.bias"], (64,)) for k in (1, 2)]
    channels, oh, ow = model.shapes()[1].output
    dtype = storage_dtype(precision)
    y = aligned(np.full((len(images), oh, ow, padded(channels)), 7, dtype))
    given = map(
        aligned, (images, both.pack_first(filters["conv1"]), both.pack_second(filters["conv2"]))
    )
    scales = both.scales(filters["conv1"], tensors["conv1.bias"], filters["conv2"])
    kept = [*given, *map(aligned, biases), aligned(scales), y]
    kernel.run(*addresses(*kept), len(images), 1, split.slices)
    assert not y[..., channels:].any()

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
    return y[..., :channels].transpose(0, 3, 1, 2), expected


@pytest.mark.parametrize(
    ("block", "precision"),
    [
        (ConvBlock(20, (5, 5), pool=Pool("max")), "fp16"),  # four tiles of channels
        (ConvBlock(40, (3, 3), padding=(1, 1), pool=Pool("average")), "fp16"),  # two chunks
        (ConvBlock(9, (3, 4), activation=Activation("sigmoid")), "fp32"),  # padding becomes 0.5
    ],
    ids=lambda value: str(getattr(value, "channels", value)),
)
def test_the_first_convolution_is_that_of_float64(compiled, block, precision):
    model = Model("first", (block, LAST))
    shape, dtype = model.shapes()[0], storage_dtype(precision)
    kernel = compiled("conv1", {**conv1.macros(block, shape), "SCALAR": scalar(dtype)})
    generator = np.random.default_rng(5)
    images = generator.integers(0, 256, (3, 28, 28), np.uint8)
    exact = {key: generator.standard_normal(size) for key, size in model.parameters().items()}
    packed = conv1.fragments(exact["conv1.weight"], conv1.parts(precision))
    channels, oh, ow = shape.output
    y = aligned(np.full((len(images), oh, ow, padded(channels)), 7, dtype))
    bias = zero_pad_to(exact["conv1.bias"].astype(np.float32), (padded(channels),))
    kernel.run(*addresses(aligned(images), aligned(packed), bias, y), len(images), 1)
    *_, expected, _ = (step.values for step in reference.steps(model, exact, images))
    error = np.linalg.norm(y[..., :channels].transpose(0, 3, 1, 2) - expected)
    assert error < LARGEST[precision] * np.linalg.norm(expected)
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


@pytest.mark.parametrize(
    ("rows", "inputs", "units", "side", "kind", "size"),
    [
        (5, 200, 13, 64, "relu", 1.0),  # a last round of 8 inputs, less than a block's units
        (70, 128, 72, 64, "elu", 1e12),  # two blocks of rows and of units
        (130, 72, 144, 128, "identity", 1e-30),
        (3, 4, 5, 64, "sigmoid", 1.0),  # zeros behind the units would become 0.5
    ],
)
def test_a_dense_layer_of_halves_is_that_of_float64(
    compiled, rows, inputs, units, side, kind, size
):
    block, wide = DenseBlock(units, activation=Activation(kind)), padded(units)
    kernel = compiled("dense_halves", dense_halves.macros(block, inputs, wide, side))
    assert kernel.shared_bytes() == dense_halves.shared_bytes(side)
    generator = np.random.default_rng(5)
    x = generator.uniform(-1, 1, (rows, inputs)).astype(np.float32) * np.float32(size)
    sizes = np.geomspace(1, 1e6, units, dtype=np.float32)[:, None] / np.float32(size)
    weight = zero_pad_to(generator.standard_normal((units, inputs)), (wide, inputs))
    weight = weight.astype(np.float32)
    weight[:units] *= sizes
    bias = zero_pad_to(generator.standard_normal(units).astype(np.float32), (wide,))
    packed, factors = dense_halves.pack(weight), dense_halves.factors(weight, size)
    y = aligned(np.full((rows + 1, wide), 7, np.float32))
    kept = [aligned(array) for array in (x, packed, bias, factors)]
    kernel.run(*addresses(*kept, y), rows)
    z = x.astype(float) @ weight[:units].astype(float).T + bias[:units]
    expected = reference.activate(z, block.activation)
    found = y[:rows, :units]
    error = np.linalg.norm(found - expected, axis=0) / np.linalg.norm(z, axis=0)
    assert error.max() < LARGEST["fp32"]
    assert not y[:rows, units:].any()
    assert (y[rows] == 7).all()


def assert_rows(logits, probabilities, expected, largest):
    """Rows of a last layer: the last of `expected` is NaN, and one more row was not written."""
    *good, bad = expected
    error = np.linalg.norm(logits[:-2] - good) / np.linalg.norm(good)
    assert error < largest
    np.testing.assert_allclose(probabilities[:-2], reference.softmax(np.array(good)), atol=largest)
    assert np.isnan(probabilities[len(expected) - 1]).all()
    assert np.isnan(bad).any()
    assert (logits[-1] == 7).all()
    assert (probabilities[-1] == 7).all()


@pytest.mark.parametrize("classes", [10, 32, 33, 47, 64])
@pytest.mark.parametrize(("dtype", "largest"), [(np.float32, 1e-6), (np.float16, 1e-3)])
def test_a_last_layer_is_that_of_float64_for_each_number_of_classes(
    compiled, classes, dtype, largest
):
    n, inputs, generator = 7, 40, np.random.default_rng(5)
    x = aligned(generator.standard_normal((n, inputs)).astype(dtype))
    x[-1, 3] = np.nan
    weight = aligned(generator.standard_normal((padded(classes), inputs)).astype(dtype))
    bias = generator.standard_normal(classes).astype(np.float32)
    expected = x.astype(float) @ weight[:classes].astype(float).T + bias
    answers = [np.full((n + 1, classes), 7, np.float32) for _ in range(2)]
    macros = {"SCALAR": scalar(np.dtype(dtype)), "I": inputs, "CLASSES": classes}
    kernel = compiled("dense_softmax", macros | {"ROWS": 2 if classes <= 32 else 1})
    kernel.run(*addresses(x, weight, bias, *answers), n)
    assert_rows(*answers, expected, largest)


@pytest.mark.parametrize("classes", [10, 47, 64])
def test_a_bias_and_a_softmax_behind_a_product_are_those_of_float64(compiled, classes):
    n, pitch, generator = 7, padded(classes), np.random.default_rng(5)
    product = generator.standard_normal((n, pitch)).astype(np.float32)
    product[-1, classes - 1] = np.nan
    bias = generator.standard_normal(classes).astype(np.float32)
    answers = [np.full((n + 1, classes), 7, np.float32) for _ in range(2)]
    kernel = compiled("bias_softmax", {"PITCH": pitch, "CLASSES": classes})
    kernel.run(*addresses(product, bias, *answers), n)
    assert_rows(*answers, product[:, :classes].astype(float) + bias, 1e-6)


@pytest.mark.parametrize(
    ("rows", "blocks", "image", "filter_size", "padding", "channels", "pixels", "largest"),
    [
        (5, 3, (28, 28), (5, 5), (0, 0), (20, 32), (0, 1), 1e-6),
        # a block takes more than two images
        (5, 1, (28, 28), (5, 5), (2, 2), (20, 24), (0, 1), 1e-6),
        # blocks of two groups; odd steps
        (29, 15, (10, 12), (3, 3), (1, 1), (9, 16), (0, 1), 1e-6),
        (4, 2, (9, 12), (2, 5), (0, 0), (8, 8), (0, 1), 1e-6),
        # Bright images with little contrast: sums of float rounded to 1e-7 of the mean, which is
        # 400 deviations.
        (5, 3, (28, 28), (5, 5), (0, 0), (20, 32), (0.97, 0.99), 1e-4),
        (5, 3, (28, 28), (5, 5), (2, 2), (20, 24), (0.97, 0.99), 1e-5),
    ],
)
def test_the_first_block_of_training_is_that_of_float64(
    compiled, rows, blocks, image, filter_size, padding, channels, pixels, largest
):
    epsilon, (channels, stored), (r, s) = 1e-5, channels, filter_size
    oh, ow = (side + 2 * p - k + 1 for side, p, k in zip(image, padding, filter_size, strict=True))
    macros = dict(
        zip(("H", "W", "R", "S", "PAD_H", "PAD_W"), (*image, r, s, *padding), strict=True)
    )
    macros |= {"POOL": "MAX", "C": stored, "CHANNELS": channels}
    kernel = compiled("first_block", macros)
    generator = np.random.default_rng(5)

    def zeros(*shape, dtype=np.float32):
        return aligned(np.zeros(shape, dtype))

    def normal(*shape):
        tensor = np.zeros(shape, np.float32)
        tensor[:channels] = generator.standard_normal((channels, *shape[1:]))
        return aligned(tensor)

    x = aligned(generator.uniform(*pixels, (rows, *image)).astype(np.float16))
    weight, gamma, beta = normal(stored, r * s), normal(stored), normal(stored)
    partial, counters = zeros(blocks * 1024), zeros(8, dtype=np.uint32)
    patches, mean = zeros(channels + 1, r * s), zeros(stored)
    variance, running_mean = zeros(stored), zeros(stored)
    running_variance = aligned(np.ones(stored, np.float32))
    moments = patches, mean, variance, running_mean, running_variance
    kernel.moments(*addresses(x, weight, partial, counters, *moments), rows, blocks)
    pooled = rows, oh // 2, ow // 2, stored
    y, dy = zeros(*pooled, dtype=np.float16), zeros(*pooled, dtype=np.float16)
    dy[...] = generator.standard_normal(dy.shape)
    index = zeros(*pooled, dtype=np.uint8)
    given = addresses(x, weight, mean, variance, gamma, beta, y, index)
    kernel.forward(*given, rows, blocks)
    dweight, dgamma, dbeta = zeros(stored, r * s), zeros(stored), zeros(stored)
    saved = x, y, dy, index, weight, mean, variance, gamma, patches, partial, counters
    kernel.backward(*addresses(*saved, dweight, dgamma, dbeta), rows, blocks)

    # The usual way, with all that the convolution computes.
    around = [(0, 0), *((p, p) for p in padding)]
    patch = np.lib.stride_tricks.sliding_window_view(
        np.pad(x.astype(float), around), filter_size, (1, 2)
    )
    patch = patch.reshape(-1, r * s)
    computed = patch @ weight.astype(np.float16).astype(float).T
    inverse = 1 / np.sqrt(computed.var(0) + epsilon)
    normalized = (computed - computed.mean(0)) * inverse
    windows = (gamma * normalized + beta).reshape(rows, oh // 2, 2, ow // 2, 2, stored)
    windows = windows.transpose(0, 1, 3, 5, 2, 4).reshape(*pooled, 4)
    # Sums of halves in float may choose the other one of two that are almost equal.
    chosen = np.take_along_axis(windows, index.astype(int)[..., None], -1)[..., 0]
    gradient = np.zeros_like(windows)
    passed = np.where(y > 0, dy, 0).astype(float)[..., None]
    np.put_along_axis(gradient, index.astype(int)[..., None], passed, -1)
    gradient = gradient.reshape(*pooled, 2, 2).transpose(0, 1, 4, 2, 5, 3)
    dz = gradient.reshape(-1, stored)
    dbeta_exact, dgamma_exact = dz.sum(0), (dz * normalized).sum(0)
    centred = dz - (dbeta_exact + normalized * dgamma_exact) / len(patch)
    for found, exact, most in (
        (mean, computed.mean(0), 1e-6),
        (variance, computed.var(0), largest),
        (running_mean, 0.1 * computed.mean(0), 1e-6),
        (running_variance, 0.9 + 0.1 * computed.var(0, ddof=1), 1e-6),
        (chosen, windows.max(-1), largest),
        (y, np.maximum(windows.max(-1), 0), 1e-3),
        (dbeta, dbeta_exact, 1e-6),
        (dgamma, dgamma_exact, largest),
        (dweight, (gamma * inverse * centred).T @ patch, largest),
    ):
        real = (slice(channels),) if found.ndim < 4 else (..., slice(channels))
        error = np.linalg.norm(found[real] - exact[real]) / np.linalg.norm(exact[real])
        assert error < most
    assert not counters.any()
    assert not y[..., channels:].any()
    assert not dweight[channels:].any()
