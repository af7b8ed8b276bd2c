"""The files in which several workers keep their metrics: prometheus_client's multiprocess mode.

The library maps a file for each kind of metric into memory, named KIND_PID.db, in the folder that
an environment variable names when it is imported. Nothing about them may end a process: what cannot
be shared is reported once, and `/metrics` then shows the worker that answers.

The counts of workers that have ended are kept by the supervisor, in one file of each kind.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client."""

_PREFIX = "lenet-serve-metrics-"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a writable folder in most containers
_FILE_BYTES = {
    "counter": 5 << 19,
    "histogram": 1 << 17,
    "gauge_livesum": 1 << 18,
    "gauge_livemax": 1 << 20,
    "gauge_livemin": 1 << 16,
    "gauge_max": 1 << 16,
}
"""Five models use 58 KiB of histogram at first, 35 of counter, and 5 of each gauge's. A version
that is loaded adds up to 12 KiB to counter, less than 1 to the others: there is room for 200."""

_KEPT: dict[str, Callable[[float, float], float]] = {
    "counter": float.__add__,
    "histogram": float.__add__,
    "gauge_max": max,
}
"""Kinds that outlive their worker, and how two values are merged."""

_ENDED = "ended"
"""A file with a byte for each worker that has ended, locked while files are read or merged. In
place of a process id: the files with the counts of those workers."""

_USED = struct.Struct("I4x")
_KEY_BYTES = struct.Struct("I")
_VALUE = struct.Struct("dd")
"""The library's files: the number of bytes in use; then for each value the size of its key, the key
with spaces up to a multiple of 8 bytes, the value, and a time that is 0 here."""

_LOST = "/metrics of each worker shows only its own numbers"


@contextlib.contextmanager
def shared_folder(workers: int) -> Iterator[None]:
    """Inside, processes that are started share a folder, named in this process's environment.

    It is in the folder for temporary files or, where that is full or read-only, in shared memory.
    If neither works one warning says so. Folders that killed supervisors of this user left are
    removed.
    """
    os.environ.pop(VARIABLE, None)
    with contextlib.ExitStack() as stack:
        reasons = []
        for place in _places():
            _remove_stale(place)
            try:
                folder = stack.enter_context(_folder(place, workers))
            except OSError as exc:
                reasons.append(f"{place} ({exc.strerror})")
            else:
                os.environ[VARIABLE] = str(folder)
                break
        else:
            _log.warning(
                "no folder for the metrics of several workers: %s; %s; set TMPDIR to one that is "
                "writable",
                ", ".join(reasons),
                _LOST,
            )
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)


def prepare() -> None:
    """Make this process's files: in a worker, before prometheus_client is imported.

    All their bytes are allocated: on a full disk, writing to a mapped page that has none ends the
    process (SIGBUS). If that fails, this worker keeps its metrics to itself.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    try:
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        for path, size in _files(Path(folder)):
            _allocate(path, size)
    except OSError as exc:
        _log.warning("metrics: cannot write to %s (%s); %s", folder, exc.strerror, _LOST)
        for path, _ in _files(Path(folder)):
            with contextlib.suppress(OSError):
                path.unlink()
        del os.environ[VARIABLE]


def shared() -> Path | None:
    """The folder, which may be full: in a worker, before `prepare`."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else None


def are_there() -> bool:
    """Whether the files of this process are still in their folder."""
    folder = os.environ.get(VARIABLE)
    return folder is not None and all(path.exists() for path, _ in _files(Path(folder)))


def remove_live(pid: int) -> None:
    """Remove what counts only while worker `pid` lives: its gauges, and how far it has followed.

    To be called once, when it has ended; its counts are for `merge`.
    """
    folder = os.environ.get(VARIABLE)
    if folder is not None:
        with contextlib.suppress(OSError), Path(folder, _ENDED).open("ab") as ended:
            ended.write(b"\n")
        for path, _ in _files(Path(folder), pid):
            if "_live" in path.name:
                with contextlib.suppress(OSError):
                    path.unlink()
        with contextlib.suppress(OSError):
            (Path(folder) / f"repository-{pid}").unlink()


def merge(pid: int) -> bool:
    """Add the counts of worker `pid`, which has ended, to those of the workers that ended before.

    Returns: False if a scrape reads the files now; nothing has changed then.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return True
    try:
        with _locked(Path(folder, _ENDED), os.O_CREAT):
            for kind, merged in _KEPT.items():
                _merge(
                    Path(folder, f"{kind}_{pid}.db"), Path(folder, f"{kind}_{_ENDED}.db"), merged
                )
    except BlockingIOError:
        return False
    except FileNotFoundError:  # the worker could not make its files, or somebody removed them
        pass
    except (OSError, struct.error) as exc:
        _log.warning("metrics of worker %d stay in files of their own: %s", pid, exc)
    return True


@contextlib.contextmanager
def unchanged() -> Iterator[int]:
    """Inside, no counts are merged; yields how many workers have ended.

    Raises:
        OSError: the folder is gone.
    """
    with _locked(Path(os.environ[VARIABLE], _ENDED), os.O_CREAT, fcntl.LOCK_SH) as ended:
        yield os.fstat(ended).st_size


def _merge(path: Path, into: Path, merged: Callable[[float, float], float]) -> None:
    """Merge the values in `path` into those of the other file, and remove it."""
    values = _values(into) if into.exists() else {}
    for key, value in _values(path).items():
        values[key] = merged(values[key], value) if key in values else value
    content = b"".join(key + _VALUE.pack(value, 0.0) for key, value in values.items())
    whole = into.with_suffix(".new")
    whole.write_bytes(_USED.pack(_USED.size + len(content)) + content)
    whole.replace(into)
    path.unlink()


def _values(path: Path) -> dict[bytes, float]:
    """The values in one of the library's files, by key with its size and its spaces."""
    with path.open("rb") as file:
        (used,) = _USED.unpack(file.read(_USED.size))
        content = file.read(max(0, used - _USED.size))
    found: dict[bytes, float] = {}
    at = 0
    while at < len(content):
        (size,) = _KEY_BYTES.unpack_from(content, at)
        end = at + (_KEY_BYTES.size + size) // 8 * 8 + 8
        (found[content[at:end]], _) = _VALUE.unpack_from(content, end)
        at = end + _VALUE.size
    return found


def _files(folder: Path, pid: int | None = None) -> Iterator[tuple[Path, int]]:
    for kind, size in _FILE_BYTES.items():
        yield folder / f"{kind}_{os.getpid() if pid is None else pid}.db", size


def _allocate(path: Path, size: int) -> None:
    with path.open("ab") as file:
        if file.tell() == 0:  # not one of a worker that had the same process id
            file.write(bytes(size))


def _places() -> list[str]:
    places = []
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files is writable
        places.append(tempfile.gettempdir())
    return list(dict.fromkeys([*places, _SHARED_MEMORY]))


@contextlib.contextmanager
def _folder(place: str, workers: int) -> Iterator[Path]:
    """A new folder in `place` with room for the files of `workers`, locked by this process.

    Raises:
        OSError: it cannot be made, or there is not enough room.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(_locked(folder))
        room = folder / "room"
        _allocate(room, workers * sum(_FILE_BYTES.values()))
        room.unlink()
        yield folder


@contextlib.contextmanager
def _locked(
    path: Path, flag: int = os.O_DIRECTORY, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB
) -> Iterator[int]:
    """The descriptor of a locked folder or file.

    Raises:
        BlockingIOError: another process has the lock.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flag, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_stale(place: str) -> None:
    for folder in Path(place).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # locked: its supervisor lives
            if folder.lstat().st_uid == os.getuid():
                with _locked(folder):
                    shutil.rmtree(folder)
