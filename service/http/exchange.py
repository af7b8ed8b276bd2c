"""Requests on a connection: what all have in common, and those for the ASGI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from service.errors import ServiceError
from service.http.answer import INTERNAL_ERROR, Answer, status_line
from service.http.head import Head
from service.ids import Ids
from service.listener import at

if TYPE_CHECKING:
    from service.http.connection import Connection, FrontDoor

_log = logging.getLogger(__name__)

BUFFERED_BYTES = 64 * 1024
"""Bytes of a body that an application has not asked for before reading pauses."""


class Exchange:
    """One request and its answer, which is `answer` once it is complete.

    Initial values are attributes of the class, all immutable: setting each of them in every
    instance would take time.
    """

    head: Head | None
    answer: bytes | None = None
    begun = False
    """Whether a part of the answer is written."""
    close = False
    whole = False
    """Whether the body has arrived."""
    buffered_bytes = 0
    _asked = False
    _began_s = 0.0

    def __init__(self, connection: Connection, head: Head | None) -> None:
        self.connection, self.head = connection, head

    def note_beginning(self) -> None:
        """Note the time, for the access log."""
        if self.connection.door.access is not None:
            self._began_s = time.perf_counter()

    @property
    def request(self) -> str:
        """Method and target, for logs."""
        if self.head is None:
            return "-"
        head = self.head
        target = head.path + b"?" * bool(head.query) + head.query
        return f"{head.method.decode('ascii')} {target.decode('latin-1')}"

    def log(self, status: int, size: int) -> None:
        """Add the answer to the access log, if there is one; `size` is its body's."""
        connection = self.connection
        if connection.door.access is not None:
            now_s = time.perf_counter()  # the loop's clock stands still during a turn
            client = at(*connection.client) if connection.client else "-"
            if self.head is not None and self.head.method == b"HEAD":
                size = 0
            connection.door.access.add(
                connection.door.scheme.decode(),
                client,
                self.request,
                status,
                size,
                now_s - (self._began_s or now_s),
                self.head.ids if self.head else Ids(),
            )

    def open(self) -> None:
        """The headers have arrived."""

    def data(self, data: bytes) -> None:
        """A piece of the body."""

    def wait_for_body(self) -> None:
        """The body has not arrived whole; called after each piece."""

    def end(self) -> None:
        """The body has arrived."""

    def start(self) -> None:
        """The answers before are written; may be called again."""
        self.ask_for_body()

    def cancel(self) -> None:
        """The client is gone."""

    def give_up(self, error: ServiceError) -> None:
        """The stop takes too long; a task would be cancelled by uvicorn."""

    def patience_s(self, door: FrontDoor) -> float:
        """How long its body may take from the last time that `touch` was called."""
        return door.keep_alive_s

    def end_with(self, answer: Answer) -> None:
        """The rest of the body cannot be read: answer, close."""
        self.cancel()
        self.close = True
        self.answer = self.connection.encode(self.head, answer, close=True)
        self.log(answer.status, len(answer.body))

    def ask_for_body(self) -> None:
        """Tell a client that waits for it to send the body."""
        connection, head = self.connection, self.head
        if head is None or not head.expects_continue or self.whole or self._asked or self.begun:
            return
        if connection.is_first(self):
            self._asked = True
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


class AsgiExchange(Exchange):
    """A request for the ASGI application, which runs once the answers before are written and read.

    Each answer takes up to megabytes of memory: a client that does not read has one of them made,
    not all that it asked for.
    """

    head: Head

    def __init__(self, connection: Connection, head: Head) -> None:
        super().__init__(connection, head)
        self._body: list[bytes] = []
        self._arrived = asyncio.Event()  # a piece of the body, its end, or the client's
        self._chunked = self._gone = self._handed_over = False
        self._sent_bytes = 0
        self._response: Mapping[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self.note_beginning()
        if self.connection.is_first(self):
            self.start()

    def data(self, data: bytes) -> None:
        self._body.append(data)
        self.buffered_bytes += len(data)
        self._arrived.set()
        self.connection.touch()

    def end(self) -> None:
        self.whole = True
        self._arrived.set()

    def cancel(self) -> None:
        self._gone = True
        self._arrived.set()

    def start(self) -> None:
        if self._task is None and self.connection.is_read():
            task = self._task = self.connection.loop.create_task(self._run())
            tasks = self.connection.state.tasks
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _run(self) -> None:
        connection, head = self.connection, self.head
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            # The answer to HEAD is that to GET without its body, which `_send` leaves out.
            "method": "GET" if head.method == b"HEAD" else head.method.decode("ascii"),
            "scheme": connection.door.scheme.decode(),
            "path": unquote(head.path.decode("latin-1")),
            "raw_path": head.path,
            "query_string": head.query,
            "root_path": "",
            "headers": list(head.headers),
            "client": connection.client,
            "server": connection.server,
            "state": connection.app_state.copy(),
        }
        try:
            await connection.app(scope, self._receive, self._send)
        except asyncio.CancelledError:
            connection.transport.abort()
            raise
        except Exception:  # noqa: BLE001 - the application's edge: the client gets an answer
            _log.exception("%s failed%s", self.request, f": {head.ids}" if head.ids else "")
        if self._gone or self.answer is not None:
            return
        if self.begun:  # the answer is incomplete, and nothing else can say so
            connection.transport.abort()
            return
        self.close = connection.will_close(self)
        self.answer = connection.encode(head, INTERNAL_ERROR, self.close)
        self.log(INTERNAL_ERROR.status, len(INTERNAL_ERROR.body))
        connection.flush()

    async def _receive(self) -> dict[str, Any]:
        if not self._body and not self.whole:
            self.ask_for_body()
        while not self._gone and self.answer is None:
            if self._body or (self.whole and not self._handed_over):
                body = b"".join(self._body)
                self._body.clear()
                self.buffered_bytes = 0
                self.connection.body_was_taken()
                self._handed_over = self.whole
                return {"type": "http.request", "body": body, "more_body": not self.whole}
            self._arrived.clear()
            await self._arrived.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self._response = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        pieces = []
        if not self.begun:
            self.begun = True
            pieces.append(self._encode_head(len(body), more))
        if self.head.method != b"HEAD":
            if self._chunked:
                pieces += [b"%x\r\n%s\r\n" % (len(body), body)] if body else []
                pieces += [] if more else [b"0\r\n\r\n"]
            else:
                pieces.append(body)
        data = b"".join(pieces)
        self._sent_bytes += len(body)
        if more:
            self.connection.write(data)
        else:
            self.answer = data
            assert self._response is not None, "bug: an end before its start"
            self.log(self._response["status"], self._sent_bytes)
            self._arrived.set()
            self.connection.flush()
        await self.connection.drained()

    def _encode_head(self, length: int, more: bool) -> bytes:
        connection, response = self.connection, self._response
        assert response is not None, "bug: a body before its start"
        headers = [(name.lower(), value) for name, value in response["headers"]]
        self.close = connection.will_close(self)
        bodiless = response["status"] in (204, 304)
        if not bodiless and all(name != b"content-length" for name, _ in headers):
            if not more:
                headers.append((b"content-length", b"%d" % length))
            elif self.head.version == "1.1":
                self._chunked = True
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                self.close = True
        if self.close:
            headers.append((b"connection", b"close"))
        elif self.head.version == "1.0":
            headers.append((b"connection", b"keep-alive"))
        lines = [b"%s: %s\r\n" % header for header in headers]
        common = connection.door.common_headers(connection.state)
        extra = self.head.extra
        return b"".join((status_line(response["status"]), common, *lines, extra, b"\r\n"))
