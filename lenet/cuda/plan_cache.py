"""What was measured to be the fastest, kept on disk between runs; no GPU library is needed for it.

One JSON object, key to plan name. It refuses to trust the file: what cannot be read is measured
anew, and a name that cuDNN does not offer any more is never found.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, flock
from pathlib import Path

from lenet.files import write_atomically

_log = logging.getLogger(__name__)


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
