"""Describes a weight file and who computes its layers, or each call of one training step.

A real step runs on operations that record their calls. On a GPU each recorded call is then captured
and timed alone, and compared with a large copy and a large matrix product: how near it is to the
GPU's limits. Without a GPU the step runs on the CPU and the table has no engines and no times; its
shapes are those of the GPU: channels last, padded as `lenet.cuda.packing` says.

Source: Williams, Waterman & Patterson 2009, "Roofline".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from lenet.context import ExecutionContext, Target, open_backend
from lenet.cuda.epilogue import ONE_BLOCK_PIXELS
from lenet.cuda.graphs import Convolution, ConvolutionsBy
from lenet.cuda.graphs import Precision as ServingPrecision
from lenet.cuda.packing import layout, padded
from lenet.model import IDENTITY, Block, ConvBlock, Model, Shape
from lenet.pixels import HEIGHT, WIDTH
from lenet.weightfile import WeightFile
from trainer.augment import WarpLimits
from trainer.devices import on_gpu
from trainer.mnist import DIGITS, Digits
from trainer.network import Network, initial_tensors, take_step
from trainer.ops import Array, Epilogue, Run, RunState, Saved, Tensor, TrainingOps, Update
from trainer.ops_cpu import CpuOps
from trainer.ops_cuda import first_block, first_filter
from trainer.optimizer import Sgd
from trainer.settings import Precision, Recipe

_STEPS = 100_000  # of the run; timing the update counts thousands of them
_DIGITS = 50_000  # to draw from; fewer would fit into a cache
_FLOAT32 = 4
_SERVED_ROWS = 1024  # the service's default on a GPU
_MAX_BYTE_TAPS = 256  # larger windows need two bytes for the position of a maximum
_HEADINGS = ("layer", "part", "shape in -> out", "call", "MFLOP", "MB")
_MEASURED = ("workspace B", "us", "roofline %", "engine")
SERVED: dict[Precision, ServingPrecision] = {"fp32": "fp32", "tf32": "tf32", "mixed": "fp16"}
"""The precision of the service for one of training."""

_NUMBERS = frozenset(
    {
        "images",
        "MFLOP",
        "MB",
        "workspace B",
        "us",
        "roofline %",
        "parameters",
        "mean",
        "sd",
        "largest",
    }
)
_CUBLAS, _EPILOGUE = "cuBLAS product", "our epilogue kernels"
_FIRST_BLOCK = "our first_block kernels"
_GRADIENTS = {
    "convolution_weight_gradient": "weight gradient",
    "convolution_input_gradient": "input gradient",
    "dense_weight_gradient": "weight gradient",
    "dense_input_gradient": "input gradient",
}


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a step; `run` repeats it with the same arguments.

    `operations` are the multiplications and additions of a product or convolution, 0 of anything
    else. `size_bytes` is the least memory traffic: each array once, the input of batch norm twice.
    `convolution` is set if cuDNN computes it.
    """

    layer: str
    part: str
    source: Shape
    result: Shape
    routine: str
    size_bytes: int
    run: Callable[[], object]
    operations: int = 0
    convolution: Convolution | None = None


class _Linear(NamedTuple):
    """The shapes of a layer's product or convolution."""

    layer: str
    x: Shape
    y: Shape
    weight: Shape
    convolution: Convolution | None


class RecordingOps:
    """Runs the operations of `ops` and records in `calls` those that compute something.

    Shapes are those of the arrays of `ops`, except on the CPU: there they are those that a step of
    `batch` images has on a GPU.
    """

    def __init__(self, ops: TrainingOps, batch: int, precision: Precision) -> None:
        self.calls: list[Call] = []
        self._ops, self._batch, self._precision = ops, batch, precision
        self._width = 2 if precision == "mixed" else _FLOAT32
        self._layers: dict[int, str] = {}  # by the identity of a parameter
        self._sizes: dict[str, int] = {}
        self._images: Array = None
        self._first_block: str | None = None  # the layer that first_block.cu computes, if one

    def __getattr__(self, name: str) -> Any:
        return partial(self._gradient, name) if name in _GRADIENTS else getattr(self._ops, name)

    def upload(
        self, model: Model, tensors: Mapping[str, Tensor], operands: bool = True
    ) -> dict[str, Array]:
        """Notes the layer of each array."""
        arrays = self._ops.upload(model, tensors, operands)
        self._layers |= {id(array): name.partition(".")[0] for name, array in arrays.items()}
        self._sizes |= {name: math.prod(packed.shape) for name, packed in layout(model).items()}
        return arrays

    def batch(self, state: RunState) -> tuple[Array, Array]:
        """Recorded."""
        x, labels = self._ops.batch(state)
        self._images = x
        shape = self._shape(x)
        size, run = math.prod(shape) * (1 + self._width), partial(self._ops.batch, state)
        self.calls.append(Call("batch", "step", shape[:-1], shape, "our batch kernel", size, run))
        return x, labels

    def convolution(self, x: Array, weight: Array, block: ConvBlock) -> tuple[Array, Saved]:
        """Recorded."""
        y, saved = self._ops.convolution(x, weight, block)
        (n, h, w, c), output = self._shape(x), self._shape(y)
        filters = (output[-1], *block.kernel, c)
        precision = "fp16" if self._precision == "mixed" else self._precision
        geometry = block.stride, block.padding, block.dilation
        convolution = Convolution("forward", precision, (n, h, w, c), filters, *geometry)
        linear = _Linear(self._layers[id(weight)], (n, h, w, c), output, filters, convolution)
        self._record(linear, "forward", partial(self._ops.convolution, x, weight, block))
        if first_block.fits(convolution, block):
            self._first_block = linear.layer
            self.calls[-1] = replace(self.calls[-1], routine=_FIRST_BLOCK, convolution=None)
        return y, (linear, saved)

    def dense(self, x: Array, weight: Array) -> tuple[Array, Saved]:
        """Recorded."""
        y, saved = self._ops.dense(x, weight)
        (n, *image), units = self._shape(x), self._shape(y)[1]
        inputs = math.prod(image)
        linear = _Linear(self._layers[id(weight)], (n, inputs), (n, units), (units, inputs), None)
        self._record(linear, "forward", partial(self._ops.dense, x, weight))
        return y, (linear, saved)

    def _gradient(self, operation: str, dy: Array, saved: Saved) -> Array:
        linear, own = saved
        run = partial(getattr(self._ops, operation), dy, own)
        if linear.layer != self._first_block:  # its gradient is known
            self._record(linear, _GRADIENTS[operation], run)
        return run()

    def _record(self, linear: _Linear, part: str, run: Callable[[], object]) -> None:
        layer, x, y, weight, convolution = linear
        source, to = (x, y) if part == "forward" else (y, x)
        routine, weight_width = _CUBLAS, self._width
        if part == "weight gradient":
            to, weight_width = weight, _FLOAT32
        if part == "weight gradient" and convolution and first_filter.fits(convolution):
            routine, convolution = "our first_filter kernel", None
        elif convolution is not None:
            directions: dict[str, tuple[Literal["forward", "filter", "data"], str]] = {
                "forward": ("forward", "forward"),
                "weight gradient": ("filter", "filter gradient"),
                "input gradient": ("data", "data gradient"),
            }
            direction, verb = directions[part]
            convolution = replace(convolution, direction=direction)
            routine, weight_width = f"cuDNN convolution {verb}", self._width
        size = self._width * (math.prod(x) + math.prod(y)) + weight_width * math.prod(weight)
        operations = 2 * math.prod(y) * math.prod(weight[1:])
        self.calls.append(
            Call(layer, part, source, to, routine, size, run, operations, convolution)
        )

    def epilogue(self, x: Array, epilogue: Epilogue, training: bool) -> tuple[Array, Saved]:
        """Recorded. Batch norm reads x for its moments first, unless one block has all of it."""
        y, saved = self._ops.epilogue(x, epilogue, training)
        if self.calls[-1].routine == _FIRST_BLOCK:
            run = partial(self._ops.epilogue, x, epilogue, training)
            return y, (self._record_first_block(self._shape(y), run), saved)
        norm, pool = epilogue.norm, epilogue.pool
        layer = self._layers[id(epilogue.bias if norm is None else norm.gamma)]
        source, to = self._shape(x), self._shape(y)
        is_one = pool is None and math.prod(source[:-1]) <= ONE_BLOCK_PIXELS
        passes = 1 if norm is None or is_one else 2
        read, written = (self._width * math.prod(shape) for shape in (source, to))
        if pool is not None and pool.kind == "max":
            written += math.prod(to) * (1 if math.prod(pool.size) <= _MAX_BYTE_TAPS else 2)
        size, run = passes * read + written, partial(self._ops.epilogue, x, epilogue, training)
        self.calls.append(Call(layer, "epilogue forward", source, to, _EPILOGUE, size, run))
        size = passes * (written + read) + read
        if norm is None and pool is None and epilogue.activation == IDENTITY:
            size = written  # dx is dy: only the gradient of the bias is computed
        backward = partial(Call, layer, "epilogue backward", to, source, _EPILOGUE, size)
        return y, (backward, saved)

    def _record_first_block(
        self, to: Shape, run: Callable[[], object]
    ) -> Callable[[Callable[[], object]], Call]:
        """Completes the call of the convolution; returns what records the gradients."""
        forward = self.calls[-1]
        images, outputs = (self._width * math.prod(shape) for shape in (forward.source, to))
        outputs += math.prod(to)  # the positions of the maxima
        self.calls[-1] = replace(
            forward,
            result=to,
            size_bytes=2 * images + outputs,
            run=run,
        )
        backward = partial(Call, forward.layer, "backward", to, forward.source, _FIRST_BLOCK)
        size = images + outputs + self._width * math.prod(to)
        return partial(backward, size, operations=forward.operations)

    def epilogue_backward(self, dy: Array, saved: Saved) -> tuple[Array, tuple[Array, ...]]:
        """Recorded. Batch norm reads x and dy for its sums first."""
        call, own = saved
        run = partial(self._ops.epilogue_backward, dy, own)
        self.calls.append(call(run))
        return run()

    def softmax_cross_entropy(self, logits: Array, labels: Array, state: RunState) -> Saved:
        """Recorded."""
        shape = self._shape(logits)
        run = partial(self._ops.softmax_cross_entropy, logits, labels, state)
        size = 2 * self._width * math.prod(shape)
        self.calls.append(Call("loss", "step", shape, shape, "our loss kernel", size, run))
        return run()

    def sgd_step(self, updates: Sequence[Update], state: RunState, *settings: Any) -> None:
        """Recorded together with `end_step`. Velocities and float16 copies are updated, too."""
        mixed, size = self._precision == "mixed", 0
        # cuDNN writes the gradient of a filter in the dtype of the activations.
        by_cudnn = {c.layer for c in self.calls if c.convolution and c.part == "weight gradient"}
        for update in updates:
            owner, _, kind = update.name.partition(".")
            half = mixed and kind == "weight"
            gradient = 2 if half and owner in by_cudnn else _FLOAT32
            size += (4 * _FLOAT32 + gradient + (2 if half else 0)) * self._sizes[update.name]

        def run() -> None:
            self._ops.sgd_step(updates, state, *settings)
            self._ops.end_step(state)

        self.calls.append(Call("update", "step", (), (), "our update kernels", size, run))
        self._ops.sgd_step(updates, state, *settings)

    def end_step(self, state: RunState) -> None:
        """Not run: it would free the arrays that the recorded calls need."""

    def _shape(self, x: Array) -> Shape:
        if self._ops.name != "cpu":
            return tuple(x.shape)
        return (self._batch, *x.shape[1:-1], 1 if x is self._images else padded(len(x)))


def record_step(
    model: Model, ops: TrainingOps, run: Run, batch: int, precision: Precision
) -> list[Call]:
    """The calls of one step of `run` in order; `batch` as in `RecordingOps`."""
    recorder = RecordingOps(ops, batch, precision)
    _step(model, cast("TrainingOps", recorder), run)()
    return recorder.calls


def content(weights: WeightFile) -> str:
    """Describe a weight file: its origin, and a row for each layer."""
    model, training = weights.model, weights.training
    rows = [("layer", "what", "shape in -> out", "weight", "parameters", "mean", "sd", "largest")]
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        weight, bias = (weights.tensors[f"{shape.name}.{part}"] for part in ("weight", "bias"))
        size = weight.size + bias.size
        rows.append(
            (
                shape.name,
                _described(block),
                f"{_format_shape(shape.input)} -> {_format_shape(shape.output)}",
                _format_shape(weight.shape),
                str(size),
                f"{weight.mean():.4f}",
                f"{weight.std():.4f}",
                f"{np.abs(weight).max():.3f}",
            )
        )
    total = sum(tensor.size for tensor in weights.tensors.values())
    accuracy = "not measured" if training.accuracy is None else f"{training.accuracy:.2%}"
    trained = f"{training.epochs} epochs, seed {training.seed}"
    if training.epochs is None:
        trained = "trained elsewhere"
    return "\n".join(
        (
            f"model {model.name}, {total} parameters, float32, batch norm folded in",
            f"test accuracy {accuracy}, {trained}",
            f"classes: {', '.join(training.labels)}",
            f"made by: {training.command}",
            f"dataset: {training.dataset_sha256 or 'not known'}",
            f"sha256: {weights.digest()}",
            _table(rows),
            "mean, sd and largest size of the weights, without the biases",
        )
    )


def serving(weights: WeightFile, precision: ServingPrecision, convolutions: ConvolutionsBy) -> str:
    """Who computes each layer on GPU 0: a row for each batch size of the service.

    Raises:
        LeNetError: the GPU cannot serve it; the message says why.
    """
    target = Target("cuda", precision=precision, convolutions=convolutions)
    with ExecutionContext(open_backend(target), weights, _SERVED_ROWS) as context:
        context.warm_up()
        layers = context.layers
    names = [shape.name for shape in weights.model.shapes()]
    rows = [[str(bucket), *(who[name] for name in names)] for bucket, who in layers.items()]
    return _table([("images", *names), *map(tuple, rows)])


def _described(block: Block) -> str:
    if isinstance(block, ConvBlock):
        parts = [f"conv {_format_shape(block.kernel)}"]
        for name, plain in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1))):
            if (value := getattr(block, name)) != plain:
                parts.append(f"{name} {_format_shape(value)}")
    else:
        parts = ["dense"]
    if block.activation != IDENTITY:
        parts.append(block.activation.kind)
    if isinstance(block, ConvBlock) and (pool := block.pool) is not None:
        window = "" if pool.kind == "global_average" else f" {_format_shape(pool.size)}"
        parts.append(f"{pool.kind}{window}")
    return ", ".join(parts)


def outline(model: Model, batch: int, precision: Precision) -> str:
    """The table without engines, workspaces and times."""
    # Two images are enough: a step of any size makes the same calls.
    calls = record_step(model, CpuOps(), _run(2, 2), batch, precision)
    return _table([_HEADINGS, *map(_cells, calls)])


def measure(model: Model, batch: int, precision: Precision) -> str:
    """The whole table, with what was measured on GPU 0.

    Raises:
        DeviceError: the GPU failed, or has too little memory.
    """
    return on_gpu(precision, lambda ops, _: _measured(ops, model, batch, precision))


def _measured(ops: Any, model: Model, batch: int, precision: Precision) -> str:
    from lenet.cuda.cublas import WORKSPACE_BYTES
    from trainer.ops_cuda import timed

    run = _run(batch, max(batch, _DIGITS))
    calls = record_step(model, ops, run, batch, precision)
    measured = []
    for call, time_us in zip(calls, timed.times_alone_us(ops, [c.run for c in calls]), strict=True):
        if call.convolution is not None:
            engine = ops.linear.engine(call.convolution)
            measured.append(Measured(time_us, engine.name, engine.workspace_bytes))
        elif call.routine == _CUBLAS:
            measured.append(Measured(time_us, "cuBLAS's own choice", WORKSPACE_BYTES))
        else:
            measured.append(Measured(time_us))
    roofline = Roofline(timed.copy_bytes_per_s(ops), timed.product_flop_per_s(ops))
    step_us = timed.replay_us(ops, _step(model, ops, run))
    device = f"{ops.handle.name}, cuDNN {ops.handle.cudnn_version}"
    return report(device, calls, measured, roofline, step_us)


def _run(batch: int, size: int) -> Run:
    """Steps on `size` random digits, augmented as by default; the rate is too small to matter."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (size, HEIGHT, WIDTH), np.uint8)
    labels = random.integers(0, len(DIGITS), size).astype(np.uint8)
    usual = Recipe.model_construct()  # the defaults, not the environment's values
    limits = WarpLimits(usual.rotation, usual.scale, usual.shear, usual.shift, usual.elastic)
    return Run(Digits(images, labels), batch, limits, 1, np.full(_STEPS, 1e-9, np.float32))


def _step(model: Model, ops: TrainingOps, run: Run) -> Callable[[], None]:
    network = Network(model, initial_tensors(model, np.random.default_rng(0)), ops)
    optimizer = Sgd(model, network.parameters, ops, 0.9, 5e-4)
    return partial(take_step, network, optimizer, ops.start(run))


class Measured(NamedTuple):
    """The time of a call alone, its engine, and the workspace that cuDNN or cuBLAS has for it."""

    time_us: float
    engine: str = "-"
    workspace_bytes: int | None = None


class Roofline(NamedTuple):
    """Rates of a large copy, counting bytes read and written, and of a large product."""

    copy_bytes_per_s: float
    product_flop_per_s: float

    def share(self, call: Call, time_us: float) -> float:
        """The share of `time_us` that the call would need at these rates."""
        least_s = max(
            call.operations / self.product_flop_per_s, call.size_bytes / self.copy_bytes_per_s
        )
        return least_s / (1e-6 * time_us)


def report(
    device: str,
    calls: Sequence[Call],
    measured: Sequence[Measured],
    roofline: Roofline,
    step_us: float,
) -> str:
    """The table of `calls` with what was measured, followed by sums and rates."""
    rows: list[tuple[str, ...]] = [(*_HEADINGS, *_MEASURED)]
    for call, (time_us, engine, workspace_bytes) in zip(calls, measured, strict=True):
        workspace = "-" if workspace_bytes is None else str(workspace_bytes)
        share = f"{100 * roofline.share(call, time_us):.1f}"
        rows.append((*_cells(call), workspace, f"{time_us:.2f}", share, engine))
    total_us = sum(one.time_us for one in measured)
    return "\n".join(
        (
            device,
            _table(rows),
            f"sum of the times {total_us:.1f} us, the whole captured step {step_us:.1f} us: alone, "
            "a call finds its data in the L2 cache; in the step, weight gradients and the next "
            "batch run beside the rest on a second stream",
            "workspace: what cuDNN's engine needs, what cuBLAS is given",
            f"roofline: {roofline.copy_bytes_per_s / 1e12:.2f} TB/s, read and written, in a large "
            f"copy; {roofline.product_flop_per_s / 1e12:.1f} TFLOP/s in a large product; data in "
            "the L2 cache can exceed 100 %",
        )
    )


def _cells(call: Call) -> tuple[str, ...]:
    return (
        call.layer,
        call.part,
        f"{_format_shape(call.source)} -> {_format_shape(call.result)}" if call.source else "-",
        call.routine,
        f"{call.operations / 1e6:.1f}" if call.operations else "-",
        f"{call.size_bytes / 1e6:.2f}",
    )


def _format_shape(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Columns two blanks apart, numbers right-aligned."""
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        right = column[0] in _NUMBERS
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
