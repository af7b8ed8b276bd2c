"""What was measured to be the fastest, kept on disk between runs; no GPU library is needed for it.

One JSON object, key to plan name, and beside it a folder of plans as cuDNN made them, a file each.
It refuses to trust the files: what cannot be read is measured or built anew, and a name that cuDNN
does not offer any more is never found.
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


def _digest(plan: bytes) -> bytes:
    return sha256(plan).hexdigest().encode()


def default_cache() -> Path:
    """Where plans are kept unless told otherwise: below XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "lenet-serve" / "plans.json"


class PlanCache:
    """Choices by name, in one JSON file; whatever cannot be read there is measured anew.

    Whoever measures does so while it is `locked`, so that of several threads and processes one
    does, and the others find what it chose.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._names = self._read()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other thread or process is between these lines; what they chose before is known."""
        with self._lock, ExitStack() as stack:
            with suppress(OSError):  # a folder that cannot be written: then each for itself
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self._path.with_suffix(".lock").open("w"))
                flock(file, LOCK_EX)
                self._names = {**self._names, **self._read()}
            yield

    def get(self, key: str) -> str | None:
        """The name of the plan chosen under `key`."""
        return self._names.get(key)

    def put(self, key: str, name: str) -> None:
        """Keep a choice, beside those that other processes have kept meanwhile.

        A folder that cannot be written costs the next start its time, no more.
        """
        self._names = {**self._read(), **self._names, key: name}
        try:
            content = json.dumps(self._names, indent=1, sort_keys=True)
            write_atomically(self._path, content.encode())
        except OSError as exc:
            _log.warning("%s: the cache of cuDNN plans cannot be written: %s", self._path, exc)

    def plan(self, key: str, name: str) -> bytes | None:
        """The plan `name` that was kept under `key`, as it was given."""
        path = self._plan_path(key, name)
        try:
            digest, plan = path.read_bytes().split(b"\n", 1)
            if digest != _digest(plan):
                raise ValueError("its content was changed")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as exc:
            _log.warning("%s: a kept cuDNN plan is dropped: %s", path, exc)
            return None
        return plan

    def put_plan(self, key: str, name: str, plan: bytes) -> None:
        """Keep a plan; where that cannot be done the next start builds it again."""
        path = self._plan_path(key, name)
        try:
            write_atomically(path, _digest(plan) + b"\n" + plan)
        except OSError as exc:
            _log.warning("%s: a cuDNN plan cannot be kept: %s", path, exc)

    def _plan_path(self, key: str, name: str) -> Path:
        return self._path.with_suffix("") / sha256(f"{key} | {name}".encode()).hexdigest()

    def _read(self) -> dict[str, str]:
        try:
            names = json.loads(self._path.read_text())
            if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
                raise ValueError("it is not an object of strings")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as exc:
            _log.warning("%s: the cache of cuDNN plans is dropped: %s", self._path, exc)
            return {}
        return names
