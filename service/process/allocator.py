"""How glibc's allocator serves this process. Other C libraries are left as they are."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h


def set_up() -> None:
    """Call on the main thread, before other threads start.

    One heap for all threads: each thread that opens models would have one of its own, and what it
    frees would be of use to no other. 6 to 9 MiB less with five models, and as fast.

    Blocks of 4 MiB and more are mapped, and up to 8 MiB at the end of the heap are kept. What is
    mapped grows without a copy and is returned to the system when freed. By default glibc raises
    that size up to 32 MiB with what is freed. Then a body that grows to 32 MB is copied again and
    again, in steps of up to 12 ms; now a step takes 2 ms. With 1 MiB it would be 0.6 ms, but the
    JSON of 64 images would take 0.3 ms more: it is 1.4 MB when parsed. The end of the heap would be
    returned from 128 KiB on, and taken again page by page: an answer of 3 MB would take twice the
    time.
    """
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 8 << 20)


def return_memory() -> None:
    """Return free memory to the system, from within the heap, too."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
