"""The CUDA sources compile for every supported GPU, without spilling: no GPU is needed to see it.

One compilation a specialisation makes the code of all GPUs that it is for. It refuses to say that
a kernel is right: that takes a GPU. nvcc is started when the session is, by `nvcc_says`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lenet.cuda.fusion import first_macros, whole_macros
from lenet.model import ARCHITECTURES, IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool

ROOT = Path(__file__).parents[1]
SERVING, TRAINING = ROOT / "lenet" / "cuda", ROOT / "trainer" / "ops_cuda"
GPUS = ("75", "80", "90")  # Turing: the oldest of CUDA 13; Ampere; Hopper
SCALARS = ("float", "__half")


def pair(name, values):
    """The macros of both axes, vertical first."""
    return dict(zip((f"{name}H", f"{name}W"), values, strict=True))


def tail(height, channels, window=(1, 1), pool="NONE", activation="relu", norm=1, **fields):
    """Macros of epilogue.cu for a square image; `fields`: stride (default: window), padding."""
    stride = fields.get("stride", window)
    padding = fields.get("padding", (0, 0))
    out = [(height + 2 * p - w) // s + 1 for w, s, p in zip(window, stride, padding, strict=True)]
    axes = pair("", (height, height)) | pair("O", out) | pair("WINDOW_", window)
    return axes | pair("STRIDE_", stride) | pair("PAD_", padding) | {
        "C": -(-channels // 8) * 8,
        "CHANNELS": channels,
        "POOL": pool,
        "NORM": norm,
        "ACTIVATION": activation,
        "PARAMETER": "1.0f",
        "INDEX": "uint8" if window[0] * window[1] <= 256 else "uint16",
    }  # fmt: skip


def first_filter(kernel, channels, stride=1, padding=0, dilation=1):
    """Macros of first_filter.cu for a 28 x 28 image."""
    out = (28 + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    axes = pair("STRIDE_", (stride,) * 2) | pair("PAD_", (padding,) * 2)
    axes |= pair("DILATION_", (dilation,) * 2) | pair("", (28, 28)) | pair("O", (out, out))
    return axes | {"C": channels, "R": kernel, "S": kernel}


def first(kernel, channels, padding=(0, 0), pool="MAX", size=(28, 28), activation="relu"):
    """Macros of conv1.cu; pooling is 2 x 2 with stride 2."""
    pool = None if pool == "NONE" else Pool(pool.lower())
    kind = Activation(activation)
    block = ConvBlock(channels, kernel, padding=padding, activation=kind, pool=pool)
    model = Model("first", (block, DenseBlock(10, activation=IDENTITY)), (1, *size))
    return first_macros(block, model.shapes()[0])


ODD = Model(
    "odd",
    (
        ConvBlock(9, (4, 3), padding=(1, 2), activation=Activation("tanh"), pool=Pool("average")),
        ConvBlock(33, (3, 4), padding=(2, 1), activation=Activation("elu"), pool=Pool("max")),
        DenseBlock(300, activation=Activation("sigmoid")),
        DenseBlock(7, activation=IDENTITY),
    ),
    (1, 21, 20),
)

# What the networks of this project ask for: here nothing may spill.
LENET = {
    "tail-conv1": (SERVING / "epilogue.cu", tail(24, 32, (2, 2), "MAX")),
    "tail-conv2": (SERVING / "epilogue.cu", tail(8, 64, (2, 2), "MAX")),
    "tail-dense": (SERVING / "epilogue.cu", tail(1, 512)),
    "tail-logits": (SERVING / "epilogue.cu", tail(1, 10, activation="identity", norm=0)),
    "tail-classic": (SERVING / "epilogue.cu", tail(24, 6, (2, 2), "AVERAGE", "tanh", norm=0)),
    "first": (SERVING / "conv1.cu", first((5, 5), 20)),
    "first-6-16": (SERVING / "conv1.cu", first((5, 5), 6)),
    "first-32-64": (SERVING / "conv1.cu", first((3, 3), 32, (1, 1))),
    "unpack": (SERVING / "unpack.cu", {}),
    "last": (SERVING / "dense_softmax.cu", {"I": 512, "CLASSES": 10, "ROWS": 4}),
    "last-one-row": (SERVING / "dense_softmax.cu", {"I": 512, "CLASSES": 10, "ROWS": 1}),
    "first-filter": (TRAINING / "first_filter.cu", first_filter(5, 32)),
    "batch": (TRAINING / "batch.cu", {}),
    "loss": (TRAINING / "loss.cu", {"CLASSES": 10, "PADDED": 16}),
    "update": (TRAINING / "update.cu", {"CHUNK": 1024}),
    "dropout": (TRAINING / "dropout.cu", {"C": 512, "UNITS": 500}),
}
LENET |= {
    f"whole-{name}": (SERVING / "fused_network.cu", whole_macros(model))
    for name, model in ARCHITECTURES.items()
}

# What a described network may ask for besides.
OTHERS = {
    "tail-overlapping": (
        SERVING / "epilogue.cu",
        tail(13, 20, (3, 2), "MAX", "elu", stride=(2, 1), padding=(1, 1)),
    ),
    "tail-padded-average": (
        SERVING / "epilogue.cu",
        tail(13, 24, (3, 3), "AVERAGE", "sigmoid", stride=(1, 1), padding=(1, 1)),
    ),
    "tail-global-average": (
        SERVING / "epilogue.cu",
        tail(8, 16, (8, 8), "AVERAGE", "clipped_relu"),
    ),
    "tail-wide-window": (SERVING / "epilogue.cu", tail(24, 8, (24, 24), "MAX", norm=0)),
    "first-unpooled": (
        SERVING / "conv1.cu",
        first((4, 6), 9, (1, 2), "NONE", (13, 16), "sigmoid"),
    ),
    "first-largest": (
        SERVING / "conv1.cu",
        first((10, 9), 100, (4, 3), "AVERAGE", activation="elu"),
    ),
    "last-odd": (SERVING / "dense_softmax.cu", {"I": 1000, "CLASSES": 17, "ROWS": 3}),
    "whole-odd": (SERVING / "fused_network.cu", whole_macros(ODD)),
    "first-filter-largest": (
        TRAINING / "first_filter.cu",
        first_filter(7, 40, stride=2, padding=3, dilation=2),
    ),
    "first-filter-smallest": (TRAINING / "first_filter.cu", first_filter(1, 8)),
    "loss-unpadded": (TRAINING / "loss.cu", {"CLASSES": 8, "PADDED": 8}),
    "dropout-odd": (TRAINING / "dropout.cu", {"C": 88, "UNITS": 83}),
}


def supported(source):
    """(GPUs, storage types) of a source: clusters of blocks came with Hopper."""
    return (GPUS[-1:], SCALARS[-1:]) if source.name == "fused_network.cu" else (GPUS, SCALARS)


def nvcc(source, macros, scalar, gpus):
    """The arguments of nvcc for one specialisation."""
    options = ["-std=c++17", "-fatbin", "--threads=2", "--Werror=all-warnings", "-Xptxas=-v"]
    options += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in gpus]
    options += [f"-I{SERVING}", f"-I{TRAINING}"]
    options += [f"-D{name}={value}" for name, value in {**macros, "SCALAR": scalar}.items()]
    return (*options, str(source))


@pytest.mark.parametrize(
    ("source", "nvcc_arguments"),
    [
        pytest.param(
            source, nvcc(source, macros, scalar, supported(source)[0]), id=f"{case}-{scalar}"
        )
        for case, (source, macros) in LENET.items()
        for scalar in supported(source)[1]
    ],
)
def test_a_kernel_of_lenet_compiles_and_keeps_everything_in_registers(
    source, nvcc_arguments, nvcc_says
):
    said = nvcc_says(nvcc_arguments)
    kernels = len(re.findall(r"Compiling entry function", said))
    assert kernels == len(supported(source)[0]) * source.read_text().count("__global__")
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert stacks == [("0", "0")] * kernels, said


@pytest.mark.parametrize(
    "nvcc_arguments",
    [
        # What differs from lenet's kernels differs in no way between GPUs: the oldest will do.
        pytest.param(nvcc(source, macros, "__half", supported(source)[0][:1]), id=case)
        for case, (source, macros) in OTHERS.items()
    ],
)
def test_a_kernel_compiles_for_other_networks(nvcc_arguments, nvcc_says):
    nvcc_says(nvcc_arguments)


WHOLE, WHOLE_LENET = LENET["whole-lenet"]


@pytest.mark.parametrize(
    ("nvcc_arguments", "reason"),
    [
        (nvcc(WHOLE, WHOLE_LENET, "__half", ["80"]), "thread block clusters"),
        (nvcc(WHOLE, WHOLE_LENET | {"UNITS": 1025}, "__half", ["90"]), "wait in registers"),
        (nvcc(WHOLE, WHOLE_LENET | {"C2": 72}, "__half", ["90"]), "8 channels of the second"),
    ],
)
def test_a_whole_network_is_refused_with_the_reason(nvcc_arguments, reason, nvcc_says):
    assert reason in nvcc_says(nvcc_arguments, refused=True)


def test_every_cuda_source_is_compiled_here():
    found = {*SERVING.glob("*.cu"), *TRAINING.glob("*.cu")}
    assert found == {source for source, _ in LENET.values()}
