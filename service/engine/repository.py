"""Loading and unloading of models by request, in every worker.

A worker that got such a request makes the change, adds it to a file in the folder that the workers
share, and has the supervisor pass SIGHUP on. Every worker then applies the changes in that file,
and writes its progress into a file of its own: the number of the last change that it applied, and
those that it refused. The request is answered when all have. A worker that replaces another applies
the changes before it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from service.engine.models import Models
from service.engine.versions import Listed
from service.errors import InvalidInput, ServiceError, Unavailable, UnknownModel

_log = logging.getLogger(__name__)

_CHANGES_FILE = "repository.json"
_PROGRESS = "repository-"
"""Followed by the process id of a worker, whose supervisor removes its files when it has ended."""
_APPLY_S = 60.0
"""Timeout for the other workers: on a GPU a model takes some seconds to load."""
_POLL_S = 0.05

_Changes: TypeAlias = dict[str, tuple[int, bool]]
"""For each model, the number of its latest change, counted from 1, and whether it loads."""


class Repository:
    """The models of this worker and of those that share `folder` with it.

    `alone`: there is no supervisor, and so no other worker, now or later.
    """

    def __init__(self, models: Models, folder: Path | None = None, *, alone: bool = True) -> None:
        self._models, self._folder, self._alone = models, folder, alone
        self._supervisor = os.getppid()
        self._applied, self._reported = 0, -1
        self._refused: dict[int, tuple[str, str]] = {}
        """Code and message of the error, by number of the change."""
        self._applying = asyncio.Lock()  # while the models here do not agree with `_applied`
        self._unpublished: set[str] = set()
        """Models that were changed here alone, as the file could not be written."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, name: str) -> None:
        """Load the model in every worker, see `Models.load`.

        Raises:
            UnknownModel, InvalidInput, Unavailable: `Models.load` failed in any worker.
            Unavailable: other workers cannot be reached, or take too long.
        """
        await self._uncancelled(self._change(name, load=True))

    async def unload(self, name: str) -> None:
        """Unload the model in every worker. Raises: UnknownModel, Unavailable."""
        await self._uncancelled(self._change(name, load=False))

    async def index(self) -> tuple[Listed, ...]:
        """The model index of this worker, see `Models.index`."""
        return await self._models.index()

    def request_changes(self) -> None:
        """Apply the changes of other workers soon."""
        self._start(self.apply_changes())

    async def apply_changes(self) -> None:
        """Load and unload here what requests to any worker named since the last time."""
        if self._folder is None:
            return
        async with self._applying:
            try:
                changes = _read(self._folder)
                for name, (number, load) in sorted(changes.items(), key=lambda item: item[1]):
                    if number > self._applied:
                        await self._apply(name, number, load)
                self._applied = max([self._applied, *(number for number, _ in changes.values())])
                self._report(self._folder, changes)
            except (OSError, ValueError) as exc:
                _log.warning("models: changes of other workers are not followed (%s)", exc)

    async def _apply(self, name: str, number: int, load: bool) -> None:
        try:
            await (self._models.load(name) if load else self._models.unload(name))
        except UnknownModel as exc:
            if load:  # else it is unloaded already
                self._refused[number] = exc.code, exc.message
        except ServiceError as exc:  # which is logged
            self._refused[number] = exc.code, exc.message
        except Exception as exc:  # noqa: BLE001 - whatever one model does, the worker serves on
            self._refused[number] = ServiceError.code, f"{exc!r}; see the server log"

    def _report(self, folder: Path, changes: _Changes) -> None:
        """Write the progress, if there is any: a SIGHUP may come while the disk is full."""
        if self._applied > self._reported:
            latest = {number for number, _ in changes.values()}
            refused = {number: why for number, why in self._refused.items() if number in latest}
            self._refused = refused
            progress = {"applied": self._applied, "refused": list(refused.items())}
            _write(folder / f"{_PROGRESS}{os.getpid()}", progress)
            self._reported = self._applied

    async def _change(self, name: str, *, load: bool) -> None:
        if self._folder is None and not self._alone:
            raise Unavailable("model: the workers share no folder, so that not all can be reached")
        async with self._applying:  # so that the changes here are made in the order of the file
            try:
                await (self._models.load(name) if load else self._models.unload(name))
            except UnknownModel:
                if name not in self._unpublished:
                    raise
            if self._folder is None:
                return
            number = self._publish(self._folder, name, load)
        await self._wait_for_others(self._folder, number)

    def _publish(self, folder: Path, name: str, load: bool) -> int:
        """Add a change that this worker made to the file; its number."""
        try:
            with _locked(folder):
                changes = _read(folder)
                number = 1 + max([self._applied, *(number for number, _ in changes.values())])
                changes[name] = number, load
                _write(folder / _CHANGES_FILE, changes)
            self._unpublished.discard(name)
            if self._applied == number - 1:  # nothing of others is in between
                self._applied = number
                self._report(folder, changes)
        except (OSError, ValueError) as exc:
            self._unpublished.add(name)
            raise _unreached(exc) from None
        return number

    async def _wait_for_others(self, folder: Path, number: int) -> None:
        try:
            os.kill(self._supervisor, signal.SIGHUP)  # which passes it on
            async with asyncio.timeout(_APPLY_S):
                # Other processes cannot set an event.
                while any(one["applied"] < number for one in _progress(folder)):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Unavailable(
                f"model: not all workers have done it within {_APPLY_S:g} s; ask again",
                retry_after_s=1,
            ) from None
        except (OSError, ValueError) as exc:
            raise _unreached(exc) from None
        for one in _progress(folder):
            for refused, (code, message) in one["refused"]:
                if refused == number:
                    kind = InvalidInput if code == InvalidInput.code else Unavailable
                    raise kind(f"another worker refused it: {message}", field="model")

    async def _uncancelled(self, work: Awaitable[None]) -> None:
        """Do `work` to its end, also if the caller is cancelled because its client has left."""
        await asyncio.shield(self._start(work))

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def done() -> None:
            await work

        task = asyncio.create_task(done())
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, or has left


def _unreached(cause: Exception) -> Unavailable:
    _log.error("models: the other workers could not be reached: %s", cause)
    return Unavailable(
        "model: changed in this worker only, the other workers could not be reached; see the "
        "server log and ask again"
    )


def unloaded(folder: Path | None) -> frozenset[str]:
    """The models that requests unloaded; `apply_changes` reports a file that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        if folder is not None:
            return frozenset(name for name, (_, load) in _read(folder).items() if not load)
    return frozenset()


def _progress(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the progress file of each worker. Raises: OSError, ValueError."""
    for path in folder.glob(f"{_PROGRESS}[0-9]*"):
        with contextlib.suppress(FileNotFoundError):  # its worker has ended
            yield orjson.loads(path.read_bytes())


def _read(folder: Path) -> _Changes:
    """Raises: OSError, ValueError."""
    try:
        found = orjson.loads((folder / _CHANGES_FILE).read_bytes())
    except FileNotFoundError:
        return {}
    return {name: (int(number), bool(load)) for name, (number, load) in found.items()}


def _write(path: Path, content: object) -> None:
    """Replace a file as a whole, for those who read it meanwhile."""
    new = path.with_name(f"new-{path.name}-{os.getpid()}")
    new.write_bytes(orjson.dumps(content))
    new.replace(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / f"{_CHANGES_FILE}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held by others for the time of a small file
        yield
