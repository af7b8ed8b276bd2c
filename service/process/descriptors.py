"""File descriptors of the process: the standard ones, and how many it may open."""

from __future__ import annotations

import os
import resource
import sys

LEAST = 64
"""A start with one worker, one connection and every kind of request opens at most 55 (Linux, CPU,
IPv4 and IPv6; 2026-11-22)."""

LEAST_PER_WORKER = 4
"""Descriptors of a supervisor for each worker: its pipes, while another is being started."""

_RESERVED = 48
"""At least so many are no client's: 38 of an idle process (Linux, CPU), files that are read,
decoding processes, and connections that are accepted only to be closed."""

_WANTED = 65_536
_MODES = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def open_standard() -> None:
    """Open those of descriptors 0, 1 and 2 that are closed on /dev/null.

    Otherwise a socket takes the number, and what a library prints goes to a client; libuv aborts.
    """
    for number, name, mode in _MODES:
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def raise_limit() -> int:
    """Raise the limit of open descriptors as far as this process may, to 65,536 at most.

    Returns: the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _WANTED
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS allows less than the hard limit says
            return soft
        return wanted
    return soft


def connections() -> int:
    """The most connections, so that clients never take the last descriptor.

    Without any, libuv tries to accept again and again, with a whole core, once another library has
    taken the spare descriptor that it frees for a moment (uvloop 0.23).
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = _WANTED
    return max(4, limit - max(_RESERVED, limit // 8))


def too_few(limit: int, workers: int = 0) -> str:
    """The message if `limit` descriptors are too few, else "".

    workers: of a supervisor.
    """
    least = LEAST + LEAST_PER_WORKER * workers
    if limit >= least:
        return ""
    return (
        f"file descriptors: got a limit of {limit}, expected at least {least}; raise it with "
        "`ulimit -n`, LimitNOFILE= of systemd or --ulimit of Docker"
    )
