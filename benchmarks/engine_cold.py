"""How long the service needs from its command to /readyz, with caches and without."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

from benchmarks.servers import free_port, running

CACHES = ("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")
"""The variables that say where plans, compiled kernels and translated kernels are kept."""


def cold_start_s(command: Sequence[str] = ("service", "--device=cuda")) -> dict[str, float]:
    """Seconds until `command`, a Python module with its arguments, is ready.

    Returns: `no_cache`, with empty folders for all of `CACHES`, and `warm_cache`, the next start
    with what that one left there. Readiness is asked for about ten times a second.

    Raises:
        ServerFailed: it did not become ready within a minute.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = dict.fromkeys(CACHES, folder)
        for name in ("no_cache", "warm_cache"):
            port = free_port()
            begun_s = time.monotonic()
            asked = [*command, f"--port={port}", "--grpc-port=0"]
            with running("lenet-serve", asked, port, {}, environment):
                found[name] = time.monotonic() - begun_s
    return found
