"""`trainer.ops.TrainingOps` on a GPU, with cuDNN, cuBLAS and our kernels.

Activations are channels last, (n, h, w, c) or (n, units), channels padded as `lenet.cuda.packing`
says, in float32 or, in mixed precision, float16. Operations are queued and nothing waits, so a
whole step can be captured. Buffers come from an arena, which `end_step` rewinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Event
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import cupy
import numpy as np
from numpy.typing import NDArray

from lenet.cuda.capture import captured
from lenet.cuda.device import Handle, translated
from lenet.cuda.engine_cache import EngineCache
from lenet.cuda.engines import EngineCatalog
from lenet.cuda.kernels import Kernels, storage_dtype
from lenet.cuda.memory import Arena, Workspace
from lenet.model import ConvBlock, Model
from lenet.pixels import Images
from trainer.ops import Array, Epilogue, LossScale, Run, Saved, Update, check_stop
from trainer.ops_cuda import first_block, parameters
from trainer.ops_cuda.batch import BatchKernels
from trainer.ops_cuda.epilogue import Epilogues
from trainer.ops_cuda.first_block import FirstBlock, FirstGradient, SavedFirst, Unwritten
from trainer.ops_cuda.linear import Linear
from trainer.ops_cuda.parameters import Parameter
from trainer.ops_cuda.ranks import Ranks
from trainer.ops_cuda.sgd import FusedSgd
from trainer.ops_cuda.state import RunState
from trainer.settings import Precision


class CudaOps:
    """`TrainingOps` on GPU number `device`, for the thread that constructs it; see `close`.

    `fp32` never uses TF32; `mixed` computes in float16 with float32 sums, masters and moments.
    Once `stopping` is set, choosing cuDNN engines and reading losses fail with a DeviceError.

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
        cache: EngineCache | None = None,
        autotune: bool = True,
        stopping: Event | None = None,
    ) -> None:
        self.precision = precision
        self.arithmetic = "fp16" if precision == "mixed" else precision
        self._ranks: Ranks | None = None
        self._parameters: WeakSet[Parameter] = WeakSet()
        self._state: RunState | None = None
        self._captured: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._classes = 0
        self.arena = Arena()
        with ExitStack() as opened:
            # The handle made last binds the thread's current stream.
            self.wgrad_handle = opened.enter_context(Handle(device))
            self.handle = opened.enter_context(Handle(device))
            kernels = Kernels(self.handle)
            self._check_stop = partial(check_stop, stopping)
            engines, wgrad_engines = (
                EngineCatalog(handle, Workspace(), cache, autotune, check_stop=self._check_stop)
                for handle in (self.handle, self.wgrad_handle)
            )
            self.linear = Linear(
                self.handle,
                self.wgrad_handle,
                (engines, wgrad_engines),
                kernels,
                self.arena,
                self.arithmetic,
            )
            self._epilogues = Epilogues(self.handle, kernels, self.arena)
            self._first = FirstBlock(self.handle, kernels, self.arena)
            self._batch = BatchKernels(kernels, self.arena, storage_dtype(self.arithmetic))
            self._sgd = FusedSgd(kernels)
            self._opened = opened.pop_all()
        self.batch = self._batch.batch
        self.convolution_input_gradient = self.linear.convolution_input_gradient
        self.dense = self.linear.dense
        self.dense_weight_gradient = self.linear.dense_weight_gradient
        self.dense_input_gradient = self.linear.dense_input_gradient

    def join(self, ranks: Ranks) -> None:
        """Train on a part of every batch from now on, together with the other ranks."""
        self._epilogues.is_alone = False
        self._ranks = self._epilogues.ranks = ranks

    def close(self) -> None:
        """Drop captured steps and close the handles; may be called twice.

        NCCL can neither be left nor aborted while a graph with its all-reduces exists. So the graph
        must go here, though others, such as a traceback, may still hold what `capture` returned.
        """
        self._captured.clear()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._captured.clear()
        self._opened.__exit__(kind, problem, trace)

    def upload(
        self, model: Model, tensors: Mapping[str, NDArray[Any]], operands: bool = True
    ) -> dict[str, Array]:
        """Packed, as float32 masters; in mixed precision weights have a float16 copy, too."""
        self._classes = model.classes
        with translated("loading the network"):
            uploaded = parameters.upload(model, tensors, operands and self.precision == "mixed")
        self._parameters.update(uploaded.values())
        return uploaded

    def download(self, model: Model, arrays: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
        """Unpacked; waits."""
        with translated("waiting for the GPU"):
            return parameters.download(model, arrays)

    def copy(self, source: Mapping[str, Array], target: Mapping[str, Array]) -> None:
        for name, parameter in target.items():
            parameter.master[...] = source[name].master
            parameter.refresh()

    def start(self, run: Run, step: int = 0, loss_scale: LossScale | None = None) -> RunState:
        rank, ranks = (self._ranks.rank, self._ranks.size) if self._ranks else (0, 1)
        scaled = self.precision == "mixed"
        with translated("loading the digits"):
            dtype = storage_dtype(self.arithmetic)
            self._state = RunState.upload(run, step, scaled, dtype, loss_scale, rank, ranks)
        return self._state

    def skipped(self, state: RunState) -> int:
        with translated("waiting for the GPU"):
            return int(state.skipped[0])

    def loss_scale(self, state: RunState) -> LossScale:
        with translated("waiting for the GPU"):
            scale, steps = state.scale.tolist()
        return scale, int(steps)

    def prefetch(self, state: RunState) -> None:
        """On the second stream: the small layers that come now leave most of the GPU idle."""
        with self.wgrad_handle.fork(self.handle):
            self._batch.prefetch(state)

    def input_from_images(self, images: Images) -> Array:
        self.arena.rewind()
        return self._batch.input_from_images(images)

    def to_numpy(self, x: Array) -> NDArray[Any]:
        """Float32; waits."""
        with translated("waiting for the GPU"):
            host: NDArray[Any] = cupy.asnumpy(x)[:, : self._classes].astype(np.float32)
        return host

    def convolution(
        self, x: Array, weight: Parameter, block: ConvBlock
    ) -> tuple[Array | Unwritten, Saved]:
        """Not computed where the epilogue does without it, see `first_block`."""
        forward = self.linear.forward(x, weight, block)
        if self._epilogues.is_alone and first_block.fits(forward, block):
            unwritten = Unwritten(x, weight, block, forward)
            return unwritten, unwritten
        return self.linear.convolution(x, weight, block)

    def convolution_weight_gradient(self, dy: Array | FirstGradient, saved: Saved) -> Array:
        if isinstance(dy, FirstGradient):
            return dy.dweight
        return self.linear.convolution_weight_gradient(dy, saved)

    def epilogue(
        self, x: Array | Unwritten, epilogue: Epilogue, training: bool
    ) -> tuple[Array, Saved]:
        if isinstance(x, Unwritten):
            if training:
                return self._first.forward(x, epilogue)
            x, _ = self.linear.convolution(x.x, x.weight, x.block)
        return self._epilogues.forward(x, epilogue, training)

    def epilogue_backward(self, dy: Array, saved: Saved) -> tuple[Array, tuple[Array, ...]]:
        if isinstance(saved, SavedFirst):
            return self._first.backward(dy, saved)
        return self._epilogues.backward(dy, saved)

    def dropout(
        self, x: Array, units: int, rate: float, layer: int, state: RunState
    ) -> tuple[Array, Callable[[Array], Array]]:
        """The mask is a function of seed, step, row and layer, so it is not saved."""
        masked = partial(self._batch.dropout, units=units, rate=rate, layer=layer, state=state)
        return masked(x), masked

    def dropout_backward(self, dy: Array, saved: Callable[[Array], Array]) -> Array:
        return saved(dy)

    def softmax_cross_entropy(self, logits: Array, labels: Array, state: RunState) -> Array:
        """Loss, correct answers and the gradient of the logits in one kernel."""
        return self._batch.softmax_cross_entropy(logits, self._classes, labels, state)

    def softmax_cross_entropy_backward(self, saved: Array) -> Array:
        """The saved gradient, which includes the loss scale."""
        return saved

    def all_reduce(self, gradients: Mapping[str, Array]) -> None:
        """Sum by NCCL on a stream of its own; batch norm's gradients are global sums already."""
        if self._ranks is not None:
            local = [g for name, g in gradients.items() if not name.endswith((".gamma", ".beta"))]
            if local:
                # A capture rejects an event of a stream outside it, and the last block may have
                # the gradient of a bias before any weight's was queued on the second stream.
                self.wgrad_handle.join(self.handle)
                self._ranks.start_all_reduce(local, self.handle.stream, self.wgrad_handle.stream)

    def sgd_step(
        self,
        updates: Sequence[Update],
        state: RunState,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        """Waits on the device for all gradients, then updates all parameters in one kernel."""
        self.handle.join(self.wgrad_handle)
        if self._ranks is not None:
            self._ranks.finish_all_reduce(self.handle.stream)
        self._sgd.step(updates, state, momentum, weight_decay, nesterov)

    def end_step(self, state: RunState) -> None:
        self._sgd.end_step(state)
        state.advance()
        self.arena.rewind()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Two CUDA graphs of `step`, which take turns: each draws the batch of the other.

        The step runs once before, to choose engines and take memory. That run leaves the other
        ranks out: loading a kernel or allocating memory may wait for the device, which would wait
        for an all-reduce, which would wait for another rank's thread, which may need the
        interpreter that this thread holds.

        Raises:
            DeviceError: the step cannot be run or captured.
        """
        assert self._state is not None, "bug: no run was started"
        state, uploaded = self._state, list(self._parameters)
        arrays = [parameter.master for parameter in uploaded] + state.changing
        before, batches = [array.copy() for array in arrays], (state.batch, state.next_batch)
        ranks, self._ranks, self._epilogues.ranks = self._ranks, None, None
        try:
            step()
        finally:
            self._ranks = self._epilogues.ranks = ranks
        for array, old in zip(arrays, before, strict=True):
            array[...] = old
        for parameter in uploaded:
            parameter.refresh()
        self.handle.synchronize()
        # The step is kept, too: its arrays are those that the graph writes to. Nothing else owns
        # the graph, not even a local variable, which a traceback might keep: see `close`.
        graphs, first = self._captured, len(self._captured)
        state.batch, state.next_batch = batches
        with translated("capturing a step"):
            for _ in range(2):
                graphs.append((captured(step, self.handle.stream), step))
        left, turn = state.steps_left, 0

        def replay() -> None:
            nonlocal left, turn
            assert graphs, "bug: the operations are closed"
            assert left > 0, "bug: a step beyond the last of the run"
            left -= 1
            graphs[first + turn][0]()
            turn = 1 - turn

        return replay

    def losses(
        self, state: RunState, start: int, stop: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        if self._ranks is None:  # ranks agree on it: one that stops alone would block the others
            self._check_stop()
        with translated("waiting for the GPU"):
            return state.download(start, stop, self._ranks)

    def finite(self, x: Array) -> bool:
        self.handle.join(self.wgrad_handle)
        if isinstance(x, Unwritten):
            return True
        array = x.master if isinstance(x, Parameter) else x
        array = array.dweight if isinstance(array, FirstGradient) else array
        return bool(cupy.isfinite(array).all())

    @property
    def ranks(self) -> int:
        return self._ranks.size if self._ranks else 1

    def barrier(self) -> None:
        """Blocks the thread; work queued before must not wait for other ranks."""
        if self._ranks is not None:
            self._ranks.barrier()

    @property
    def memory_bytes(self) -> int:
        """The memory that CuPy has allocated, without contexts and libraries."""
        return int(cupy.get_default_memory_pool().total_bytes())
