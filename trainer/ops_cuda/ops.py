"""The training operations on cuDNN, cuBLAS and our kernels; see `trainer.ops.TrainingOps`.

Activations lie channels last, (n, h, w, c) or (n, units), channels padded as `lenet.cuda.packing`
says, in float32 or, under mixed precision, float16. All is queued and nothing waits, so that a
whole step can be captured. It refuses to take memory by itself: buffers are the arena's, and are
the next step's again after `tick`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import cupy
import numpy as np
from numpy.typing import NDArray

from lenet.cuda.device import Handle, translated
from lenet.cuda.engine_cache import PlanCache
from lenet.cuda.kernels import Kernels
from lenet.cuda.memory import Arena
from lenet.model import ConvBlock, Model
from lenet.pixels import Images
from trainer.ops import Array, Run, Tail, Update
from trainer.ops_cuda import parameters
from trainer.ops_cuda.descent import Descent
from trainer.ops_cuda.linear import Convolved, Linear, Multiplied
from trainer.ops_cuda.parameters import Parameter
from trainer.ops_cuda.progress import Progress
from trainer.ops_cuda.ranks import Ranks
from trainer.ops_cuda.rows import Rows
from trainer.ops_cuda.tails import Saved as TailSaved
from trainer.ops_cuda.tails import Tails
from trainer.settings import Precision


class CudaOps:
    """`TrainingOps` on GPU number `device`, for the thread that makes it; see `close`.

    `fp32` never uses TF32; `mixed` computes in float16 with float32 sums, masters and moments.

    Raises:
        BackendUnavailable: see `lenet.cuda.device.devices`.
        DeviceError: the device cannot be used.
    """

    name = "cuda"
    readback_steps = 1000

    def __init__(
        self,
        precision: Precision,
        device: int = 0,
        cache: PlanCache | None = None,
        autotune: bool = True,
    ) -> None:
        with ExitStack() as opened:
            # The one made last is the thread's own.
            self._aside = opened.enter_context(Handle(device))
            self._handle = opened.enter_context(Handle(device))
            self._opened = opened.pop_all()
        self.precision = precision
        self._ranks: Ranks | None = None
        self._arena = Arena()
        arithmetic = "fp16" if precision == "mixed" else precision
        dtype = cupy.float16 if precision == "mixed" else cupy.float32
        kernels = Kernels(self._handle)
        self.linear = Linear(
            self._handle, self._aside, kernels, self._arena, arithmetic, cache, autotune
        )
        self._tails = Tails(self._handle, kernels, self._arena)
        self._rows = Rows(kernels, self._arena, dtype)
        self._descent = Descent(kernels)
        self._parameters: list[Parameter] = []
        self._progress: Progress | None = None
        self._recorded: list[tuple[Any, Callable[[], None]]] = []
        self._classes = 0

    def join(self, ranks: Ranks) -> None:
        """Be one of several from now on, each of which has a part of every batch."""
        self._ranks = self._tails.ranks = ranks

    def close(self) -> None:
        """Drop what was recorded, give the handles back; closing twice is allowed.

        NCCL can neither be left nor aborted while a graph with its sums is alive, and whoever holds
        the step that `record` gave, as the traceback of an error does, would keep it so.
        """
        self._recorded.clear()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._recorded.clear()
        self._opened.__exit__(kind, problem, trace)

    def place(self, model: Model, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
        """Packed, as float32 masters."""
        self._classes = model.classes
        with translated("loading the network"):
            placed = parameters.place(model, tensors)
        self._parameters += placed.values()
        return placed

    def read(self, model: Model, placed: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
        """Unpacked; waits."""
        with translated("waiting for the GPU"):
            return parameters.read(model, placed)

    def write(
        self, model: Model, placed: Mapping[str, Array], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """Masters and their halves."""
        parameters.write(model, placed, tensors)

    def copy(self, source: Mapping[str, Array], target: Mapping[str, Array]) -> None:
        """Masters and their halves."""
        for name, parameter in target.items():
            parameter.master[...] = source[name].master
            parameter.refresh()

    def start(self, run: Run, step: int = 0) -> Progress:
        """Digits and rates go to the GPU."""
        rank, ranks = (self._ranks.rank, self._ranks.size) if self._ranks else (0, 1)
        scaled = self.precision == "mixed"
        with translated("loading the digits"):
            self._progress = Progress.begin(run, step, scaled, rank, ranks)
        return self._progress

    def batch(self, progress: Progress) -> tuple[Array, Array]:
        """(rows, 28, 28, 1) and uint8 (rows,)."""
        return self._rows.batch(progress)

    def enter(self, images: Images) -> Array:
        """(n, 28, 28, 1)."""
        self._arena.rewind()
        return self._rows.enter(images)

    def leave(self, x: Array) -> NDArray[Any]:
        """Float32; waits."""
        with translated("waiting for the GPU"):
            host: NDArray[Any] = cupy.asnumpy(x)[:, : self._classes].astype(np.float32)
        return host

    def convolution(self, x: Array, weight: Parameter, block: ConvBlock) -> tuple[Array, Convolved]:
        """See `Linear`."""
        return self.linear.convolution(x, weight, block)

    def convolution_backward(
        self, dy: Array, saved: Convolved, input_gradient: bool
    ) -> tuple[Array | None, Array]:
        """See `Linear`."""
        return self.linear.convolution_backward(dy, saved, input_gradient)

    def dense(self, x: Array, weight: Parameter) -> tuple[Array, Multiplied]:
        """See `Linear`."""
        return self.linear.dense(x, weight)

    def dense_backward(
        self, dy: Array, saved: Multiplied, input_gradient: bool
    ) -> tuple[Array | None, Array]:
        """See `Linear`."""
        return self.linear.dense_backward(dy, saved, input_gradient)

    def tail(self, x: Array, tail: Tail, training: bool) -> tuple[Array, TailSaved]:
        """See `Tails`."""
        return self._tails.forward(x, tail, training)

    def tail_backward(self, dy: Array, saved: TailSaved) -> tuple[Array, tuple[Array, ...]]:
        """See `Tails`."""
        return self._tails.backward(dy, saved)

    def dropout(
        self, x: Array, units: int, rate: float, layer: int, progress: Progress
    ) -> tuple[Array, Callable[[Array], Array]]:
        """The mask is a function of seed, step, row and layer: nothing is kept of it."""
        masked = partial(self._rows.dropout, units=units, rate=rate, layer=layer, progress=progress)
        return masked(x), masked

    def dropout_backward(self, dy: Array, saved: Callable[[Array], Array]) -> Array:
        """The same units are zeroed."""
        return saved(dy)

    def softmax_cross_entropy(self, logits: Array, labels: Array, progress: Progress) -> Array:
        """Loss, hits and the gradient of the logits in one kernel; the gradient is kept."""
        return self._rows.softmax_cross_entropy(logits, self._classes, labels, progress)

    def softmax_cross_entropy_backward(self, saved: Array) -> Array:
        """As it was kept: times the loss scale."""
        return saved

    def share(self, gradients: Mapping[str, Array]) -> None:
        """By NCCL on a stream of its own; batch norm's are sums over all ranks already."""
        if self._ranks is not None:
            own = [g for name, g in gradients.items() if not name.endswith((".gamma", ".beta"))]
            if own:
                # A capture takes no wait for a stream that it has not met: the last block may have
                # the gradient of a bias before any weight's was queued there.
                self._aside.join(self._handle)
                self._ranks.start_sum(own, self._handle.stream, self._aside.stream)

    def descend(
        self,
        updates: Sequence[Update],
        progress: Progress,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        """All parameters in one kernel, once all gradients are there."""
        self._handle.join(self._aside)
        if self._ranks is not None:
            self._ranks.finish(self._handle.stream)
        self._descent.step(updates, progress, momentum, weight_decay, nesterov)

    def tick(self, progress: Progress) -> None:
        """Count the step; what it took of the arena is free."""
        self._descent.tick(progress)
        self._arena.rewind()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of `step`, which runs once for its plans and buffers and is then undone.

        That run is this rank's alone: loading a kernel or taking memory may wait for the device,
        which would wait for a sum over the ranks, for which another thread needs the interpreter.
        """
        assert self._progress is not None, "bug: no run was started"
        state = [parameter.master for parameter in self._parameters] + self._progress.state
        before = [array.copy() for array in state]
        ranks, self._ranks, self._tails.ranks = self._ranks, None, None
        step()
        self._ranks = self._tails.ranks = ranks
        for array, old in zip(state, before, strict=True):
            array[...] = old
        for parameter in self._parameters:
            parameter.refresh()
        self._handle.synchronize()
        stream = self._handle.stream
        with translated("capturing a step"):
            stream.begin_capture()
            step()
            graph = stream.end_capture()
            graph.upload(stream)
        # With the step, whose arrays the graph has only the addresses of.
        recorded, place = self._recorded, len(self._recorded)
        recorded.append((graph, step))
        left = iter(range(self._progress.left))

        def repeat() -> None:
            assert recorded, "bug: the operations are closed"
            assert next(left, None) is not None, "bug: a step beyond the last of the run"
            recorded[place][0].launch(stream)

        return repeat

    def losses(
        self, progress: Progress, start: int, stop: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Over all ranks; waits."""
        with translated("waiting for the GPU"):
            return progress.read(start, stop, self._ranks)

    def finite(self, x: Array) -> bool:
        """Of activations, gradients or parameters; waits."""
        self._handle.join(self._aside)
        array = x.master if isinstance(x, Parameter) else x
        return bool(cupy.isfinite(array).all())

    @property
    def ranks(self) -> int:
        """As many as have joined."""
        return self._ranks.size if self._ranks else 1

    def meet(self) -> None:
        """The host waits; nothing that it has queued may wait for the others meanwhile."""
        if self._ranks is not None:
            self._ranks.meet()

    @property
    def memory_bytes(self) -> int:
        """What CuPy has taken of the GPU for this process: all but contexts and libraries."""
        return int(cupy.get_default_memory_pool().total_bytes())
