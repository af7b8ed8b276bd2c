"""Requests on a connection: what all have in common, and those for the ASGI application."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from service.errors import ServiceError
from service.observe.ids import Ids
from service.process.listener import at
from service.transport.answer import INTERNAL_ERROR, Answer, status_line
from service.transport.asgi import AsgiRequest
from service.transport.head import Head

if TYPE_CHECKING:
    from service.transport.connection import Connection, FrontDoor

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
        self._request = AsgiRequest(self, connection.app)
        self._pieces: list[bytes] = []
        self._chunked = False
        self._sent_bytes = self._status = 0

    @property
    def buffered_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the body that the application has not taken."""
        return self._request.buffered_bytes

    def open(self) -> None:
        self.note_beginning()
        if self.connection.is_first(self):
            self.start()

    def data(self, data: bytes) -> None:
        self._request.data(data)
        self.connection.touch()

    def end(self) -> None:
        self.whole = True
        self._request.end()

    def cancel(self) -> None:
        self._request.cancel()

    def start(self) -> None:
        if self.connection.is_read():
            self._request.start(self.connection.loop, self.connection.state.tasks)

    # What the application's run calls.

    def scope(self) -> dict[str, Any]:
        connection, head = self.connection, self.head
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            # The answer to HEAD is that to GET without its body, which `write` leaves out.
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

    def name(self) -> str:
        return f"{self.request}: {self.head.ids}" if self.head.ids else self.request

    def took(self, size: int) -> None:
        self.connection.body_was_taken()

    def begin(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None) -> None:
        self.begun = True
        self._status = status
        self.close = self.connection.will_close(self)
        bodiless = status in (204, 304)
        if not bodiless and all(name != b"content-length" for name, _ in headers):
            if length is not None:
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
        connection = self.connection
        lines = [b"%s: %s\r\n" % header for header in headers]
        common = connection.door.common_headers(connection.state)
        self._pieces = [status_line(status), common, *lines, self.head.extra, b"\r\n"]

    def write(self, body: bytes, more: bool) -> None:
        pieces, self._pieces = self._pieces, []
        if self.head.method != b"HEAD":
            if self._chunked:
                pieces += [b"%x\r\n%s\r\n" % (len(body), body)] if body else []
                pieces += [] if more else [b"0\r\n\r\n"]
            else:
                pieces.append(body)
        self._sent_bytes += len(body)
        if more:
            self.connection.write(b"".join(pieces))
        else:
            self.answer = b"".join(pieces)
            self.log(self._status, self._sent_bytes)
            self.connection.flush()

    async def drained(self) -> None:
        await self.connection.drained()

    def failed(self, begun: bool) -> None:
        connection = self.connection
        if begun:  # the answer is incomplete, and nothing else can say so
            connection.transport.abort()
            return
        self.close = connection.will_close(self)
        self.answer = connection.encode(self.head, INTERNAL_ERROR, self.close)
        self.log(INTERNAL_ERROR.status, len(INTERNAL_ERROR.body))
        connection.flush()

    def aborted(self) -> None:
        self.connection.transport.abort()
