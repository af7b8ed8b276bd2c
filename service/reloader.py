"""Reading the weights folder again, when told to, while requests are answered.

Each served model is replaced by the highest version that its folder holds now; what cannot be read,
is of another architecture or fails its proof is refused by name, and the old version answers on. It
refuses to add or drop a model: that takes a restart.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Self

from lenet.errors import InvalidWeightFile, LeNetError
from service.metrics import Metrics
from service.model_files import ModelFile, read_model
from service.repository import Repository, ServedModel

_log = logging.getLogger(__name__)


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
        golden_error = max(context.golden_error for context in served.pool.statistics())
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
