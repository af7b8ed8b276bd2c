"""Which models the workers serve: a request to load or unload one is a wish that all follow.

The worker that gets such a request writes the wish into a file of the folder that the workers
share, one for each model, and has the supervisor pass SIGHUP on. Every worker then reloads: it
reads the wishes that are new to it and the weights folder, and reports in a file of its own which
wishes it followed, and why not. The request is answered when all have. A worker that replaces
another reports that it followed none, so that requests wait for it, and follows the wishes before
it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from lenet.errors import DeviceError, LeNetError
from service.errors import InvalidInput, Unavailable, UnknownModel, shown, stopping

if TYPE_CHECKING:
    from service.engine.models import Models

_log = logging.getLogger(__name__)

_WISHES = "wishes"
"""Folder of the wishes, each in a file that is called as its model."""
_REPORT = "repository-"
"""Followed by the process id of a worker, see `forget`."""
_FOLLOW_S = 60.0
"""Timeout of a request: on a GPU a model takes some seconds to load."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Wish:
    """The latest request to load or unload a model, in nanoseconds of the monotonic clock."""

    number: int
    load: bool


@dataclass(frozen=True, slots=True)
class Followed:
    """Outcome of a wish in a worker: code and message of an error, "" without one."""

    number: int
    code: str = ""
    message: str = ""


class Repository:
    """Loads, unloads and reloads `models` here and in the workers that share `folder`.

    `alone`: there is no supervisor, and so no other worker, now or later.
    """

    def __init__(self, models: Models, folder: Path | None = None, *, alone: bool = True) -> None:
        self._models, self._folder, self._alone = models, folder, alone
        self._supervisor = os.getppid()
        self._wishes: dict[str, Wish] = {}
        """Those of this process, if it shares no folder."""
        self._followed: dict[str, Followed] = {}
        self._requested = self._closed = False
        self._reloading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Follow the wishes of requests to earlier workers."""
        self._report()  # requests wait for this worker from now on
        while self._new_wishes():  # others may come during a reload
            await self.reload()

    async def close(self, timeout_s: float) -> None:
        """Give up a reload half-way, which no request notices, and wait for its end."""
        self._closed = True
        if (reloading := self._reloading) is not None:
            reloading.cancel()
            await asyncio.wait([reloading], timeout=timeout_s)

    async def load(self, name: str) -> None:
        """Have every worker serve the model `name` as its files are now.

        It is done also if the caller is cancelled.

        Raises:
            UnknownModel: it has no files.
            InvalidInput: a file is missing or must not be served; what was served still is.
            Unavailable: a worker has no room for it, is late, or the workers cannot be reached.
        """
        names = sorted({one.name for one in await self._models.index()})
        if name not in names:
            message = f"no model {shown(name)} in the weights folder, expected one of "
            raise UnknownModel(message + ", ".join(names), field="model")
        await self._wish(name, load=True)

    async def unload(self, name: str) -> None:
        """Close the model `name` in every worker; requests that came before are finished.

        Raises:
            UnknownModel: it is not loaded.
            Unavailable: a worker is late, or the workers cannot be reached.
        """
        if name not in self._models.loaded:
            raise self._models.not_loaded(name)
        await self._wish(name, load=False)

    def request_reload(self) -> None:
        """Reload soon; during a reload once more after it, which may have read older files."""
        self._requested = True
        if self._reloading is None and not self._closed:
            self._reloading = asyncio.create_task(self._reload_while_requested())

    async def reload(self) -> None:
        """Follow the wishes; serve of each loaded model what its files are now, if it is valid.

        A wish is tried once, later reloads are those of what is loaded.
        """
        counts: dict[str, int] = dict.fromkeys(("replaced", "unchanged", "refused"), 0)
        new = self._new_wishes()
        for name, wish in new.items():
            if not wish.load:
                await self._models.remove(name)
        loads = (name for name, wish in new.items() if wish.load)
        outcomes = {name: Followed(wish.number) for name, wish in new.items()}
        for name in dict.fromkeys((*self._models.loaded, *loads)):
            outcome, error = await self._models.update(name)
            counts[outcome] += 1
            if error is not None and name in new:
                ours = not isinstance(error, LeNetError) or isinstance(error, DeviceError)
                code = Unavailable.code if ours else InvalidInput.code
                message = f"model: {shown(name)} was not loaded: {error}"
                outcomes[name] = Followed(new[name].number, code, message)
        self._followed |= outcomes
        self._report()
        _log.info("reload: %s", ", ".join(f"{count} {name}" for name, count in counts.items()))

    async def _reload_while_requested(self) -> None:
        try:
            while self._requested:
                self._requested = False
                await self.reload()
        finally:
            self._reloading = None

    async def _wish(self, name: str, *, load: bool) -> None:
        if self._folder is None and not self._alone:
            raise Unavailable("model: the workers share no folder, so that not all can be reached")
        try:
            if self._folder is None:
                wish = self._wishes[name] = Wish(time.monotonic_ns(), load)
                self.request_reload()
            else:
                wish = _write_wish(self._folder, name, load=load)
                os.kill(self._supervisor, signal.SIGHUP)  # which passes it on to this worker, too
            async with asyncio.timeout(_FOLLOW_S):
                while any(one.number < wish.number for one in self._outcomes(name)):
                    if self._closed:
                        raise stopping()
                    await asyncio.sleep(_POLL_S)  # other processes cannot set an event
            outcomes = self._outcomes(name)
        except TimeoutError:
            raise Unavailable(
                f"model: not all workers have done it within {_FOLLOW_S:g} s; ask again",
                retry_after_s=1,
            ) from None
        except (OSError, ValueError) as exc:
            _log.error("models: the workers could not be reached: %s", exc)
            raise Unavailable(
                "model: the workers could not be reached; see the server log and ask again"
            ) from None
        for place, outcome in enumerate(outcomes):
            if load and outcome.code:  # of this wish, or of a later one to load the same files
                where = "another worker refused it: " if place else ""
                kind = InvalidInput if outcome.code == InvalidInput.code else Unavailable
                raise kind(f"{where}{outcome.message}", field="model")

    def _outcomes(self, name: str) -> list[Followed]:
        """What became of the latest wish that each worker followed, this one's first.

        Raises: OSError, ValueError.
        """
        found = [self._followed.get(name, Followed(0))]
        for path in self._folder.glob(f"{_REPORT}[0-9]*") if self._folder else ():
            with contextlib.suppress(FileNotFoundError):  # its worker has ended
                report = orjson.loads(path.read_bytes())
                found.append(Followed(**report.get(name, {"number": 0})))
        return found

    def _new_wishes(self) -> dict[str, Wish]:
        """Those that are not followed yet, the oldest first."""
        return {
            name: wish
            for name, wish in sorted(self._read_wishes().items(), key=lambda item: item[1].number)
            if wish.number > self._followed.get(name, Followed(0)).number
        }

    def _read_wishes(self) -> dict[str, Wish]:
        if self._folder is None:
            return self._wishes
        try:
            return _read(self._folder)
        except (OSError, ValueError, TypeError) as exc:
            _log.warning("models: what requests loaded and unloaded is not followed (%s)", exc)
            return {}

    def _report(self) -> None:
        if self._folder is not None:
            try:
                _replace(self._folder / f"{_REPORT}{os.getpid()}", self._folder, self._followed)
            except OSError as exc:
                _log.warning("models: requests cannot see what this worker loads (%s)", exc)


def unloaded(folder: Path | None) -> frozenset[str]:
    """The models that requests unloaded; `Repository` reports a file that cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        if folder is not None:
            return frozenset(name for name, wish in _read(folder).items() if not wish.load)
    return frozenset()


def forget(folder: Path, pid: int) -> None:
    """Worker `pid` has ended: no request waits for it any more."""
    with contextlib.suppress(OSError):
        (folder / f"{_REPORT}{pid}").unlink()


def _read(folder: Path) -> dict[str, Wish]:
    """Raises: OSError, ValueError, TypeError."""
    wishes = {}
    with contextlib.suppress(FileNotFoundError):  # no request came
        for path in (folder / _WISHES).iterdir():
            wishes[path.name] = Wish(**orjson.loads(path.read_bytes()))
    return wishes


def _write_wish(folder: Path, name: str, *, load: bool) -> Wish:
    """Raises: OSError."""
    wishes = folder / _WISHES
    wishes.mkdir(exist_ok=True)
    lock = os.open(wishes, os.O_RDONLY | os.O_CLOEXEC)  # the supervisor has that of `folder`
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # no worker replaces a later wish with an older one
        wish = Wish(time.monotonic_ns(), load)
        _replace(wishes / name, folder, wish)
    finally:
        os.close(lock)
    return wish


def _replace(path: Path, folder: Path, content: object) -> None:
    """Replace a file as a whole, for those who read it meanwhile; `folder` is on its disk."""
    new = folder / f"new-{os.getpid()}"
    new.write_bytes(orjson.dumps(content))
    new.replace(path)
