"""How long each call of a training step takes alone, and what the GPU can do at its best.

Every call is captured many times into one CUDA graph, so that neither Python nor launches are
timed. Its data is random, as zeros make a GPU faster, and the same in each repetition: what fits
into the L2 cache is found there, as most of a step's activations are in the step itself. It refuses
to know the order of a step: a call goes by (layer, part), as in `trainer.calls`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import cupy
import numpy as np

from lenet.cuda.cublas import WORKSPACE_BYTES, Arithmetic
from lenet.cuda.device import Handle, translated
from lenet.cuda.engine_cache import PlanCache
from lenet.cuda.engines import Plan
from lenet.cuda.graphs import Uid
from lenet.cuda.kernels import Kernels
from lenet.cuda.memory import Arena
from lenet.model import Block, ConvBlock, Model
from trainer.bounds import first_filter_fits
from trainer.ops import Norm, Run, Tail, Update
from trainer.ops_cuda import parameters
from trainer.ops_cuda.descent import Descent
from trainer.ops_cuda.linear import Convolved, Linear
from trainer.ops_cuda.parameters import Parameter
from trainer.ops_cuda.progress import Progress
from trainer.ops_cuda.rows import Rows
from trainer.ops_cuda.tails import Tails
from trainer.roofline import Key, Rate, Timed, Times
from trainer.settings import Precision

_REPEATS = 20  # of a call in one captured graph
_LARGE_REPEATS = 4  # of what takes hundreds of microseconds
_ROUNDS = 5  # of the graph; the median counts
_COPY_BYTES = 512 << 20  # ten times the largest L2 cache there is
_SIDE = 8192  # of the square matrices that are multiplied
_CUBLAS = "cuBLAS's own choice"

Call: TypeAlias = Callable[[], object]


def time_calls(model: Model, precision: Precision, run: Run, cache: PlanCache) -> Times:
    """Time every call of a step of `run` on GPU 0, with plans from `cache` or chosen now.

    Raises:
        DeviceError: the GPU cannot do it.
    """
    arithmetic: Arithmetic = "fp16" if precision == "mixed" else precision
    with Handle(0) as handle, translated("timing the calls of a step"):
        bench = _Bench(handle, arithmetic, run, cache)
        bench.add(model)
        copied, written = _random((_COPY_BYTES,), np.uint8), cupy.empty(_COPY_BYTES, np.uint8)
        a, b = (_random((_SIDE, _SIDE), bench.dtype) for _ in range(2))
        out = cupy.empty_like(a)
        copy = partial(written.data.copy_from_device_async, copied.data, _COPY_BYTES, handle.stream)
        # Not captured: a copy in a graph ran at 2.76 TB/s, the same one queued at 4.21 (H200,
        # CUDA 13.0, 2026-11-20).
        copy_us = _queued_us(handle.stream, copy, _LARGE_REPEATS)
        product_us = _time_us(
            handle, partial(handle.cublas.product, a, b, out, arithmetic), _LARGE_REPEATS
        )
        return Times(
            f"{handle.name}, cuDNN {handle.cudnn_version}",
            bench.times(),
            Rate(2 * _COPY_BYTES / (1e-6 * copy_us), f"a copy of {_COPY_BYTES >> 20} MiB"),
            Rate(
                2 * _SIDE**3 / (1e-6 * product_us),
                f"a product of {_SIDE} x {_SIDE} matrices in {arithmetic}",
            ),
        )


def replay_us(repeat: Call) -> float:
    """The time of one of many `repeat`, which queues on the current stream, back to back."""
    with translated("timing a step"):
        return _queued_us(cupy.cuda.get_current_stream(), repeat, _REPEATS)


class _Bench:
    """Every call of a step on one stream, with arrays of its own."""

    def __init__(self, handle: Handle, arithmetic: Arithmetic, run: Run, cache: PlanCache) -> None:
        self._handle, self._arithmetic = handle, arithmetic
        self.dtype = cupy.float16 if arithmetic == "fp16" else cupy.float32
        self._arena = Arena()
        kernels = Kernels(handle)
        # A handle that forks from itself does one thing after another.
        self._linear = Linear(handle, handle, kernels, self._arena, arithmetic, cache, True)
        self._tails = Tails(handle, kernels, self._arena)
        self._rows = Rows(kernels, self._arena, self.dtype)
        self._descent = Descent(kernels)
        self._progress = Progress.begin(run, 0, arithmetic == "fp16", 0, 1)
        self._updates: list[Update] = []
        self._calls: dict[Key, Call] = {}
        self._plans: dict[Key, Plan | None] = {}

    def times(self) -> dict[Key, Timed]:
        """Each call timed alone."""
        return {key: self._timed(key) for key in self._calls}

    def _timed(self, key: Key) -> Timed:
        call = self._calls[key]

        def again() -> None:
            self._arena.rewind()
            call()

        time_us = _time_us(self._handle, again, _REPEATS)
        if key not in self._plans:
            return Timed(time_us)
        plan = self._plans[key]
        if plan is None:
            return Timed(time_us, _CUBLAS, WORKSPACE_BYTES)
        return Timed(time_us, plan.name, plan.workspace_bytes)

    def add(self, model: Model) -> None:
        """All that a step of `model` calls."""
        tensors = {
            name: np.random.default_rng(0).uniform(0.1, 1, shape).astype(np.float32)
            for name, shape in model.parameters().items()
        }
        placed = parameters.place(model, tensors)
        x, labels = self._rows.batch(self._progress)
        x, labels = x.copy(), labels.copy()  # out of the arena
        self._calls["batch", "step"] = partial(self._rows.batch, self._progress)
        for index, (block, shape) in enumerate(zip(model.blocks, model.shapes(), strict=True)):
            weight = placed[f"{shape.name}.weight"]
            if isinstance(block, ConvBlock):
                y = self._add_convolution(shape.name, x, weight, block, index == 0)
            else:
                y = self._add_dense(shape.name, x, weight, index == 0)
            x = self._add_tail(shape.name, y, _tail(shape.name, block, placed))
        self._calls["loss", "step"] = partial(
            self._rows.softmax_cross_entropy, x, model.classes, labels, self._progress
        )
        self._updates += [
            self._update(name, parameter, tensors[name].shape)
            for name, parameter in placed.items()
            if not name.endswith((".mean", ".variance"))
        ]
        self._calls["update", "step"] = self._descend

    def _add_convolution(
        self, name: str, x: Any, weight: Parameter, block: ConvBlock, first: bool
    ) -> Any:
        linear = self._linear
        y, saved = linear.convolution(x, weight, block)
        dy, forward = _random(y.shape, self.dtype), saved.forward
        self._calls[name, "forward"] = partial(linear.convolution, x, weight, block)
        self._plans[name, "forward"] = linear.planners[0].plan(forward)
        self._calls[name, "weight gradient"] = partial(
            linear.convolution_backward, dy, saved, False
        )
        if not (first and first_filter_fits(forward)):
            planned = linear.planners[1].plan(replace(forward, direction="filter"))
            self._plans[name, "weight gradient"] = planned
        if not first:
            self._add_data_gradient(name, dy, saved)
        return dy  # random, and of the shape of y

    def _add_data_gradient(self, name: str, dy: Any, saved: Convolved) -> None:
        plan = self._linear.planners[0].plan(replace(saved.forward, direction="data"))
        operand, dx = saved.weight.operand(self.dtype), cupy.empty_like(saved.x)
        addresses = {Uid.INPUT: dy, Uid.WEIGHT: operand, Uid.OUTPUT: dx}
        self._calls[name, "input gradient"] = partial(plan.run, addresses)
        self._plans[name, "input gradient"] = plan

    def _add_dense(self, name: str, x: Any, weight: Parameter, first: bool) -> Any:
        linear = self._linear
        y, saved = linear.dense(x, weight)
        dy, dx = _random(y.shape, self.dtype), cupy.empty((len(x), x[0].size), self.dtype)
        self._calls[name, "forward"] = partial(linear.dense, x, weight)
        self._calls[name, "weight gradient"] = partial(linear.dense_backward, dy, saved, False)
        if not first:
            operand = weight.operand(self.dtype)
            self._calls[name, "input gradient"] = partial(
                self._handle.cublas.product, dy, operand, dx, self._arithmetic
            )
        for part in ("forward", "weight gradient", *(() if first else ("input gradient",))):
            self._plans[name, part] = None
        return dy

    def _add_tail(self, name: str, x: Any, tail: Tail) -> Any:
        y, saved = self._tails.forward(x, tail, True)
        dy = _random(y.shape, self.dtype)
        # Out of the arena, where the next call would write over it.
        kept = saved._replace(
            **{
                name: part.copy()
                for name, part in saved._asdict().items()
                if isinstance(part, cupy.ndarray)
            }
        )
        self._calls[name, "tail forward"] = partial(self._tails.forward, x, tail, True)
        self._calls[name, "tail backward"] = partial(self._tails.backward, dy, kept)
        return dy

    def _update(self, name: str, parameter: Parameter, shape: tuple[int, ...]) -> Update:
        # cuDNN leaves the gradient of a filter in the dtype of the arithmetic.
        owner = name.removesuffix(".weight")
        by_cudnn = len(shape) == 4 and self._plans.get((owner, "weight gradient")) is not None
        dtype = self.dtype if by_cudnn else cupy.float32
        gradient = _random(parameter.master.shape, dtype)
        velocity = Parameter(cupy.zeros_like(parameter.master), parameter.channels)
        return Update(name, parameter, gradient, velocity)

    def _descend(self) -> None:
        self._descent.step(self._updates, self._progress, 0.9, 5e-4, True)
        self._descent.tick(self._progress)


def _tail(name: str, block: Block, placed: dict[str, Parameter]) -> Tail:
    norm = None
    if block.batch_norm:
        norm = Norm(*(placed[f"{name}.{part}"] for part in Norm._fields))
    pool = block.pool if isinstance(block, ConvBlock) else None
    return Tail(norm, placed.get(f"{name}.bias"), block.activation, pool)


def _random(shape: tuple[int, ...], dtype: Any) -> Any:
    """Uniform from -1 to 1, or all bytes; a block of a million values, repeated."""
    random, block = np.random.default_rng(0), min(math.prod(shape), 1 << 20)
    if np.dtype(dtype) == np.uint8:
        values = random.integers(0, 256, block, np.uint8)
    else:
        values = random.uniform(-1, 1, block).astype(dtype)
    count = -(-math.prod(shape) // block)
    return cupy.tile(cupy.asarray(values), count)[: math.prod(shape)].reshape(shape)


def _time_us(handle: Handle, call: Call, repeats: int) -> float:
    """The time of one of `repeats` captured calls."""
    stream = handle.stream
    call()  # makes plans, kernels and buffers, which a capture forbids
    stream.synchronize()
    stream.begin_capture()
    for _ in range(repeats):
        call()
    graph = stream.end_capture()
    return _median_us(stream, partial(graph.launch, stream)) / repeats


def _queued_us(stream: Any, call: Call, repeats: int) -> float:
    """The time of one of `repeats` calls queued one behind the other, not captured."""

    def many() -> None:
        for _ in range(repeats):
            call()

    return _median_us(stream, many) / repeats


def _median_us(stream: Any, launch: Call) -> float:
    launch()
    times: list[float] = []
    for _ in range(_ROUNDS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        launch()
        stop.record(stream)
        stop.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, stop))
    return statistics.median(times)
