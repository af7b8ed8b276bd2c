"""Loading and unloading of models by request, in every worker.

What was asked for is a file in the folder that the workers share; who was asked writes it and has
the supervisor pass SIGHUP on, on which every worker reads it. Each notes how far it has followed.
A worker that replaces another follows before it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import orjson

from service.engine.models import Models
from service.engine.versions import Listed
from service.errors import ServiceError, Unavailable, UnknownModel

_log = logging.getLogger(__name__)

_FILE = "repository.json"
_FOLLOWED = "repository-followed-"
_FOLLOW_S = 60.0
"""How long the other workers may take: on a GPU a model takes some seconds."""
_LOOK_S = 0.05

_Asked: TypeAlias = dict[str, tuple[int, bool]]
"""By model: the number of the latest request, and whether it was to load it."""


class Repository:
    """The models of this worker and, if they share `folder`, of the others."""

    def __init__(self, models: Models, folder: Path | None) -> None:
        self._models, self._folder = models, folder
        self._followed = 0
        self._following = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, name: str) -> None:
        """As `Models.load`, in every worker.

        Raises:
            UnknownModel, InvalidInput, Unavailable: as there.
            Unavailable: other workers could not be told, or did not follow in time.
        """
        await self._models.load(name)
        await self._tell(name, True)

    async def unload(self, name: str) -> None:
        """As `Models.unload`, in every worker. Raises: UnknownModel, Unavailable."""
        await self._models.unload(name)
        await self._tell(name, False)

    async def index(self) -> tuple[Listed, ...]:
        """As `Models.index`: of this worker."""
        return await self._models.index()

    def request_follow(self) -> None:
        """Follow soon."""
        task = asyncio.create_task(self.follow())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
                        await self._follow_one(name, load)
                self._followed = latest
                (self._folder / f"{_FOLLOWED}{os.getpid()}").write_text(str(latest))
            except OSError as exc:
                _log.warning("models: requests of other workers cannot be read (%s)", exc)

    async def _follow_one(self, name: str, load: bool) -> None:
        try:
            await (self._models.load(name) if load else self._models.unload(name))
        except (UnknownModel, Unavailable):  # unloaded already; the service stops
            pass
        except ServiceError as exc:
            _log.error("models: %s", exc)

    async def _tell(self, name: str, load: bool) -> None:
        if self._folder is None:
            return
        try:
            with _locked(self._folder):
                asked = _read(self._folder)
                number = 1 + max((number for number, _ in asked.values()), default=0)
                asked[name] = number, load
                new = self._folder / f"{_FILE}.new"
                new.write_bytes(orjson.dumps(asked))
                new.replace(self._folder / _FILE)
            os.kill(os.getppid(), signal.SIGHUP)  # the supervisor's, which passes it on
            async with asyncio.timeout(_FOLLOW_S):
                # Other processes cannot set an event.
                while any(done < number for done in self._all_followed()):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except OSError as exc:
            raise Unavailable(f"model: the other workers could not be told ({exc})") from None
        except TimeoutError:
            raise Unavailable(
                f"model: not all workers have followed within {_FOLLOW_S:g} s; ask again",
                retry_after_s=1,
            ) from None

    def _all_followed(self) -> Iterator[int]:
        assert self._folder is not None, "bug: nothing is shared"
        for path in self._folder.glob(f"{_FOLLOWED}*"):
            pid = int(path.name.removeprefix(_FOLLOWED))
            with contextlib.suppress(ValueError, ProcessLookupError):  # being written; ended
                os.kill(pid, 0)
                yield int(path.read_text())


def _read(folder: Path) -> _Asked:
    """Raises: OSError."""
    try:
        found = orjson.loads((folder / _FILE).read_bytes())
    except FileNotFoundError:
        return {}
    return {name: (int(number), bool(load)) for name, (number, load) in found.items()}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / f"{_FILE}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held by others for the time of a small file
        yield
