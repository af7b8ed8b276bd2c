"""A process that decodes for the service, one body or message after another: `Decoders` starts it.

What is decoded comes from clients, and so does the memory that it takes, which is limited here. The
process has lower priority than serving, is the first to be killed where the machine has no memory
left, and ends when the service does.

Messages on its socket:

    head     lengths of the header and of the content, 4 + 8 bytes in network order
    header   to the process a pickled `Form` and whether the work is known to be large, from it JSON
    content  a body or message; in a reply the pixels of its images

The process sends a head of zeros when it has started; sent to it, a head of zeros asks it to end
its work early. Each other message has one reply.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from service.process import allocator

HEAD = struct.Struct("!IQ")
READY = CANCEL = HEAD.pack(0, 0)

NICE = 5
"""Added to the service's own: where both want a core, serving gets three quarters of it."""

SMALL_PIXELS = 1 << 20
"""Maximum pixels of small work, times the passes over them: 5 to 15 ms (one Xeon core)."""

_PICTURE_PIXELS = 1 << 14
"""Counted for each picture besides its own: preparing a digit takes 0.3 ms."""

_RETURNED_BYTES = 1 << 20
"""After content of that size freed memory is returned to the system."""

_PR_SET_PDEATHSIG = 1


class _Ended(Exception):
    """The work is to end early."""


class _Large(Exception):
    """The work is larger than its bytes said."""


def main() -> None:
    """Decode the bodies that arrive on the descriptor `argv[1]` until the service closes it.

    `argv[2]` is the service's process id, `argv[3]` the most bytes of memory.
    """
    descriptor, parent, memory_bytes = map(int, sys.argv[1:4])
    _set_up_process(parent, memory_bytes)
    with socket.socket(fileno=descriptor) as channel, suppress(BrokenPipeError):
        _serve(channel, memory_bytes)


def _set_up_process(parent: int, memory_bytes: int) -> None:
    """Leave signals to the service, limit memory, and end with the service."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal and service managers send them to every process of the service.
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICE)
    import resource

    for kind, limit in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        with suppress(ValueError, OSError):
            lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (lowest, hard))
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
            score.write("900")
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            sys.exit()


def _serve(channel: socket.socket, memory_bytes: int) -> None:
    # Imported after memory is limited, and before the first message is read: it takes 0.1 s.
    import orjson

    from service.errors import ServiceError, TooLarge
    from service.forms import prediction  # noqa: F401 - and with it what most forms need

    loads = lru_cache(maxsize=64)(pickle.loads)  # the service wrote it; few forms are used
    channel.sendall(READY)
    poll = select.poll()
    poll.register(channel, select.POLLIN)

    while head := _received(channel, HEAD.size):
        header_bytes, content_bytes = HEAD.unpack(head)
        if not header_bytes:
            continue  # the work had ended before it was asked to
        form, is_large = loads(_received(channel, header_bytes))
        content = _received(channel, content_bytes)
        left = float("inf") if is_large else SMALL_PIXELS

        def between(pixels: int) -> None:
            nonlocal left
            if poll.poll(0):  # asked to end, or the service is gone
                raise _Ended
            left -= pixels and pixels + _PICTURE_PIXELS
            if left < 0:
                raise _Large

        answer: dict[str, Any]
        images = memoryview(b"")
        try:
            decoded = form.decode(content, between)
            answer, images = {"asked": asdict(decoded.asked)}, memoryview(decoded.images).cast("B")
            del decoded
        except _Large:
            answer = {"large": True}
        except _Ended:
            answer = _error("cancelled", "ended early")
        except ServiceError as exc:
            answer = _error(exc.code, exc.message, exc.field)
            answer["asked"] = None if exc.asked is None else asdict(exc.asked)
        except MemoryError:
            most = f"{memory_bytes >> 20} MiB of memory"
            message = f"body: decoding it takes more than {most}; send fewer images at a time"
            answer = _error(TooLarge.code, message, "body")
        except Exception as exc:  # noqa: BLE001 - the edge of the process: the service logs it
            import traceback

            answer = _error("internal", "".join(traceback.format_exception(exc))[-4000:])
        del form, content
        text = orjson.dumps(answer)
        channel.sendall(HEAD.pack(len(text), len(images)) + text)
        channel.sendall(images)
        del images
        if content_bytes > _RETURNED_BYTES:
            allocator.return_memory()


def _received(channel: socket.socket, size: int) -> bytes:
    """So many bytes. Exits where the connection ends."""
    found = channel.recv(size, socket.MSG_WAITALL) if size else b""
    if len(found) < size:
        sys.exit()
    return found


def _error(code: str, message: str, field: str = "") -> dict[str, Any]:
    # A message may quote a lone surrogate of the client's, which JSON cannot contain.
    text = message.encode("utf-8", "replace").decode()
    return {"error": {"code": code, "message": text, "field": field}}


if __name__ == "__main__":
    main()
