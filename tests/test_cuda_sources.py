"""Every CUDA source compiles for every supported GPU, without spilling. This needs no GPU.

The compiler is NVRTC, as in production, from the wheels of the extra `dev`.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import get_args

import pytest

from lenet.context import architectures
from lenet.cuda import conv1, dense_halves, fused_network
from lenet.cuda.convolutions import Convolutions
from lenet.cuda.device import Limits
from lenet.cuda.epilogue import EpilogueShape
from lenet.cuda.graphs import Convolution
from lenet.cuda.nvrtc import nvrtc
from lenet.cuda.programs import Program
from lenet.errors import DeviceError
from lenet.model import (
    ARCHITECTURES,
    IDENTITY,
    Activation,
    ActivationKind,
    ConvBlock,
    DenseBlock,
    Model,
    Pool,
)
from trainer.ops_cuda.first_filter import macros as macros_of

pytestmark = pytest.mark.process  # runs a compiler

ROOT = Path(__file__).parents[1]
SERVING, TRAINING = ROOT / "lenet" / "cuda", ROOT / "trainer" / "ops_cuda"
GPUS = architectures()
SCALARS = ("float", "__half")


def epilogue(side, channels, pool=None, kind="relu", norm=True):
    """Macros of epilogue.cu for a square image."""
    c = -(-channels // 8) * 8
    shape = EpilogueShape(side, side, c, channels, pool, Activation(kind), norm, "")
    return {name: value for name, value in shape.macros().items() if name != "SCALAR"}


def first_filter(kernel, channels, **geometry):
    """Macros of first_filter.cu for a 28 x 28 image."""
    filters = channels, kernel, kernel, 1
    return macros_of(Convolution("forward", "fp32", (1, 28, 28, 1), filters, **geometry))


def conv1_macros(kernel, channels, padding=(0, 0), pool="MAX", size=(28, 28), activation="relu"):
    """Macros of conv1.cu; pooling is 2 x 2 with stride 2."""
    pool = None if pool == "NONE" else Pool(pool.lower())
    kind = Activation(activation)
    block = ConvBlock(channels, kernel, padding=padding, activation=kind, pool=pool)
    model = Model("conv1", (block, DenseBlock(10, activation=IDENTITY)), (1, *size))
    return conv1.macros(block, model.shapes()[0])


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

EPILOGUES = {
    "conv1": epilogue(24, 32, Pool("max")),
    "conv2": epilogue(8, 64, Pool("max")),
    "dense": epilogue(1, 512),
    "logits": epilogue(1, 10, kind="identity", norm=False),
    "classic": epilogue(24, 6, Pool("average"), "tanh", norm=False),
}
OTHER_EPILOGUES = {
    "overlapping": epilogue(13, 20, Pool("max", (3, 2), (2, 1), (1, 1)), "elu"),
    "padded": epilogue(13, 24, Pool("average", (3, 3), (1, 1), (1, 1)), "sigmoid"),
    "global-average": epilogue(8, 16, Pool("global_average"), "clipped_relu"),
    "wide-window": epilogue(24, 8, Pool("max", (24, 24), (24, 24)), norm=False),
}


def forward_and_backward(cases):
    """Each case with the kernel of serving and those of training."""
    sources = SERVING / "epilogue.cu", TRAINING / "epilogue_backward.cu"
    return {
        f"{source.stem}-{case}": (source, macros)
        for case, macros in cases.items()
        for source in sources
    }


# Kernels of the named networks: none may spill.
LENET = forward_and_backward(EPILOGUES) | {
    "conv1": (SERVING / "conv1.cu", conv1_macros((5, 5), 20)),
    "conv1-6-16": (SERVING / "conv1.cu", conv1_macros((5, 5), 6)),
    "conv1-32-64": (SERVING / "conv1.cu", conv1_macros((3, 3), 32, (1, 1))),
    "bias-softmax": (SERVING / "bias_softmax.cu", {"PITCH": 16, "CLASSES": 10}),
    "hang": (SERVING / "hang.cu", {}),
    "unpack": (SERVING / "unpack.cu", {}),
    "unpack-training": (SERVING / "unpack.cu", {"SCALE": "0.00392156862745098f"}),
    "dense-softmax": (SERVING / "dense_softmax.cu", {"I": 512, "CLASSES": 10, "ROWS": 4}),
    "dense-softmax-one-row": (SERVING / "dense_softmax.cu", {"I": 512, "CLASSES": 10, "ROWS": 1}),
    "first-filter": (TRAINING / "first_filter.cu", first_filter(5, 32)),
    "first-block": (
        TRAINING / "first_block.cu",
        conv1_macros((5, 5), 20) | {"C": 32, "SCALAR": "__half"},
    ),
    "batch": (TRAINING / "batch.cu", {}),
    "loss": (TRAINING / "loss.cu", {"CLASSES": 10, "PADDED": 16}),
    "sgd": (TRAINING / "sgd.cu", {"CHUNK": 1024}),
    "dropout": (TRAINING / "dropout.cu", {"C": 512, "UNITS": 500}),
}
LENET |= {
    f"fused-{name}": (SERVING / "fused_network.cu", fused_network.macros(model))
    for name, model in ARCHITECTURES.items()
}

HOPPER = Limits(90, 232_448, 132)


def convolutions(name, precision, rows):
    """The kernel of the first two convolutions of a named network, as it is launched."""
    found = Convolutions.of(ARCHITECTURES[name].folded, precision, HOPPER)
    assert found is not None
    return SERVING / "convolutions.cu", found.macros(found.split(rows, HOPPER))


LENET |= {
    f"convolutions-{name}-{precision}-{rows}": convolutions(name, precision, rows)
    for name in ("lenet", "lenet-6-16", "cnn-32-64")
    for precision in ("fp16", "tf32", "fp32")
    for rows in (1, 8192)
}
LENET |= {
    f"dense-{rows}": (
        SERVING / "dense.cu",
        {"I": 1024, "U": 512, "UNITS": 500, "ROWS": rows, "ACTIVATION": "relu"}
        | {"PARAMETER": "1.0f", "BIAS": "float"},
    )
    for rows in (1, 8)
}

LENET |= {
    f"dense-halves-{side}": (
        SERVING / "dense_halves.cu",
        {**dense_halves.macros(DenseBlock(500), 1024, 512, side), "SCALAR": "float"},
    )
    for side in (64, 128)
}

# Kernels of other networks.
OTHERS = forward_and_backward(OTHER_EPILOGUES) | {
    "conv1-unpooled": (
        SERVING / "conv1.cu",
        conv1_macros((4, 6), 9, (1, 2), "NONE", (13, 16), "sigmoid"),
    ),
    "conv1-largest": (
        SERVING / "conv1.cu",
        conv1_macros((10, 9), 100, (4, 3), "AVERAGE", activation="elu"),
    ),
    "bias-softmax-most": (SERVING / "bias_softmax.cu", {"PITCH": 64, "CLASSES": 64}),
    "dense-softmax-most": (SERVING / "dense_softmax.cu", {"I": 512, "CLASSES": 64, "ROWS": 1}),
    "dense-softmax-odd": (SERVING / "dense_softmax.cu", {"I": 1000, "CLASSES": 17, "ROWS": 3}),
    "fused-odd": (SERVING / "fused_network.cu", fused_network.macros(ODD)),
    "first-block-largest": (
        TRAINING / "first_block.cu",
        conv1_macros((31, 1), 32, size=(64, 64)),
    ),
    "first-block-smallest": (
        TRAINING / "first_block.cu",
        conv1_macros((1, 1), 3, size=(2, 4)),
    ),
    "first-filter-largest": (
        TRAINING / "first_filter.cu",
        first_filter(7, 40, stride=(2, 2), padding=(3, 3), dilation=(2, 2)),
    ),
    "first-filter-smallest": (TRAINING / "first_filter.cu", first_filter(1, 8)),
    "loss-unpadded": (TRAINING / "loss.cu", {"CLASSES": 8, "PADDED": 8}),
    "dropout-odd": (TRAINING / "dropout.cu", {"C": 88, "UNITS": 83}),
}


FIRST = dict(reversed(LENET.values()))


TENSOR_CORES = tuple(
    f"{name}.cu"
    for name in ("conv1", "first_block", "convolutions", "dense_halves", "fused_network")
)


def builds(source, macros):
    """(GPU, storage type) of each build: clusters need Hopper, TF32 needs Ampere.

    A source with instructions for tensor cores is built for every GPU in its first case. All other
    code is the same on all GPUs, with 255 registers a thread: three are enough.
    """
    of_some = {"fused_network.cu": 90, "convolutions.cu": 80, "dense_halves.cu": 80}
    first = of_some.get(source.name, 75)
    gpus = GPUS[GPUS.index(first) :]
    if source.name not in TENSOR_CORES or FIRST[source] is not macros:
        gpus = [gpu for gpu in gpus if gpu in (75, 80, 90)]
    scalars = ("__half",) if source.name == "fused_network.cu" else SCALARS
    scalars = (macros["SCALAR"],) if "SCALAR" in macros else scalars
    return itertools.product(gpus, scalars)


def compiled(source, macros, scalar, gpu):
    """The log of NVRTC and ptxas from compiling one specialisation of a file."""
    pytest.importorskip("nvidia.cu13", reason="the wheel nvidia-cuda-nvrtc is missing")
    options = Program.of(source, {**macros, "SCALAR": scalar}).options
    _, log = nvrtc().compile(source, gpu, (*options, "--ptxas-options=-v"))
    assert "warning" not in log
    return log


@pytest.mark.parametrize(
    ("case", "gpu", "scalar"),
    [(case, *build) for case in LENET for build in builds(*LENET[case])],
)
def test_a_kernel_of_a_named_network_compiles_and_keeps_everything_in_registers(case, gpu, scalar):
    source, macros = LENET[case]
    log = compiled(source, macros, scalar, gpu)
    kernels = len(re.findall(r"Compiling entry function", log))
    assert kernels == source.read_text().count("__global__")
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert stacks == [("0", "0")] * kernels, log


@pytest.mark.parametrize("case", OTHERS)
def test_a_kernel_compiles_for_other_networks(case):
    source, macros = OTHERS[case]
    # The shapes that differ from the named networks' are the same on every GPU: one is enough.
    compiled(source, macros, "__half", next(builds(source, macros))[0])


FUSED, FUSED_LENET = LENET["fused-lenet"]


@pytest.mark.parametrize(
    ("macros", "gpu", "reason"),
    [
        ({}, 80, "thread block clusters"),
        ({"UNITS": 1025}, 90, "wait in registers"),
        ({"C2": 72}, 90, "8 channels of the second"),
    ],
)
def test_the_fused_network_fails_to_compile_with_the_reason_beyond_its_bounds(macros, gpu, reason):
    with pytest.raises(DeviceError, match=reason):
        compiled(FUSED, FUSED_LENET | macros, "__half", gpu)


def test_every_cuda_source_is_compiled_here():
    found = {*SERVING.glob("*.cu"), *TRAINING.glob("*.cu")}
    assert found == {source for source, _ in LENET.values()}


def test_every_activation_is_compiled_here():
    compiled = {macros["ACTIVATION"] for macros in (EPILOGUES | OTHER_EPILOGUES).values()}
    assert compiled == set(get_args(ActivationKind))
