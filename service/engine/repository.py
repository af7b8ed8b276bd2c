"""Loading and unloading of models by request, in every worker.

What was asked for is a file in the folder that the workers share; who was asked writes it and has
the supervisor pass SIGHUP on, on which every worker reads it. Each notes how far it has followed,
and what it could not do. A worker that replaces another follows before it is ready.
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

_FILE = "repository.json"
_NOTE = "repository-"
"""Followed by the process id of a worker, whose supervisor removes its files when it has ended."""
_FOLLOW_S = 60.0
"""How long the other workers may take: on a GPU a model takes some seconds."""
_LOOK_S = 0.05

_Asked: TypeAlias = dict[str, tuple[int, bool]]
"""By model: the number of the latest request, and whether it was to load it."""


class Repository:
    """The models of this worker and, if it has others beside it, of those that share `folder`.

    `alone`: no other worker is there, or will take the place of this one.
    """

    def __init__(self, models: Models, folder: Path | None = None, *, alone: bool = True) -> None:
        self._models, self._folder, self._alone = models, folder, alone
        self._supervisor = os.getppid()
        self._followed = -1
        self._refused: dict[int, str] = {}
        self._following = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, name: str) -> None:
        """As `Models.load`, in every worker.

        Raises:
            UnknownModel, InvalidInput, Unavailable: as there.
            InvalidInput: another worker refused it.
            Unavailable: other workers cannot be told, or did not follow in time.
        """
        await self._to_its_end(self._everywhere(name, load=True))

    async def unload(self, name: str) -> None:
        """As `Models.unload`, in every worker. Raises: UnknownModel, Unavailable."""
        await self._to_its_end(self._everywhere(name, load=False))

    async def index(self) -> tuple[Listed, ...]:
        """As `Models.index`: of this worker."""
        return await self._models.index()

    def request_follow(self) -> None:
        """Follow soon."""
        self._start(self.follow())

    async def follow(self) -> None:
        """Load and unload here what was asked for, of any worker, since the last time."""
        if self._folder is None:
            return
        async with self._following:
            try:
                asked = _read(self._folder)
                latest = max((number for number, _ in asked.values()), default=0)
                for name, (number, load) in sorted(asked.items(), key=lambda item: item[1]):
                    if number > self._followed:
                        await self._follow_one(name, number, load)
                if latest > self._followed:  # a SIGHUP alone writes nothing: the disk may be full
                    note = {"followed": latest, "refused": list(self._refused.items())}
                    _write(self._folder / f"{_NOTE}{os.getpid()}", note)
                    self._followed = latest
            except (OSError, ValueError) as exc:
                _log.warning("models: requests to other workers cannot be followed (%s)", exc)

    async def _follow_one(self, name: str, number: int, load: bool) -> None:
        try:
            await (self._models.load(name) if load else self._models.unload(name))
        except (UnknownModel, Unavailable) as exc:  # unloaded already; the service stops
            if load:
                self._refused[number] = exc.message
        except ServiceError as exc:  # which is logged
            self._refused[number] = exc.message

    async def _everywhere(self, name: str, *, load: bool) -> None:
        if self._folder is None and not self._alone:
            raise Unavailable("model: the workers share no folder, so that not all can be told")
        await (self._models.load(name) if load else self._models.unload(name))
        if self._folder is not None:
            await self._tell(self._folder, name, load)

    async def _tell(self, folder: Path, name: str, load: bool) -> None:
        try:
            with _locked(folder):
                asked = _read(folder)
                number = 1 + max((number for number, _ in asked.values()), default=0)
                asked[name] = number, load
                _write(folder / _FILE, asked)
            os.kill(self._supervisor, signal.SIGHUP)  # which passes it on
            async with asyncio.timeout(_FOLLOW_S):
                # Other processes cannot set an event.
                while any(note["followed"] < number for note in _notes(folder)):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise Unavailable(
                f"model: not all workers have followed within {_FOLLOW_S:g} s; ask again",
                retry_after_s=1,
            ) from None
        except (OSError, ValueError) as exc:
            _log.error("models: the other workers could not be told: %s", exc)
            raise Unavailable(
                "model: this worker did it, the others could not be told; see the server log"
            ) from None
        for note in _notes(folder):
            for refused, message in note["refused"]:
                if refused == number:
                    raise InvalidInput(f"another worker refused it: {message}", field="model")

    async def _to_its_end(self, work: Awaitable[None]) -> None:
        """Do `work` also if the caller is cancelled, who has left."""
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


def unloaded(folder: Path | None) -> frozenset[str]:
    """The models that are unloaded by request; what cannot be read is reported by `follow`."""
    with contextlib.suppress(OSError, ValueError):
        if folder is not None:
            return frozenset(name for name, (_, load) in _read(folder).items() if not load)
    return frozenset()


def _notes(folder: Path) -> Iterator[dict[str, Any]]:
    """Of each worker, how far it has followed. Raises: OSError, ValueError."""
    for path in folder.glob(f"{_NOTE}[0-9]*"):
        with contextlib.suppress(FileNotFoundError):  # its worker has ended
            yield orjson.loads(path.read_bytes())


def _read(folder: Path) -> _Asked:
    """Raises: OSError, ValueError."""
    try:
        found = orjson.loads((folder / _FILE).read_bytes())
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
    with (folder / f"{_FILE}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held by others for the time of a small file
        yield
