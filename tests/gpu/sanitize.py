"""Our own kernels alone, at small odd shapes, for compute-sanitizer to look at.

    compute-sanitizer --report-api-errors no --tool memcheck python -m tests.gpu.sanitize

and likewise racecheck, initcheck and synccheck. cuDNN's and cuBLAS's kernels are not run, so
whatever is found is ours or CuPy's. API errors are not reported: the first use of `cudnn` asks it
for 34 functions that it does not have (nvidia-cudnn-frontend 1.28, CUDA 13.0).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cupy
import numpy as np

from lenet.cuda.backend import CudaBackend
from lenet.cuda.device import Handle
from lenet.cuda.engines import EngineCatalog
from lenet.cuda.graphs import Convolution
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.memory import Arena, Workspace
from lenet.model import IDENTITY, RELU, Activation, ConvBlock, DenseBlock, Model, Pool
from lenet.weightfile import WeightFile
from trainer.augment import WarpLimits
from trainer.mnist import Digits
from trainer.ops import Epilogue, Norm, Run, Update
from trainer.ops_cuda.batch import BatchKernels
from trainer.ops_cuda.epilogue import Epilogues
from trainer.ops_cuda.first_block import FirstBlock, Unwritten
from trainer.ops_cuda.linear import Linear, SavedConvolution
from trainer.ops_cuda.parameters import Parameter
from trainer.ops_cuda.sgd import FusedSgd
from trainer.ops_cuda.state import RunState

WEIGHTS = Path(__file__).parents[2] / "weights"
MLP = "mlp/1.safetensors"

# Networks without a layer between our two kernels.
LAST = DenseBlock(10, activation=IDENTITY)
ONE = Model("one", (ConvBlock(20, (5, 5), pool=Pool("max")), LAST))
TWO = Model("two", (*ONE.blocks[:1], ConvBlock(50, (5, 5), pool=Pool("max")), LAST))
# 49 quads in the second: in the last group of eight some lanes have none.
PADDED = Model(
    "padded",
    (
        ConvBlock(32, (3, 3), padding=(1, 1), pool=Pool("max")),
        ConvBlock(64, (3, 3), padding=(1, 1), pool=Pool("max")),
        LAST,
    ),
)
# Two hidden dense layers: the last round of the first has 16 inputs, and the second half of a
# block's units.
DENSE = Model("dense", (DenseBlock(100), DenseBlock(20, activation=Activation("tanh")), LAST))
ROWS = (1, 7, 140, 300, 1100)  # from several blocks for an image to several images for a block

EPILOGUES = [
    ((5, 12, 12, 32), 20, True, RELU, Pool("max")),
    ((3, 8, 8, 64), 50, True, RELU, Pool("max", (3, 2), (1, 2), (1, 0))),
    ((7, 9, 6, 8), 3, False, Activation("elu"), Pool("average", (3, 3), (2, 2), (1, 1))),
    ((33, 96), 77, True, Activation("tanh"), None),
]


def parameter(random: np.random.Generator, wide: int, true: int) -> Parameter:
    """A vector with its padding."""
    values = np.zeros(wide, np.float32)
    values[:true] = random.uniform(0.5, 1.5, true)
    return Parameter(cupy.asarray(values), true)


def main() -> None:
    """Run each kernel at least once in both storage types."""
    random = np.random.default_rng(1)
    with Handle() as handle:
        for dtype in (np.float32, np.float16):
            kernels, arena = Kernels(handle), Arena(1 << 22)
            batch = BatchKernels(kernels, arena, cupy.dtype(dtype))
            epilogues, sgd = Epilogues(handle, kernels, arena), FusedSgd(kernels)
            engines = EngineCatalog(handle, Workspace(), None, autotune=False)
            linear = Linear(handle, handle, (engines, engines), kernels, arena, "fp32")
            for shape, channels, norm, activation, pool in EPILOGUES:
                values = random.standard_normal(shape).astype(dtype)
                values[..., channels:] = 0
                vectors = [parameter(random, shape[-1], channels) for _ in range(4)]
                epilogue = Epilogue(Norm(*vectors), None, activation, pool) if norm else None
                epilogue = epilogue or Epilogue(None, vectors[0], activation, pool)
                y, saved = epilogues.forward(cupy.asarray(values), epilogue, True)
                epilogues.backward(y, saved)
                epilogues.forward(cupy.asarray(values), epilogue, False)
            images = random.integers(0, 256, (40, 28, 28), np.uint8)
            digits = Digits(images, random.integers(0, 10, 40).astype(np.uint8))
            limits = WarpLimits(10, 0.1, 5, 2, 2)
            run = Run(digits, 13, limits, 5, np.full(3, 0.1, np.float32))
            state = RunState.upload(run, 0, dtype == np.float16, dtype, None, 0, 1)
            x, labels = batch.batch(state)
            batch.prefetch(state)
            batch.input_from_images(images)
            dy = cupy.asarray(random.standard_normal((13, 24, 24, 32)).astype(dtype))
            forward = Convolution("forward", "fp32", (13, 28, 28, 1), (32, 5, 5, 1))
            logits = cupy.asarray(random.standard_normal((13, 16)).astype(dtype))
            macros = {"PITCH": 16, "CLASSES": 10}
            kernel = kernels.get(FOLDER / "bias_softmax.cu", "bias_softmax", macros)
            product = cupy.asarray(random.standard_normal((13, 16)).astype(np.float32))
            bias = cupy.asarray(random.standard_normal(10).astype(np.float32))
            answers = [cupy.empty((13, 10), np.float32) for _ in range(2)]
            for blocks in (2, 4):  # warps with several rows, and warps without one
                kernel((blocks,), (128,), (product, bias, *answers, np.int32(13)))
            dlogits = batch.softmax_cross_entropy(logits, 10, labels, state)
            batch.dropout(dlogits, 10, 0.3, 1, state)
            zeros, half = (cupy.zeros((32, 5, 5, 1), kind) for kind in ("f4", "f2"))
            weight, velocity = Parameter(zeros, 20, half), Parameter(zeros.copy(), 20)
            saved = SavedConvolution(x, weight, forward)
            gradient = linear.convolution_weight_gradient(dy, saved)
            sgd.step([Update("conv1.weight", weight, gradient, velocity)], state, 0.9, 0.1, True)
            sgd.end_step(state)
            if dtype == np.float16:
                block = ConvBlock(20, (5, 5), batch_norm=True, pool=Pool("max"))
                first = FirstBlock(handle, kernels, arena)
                of = Unwritten(x, weight, block, replace(forward, precision="fp16"))
                norm = Norm(*(parameter(random, 32, 20) for _ in range(4)))
                y, kept = first.forward(of, Epilogue(norm, None, RELU, block.pool))
                first.backward(cupy.asarray(random.standard_normal(y.shape).astype(dtype)), kept)
            handle.synchronize()
    lenet, mlp = (WeightFile.read(WEIGHTS / name) for name in ("lenet/2.safetensors", MLP))
    runs = [(lenet, "fp16", (1, 7)), (mlp, "fp16", (1, 7)), (lenet, "fp32", (1, 7))]
    all_three = ("fp16", "tf32", "fp32")
    for model, rows, precisions in (
        *((ONE, (1, 7), all_three), (TWO, ROWS, all_three), (PADDED, ROWS, all_three)),
        (DENSE, (7, 1100), ("fp32",)),  # the others are cuBLAS's
    ):
        tensors = {
            name: random.standard_normal(shape).astype(np.float32)
            for name, shape in model.parameters().items()
        }
        file = replace(lenet, model=model, tensors=tensors)
        runs += [(file, precision, rows) for precision in precisions]
    for file, precision, rows in runs:
        with CudaBackend(precision=precision) as backend:
            for count in rows:
                plan = backend.plan(file, count)
                plan.run(random.integers(0, 256, (count, 28, 28), np.uint8))
                plan.logits(np.zeros((count, 28, 28), np.uint8))


if __name__ == "__main__":
    main()
