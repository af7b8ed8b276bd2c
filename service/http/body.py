"""What a request may cost before it is understood: bytes of body, time to answer, patience.

Refuses to look inside the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeAlias

from fastapi import Request

from service.errors import (
    BodyTimeout,
    Cancelled,
    InvalidInput,
    Overloaded,
    TooLarge,
    Unavailable,
    UnsupportedMediaType,
)
from service.http.openapi import MAX_TIMEOUT_MS

TIMEOUT_HEADER = "X-Request-Timeout-Ms"

Headers: TypeAlias = Mapping[str, str]
"""Names in lower case."""

_WATCH_AFTER_S = 0.02
"""A request is answered sooner than this unless the service is busy; watching costs a task."""


class Bodies:
    """Reads bodies of at most `max_bytes` each, at most `max_total_bytes` of them held at once.

    A body is held from its first byte until `release`: the memory of what is read but not yet
    admitted as rows has a bound too.
    """

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._held_bytes = 0

    async def read(self, request: Request, headers: Headers, within_s: float) -> bytes:
        """The whole body; the caller gives its length to `release` once it is decoded.

        Raises:
            TooLarge: by its Content-Length, before any of it is read, or by what arrived.
            UnsupportedMediaType: it is compressed.
            Overloaded: the bodies in hand leave no room for it.
            BodyTimeout: it was not there after `within_s`.
            Cancelled: the client went away in the middle of it.
        """
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise UnsupportedMediaType(
                f"content-encoding: got {encoding[:40]!r}, expected the body as it is",
                field="content-encoding",
            )
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise _too_large(f"{declared} bytes", self._max_bytes)
        chunks: list[bytes] = []
        size = 0
        more = True
        try:
            async with asyncio.timeout(within_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled("the client went away while it sent the body")
                    chunk = message.get("body", b"")
                    more = message.get("more_body", False)
                    chunks.append(chunk)
                    size += len(chunk)
                    self._held_bytes += len(chunk)
                    if size > self._max_bytes:
                        raise _too_large("more", self._max_bytes)
                    if self._held_bytes > self._max_total_bytes:
                        raise Overloaded(
                            f"the bodies that are read or decoded passed {self._max_total_bytes} "
                            "bytes with this one; try again later",
                            field="body",
                            retry_after_s=1,
                        )
        except TimeoutError as exc:
            self.release(size)
            raise BodyTimeout(
                f"{size} bytes of the body arrived in {within_s:g} s, expected all of it",
                field="body",
            ) from exc
        except BaseException:
            self.release(size)
            raise
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self, size: int) -> None:
        """A body of `size` bytes is decoded or given up."""
        self._held_bytes -= size


def _too_large(found: str, max_bytes: int) -> TooLarge:
    return TooLarge(
        f"the body has {found}, expected at most {max_bytes} bytes; send fewer images at a time",
        field="body",
    )


def headers_of(request: Request) -> Headers:
    """All headers, of those that are given twice the first.

    Starlette looks through all of them for each that it is asked for.
    """
    given: list[tuple[bytes, bytes]] = request.scope["headers"]
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(given)}


def asked_timeout_s(headers: Headers) -> float | None:
    """What `X-Request-Timeout-Ms` asks for, in seconds; None without it.

    Raises:
        InvalidInput: not a whole number of milliseconds from 1 to an hour.
    """
    text = headers.get(TIMEOUT_HEADER.lower())
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


class UnavailableOnStop:
    """A request that outlasts the stop is cancelled by the server; let its caller know.

    Raises:
        Unavailable: at the end of the block, it was.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is asyncio.CancelledError:
            message = "the service stopped before the answer; send this to another instance"
            raise Unavailable(message, retry_after_s=1) from None


class CancelledOnDisconnect:
    """Cancels the block of a request when its client goes away; its body must have been read.

    Raises:
        Cancelled: at the end of the block, it did.
    """

    __slots__ = ("_gone", "_request", "_task", "_timer", "_watcher")

    def __init__(self, request: Request) -> None:
        task = asyncio.current_task()
        assert task is not None, "bug: outside a task"
        self._request, self._task, self._gone = request, task, False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._begin)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        # Otherwise it is the server that cancels: it stops.
        if kind is asyncio.CancelledError and self._gone and not self._task.uncancel():
            raise Cancelled("the client went away before the answer") from None

    def _begin(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
