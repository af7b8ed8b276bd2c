"""The folder that the workers of a supervisor share: their metrics, and what requests loaded."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

_PREFIX = "lenet-serve-metrics-"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a writable folder in most containers
FILE_BYTES = 1 << 20
"""Room for the metrics of a worker while they are replaced. Five models take 11 KiB, 200 versions
361."""


@contextlib.contextmanager
def shared_folder(workers: int) -> Iterator[Path | None]:
    """A new folder with room for the files of `workers`, while the block runs; None if none can be.

    It is in the folder for temporary files or, where that is full or read-only, in shared memory.
    If neither works one warning says so. Folders that killed supervisors of this user left are
    removed.
    """
    with contextlib.ExitStack() as stack:
        reasons = []
        for place in _places():
            _remove_stale(place)
            try:
                folder = stack.enter_context(_folder(place, workers))
            except OSError as exc:
                reasons.append(f"{place} ({exc.strerror})")
            else:
                break
        else:
            folder = None
            _log.warning(
                "no folder for the metrics of several workers: %s; %s; set TMPDIR to one that is "
                "writable",
                *(", ".join(reasons), "/metrics of each worker shows only its own numbers"),
            )
        yield folder


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
        room.write_bytes(bytes(workers * FILE_BYTES))
        room.unlink()
        yield folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder.

    Raises:
        BlockingIOError: another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(place: str) -> None:
    for folder in Path(place).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # locked: its supervisor lives
            if folder.lstat().st_uid == os.getuid():
                with _locked(folder):
                    shutil.rmtree(folder)
