"""A request that the ASGI application answers, over any version of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from wire.errors import INTERNAL, Refusal
from wire.exchange import Exchange
from wire.head import RequestHead
from wire.http2_fields import OF_CONNECTIONS, is_field

_log = logging.getLogger(__name__)


class AsgiExchange(Exchange):
    """One run of the application."""

    head: RequestHead
    is_limited = False  # a probe may be one
    may_give_way = True
    _gone = _whole = _handed_over = _begun = _complete = False
    _response: Mapping[str, Any] | None = None
    _length: int | None = None
    """Length of the answer's body, where the application says it."""
    _sent_bytes = 0

    def open(self) -> None:
        """Have it answered when its time has come."""
        self._body: list[bytes] = []
        self._arrived = asyncio.Event()  # a piece of the body, its end, or the client's
        self.writer.run(self, self._start)

    def _start(self, ended: Callable[[], None]) -> None:
        """Run the application, and call `ended` then."""
        self.may_give_way = False
        tasks = self.writer.service.tasks
        task = self.writer.loop.create_task(self._run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: ended())

    def data(self, data: bytes, end: bool) -> None:
        """Keep it until the application takes it."""
        if data:
            self.since_s = self.writer.loop.time()
            self._body.append(data)
            self.buffered_bytes += len(data)
        self._whole = self._whole or end
        self._arrived.set()

    def cancel(self) -> None:
        """The client is gone."""
        self._gone = True
        self._body.clear()
        self._arrived.set()
        self.sent()

    def fail(self, error: Refusal) -> None:
        """Answer with `error`, or give the answer up in its middle."""
        self.cancel()
        if self._begun:
            self.writer.reset(self)
        else:
            self.refuse(error)

    async def _run(self) -> None:
        try:
            await self.writer.service.app(self._scope(), self._receive, self._send)
        except asyncio.CancelledError:
            if self._gone:  # the stop takes too long, and the client got its answer
                raise
            self._note_failure()
        except Exception:  # noqa: BLE001 - the application's edge: the client gets an answer
            self._note_failure()
        if not (self._gone or self._complete):
            self._complete = True
            if self._begun:
                self.writer.reset(self, fault=True)
            else:
                self.refuse(Refusal(INTERNAL))

    def _note_failure(self) -> None:
        ids = f": {self.head.ids}" if self.head.ids else ""
        _log.exception("%s failed", self.request + ids)

    def _scope(self) -> dict[str, Any]:
        connection, service, head = self.writer.connection, self.writer.service, self.head
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            # The answer to HEAD is that to GET without its body, which is not written.
            "method": "GET" if head.method == b"HEAD" else head.method.decode("ascii"),
            "scheme": service.scheme,
            "path": unquote(head.path.decode("latin-1")),
            "raw_path": head.path,
            "query_string": head.query,
            "root_path": "",
            "headers": list(head.headers),
            "client": connection.client,
            "server": connection.server,
            "state": dict(service.state),
        }

    async def _receive(self) -> dict[str, Any]:
        waits = not (self._body or self._whole or self._gone or self._begun)
        if waits and self.head.expects_continue:
            self.writer.ask_for_body(self)
        while not self._gone and not self._complete:
            if self._body or (self._whole and not self._handed_over):
                body = b"".join(self._body)
                self._body.clear()
                self.buffered_bytes, self.since_s = 0, self.writer.loop.time()
                self.writer.taken(self, len(body))
                self._handed_over = self._whole
                return {"type": "http.request", "body": body, "more_body": not self._whole}
            self._arrived.clear()
            await self._arrived.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self._gone or self._complete:
            return
        if message["type"] == "http.response.start":
            self._length = _length(message["status"], message.get("headers", ()))
            self._response = message
            return
        response, writer = self._response, self.writer
        assert response is not None, "bug: a body before its start"
        body, more = message.get("body", b""), message.get("more_body", False)
        self._sent_bytes += len(body)
        length, sent_bytes = self._length, self._sent_bytes
        if length is not None and (sent_bytes > length or (sent_bytes < length and not more)):
            raise ValueError(f"answer: got {sent_bytes} bytes of body, expected {length}")
        if not self._begun:
            self._begun = True
            found = ((name.lower(), value) for name, value in response.get("headers", ()))
            headers = [field for field in found if field[0] not in OF_CONNECTIONS]
            writer.start(self, response["status"], headers, None if more else len(body))
        if body:
            writer.write(self, body)
        if not more:
            self._complete = True
            self._arrived.set()
            self.log_http(response["status"], self._sent_bytes)
            writer.finish(self)
        await writer.drained(self)


def _length(status: int, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The length of an answer's body, None if not known.

    Raises:
        ValueError: a header could end, or change, the answer.
    """
    lengths = []
    for name, value in headers:
        if name.lower() in OF_CONNECTIONS:  # the connection's are ours, and these are left out
            continue
        is_length = name.lower() == b"content-length"
        if not is_field(name.lower(), value) or (is_length and not value.isdigit()):
            raise ValueError(f"answer: got header {name!r} {value!r}, expected a name and a line")
        if is_length:
            lengths.append(int(value))
    if len(lengths) > 1:
        raise ValueError(f"answer: got {len(lengths)} lengths, expected at most one")
    if status in (204, 304):
        return 0
    return lengths[0] if lengths else None
