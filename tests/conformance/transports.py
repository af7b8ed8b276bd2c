"""Clients that carry one request each: HTTP/1.1 by h11, HTTP/2 by h2, ASGI by plain calls."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

import h2.events as http2
import h11
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes

from tests.service_process import PATIENCE_S


class Message(NamedTuple):
    """A request.

    Attributes:
        is_answered: whether a body is an answer before the end of the reply.
        has_length: whether the client says the length of the body at its beginning.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    is_answered: Callable[[bytes], bool] = lambda _: False
    has_length: bool = True


class Reply(NamedTuple):
    """An answer; trailers are among `headers`."""

    status: int
    headers: dict[str, str]
    body: bytes


class Lost(Exception):
    """The connection or the request ended without an answer."""


class Transport:
    """A connection with one request.

    Attributes:
        leaves: the ways in which a client can leave, for `leave`.
    """

    leaves = ("connection",)

    def __init__(self, reader, writer):
        self._reader, self._writer, self._rest = reader, writer, b""

    @classmethod
    async def open(cls, port):
        """A client of what its server yields: a port, or an application."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, message, held_back=0):
        """Send `message` but the last `held_back` bytes of its body."""
        sent = len(message.body) - held_back
        self._rest, self._missing = message.body[sent:], len(message.body)
        self._message = message
        self._writer.write(self._begin(message) + self._data(message.body[:sent]))

    def send_rest(self):
        self._writer.write(self._data(self._rest))

    async def reply(self):
        async with asyncio.timeout(PATIENCE_S):
            return await self._reply()

    async def _read(self):
        try:
            return await self._reader.read(1 << 16)
        except ConnectionError:
            return b""

    def leave(self, how="connection"):
        """Reset the connection."""
        reset = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self._writer.transport.abort()

    async def close(self):
        self._writer.transport.abort()
        await asyncio.sleep(0)


class Http1(Transport):
    """HTTP/1.1."""

    def _begin(self, message):
        self._h11 = h11.Connection(h11.CLIENT)
        length = {"Transfer-Encoding": "chunked"}
        if message.has_length:
            length = {"Content-Length": str(self._missing)}
        headers = [("Host", "a"), *length.items(), *message.headers.items()]
        return self._h11.send(
            h11.Request(method=message.method, target=message.path, headers=headers)
        )

    def _data(self, data):
        self._missing -= len(data)
        sent = self._h11.send(h11.Data(data=data)) if data else b""
        return sent if self._missing else sent + self._h11.send(h11.EndOfMessage())

    async def _reply(self):
        status, headers, body = 0, {}, b""
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as exc:
                raise Lost from exc
            if event is h11.NEED_DATA:
                self._h11.receive_data(await self._read())
            elif isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode(): text.decode() for name, text in event.headers}
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return Reply(status, headers, body)
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                raise Lost


class Http2(Transport):
    """HTTP/2, known beforehand."""

    leaves = ("connection", "request")

    def _begin(self, message):
        self._h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        names = {":method": message.method, ":scheme": "http", ":authority": "a"}
        names[":path"] = message.path
        if message.has_length:
            names["content-length"] = str(self._missing)
        names |= {name.lower(): text for name, text in message.headers.items()}
        self._h2.send_headers(1, [*names.items()], end_stream=not self._missing)
        return self._h2.data_to_send()

    def _data(self, data):
        self._missing -= len(data)
        size = self._h2.max_outbound_frame_size
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            end = not self._missing and at + len(piece) == len(data)
            self._h2.send_data(1, piece, end_stream=end)
        return self._h2.data_to_send()

    def _flush(self):
        self._writer.write(self._h2.data_to_send())

    async def _reply(self):
        headers, body, received = {}, b"", bytearray()
        while data := await self._read():
            received += data
            for event in self._h2.receive_data(self._take(received)):
                if isinstance(event, http2.DataReceived):
                    body += event.data
                    self._h2.acknowledge_received_data(event.flow_controlled_length, 1)
                elif isinstance(event, http2.ResponseReceived | http2.TrailersReceived):
                    headers |= dict(event.headers)
                elif isinstance(event, http2.StreamReset):
                    raise Lost
                if isinstance(event, http2.StreamEnded) or self._message.is_answered(body):
                    return Reply(int(headers.pop(":status")), headers, body)
            self._flush()
        raise Lost

    def _take(self, received):
        """The frames that are complete, but for GOAWAY: h2 reads no answer behind it."""
        taken = b""
        while len(received) >= 9 and len(received) >= (end := 9 + int.from_bytes(received[:3])):
            frame, received[:end] = bytes(received[:end]), b""
            if frame[3] != 7:
                taken += frame
            elif int.from_bytes(frame[9:13]) < 1:
                raise Lost
        return taken

    def leave(self, how="connection"):
        if how == "connection":
            super().leave()
        else:
            self._h2.reset_stream(1, ErrorCodes.CANCEL)
            self._flush()


class Asgi(Transport):
    """A call of an ASGI application in this process."""

    def __init__(self, app):
        self._app, self._events, self._sent = app, asyncio.Queue(), []

    @classmethod
    async def open(cls, app):
        return cls(app)

    def send(self, message, held_back=0):
        path, _, query = message.path.partition("?")
        length = {"host": "a"}
        if message.has_length:
            length["content-length"] = str(len(message.body))
        fields = {name.lower(): text for name, text in message.headers.items()}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": message.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in (length | fields).items()],
        }
        sent = len(message.body) - held_back
        self._rest = message.body[sent:]
        self._put(message.body[:sent], bool(held_back))
        self._call = asyncio.create_task(self._app(scope, self._events.get, self._send))

    def send_rest(self):
        self._put(self._rest, False)

    def _put(self, body, more):
        self._events.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def _send(self, event):
        self._sent.append(event)

    async def _reply(self):
        await self._call
        if not self._sent:
            raise Lost
        start, *pieces = self._sent
        headers = {name.decode(): text.decode() for name, text in start["headers"]}
        body = b"".join(piece.get("body", b"") for piece in pieces)
        return Reply(start["status"], headers, body)

    def leave(self, how="connection"):
        self._events.put_nowait({"type": "http.disconnect"})

    async def close(self):
        self.leave()
        await self._call
