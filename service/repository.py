"""Which models and versions are loaded, and what serves each.

It refuses to read files: it is given those that `service.model_files` read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

from lenet.context import ExecutionContext, Target, open_backend
from lenet.errors import OutOfDeviceMemory
from lenet.footprint import context_bytes
from lenet.model import Model
from lenet.weightfile import WeightFile
from service.batcher import Batcher
from service.busy_poll import BusyPoll
from service.devices import Placement
from service.errors import UnknownModel
from service.faults import Faults, FaultyContext
from service.metrics import LossReason, Metrics
from service.model_files import ModelFile
from service.policy import BatchQueue
from service.pool import ContextPool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batching:
    """How each model is run: see the settings of the same names.

    `faults` are those that a test injects.
    """

    placement: Placement
    max_queue_rows: int
    max_wait_s: float
    hang_timeout_s: float
    drain_timeout_s: float
    faults: Faults | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with the batcher that answers for it."""

    batcher: Batcher
    pool: ContextPool

    @property
    def file(self) -> ModelFile:
        """The version that a request is computed with that comes now."""
        return self.batcher.model


class Stop:
    """When the stop began, and so how much time is left to each of its stages."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._begun = asyncio.Event()
        self._deadline_s = 0.0

    def begin(self) -> None:
        """The time of all stages runs from here; only the first call counts."""
        if not self._begun.is_set():
            self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s
            self._begun.set()

    async def begun(self) -> None:
        """Wait for the beginning."""
        await self._begun.wait()

    def left_s(self) -> float:
        """Seconds from now to the end of the stop, once it has begun; 0 past it."""
        assert self._begun.is_set(), "bug: the stop has not begun"
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())


class Repository:
    """The loaded models, and the `stop` that whatever serves them shares with them.

    Use it as an async context manager: entering makes and proves every context, leaving drains the
    queues and closes them. `lost` is set when the process cannot compute any more: by then every
    request has been answered, and new ones are refused.

    Raises:
        OutOfDeviceMemory: on entering, a model does not fit; the message says what would.
        DeviceError: on entering, a device fails.
    """

    def __init__(
        self,
        files: Sequence[ModelFile],
        default_model: str,
        batching: Batching,
        metrics: Metrics,
    ) -> None:
        self._files = files
        self._default_model = default_model
        self._batching = batching
        self._metrics = metrics
        self._stack = AsyncExitStack()
        self.stop = Stop(batching.drain_timeout_s)
        self.lost = asyncio.Event()
        self._models: dict[str, ServedModel] = {}

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """What is loaded, the default model first."""
        return tuple(self._models.values())

    def get(self, name: str = "", version: str = "") -> ServedModel:
        """The model called `name`, the default one for ""; `version` "" is whatever is served.

        Raises:
            UnknownModel: not loaded; the message lists what is.
        """
        model = self._models.get(name or self._default_model)
        if model is None:
            raise UnknownModel(
                f"model {name!r} is not loaded, expected one of {', '.join(self._models)}",
                field="model",
            )
        if version not in ("", model.file.version):
            raise UnknownModel(
                f"version {version!r} of model {model.file.name!r} is not loaded, "
                f"expected {model.file.version!r}",
                field="version",
            )
        return model

    def start_s(self) -> tuple[float, float]:
        """Seconds that opening the devices and warming up took, of all models."""
        opening_s, warm_up_s = zip(*(model.pool.start_s() for model in self.models), strict=True)
        return sum(opening_s), sum(warm_up_s)

    async def __aenter__(self) -> Self:
        self._awake = BusyPoll(self._batching.placement.busy_poll_s)
        try:
            for file in sorted(self._files, key=lambda file: file.name != self._default_model):
                self._models[file.name] = await self._load(file)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop.begin()
        left_s = self.stop.left_s()
        try:
            await asyncio.gather(*(model.batcher.drain(left_s) for model in self.models))
        finally:
            await self._stack.aclose()

    async def _load(self, file: ModelFile) -> ServedModel:
        batching, placement = self._batching, self._batching.placement
        pool = ContextPool(
            [partial(self._open, target, file.weights) for target in placement.targets],
            placement.contexts,
            f"context-{file.name}",
            self._lose,
            batching.hang_timeout_s,
        )
        try:
            await self._stack.enter_async_context(pool)
        except OutOfDeviceMemory as exc:
            raise OutOfDeviceMemory(_does_not_fit(file.weights.model, placement, exc)) from exc
        batcher = Batcher(
            BatchQueue(placement.max_batch_rows, batching.max_queue_rows, batching.max_wait_s),
            pool,
            self._metrics.of_model(file.name),
            file,
            self._awake,
        )
        contexts = pool.statistics()
        error = max(context.golden_error for context in contexts)
        self._metrics.model_loaded(file.name, file.version, file.sha256, len(contexts), error)
        self._metrics.memory_taken(
            file.name,
            sum(context.device_bytes for context in contexts),
            sum(context.workspace_bytes for context in contexts),
        )
        _log.info(
            "model %s version %s (sha256 %s) ready on %d %s contexts, golden error %.1e",
            *(file.name, file.version, file.sha256[:12], len(contexts), placement.name, error),
        )
        return ServedModel(batcher, pool)

    def _open(self, target: Target, weights: WeightFile) -> ExecutionContext:
        rows = self._batching.placement.max_batch_rows
        backend = open_backend(target)
        if self._batching.faults is None:
            return ExecutionContext(backend, weights, rows)
        context = FaultyContext(backend, weights, rows)
        context.faults = self._batching.faults
        return context

    def _lose(self, reason: LossReason, story: str) -> None:
        if self.lost.is_set():
            return  # contexts of one device are lost together
        _log.error("the device is lost, this process ends: %s", story)
        self._metrics.device_lost(reason)
        self.lost.set()
        for model in self._models.values():
            model.batcher.abandon()


def _does_not_fit(model: Model, placement: Placement, error: OutOfDeviceMemory) -> str:
    rows, contexts = placement.max_batch_rows, placement.contexts

    def each(rows: int) -> str:
        needed = context_bytes(model, rows, placement.targets[0].precision)
        return f"{needed / 1e6:.0f} MB each"

    fitting = [f"max_batch_rows to {rows // 2} ({each(rows // 2)})"] if rows > 1 else []
    fitting += [f"contexts to {contexts // 2}"] if contexts > 1 else []
    advice = f"lower {' or '.join(fitting)}" if fitting else "load fewer models"
    return (
        f"model {model.name!r} does not fit on the GPU with max_batch_rows {rows} and contexts "
        f"{contexts}, which take about {each(rows)}: {error}; {advice}"
    )
