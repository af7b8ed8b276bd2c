"""The fastest cuDNN engines and strategies, kept on disk between runs. Needs no GPU library.

The choices are one JSON object, key to name; beside it is a folder with the engines as cuDNN
serialized them, one file each. The files are not trusted: what cannot be read is measured or built
again, and a name that cuDNN no longer offers is never found.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path

from lenet.files import write_atomically

_log = logging.getLogger(__name__)


def _digest(engine: bytes) -> bytes:
    return sha256(engine).hexdigest().encode()


def default_cache() -> Path:
    """The default path: below XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "lenet-serve" / "plans.json"


class EngineCache:
    """Choices by key. Measure only while it is `locked`, so that threads and processes agree."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # For threads that share this object where the folder, and so the file lock, is read-only.
        self._lock = threading.Lock()
        self._names = self._read()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other threads and processes; load the choices that they made before."""
        with self._lock, ExitStack() as stack:
            with suppress(OSError):  # the folder is read-only: every process measures for itself
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self._path.with_suffix(".lock").open("w"))
                flock(file, LOCK_EX)
                self._names = {**self._names, **self._read()}
            yield

    def get(self, key: str) -> str | None:
        """The name chosen under `key`."""
        return self._names.get(key)

    def put(self, key: str, name: str) -> None:
        """Keep a choice. If the folder is read-only, the next start measures again."""
        self._names = {**self._read(), **self._names, key: name}
        try:
            content = json.dumps(self._names, indent=1, sort_keys=True)
            write_atomically(self._path, content.encode())
        except OSError as exc:
            _log.warning("%s: the cache of cuDNN engines cannot be written: %s", self._path, exc)

    def engine(self, key: str, name: str) -> bytes | None:
        """The serialized engine `name` that was kept under `key`."""
        path = self._engine_path(key, name)
        try:
            digest, engine = path.read_bytes().split(b"\n", 1)
            if digest != _digest(engine):
                raise ValueError("its content was changed")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as exc:
            _log.warning("%s: a cached cuDNN engine is ignored: %s", path, exc)
            return None
        return engine

    def put_engine(self, key: str, name: str, engine: bytes) -> None:
        """Keep a serialized engine. If that fails, the next start builds it again."""
        path = self._engine_path(key, name)
        try:
            write_atomically(path, _digest(engine) + b"\n" + engine)
        except OSError as exc:
            _log.warning("%s: a cuDNN engine cannot be cached: %s", path, exc)

    def _engine_path(self, key: str, name: str) -> Path:
        return self._path.with_suffix("") / sha256(f"{key} | {name}".encode()).hexdigest()

    def _read(self) -> dict[str, str]:
        try:
            names = json.loads(self._path.read_text())
            if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
                raise ValueError("it is not an object of strings")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as exc:
            _log.warning("%s: the cache of cuDNN engines is ignored: %s", self._path, exc)
            return {}
        return names
