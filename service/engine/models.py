"""The weight files in the weights folder: which there are, found, read and doubted.

A model is a folder under the weights folder, a version a file in it: MODEL/VERSION.safetensors,
VERSION a positive integer. The highest version of each model is the one to serve. It refuses files
that leave the weights folder through a symlink, and models whose folder bears another name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from lenet import nvtx
from lenet.context import ExecutionContext, Target, estimate_bytes, open_backend
from lenet.errors import InvalidWeightFile, LeNetError, OutOfDeviceMemory
from lenet.model import Model
from lenet.pixels import Images, Probabilities
from lenet.weightfile import WeightFile
from service.engine.batcher import Batcher
from service.engine.contexts import BusyPoll, ContextPool
from service.engine.devices import Placement
from service.engine.faults import Faults, FaultyContext
from service.engine.queue import BatchQueue
from service.engine.versions import ModelFile, read_model
from service.errors import ServiceError, UnknownModel
from service.metrics import LossReason, Metrics, Stage, Transport

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
        contexts = pool.contexts()
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
        needed = estimate_bytes(placement.targets[0], model, rows)
        return f"{needed / 1e6:.0f} MB each"

    fitting = [f"max_batch_rows to {rows // 2} ({each(rows // 2)})"] if rows > 1 else []
    fitting += [f"contexts to {contexts // 2}"] if contexts > 1 else []
    advice = f"lower {' or '.join(fitting)}" if fitting else "load fewer models"
    return (
        f"model {model.name!r} does not fit on the GPU with max_batch_rows {rows} and contexts "
        f"{contexts}, which take about {each(rows)}: {error}; {advice}"
    )


class Reloader:
    """Reloads the models of `repository` from `folder`, one reload after another.

    Use it as an async context manager, inside the repository's: leaving ends a reload half-way,
    which no request notices.
    """

    def __init__(self, folder: Path, repository: Repository, metrics: Metrics) -> None:
        self._folder = folder
        self._repository = repository
        self._metrics = metrics
        self._asked = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Reload soon; during a reload: once more after it, for it may have read older files."""
        self._asked = True
        self._start()

    async def reload(self) -> None:
        """Replace each model by the newest of its files; a refusal is a log line and a count."""
        for served in self._repository.models:
            await self._reload(served)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _start(self) -> None:
        if self._asked and self._task is None and not self._closed:
            self._asked = False
            self._task = asyncio.create_task(self.reload())
            self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a reload failed", exc_info=error)
        self._start()

    async def _reload(self, served: ServedModel) -> None:
        old = served.file
        try:
            new = await asyncio.to_thread(read_model, self._folder, old.name)
        except InvalidWeightFile as exc:
            self._refuse(old, str(exc), exc)
            return
        if (new.version, new.sha256) == (old.version, old.sha256):
            _log.info("model %s: version %s is the newest already", old.name, old.version)
            self._metrics.reloaded(old.name, "ok")
            return
        error = await served.batcher.replace(new)
        if error is not None:
            self._refuse(old, f"{new.path}: {error}", error)
            return
        golden_error = max(context.golden_error for context in served.pool.contexts())
        self._metrics.model_replaced(new.name, new.version, new.sha256, golden_error)
        self._metrics.reloaded(new.name, "ok")
        _log.info(
            "model %s: version %s (sha256 %s) replaced version %s, golden error %.1e",
            *(new.name, new.version, new.sha256[:12], old.version, golden_error),
        )

    def _refuse(self, old: ModelFile, reason: str, error: Exception) -> None:
        self._metrics.reloaded(old.name, "refused")
        _log.error(
            "model %s: reload refused, version %s answers on: %s",
            *(old.name, old.version, reason),
            exc_info=None if isinstance(error, LeNetError) else error,
        )


@dataclass(slots=True)
class Prediction:
    """Probabilities float32 (n, classes) in the order of the images, and who computed them."""

    model: str
    version: str
    probabilities: Probabilities


class RequestClock:
    """Times one request by stage and counts its outcome when its `with` block ends."""

    __slots__ = ("_lap_s", "_metrics", "_protocol", "_range", "_started_s", "stages")

    def __init__(self, metrics: Metrics, protocol: Transport) -> None:
        self._metrics = metrics
        self._protocol = protocol
        self._started_s = self._lap_s = time.perf_counter()
        self.stages: dict[Stage, float] = {}

    @property
    def total_s(self) -> float:
        """Seconds since the request was met."""
        return time.perf_counter() - self._started_s

    def lap(self) -> None:
        """A stage begins here."""
        self._lap_s = time.perf_counter()

    def record(self, stage: Stage) -> None:
        """The stage that began at the last `lap` ends here."""
        self.stages[stage] = time.perf_counter() - self._lap_s

    def __enter__(self) -> Self:
        self._range = nvtx.begin("request")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        nvtx.end(self._range)
        if error is None:
            self._metrics.request_timed(self._protocol, self.stages, self.total_s)
            outcome = "ok"
        elif isinstance(error, ServiceError):
            outcome = error.code
        else:
            outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else "internal"
        self._metrics.request_done(self._protocol, outcome)


class Predictor:
    """Answers images with probabilities.

    `ready` is what /readyz says: true from the last step of the start to the first of the stop.
    """

    def __init__(self, repository: Repository, metrics: Metrics, timeout_s: float) -> None:
        self._repository = repository
        self._metrics = metrics
        self._timeout_s = timeout_s
        self.ready = False

    def clock(self, protocol: Transport) -> RequestClock:
        """Start the clock of a request that came in over `protocol`."""
        return RequestClock(self._metrics, protocol)

    async def predict(
        self,
        images: Images,
        clock: RequestClock,
        *,
        model: str = "",
        version: str = "",
        timeout_s: float | None = None,
    ) -> Prediction:
        """Classify `images`, uint8 (n, 28, 28), n >= 1; notes queue and compute time on `clock`.

        `timeout_s` is cut to the service's own.

        Raises:
            UnknownModel, Overloaded, DeadlineExceeded, InferenceFailed, Unavailable.
        """
        # No await until the request stands in the queue: a version that is asked for is the one
        # that answers.
        served = self._repository.get(model, version)
        timeout = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        answer = await served.batcher.submit(images, timeout)
        clock.stages["queue"] = answer.queue_s
        clock.stages["compute"] = answer.compute_s
        return Prediction(answer.model.name, answer.model.version, answer.probabilities)
