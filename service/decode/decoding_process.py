"""A process that decodes for the service, one body or message after another: `Decoders` starts it.

What is decoded comes from clients, and so does the memory that it takes, which is limited here. The
process has lower priority than serving, is the first to be killed where the machine has no memory
left, and ends when the service does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from service.process import allocator

NICE = 5
"""Added to the service's own: where both want a core, serving gets three quarters of it."""

_RETURNED_BYTES = 1 << 20
"""After content of that size freed memory is returned to the system."""

_PR_SET_PDEATHSIG = 1


class _Ended(Exception):
    """The work is to end early."""


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
    # Imported after memory is limited, and before the first frame is read: it takes 0.1 s.
    from service.decode.frames import READY, frame, receive
    from service.errors import ServiceError, TooLarge

    channel.sendall(READY)
    poll = select.poll()
    poll.register(channel, select.POLLIN)

    def between(_: int) -> None:
        if poll.poll(0):  # asked to end, or the service is gone
            raise _Ended

    while (received := receive(channel)) is not None:
        header, content = received
        if header is None:
            continue  # the work had ended before it was asked to
        images: bytes | memoryview = b""
        try:
            answer, images = _decode(header, content, between)
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
        size = len(content)
        del received, content
        channel.sendall(frame(answer, len(images)))
        channel.sendall(images)
        del images
        if size > _RETURNED_BYTES:
            allocator.return_memory()


def _decode(
    header: dict[str, Any], content: bytes, between: Callable[[int], None]
) -> tuple[dict[str, Any], memoryview]:
    """The header of the reply, and the pixels of the images.

    Raises: ServiceError, MemoryError, _Ended.
    """
    from service.decode.frames import form_of

    decoded = form_of(header).decode(content, between)
    pixels = memoryview(decoded.images)  # type: ignore[arg-type]  # known from NumPy 2.1 on
    return {"asked": asdict(decoded.asked)}, pixels.cast("B")


def _error(code: str, message: str, field: str = "") -> dict[str, Any]:
    # A message may quote a lone surrogate of the client's, which JSON cannot contain.
    text = message.encode("utf-8", "replace").decode()
    return {"error": {"code": code, "message": text, "field": field}}


if __name__ == "__main__":
    main()
