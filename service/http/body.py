"""Reading a request within its limits: bytes of its body, time, and the client's presence."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeAlias

from fastapi import Request

from service.errors import (
    BodyTimeout,
    Cancelled,
    Overloaded,
    TooLarge,
    Unavailable,
    UnsupportedMediaType,
    invalid,
    shown,
)
from service.http.openapi import MAX_TIMEOUT_MS, TIMEOUT_HEADER

Headers: TypeAlias = Mapping[str, str]
"""Names in lower case."""

_WATCH_AFTER_S = 0.02
"""When a request begins to watch for its client's disconnect, which costs a task. Unless the
service is busy, it is answered before."""


class BodyReader:
    """Reads bodies of at most `max_bytes` each; at most `max_total_bytes` are held at a time.

    A body is held from its first byte until `release`, which bounds the memory of what is read
    or decoded but not yet admitted to the queue.
    """

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._held_bytes = 0

    async def read(self, request: Request, headers: Headers, timeout_s: float) -> bytes:
        """The whole body. The caller passes its length to `release` after decoding it.

        Raises:
            TooLarge: by its Content-Length, before any of it is read, or by what arrived.
            UnsupportedMediaType: it is compressed.
            Overloaded: the bodies in flight leave no room for it.
            BodyTimeout: it did not arrive within `timeout_s`.
            Cancelled: the client disconnected before its end.
        """
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise UnsupportedMediaType(
                f"content-encoding: got {shown(encoding)}, expected none; "
                "send the body uncompressed",
                field="content-encoding",
            )
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large(f"{declared} bytes")
        chunks: list[bytes] = []
        size = 0
        more = True
        try:
            async with asyncio.timeout(timeout_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled("the client disconnected while sending the body")
                    chunk = message.get("body", b"")
                    more = message.get("more_body", False)
                    chunks.append(chunk)
                    size += len(chunk)
                    self._held_bytes += len(chunk)
                    if size > self._max_bytes:
                        raise self._too_large("more")
                    if self._held_bytes > self._max_total_bytes:
                        raise Overloaded(
                            "body: too many request bodies in flight "
                            f"(limit {self._max_total_bytes} bytes); try again later",
                            field="body",
                            retry_after_s=1,
                        )
        except TimeoutError as exc:
            self.release(size)
            raise BodyTimeout(
                f"body: got {size} bytes in {timeout_s:g} s, expected the whole body", field="body"
            ) from exc
        except BaseException:
            self.release(size)
            raise
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self, size: int) -> None:
        """Stop holding a body of `size` bytes."""
        self._held_bytes -= size

    def _too_large(self, found: str) -> TooLarge:
        return TooLarge(
            f"the body has {found}, expected at most {self._max_bytes} bytes; "
            "send fewer images at a time",
            field="body",
        )


def read_headers(request: Request) -> Headers:
    """All headers; of those given twice, the first.

    Faster than Starlette's, which searches the whole list at each access.
    """
    given: list[tuple[bytes, bytes]] = request.scope["headers"]
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(given)}


def requested_timeout_s(headers: Headers) -> float | None:
    """The `X-Request-Timeout-Ms` of a request, in seconds; None if it has none.

    Raises:
        InvalidInput: not a whole number of milliseconds from 1 to an hour.
    """
    text = headers.get(TIMEOUT_HEADER.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 7) or not (
        1 <= int(text) <= MAX_TIMEOUT_MS
    ):
        raise invalid(TIMEOUT_HEADER, shown(text), f"whole milliseconds from 1 to {MAX_TIMEOUT_MS}")
    return int(text) / 1e3


class Cancellation:
    """A context manager that turns the cancellation of a request into the error to answer.

    The server cancels requests when its stop takes too long. After `on_disconnect`, the client's
    disconnect cancels the request too.

    Raises:
        Unavailable: on leaving, the server cancelled the request.
        Cancelled: on leaving, the client disconnected.
    """

    __slots__ = ("_disconnected", "_request", "_task", "_timer", "_watcher")

    _request: Request

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "bug: outside a task"
        self._task = task
        self._disconnected = False
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    def on_disconnect(self, request: Request) -> None:
        """From now on a disconnect cancels `request`, whose body must have been read."""
        self._request = request
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._start_watcher)

    def __enter__(self) -> Cancellation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if kind is asyncio.CancelledError:
            # Otherwise the server has cancelled, too: it is stopping.
            if self._disconnected and not self._task.uncancel():
                raise Cancelled("the client disconnected before the answer") from None
            message = "the service stopped before the answer; send this to another instance"
            raise Unavailable(message, retry_after_s=1) from None

    def _start_watcher(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._task.cancel()
