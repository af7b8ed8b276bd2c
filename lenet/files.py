"""Atomic writes: a reader sees the old file or the complete new one, also after a crash."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def temporary_prefix(path: Path) -> str:
    """Prefix of temporary files that are renamed to `path` once they are complete."""
    return f".{path.name}."


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an error that names no file, as that of a full disk."""
    try:
        yield
    except OSError as exc:
        if exc.filename is None:
            exc.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`; a missing folder is created.

    No other file is left, unless the process is killed: then one whose name begins with
    `temporary_prefix`.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=temporary_prefix(path))
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
