"""Which models and versions are loaded, and what serves each.

It refuses to read files: it is given those that `service.model_files` read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from lenet.context import ExecutionContext, Target, open_backend
from service.batcher import Batcher
from service.errors import UnknownModel
from service.metrics import Metrics
from service.model_files import ModelFile
from service.policy import BatchQueue
from service.pool import ContextPool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batching:
    """How each model is run: see the settings of the same names."""

    device: str
    contexts: int
    cpu_threads: int
    max_batch_rows: int
    max_queue_rows: int
    max_wait_s: float
    drain_timeout_s: float


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
    queues and closes them.
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

    async def __aenter__(self) -> Self:
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
        batching = self._batching

        def make_context() -> ExecutionContext:
            backend = open_backend(Target("cpu", cpu_threads=batching.cpu_threads))
            return ExecutionContext(backend, file.weights, batching.max_batch_rows)

        pool = ContextPool(make_context, batching.contexts, f"context-{file.name}")
        await self._stack.enter_async_context(pool)
        batcher = Batcher(
            BatchQueue(batching.max_batch_rows, batching.max_queue_rows, batching.max_wait_s),
            pool,
            self._metrics.of_model(file.name),
            file,
        )
        contexts = pool.statistics()
        error = max(context.golden_error for context in contexts)
        self._metrics.model_loaded(file.name, file.version, file.sha256, batching.contexts, error)
        _log.info(
            "model %s version %s (sha256 %s) ready on %d %s contexts, golden error %.1e",
            *(file.name, file.version, file.sha256[:12], len(contexts), contexts[0].device, error),
        )
        return ServedModel(batcher, pool)
