"""Measured choices, kept on disk between runs. Needs no GPU library.

They are the fastest cuDNN engine of an operation, and who computes a bucket faster.

Each choice is a file: a line of JSON with its key and name, then the engine as cuDNN serialized it.
The files are not trusted: what is damaged is measured and built again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path

from lenet.files import write_atomically

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The `name` of an engine and its serialized form, or another name without a form."""

    name: str
    engine: bytes


def default_cache() -> Path:
    """The default folder: below XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "lenet-serve" / "engines"


class EngineCache:
    """Choices by key. Measure only while it is `locked`, so that threads and processes agree.

    A thread that has locked it may lock it again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Where the folder is read-only, choices hold for this run, for threads that share this.
        self._unwritten: dict[str, Choice] = {}
        self._lock = threading.RLock()
        self._depth = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other threads and processes."""
        with self._lock, ExitStack() as stack:
            # The folder is read-only: every process measures for itself.
            with suppress(OSError):
                if not self._depth:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    flock(stack.enter_context((self._folder / ".lock").open("w")), LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def get(self, key: str) -> Choice | None:
        """The choice that was kept under `key`."""
        path = self._path(key)
        try:
            header, engine = path.read_bytes().split(b"\n", 1)
            entry = json.loads(header)
            choice = Choice(entry["name"], engine)
            if entry != _entry(key, choice):
                raise ValueError("its content was changed")
        except (FileNotFoundError, NotADirectoryError):
            return self._unwritten.get(key)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
            _log.warning("%s: a cached cuDNN engine is ignored: %r", path, exc)
            return self._unwritten.get(key)
        return choice

    def put(self, key: str, choice: Choice) -> None:
        """Keep a choice. If the folder is read-only, the next start measures again."""
        path = self._path(key)
        header = json.dumps(_entry(key, choice)).encode()
        try:
            write_atomically(path, header + b"\n" + choice.engine)
        except OSError as exc:
            _log.warning("%s: a cuDNN engine cannot be cached: %s", path, exc)
            self._unwritten[key] = choice

    def _path(self, key: str) -> Path:
        return self._folder / sha256(key.encode()).hexdigest()


def _entry(key: str, choice: Choice) -> dict[str, str]:
    digest = sha256(f"{key}\n{choice.name}\n".encode() + choice.engine).hexdigest()
    return {"key": key, "name": choice.name, "sha256": digest}
