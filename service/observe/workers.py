"""The folder in which several workers share their numbers: a file for each, and one for the dead.

A worker replaces its file once a second. When it has ended, the supervisor adds its counts to those
of the workers that ended before. Nothing about the files may end a process: what cannot be shared
is reported once, and `/metrics` then shows the worker that answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from service.observe.series import DEATHS, FAMILIES, Numbers, decoded, encoded, merged

_log = logging.getLogger(__name__)

_LIVE, _DEAD, _NEW = ".json", ".dead", ".new"
_SUM = "dead-workers.sum"
"""The counts of dead workers, after a line with the names of files that are added to them and may
still be there."""
_READ_AGAIN = 100


class WorkerFile:
    """The file of this worker in `folder`."""

    def __init__(self, folder: Path) -> None:
        # A process id may come back; the name must not.
        self._path = folder / f"{os.getpid()}-{time.monotonic_ns()}{_LIVE}"
        self._reported = False
        self._written: Numbers | None = None

    def write(self, numbers: Numbers) -> None:
        """Replace it if they have changed, or remove it and say once that this failed.

        Its old numbers would make counters go up and down, as one worker or another is scraped.
        """
        if numbers == self._written:
            return
        self._written = None
        try:
            _replace(self._path, encoded(numbers))
            self._written = numbers
        except (OSError, TypeError) as exc:
            with contextlib.suppress(OSError):
                self._path.unlink()
            if not self._reported:
                self._reported = True
                _log.warning(
                    "metrics: cannot write to %s (%s); until it can be written again /metrics of "
                    "this worker shows only its own numbers, and that of the others omits them",
                    *(self._path.parent, exc),
                )

    def others(self) -> list[Numbers]:
        """The numbers of all other workers, of dead ones those that last.

        Raises:
            OSError: the folder or this worker's file is gone.
            ValueError, TypeError: a file is not what `write` left there.
        """
        folder = self._path.parent
        for _ in range(_READ_AGAIN):
            names = {path.name for path in folder.iterdir()}
            if self._path.name not in names:
                raise FileNotFoundError("this worker's file is gone")
            added, total = _read_dead(folder)
            found = [total]
            try:
                for name in names - {self._path.name, *added}:
                    if name.endswith((_LIVE, _DEAD)):
                        numbers = decoded((folder / name).read_bytes())
                        found.append(numbers if name.endswith(_LIVE) else _of_dead(numbers))
            except FileNotFoundError:  # its worker has ended meanwhile
                continue
            return found
        raise OSError("the files change all the time")


def fold(folder: Path, pid: int) -> None:
    """Add the counts of worker `pid`, which has ended, to those of the dead; its gauges go.

    A scrape meanwhile sees them before or after, never twice and never missing. A file that cannot
    be read is removed, which loses its counts.
    """
    try:
        for path in folder.glob(f"{pid}-*{_NEW}"):  # it was killed while it wrote
            path.unlink(missing_ok=True)
        live = list(folder.glob(f"{pid}-*{_LIVE}"))
        for path in live:
            path.rename(path.with_suffix(_DEAD))  # without its gauges, also if the disk is full
        try:
            added, total = _read_dead(folder)
        except (ValueError, TypeError) as exc:
            _report_lost(_SUM, exc)
            added, total = [], {}
        added = [name for name in added if (folder / name).exists()]
        dead = [path for path in folder.glob(f"*{_DEAD}") if path.name not in added]
        several = [_read_or_lost(path) for path in dead]
        if not live:  # it ended before its first file
            several.append(_of_dead({}))
        names = " ".join([*added, *(path.name for path in dead)])
        content = encoded(merged([total, *several]))
        _replace(folder / _SUM, names.encode() + b"\n" + content)
        for name in names.split():
            (folder / name).unlink(missing_ok=True)
    except (OSError, ValueError, TypeError) as exc:
        _log.warning("metrics of worker %d are not added to those of the dead: %s", pid, exc)


def _read_or_lost(path: Path) -> Numbers:
    """The counts of a dead worker, of which one is its death: this one alone without the others."""
    try:
        return _of_dead(decoded(path.read_bytes()))
    except (ValueError, TypeError) as exc:
        _report_lost(path.name, exc)
        return _of_dead({})


def _report_lost(name: str, exc: Exception) -> None:
    _log.warning("metrics of dead workers are lost: %s cannot be read (%s)", name, exc)


def _of_dead(numbers: Numbers) -> Numbers:
    lasting = {name: series for name, series in numbers.items() if FAMILIES[name].lasts}
    return merged([lasting, {DEATHS: {(): [1]}}])


def _read_dead(folder: Path) -> tuple[list[str], Numbers]:
    try:
        names, _, content = (folder / _SUM).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return [], {}
    return names.decode().split(), decoded(content)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(_NEW)
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
