"""A real server of the connection class on a real socket, with a route of each kind."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import h11

from service.errors import UnknownModel
from tests.service_process import PATIENCE_S
from wire.answer import Answer, error_answer
from wire.budget import Budget
from wire.door import HttpService
from wire.errors import InvalidInput, TooLarge

MAX_BODY_BYTES = 200_000
HUGE = bytes(32 << 20)
MEBIBYTE = bytes(1 << 20)
DATE_S = 1795341600
"""Sun, 22 Nov 2026 10:00:00 GMT, in all answers."""
FIXED = {"/huge": HUGE, "/mebibyte": MEBIBYTE}


async def application(events, scope, receive, send):
    """Answers with the body; /early before it came, /pieces in three, /mebibyte and /huge much."""
    path, body = scope["path"], b""
    events["begun"].append(path)
    if path == "/streams":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    if path == "/answer":
        status, headers, pieces = events["answer"]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})
        return
    if path == "/cancels":
        raise asyncio.CancelledError
    if path == "/fails":
        raise ValueError("planted")
    if path not in ("/early", *FIXED):
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
    if path == "/waits":  # for its client to leave
        events["waits"].set()
        assert (await receive())["type"] == "http.disconnect"
        events["left"].set()
        return
    if path == "/headers":  # what the application sees
        body = b"\n".join(b"%s: %s" % pair for pair in scope["headers"])
    if path == "/none":
        await send({"type": "http.response.start", "status": 204})  # headers may be left out
        await send({"type": "http.response.body", "body": b""})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if path == "/pieces":
        for piece in (b"one", b"two", b"three"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})
    else:
        await send({"type": "http.response.body", "body": FIXED.get(path, body)})


async def until(condition):
    """Wait for what has no event."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class EchoCall:
    def __init__(self, route, wanted, reply):
        self.route, self.wanted, self.reply, self.body = route, wanted, reply, b""
        self.arrived_bytes = 0  # in `room`
        route.calls.append(self)

    def data(self, data):
        self.body += data
        if len(self.body) > MAX_BODY_BYTES:
            raise TooLarge("too many bytes", field="body")

    def room(self):
        self.body = bytearray(int(self.wanted["content-length"]))
        return memoryview(self.body)

    def arrived(self, size):
        self.arrived_bytes += size

    def wait_for_body(self):
        self.route.waited.set()
        if self.route.is_unknown:
            raise UnknownModel("no such model")

    def complete(self, body=None):
        self.body = self.body if body is None else bytes(body)
        if self.route.hold:
            self.route.held.append(self)
            self.route.arrived.set()
        else:
            asyncio.get_running_loop().call_soon(self.answer)

    def answer(self):
        if not self.route.cancelled.count(self):
            self.reply(Answer(200, b"text/plain", self.body, rest=self.route.rest))

    def fail(self, error):
        self.reply(error_answer(error))

    def cancel(self):
        self.route.cancelled.append(self)
        self.route.left.set()


class Echo:
    """`POST /fast` answers with the body; with `hold`, when `release` is called."""

    def __init__(self):
        self.hold, self.refused, self.rest, self.is_unknown = False, 0, (), False
        self.calls, self.held, self.cancelled, self.reads = [], [], [], 0
        self.arrived, self.left, self.waited = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def read(self, query, headers, path=None):
        self.reads += 1
        if query:
            raise InvalidInput("no query expected", field="query")
        if int(headers.get("content-length", "0")) > MAX_BODY_BYTES:
            raise TooLarge("too many bytes", field="body")
        return headers

    def refuse(self, error):
        self.refused += 1
        return error_answer(error)

    def open(self, wanted, reply):
        return EchoCall(self, wanted, reply)

    def release(self, reverse=False):
        held, self.held = self.held, []
        for call in reversed(held) if reverse else held:
            call.answer()


class Client:
    """Raw bytes out, answers in as h11 reads them, which accepts none that breaks a rule."""

    def __init__(self, reader, writer):
        self.reader, self.writer, self._unread = reader, writer, b""

    def send(self, data):
        self.writer.write(data)

    async def answer(self, method="GET"):
        """(status, headers, body) of the next answer; an interim one has no body."""
        connection, answer, body = h11.Connection(h11.CLIENT), None, []
        connection.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
        connection.send(h11.EndOfMessage())
        if self._unread:  # nothing means the end
            connection.receive_data(self._unread)
        async with asyncio.timeout(PATIENCE_S):
            while type(event := connection.next_event()) is not h11.EndOfMessage:
                if event is h11.NEED_DATA:
                    connection.receive_data(await self.reader.read(1 << 16))
                elif isinstance(event, h11.Data):
                    body.append(event.data)
                else:
                    fields = {name.decode(): value.decode() for name, value in event.headers}
                    answer = event.status_code, fields
                    if isinstance(event, h11.InformationalResponse):
                        break
        self._unread = connection.trailing_data[0]
        return *answer, b"".join(body)

    async def rest(self):
        """The bytes up to the end of the connection."""
        async with asyncio.timeout(PATIENCE_S):
            return self._unread + await self.reader.read()


class Running:
    """A server; `open()` gives clients, `route` is the fast route."""

    def __init__(self, route, door, events, port, tls):
        self.route, self.door, self.port = route, door, port
        self.events, self.tls = events, tls
        self.clients = []

    async def open(self):
        name = "localhost" if self.tls else None
        streams = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.tls, server_hostname=name
        )
        client = Client(*streams)
        self.clients.append(client)
        return client

    async def ask(self, data, method="GET"):
        """The answer on a connection of its own."""
        client = await self.open()
        client.send(data)
        return await client.answer(method)

    def stop(self):
        """Stop like the service."""
        self.door.stop()
        for connection in list(self.door.connections):
            connection.shutdown()


@asynccontextmanager
async def running(tls=(None, None), **options):
    """`async with running(header_timeout_s=0.1) as server`.

    `tls`: the server's certificate and the context of its clients.
    """
    route = Echo()
    options["certificate"], context = tls
    events = {"begun": [], "waits": asyncio.Event(), "left": asyncio.Event()}
    options = {"app": partial(application, events), "clock": lambda: DATE_S, **options}
    door = HttpService({(b"POST", b"/fast"): route}, Budget(1 << 30), **options)
    listener = await asyncio.get_running_loop().create_server(door, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    running = Running(route, door, events, port, context)
    try:
        yield running
    finally:
        for client in running.clients:
            client.writer.transport.abort()
        await until(lambda: not door.connections and not door.tasks)
        listener.close()
        await listener.wait_closed()
