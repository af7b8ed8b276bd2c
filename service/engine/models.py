"""The loaded models, each in one version or several: find, update, remove and close them.

Called by HTTP and gRPC alike; knows no transport.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

from lenet.context import ExecutionContext, Target, estimate_bytes, open_backend, open_staging
from lenet.errors import DeviceError, InvalidWeightFile, LeNetError, OutOfDeviceMemory
from lenet.model import Model
from lenet.pixels import PIXELS
from lenet.staging import Staging
from lenet.weightfile import WeightFile
from service.engine.batcher import Batcher
from service.engine.contexts import BusyPoll, ContextPool, Worker
from service.engine.devices import Placement
from service.engine.faults import Faults, FaultyContext
from service.engine.queue import BatchQueue
from service.engine.versions import Listed, ModelVersion, WeightsFolder
from service.errors import InvalidInput, UnknownModel, shown
from service.observe.metrics import LossReason, Metrics

_log = logging.getLogger(__name__)

_HIGHEST = ("", "0")
"""Versions that a client names for the highest: OpenVINO's sends 0 where it was given none."""

_STAGED, _STAGED_BYTES = 16, 1024 * PIXELS + 4096
"""Large requests whose pixels may arrive in memory that a GPU reads, and what each may take: 1,024
images, and what comes before them in the body."""


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


class Models:
    """The models of `versions`, which `folder` reloads.

    `default` answers who names none, or `alias`.

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
        default: str,
        config: EngineConfig,
        metrics: Metrics,
        alias: str = "",
    ) -> None:
        self.ready = False
        self.lost = asyncio.Event()
        self._folder = folder
        self._versions = versions
        self.default = default
        """The name of the model for requests that name none; it may be unloaded."""
        self._default_names = {"", alias}
        self._config = config
        self._metrics = metrics
        busy_poll_s = config.placement.busy_poll_s
        self._busy_poll = BusyPoll(busy_poll_s) if busy_poll_s else None
        self._staging: Staging | None = None
        self._opening = threading.Lock()
        """Contexts of several devices are opened at the same time."""
        self._served: dict[str, tuple[Batcher, ...]] = {}
        """Loaded versions by model name, the highest version first."""
        self._labels: dict[str, dict[str, tuple[str, ...]]] = {}
        """By model and label the version, while models change also the one before."""
        self._models: list[Batcher] = []
        """All that have contexts, those that are being unloaded among them."""

    @property
    def served(self) -> tuple[Batcher, ...]:
        """All loaded versions: the default model first, then the highest version first."""
        models = sorted(self._served.items(), key=lambda item: item[0] != self.default)
        return tuple(one for _, versions in models for one in versions)

    @property
    def loaded(self) -> tuple[str, ...]:
        """The names of the loaded models."""
        return tuple(self._served)

    @property
    def names(self) -> set[str]:
        """The names by which requests find models, the alias among them."""
        alias = self._default_names - {""} if self.default in self._served else set[str]()
        return alias.union(self._served)

    @property
    def listed(self) -> list[str]:
        """`names`, those of the weights folder first."""
        return [*self._served, *sorted(self.names - self._served.keys())]

    def find(self, name: str = "", version: str = "") -> Batcher | None:
        """Like `get`, but None if it is not loaded."""
        if name in self._default_names:
            name = self.default
        versions = self._served.get(name, ())
        if version in _HIGHEST:
            if len(versions) > 1:  # one may have been replaced a moment ago
                return max(versions, key=lambda one: int(one.version.version))
            return versions[0] if versions else None
        for wanted in self._labels.get(name, {}).get(version, (version,)):
            for served in versions:
                if served.version.version == wanted:
                    return served
        return None

    def labels_of(self, served: Batcher) -> list[str]:
        """The labels of a version."""
        name = served.version.name
        return sorted(one for one in self._labels.get(name, ()) if self.find(name, one) is served)

    def get(self, name: str = "", version: str = "") -> Batcher:
        """The model called `name` in `version` or its label, the highest one for "" and "0".

        The default model for "" and for the alias.

        Raises:
            UnknownModel: not loaded; the message lists what is.
        """
        model = self.find(name, version)
        if model is not None:
            return model
        versions = self._served.get(self.default if name in self._default_names else name)
        if versions is None:
            raise self.not_loaded(name or self.default)
        found = versions[0].version.name
        loaded = [one.version.version for one in versions] + sorted(self._labels.get(found, {}))
        expected = "one of " * (len(loaded) > 1) + ", ".join(map(repr, loaded))
        if flag := self._folder.flag_for(found, version):
            expected += f"; it is in the weights folder, and {flag} loads it"
        elif not (version.isascii() and version.isdecimal()):
            expected += "; a request without a version gets the latest"
        raise UnknownModel(
            f"version {shown(version)} of model {found!r} is not loaded, expected {expected}",
            field="version",
        )

    def not_loaded(self, name: str) -> UnknownModel:
        """The error of a request to a model that is not loaded."""
        loaded = ", ".join(self.listed) or "none: no model is"
        message = f"model {shown(name)} is not loaded, expected one of {loaded}"
        return UnknownModel(message, field="model")

    def select(self, name: str = "", version: str = "") -> tuple[Batcher, ...]:
        """A version of a model, the highest first; all of them for "" and "0".

        Raises: UnknownModel.
        """
        found = self.get(name, version)
        return self._served[found.version.name] if version in _HIGHEST else (found,)

    def start_s(self) -> tuple[float, float]:
        """Seconds that opening the devices and warming up took, of all models."""
        times = [model.pool.start_s() for model in self.served]
        return sum(opening_s for opening_s, _ in times), sum(warm_up_s for _, warm_up_s in times)

    async def index(self) -> tuple[Listed, ...]:
        """Every version of a model that is in the folder or loaded.

        Raises:
            InvalidInput: the folder cannot be listed.
        """
        try:
            files = await asyncio.to_thread(self._folder.index)
        except InvalidWeightFile as exc:
            raise InvalidInput(f"models: {exc}", field="models") from exc
        loaded = {one.version.key for one in self.served}
        keys = (*files, *(key for key in loaded if key not in files))
        return tuple(Listed(*key, key in loaded) for key in keys)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, finish the waiting ones, fail what is left after `timeout_s`."""
        await asyncio.gather(*(model.drain(timeout_s) for model in self._models))

    def room(self, size_bytes: int) -> memoryview | None:
        """Memory for so many bytes of pixels, from which a batch is computed without a copy.

        None if there is none: on the CPU, for a larger body, or while all of it is used.
        """
        return None if self._staging is None else self._staging.take(size_bytes)

    async def __aenter__(self) -> Self:
        try:
            for version in self._versions:
                await self._add(version)
            for name in self._served:
                self._label(name)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ready = False
        try:
            await self.drain(self._config.drain_timeout_s)
        finally:
            await self._close()

    async def _close(self) -> None:
        async with AsyncExitStack() as stack:
            for model in self._models:
                stack.push_async_callback(model.pool.close)

    async def _add(self, version: ModelVersion) -> None:
        """Load a version beside those that are served. Raises: OutOfDeviceMemory, DeviceError."""
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
            await pool.open()
        except OutOfDeviceMemory as exc:
            raise OutOfDeviceMemory(_does_not_fit(version.weights.model, placement, exc)) from exc
        served = Batcher(
            BatchQueue(placement.max_batch_rows, config.max_queue_rows, config.max_wait_s),
            pool,
            self._metrics,
            version,
            self._busy_poll,
            time.monotonic,
            placement.overlap_rows,
        )
        if self.lost.is_set():
            served.fail_all()
        self._models.append(served)
        self._show(served)
        _log.info(
            "model %s version %s (sha256 %s) loaded: %d contexts on %s, "
            "golden logits match within %.1e",
            version.name,
            version.version,
            version.sha256[:12],
            len(workers),
            placement.name,
            served.pool.golden_error(),
        )
        self._order(version.name, (*self._served.get(version.name, ()), served))

    def _order(self, name: str, versions: Iterable[Batcher]) -> None:
        self._served[name] = tuple(sorted(versions, key=lambda one: -int(one.version.version)))

    def _label(self, name: str, *before: Mapping[str, tuple[str, ...]]) -> None:
        """Name versions as `folder` read it, or as `before` where that one is not served yet."""
        self._labels[name] = {
            label: (version, *(one for labels in before for one in labels.get(label, ())))
            for label, version in self._folder.labels.get(name, {}).items()
        }

    async def remove(self, name: str) -> None:
        """Close a model, if it is loaded: no request finds it, and those that did are finished."""
        await asyncio.gather(*map(self._close_one, self._served.pop(name, ())))

    async def _close_one(self, served: Batcher) -> None:
        """Finish the requests to a version that none finds any more, and close it."""
        version = served.version
        await served.drain(self._config.drain_timeout_s)
        await served.pool.close()
        self._models.remove(served)
        self._metrics.model_unloaded(version.key)
        _log.info("model %s version %s unloaded", version.name, version.version)

    def _show(self, served: Batcher) -> None:
        """Publish the version's gauges."""
        contexts = [worker.context for worker in served.pool.workers]
        self._metrics.model_loaded(
            served.version.key,
            served.version.sha256,
            contexts=len(contexts),
            queue_limit_rows=self._config.max_queue_rows,
            golden_error=served.pool.golden_error(),
            golden_tolerance=contexts[0].tolerance,
            device_bytes=sum(context.device_bytes for context in contexts),
            workspace_bytes=sum(context.workspace_bytes for context in contexts),
            load=served.load,
        )

    def _open(self, target: Target, weights: WeightFile) -> ExecutionContext:
        rows = self._config.placement.max_batch_rows
        with self._opening:
            if self._staging is None:
                self._staging = open_staging(target, _STAGED, _STAGED_BYTES)
        backend = open_backend(target, self._staging)
        if self._config.faults is None:
            return ExecutionContext(backend, weights, rows)
        return FaultyContext(backend, weights, rows, self._config.faults)

    def _on_device_lost(self, reason: LossReason, story: str) -> None:
        if self.lost.is_set():
            return  # contexts of one device are lost together
        _log.error("the device is lost, this process ends: %s", story)
        self.lost.set()
        for model in self._models:
            model.fail_all()
        self._metrics.device_lost(reason)

    async def update(self, name: str) -> tuple[str, Exception | None]:
        """Serve of a model what its files are now: replaced, unchanged or refused, and why.

        A version that is gone is replaced in place by one that is new, if there is one. The first
        that is refused ends it: it and those after it stay as they were, whatever goes wrong.
        """
        outcome, where, before = "unchanged", "", self._served.get(name, ())
        labels = self._labels.get(name, {})
        try:
            wanted = await asyncio.to_thread(self._folder.read, name)
            self._label(name, labels)
            kept = {one.version.version: one for one in before}
            new = [one for one in wanted if one.version not in kept]
            stay = [(kept.pop(one.version), one) for one in wanted if one.version in kept]
            gone = list(kept.values())
            for served, version in (*stay, *zip(gone, new, strict=False)):
                where = f"{version.path}: "
                if (served.version.key, served.version.sha256) != (version.key, version.sha256):
                    await self._replace(served, version)
                    outcome = "replaced"
            for version in new[len(gone) :]:
                where = f"{version.path}: "
                await self._add(version)
                outcome = "replaced"
            for served in gone[len(new) :]:
                self._order(name, (one for one in self._served[name] if one is not served))
                await self._close_one(served)
                outcome = "replaced"
            self._label(name)
        except Exception as exc:  # noqa: BLE001 - one model's change: the others follow
            self._labels[name] = labels
            served_now = self._served.get(name, ())
            _log.error(
                "model %s: %s refused, %s: %s%s",
                name,
                "reload" if before else "load",
                f"still serving version {', '.join(one.version.version for one in served_now)}"
                if served_now
                else "it is not served",
                where,
                exc,
                exc_info=None if isinstance(exc, LeNetError | OSError) else exc,
            )
            self._metrics.reloaded(name, "refused")
            if isinstance(exc, DeviceError) and exc.sticky:
                self._on_device_lost("sticky", f"loading model {name}: {exc}")
            return "refused", exc
        self._metrics.reloaded(name, "ok")
        return outcome, None

    async def _replace(self, served: Batcher, new: ModelVersion) -> None:
        """Compute with `new` on the contexts of `served`. Raises: what a context finds wrong."""
        old = served.version
        if (error := await served.replace(new)) is not None:
            raise error
        if old.key != new.key:
            self._metrics.model_unloaded(old.key)
        self._order(new.name, self._served[new.name])
        self._show(served)
        _log.info(
            "model %s: version %s (sha256 %s) replaced version %s, golden logits match within %.1e",
            new.name,
            new.version,
            new.sha256[:12],
            old.version,
            served.pool.golden_error(),
        )


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
