"""The loaded models: find, reload and close them.

Called by HTTP and gRPC alike; knows no transport.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

from lenet.context import ExecutionContext, Target, estimate_bytes, open_backend
from lenet.errors import LeNetError, OutOfDeviceMemory
from lenet.model import Model
from lenet.weightfile import WeightFile
from service.engine.batcher import Batcher
from service.engine.contexts import BusyPoll, ContextPool, Worker
from service.engine.deadlines import Deadlines
from service.engine.devices import Placement
from service.engine.faults import Faults, FaultyContext
from service.engine.queue import BatchQueue
from service.engine.versions import ModelVersion, WeightsFolder
from service.errors import UnknownModel, shown
from service.metrics import LossReason, Metrics, ReloadOutcome

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How each model is run; see the settings of the same names."""

    placement: Placement
    max_queue_rows: int
    max_wait_s: float
    hang_timeout_s: float
    drain_timeout_s: float
    faults: Faults | None = None
    """Injected by a test."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its contexts and the batcher in front of them."""

    batcher: Batcher
    pool: ContextPool

    @property
    def version(self) -> ModelVersion:
        """The version that computes a request that comes now."""
        return self.batcher.version

    def golden_error(self) -> float:
        """The largest of its contexts."""
        return max(worker.context.golden_error for worker in self.pool.workers)


class Models:
    """The models of `versions`, the default one first, which `folder` reloads.

    Use it as an async context manager: entering warms up and validates every context, leaving
    drains the queues and closes the contexts. `ready` says whether traffic may come; who opens the
    service sets it. `lost` is set when the process cannot compute any more: by then every request
    was answered, and new ones are refused.

    Raises:
        OutOfDeviceMemory: on entering, a model does not fit; the message says what would.
        DeviceError: on entering, a device fails.
    """

    def __init__(
        self,
        folder: WeightsFolder,
        versions: Sequence[ModelVersion],
        config: EngineConfig,
        metrics: Metrics,
        deadlines: Deadlines,
    ) -> None:
        self.ready = False
        self.lost = asyncio.Event()
        self._folder = folder
        self._versions = versions
        self._default = versions[0].name
        self._config = config
        self._metrics = metrics
        self._deadlines = deadlines
        self._stack = AsyncExitStack()
        self._served: dict[str, ServedModel] = {}
        self._reload_requested = self._closed = False
        self._reloading: asyncio.Task[None] | None = None

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """What is loaded, the default model first."""
        return tuple(self._served.values())

    def __contains__(self, name: str) -> bool:
        """Whether a model of this name is loaded."""
        return name in self._served

    def get(self, name: str = "", version: str = "") -> ServedModel:
        """The model called `name`, the default one for ""; `version` "" is whatever is served.

        Raises:
            UnknownModel: not loaded; the message lists what is.
        """
        model = self._served.get(name or self._default)
        if model is None:
            raise UnknownModel(
                f"model {shown(name)} is not loaded, expected one of {', '.join(self._served)}",
                field="model",
            )
        if version and version != (served := model.version).version:
            raise UnknownModel(
                f"version {shown(version)} of model {served.name!r} is not loaded, "
                f"expected {served.version!r}",
                field="version",
            )
        return model

    def start_s(self) -> tuple[float, float]:
        """Seconds that opening the devices and warming up took, of all models."""
        opening_s, warm_up_s = zip(*(model.pool.start_s() for model in self.served), strict=True)
        return sum(opening_s), sum(warm_up_s)

    def request_reload(self) -> None:
        """Reload soon; during a reload once more after it, which may have read older files."""
        self._reload_requested = True
        self._start_reload()

    async def reload(self) -> None:
        """Replace each model by the newest of its files, if that differs and is valid."""
        counts: dict[str, int] = dict.fromkeys(("replaced", "unchanged", "refused"), 0)
        for served in self.served:
            outcome = await self._reload(served)
            counts[outcome] += 1
            reloaded: ReloadOutcome = "refused" if outcome == "refused" else "ok"
            self._metrics.reloaded(served.version.name, reloaded)
        _log.info("reload: %s", ", ".join(f"{count} {name}" for name, count in counts.items()))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, finish the waiting ones, fail what is left after `timeout_s`.

        A reload is given up half-way, which no request notices.
        """
        self._closed = True
        if self._reloading is not None:
            self._reloading.cancel()
            await asyncio.wait([self._reloading])
        await asyncio.gather(*(model.batcher.drain(timeout_s) for model in self.served))

    async def __aenter__(self) -> Self:
        busy_poll = BusyPoll(self._config.placement.busy_poll_s)
        try:
            for version in self._versions:
                self._served[version.name] = await self._load(version, busy_poll)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ready = False
        try:
            await self.drain(self._config.drain_timeout_s)
        finally:
            await self._stack.aclose()

    async def _load(self, version: ModelVersion, busy_poll: BusyPoll) -> ServedModel:
        config, placement = self._config, self._config.placement
        workers = [
            Worker(
                partial(self._open, target, version.weights),
                f"context-{version.name}-{device * placement.contexts + number}",
                device,
                self._on_device_lost,
            )
            for device, target in enumerate(placement.targets)
            for number in range(placement.contexts)
        ]
        pool = ContextPool(workers, self._on_device_lost, config.hang_timeout_s)
        try:
            await self._stack.enter_async_context(pool)
        except OutOfDeviceMemory as exc:
            raise OutOfDeviceMemory(_does_not_fit(version.weights.model, placement, exc)) from exc
        batcher = Batcher(
            BatchQueue(placement.max_batch_rows, config.max_queue_rows, config.max_wait_s),
            pool,
            self._metrics,
            version,
            busy_poll,
            self._deadlines,
            time.monotonic,
            placement.joined_rows,
        )
        served = ServedModel(batcher, pool)
        contexts = [worker.context for worker in workers]
        self._metrics.model_loaded(
            version.name,
            version.version,
            version.sha256,
            contexts=len(contexts),
            golden_error=served.golden_error(),
            device_bytes=sum(context.device_bytes for context in contexts),
            workspace_bytes=sum(context.workspace_bytes for context in contexts),
        )
        _log.info(
            "model %s version %s (sha256 %s) loaded: %d contexts on %s, "
            "golden logits match within %.1e",
            version.name,
            version.version,
            version.sha256[:12],
            len(contexts),
            placement.name,
            served.golden_error(),
        )
        return served

    def _open(self, target: Target, weights: WeightFile) -> ExecutionContext:
        rows = self._config.placement.max_batch_rows
        backend = open_backend(target)
        if self._config.faults is None:
            return ExecutionContext(backend, weights, rows)
        return FaultyContext(backend, weights, rows, self._config.faults)

    def _on_device_lost(self, reason: LossReason, story: str) -> None:
        if self.lost.is_set():
            return  # contexts of one device are lost together
        _log.error("the device is lost, this process ends: %s", story)
        self._metrics.device_lost(reason)
        self.lost.set()
        for model in self.served:
            model.batcher.fail_all()

    def _start_reload(self) -> None:
        if self._reload_requested and self._reloading is None and not self._closed:
            self._reload_requested = False
            self._reloading = asyncio.create_task(self.reload())
            self._reloading.add_done_callback(self._end_reload)

    def _end_reload(self, _: asyncio.Task[None]) -> None:
        self._reloading = None
        self._start_reload()

    async def _reload(self, served: ServedModel) -> str:
        """Reload one model: replaced, unchanged or refused, whatever goes wrong."""
        old, where = served.version, ""
        try:
            new = await asyncio.to_thread(self._folder.read, old.name)
            if (new.version, new.sha256) == (old.version, old.sha256):
                return "unchanged"
            where = f"{new.path}: "
            if (error := await served.batcher.replace(new)) is not None:
                raise error
        except Exception as exc:  # noqa: BLE001 - one model's reload: the others follow
            _log.error(
                "model %s: reload refused, still serving version %s: %s%s",
                old.name,
                old.version,
                where,
                exc,
                exc_info=None if isinstance(exc, LeNetError | OSError) else exc,
            )
            return "refused"
        golden_error = served.golden_error()
        self._metrics.model_replaced(new.name, new.version, new.sha256, golden_error)
        _log.info(
            "model %s: version %s (sha256 %s) replaced version %s, golden logits match within %.1e",
            new.name,
            new.version,
            new.sha256[:12],
            old.version,
            golden_error,
        )
        return "replaced"


def _does_not_fit(model: Model, placement: Placement, error: OutOfDeviceMemory) -> str:
    rows, contexts = placement.max_batch_rows, placement.contexts

    def each(rows: int) -> str:
        needed = estimate_bytes(placement.targets[0], model, rows)
        return f"{needed / 1e6:.0f} MB each"

    fitting = [f"max_batch_rows to {rows // 2} ({each(rows // 2)})"] if rows > 1 else []
    fitting += [f"contexts to {contexts // 2}"] if contexts > 1 else []
    advice = f"lower {' or '.join(fitting)}" if fitting else "load fewer models"
    return (
        f"model {model.name!r} does not fit on the GPU with max_batch_rows {rows} and contexts "
        f"{contexts}, which take about {each(rows)}: {error}; {advice}"
    )
