"""What a request may cost before it is understood: bytes of body, time to answer, patience.

Refuses to look inside the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request

from service.errors import BodyTimeout, Cancelled, InvalidInput, TooLarge, Unavailable

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
MAX_TIMEOUT_MS = 3_600_000

_WATCH_AFTER_S = 0.02
"""A request is answered sooner than this unless the service is busy; watching costs a task."""


async def read_body(request: Request, max_bytes: int, within_s: float) -> bytes:
    """The whole body, at most `max_bytes` long.

    Raises:
        TooLarge: by its Content-Length, before any of it is read, or by what arrived.
        BodyTimeout: it was not there after `within_s`.
        Cancelled: the client went away in the middle of it.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{declared} bytes", max_bytes)
    chunks: list[bytes] = []
    size = 0
    more = True
    try:
        async with asyncio.timeout(within_s):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client went away while it sent the body")
                chunks.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(chunks[-1])
                if size > max_bytes:
                    raise _too_large("more", max_bytes)
    except TimeoutError as exc:
        raise BodyTimeout(
            f"{size} bytes of the body arrived in {within_s:g} s, expected all of it", field="body"
        ) from exc
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(found: str, max_bytes: int) -> TooLarge:
    return TooLarge(
        f"the body has {found}, expected at most {max_bytes} bytes; send fewer images at a time",
        field="body",
    )


def timeout_s(request: Request) -> float | None:
    """What `X-Request-Timeout-Ms` asks for, in seconds; None without it.

    Raises:
        InvalidInput: not a whole number of milliseconds from 1 to an hour.
    """
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 7) or not (
        1 <= int(text) <= MAX_TIMEOUT_MS
    ):
        raise InvalidInput(
            f"header {TIMEOUT_HEADER} is {text[:40]!r}, "
            f"expected whole milliseconds from 1 to {MAX_TIMEOUT_MS}",
            field=TIMEOUT_HEADER,
        )
    return int(text) / 1e3


@contextmanager
def unavailable_on_stop() -> Iterator[None]:
    """A request that outlasts the stop is cancelled by the server; let its caller know.

    Raises:
        Unavailable: it was.
    """
    try:
        yield
    except asyncio.CancelledError:
        message = "the service stopped before the answer; send this to another instance"
        raise Unavailable(message, retry_after_s=1) from None


@contextmanager
def cancelled_on_disconnect(request: Request) -> Iterator[None]:
    """Cancel the block when the client goes away; its body must have been read.

    Raises:
        Cancelled: it did.
    """
    task = asyncio.current_task()
    assert task is not None, "bug: outside a task"
    watcher: asyncio.Task[None] | None = None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.create_task(watch())

    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)
    try:
        yield
    except asyncio.CancelledError:
        if not gone or task.uncancel():
            raise  # the server stops
        raise Cancelled("the client went away before the answer") from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
