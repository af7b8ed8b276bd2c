"""One request that the ASGI application answers, over any version of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

_log = logging.getLogger(__name__)

App: TypeAlias = Callable[..., Any]


class Output(Protocol):
    """Where the answer goes to."""

    def scope(self) -> dict[str, Any]:
        """What the application gets to know of the request."""
        ...

    def name(self) -> str:
        """The request, for logs."""
        ...

    def ask_for_body(self) -> None:
        """The application wants the body."""
        ...

    def took(self, size: int) -> None:
        """It has got so many bytes of it."""
        ...

    def begin(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None) -> None:
        """The beginning of the answer. `length`: of its body, None if that is not known."""
        ...

    def write(self, body: bytes, more: bool) -> None:
        """A piece of its body; `more` will come."""
        ...

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        ...

    def failed(self, begun: bool) -> None:
        """The application ended without an answer; `begun`: in the middle of it."""
        ...

    def aborted(self) -> None:
        """The task was cancelled."""
        ...


class AsgiRequest:
    """One run of the application."""

    def __init__(self, output: Output, app: App) -> None:
        self._output, self._app = output, app
        self._body: list[bytes] = []
        self._arrived = asyncio.Event()  # a piece of the body, its end, or the client's
        self._gone = self._handed_over = self._whole = False
        self._response: Mapping[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self.buffered_bytes = 0
        """Bytes of the body that the application has not taken."""
        self.begun = self.complete = False

    def data(self, data: bytes) -> None:
        """A piece of the body."""
        self._body.append(data)
        self.buffered_bytes += len(data)
        self._arrived.set()

    def end(self) -> None:
        """The body is complete."""
        self._whole = True
        self._arrived.set()

    def cancel(self) -> None:
        """The client is gone."""
        self._gone = True
        self._arrived.set()

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        tasks: set[asyncio.Task[None]],
        ended: Callable[[], None] | None = None,
    ) -> None:
        """Run the application, in one of `tasks`, and call `ended` then; may be called again."""
        if self._task is None:
            self._task = task = loop.create_task(self._run())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if ended is not None:
                task.add_done_callback(lambda _: ended())

    async def _run(self) -> None:
        output = self._output
        try:
            await self._app(output.scope(), self._receive, self._send)
        except asyncio.CancelledError:
            output.aborted()
            raise
        except Exception:  # noqa: BLE001 - the application's edge: the client gets an answer
            _log.exception("%s failed", output.name())
        if not (self._gone or self.complete):
            self.complete = True
            output.failed(self.begun)
        del self._output  # they refer to each other: its answer would wait for the collector

    async def _receive(self) -> dict[str, Any]:
        if not (self._body or self._whole or self._gone or self.complete):
            self._output.ask_for_body()
        while not self._gone and not self.complete:
            if self._body or (self._whole and not self._handed_over):
                body = b"".join(self._body)
                self._body.clear()
                taken, self.buffered_bytes = self.buffered_bytes, 0
                self._output.took(taken)
                self._handed_over = self._whole
                return {"type": "http.request", "body": body, "more_body": not self._whole}
            self._arrived.clear()
            await self._arrived.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self._gone or self.complete:
            return
        if message["type"] == "http.response.start":
            self._response = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if not self.begun:
            self.begun = True
            response = self._response
            assert response is not None, "bug: a body before its start"
            headers = [(name.lower(), value) for name, value in response["headers"]]
            self._output.begin(response["status"], headers, None if more else len(body))
        if not more:
            self.complete = True
            self._arrived.set()
        self._output.write(body, more)
        await self._output.drained()
