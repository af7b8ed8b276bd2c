"""Stops under load: no request that the service has read is lost, over HTTP/1.1, HTTP/2 and gRPC.

Over HTTP/1.1 the service notes what it reads. Over HTTP/2 its last GOAWAY says which requests it
answers, and each connection must end with one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from http.client import HTTPResponse

import grpc
import numpy as np
import pytest
from hpack import Decoder

from benchmarks.grpc_stub import Stub
from service.errors import ExitCode
from tests.faults.checks import program, until, workers_program
from tests.faults.clients import infer_request
from tests.faults.http2 import OPENING, call_headers, message
from tests.service_process import PATIENCE_S
from tests.wire import test_http2 as h2

CLIENTS = {"kept": 6, "fresh": 16}
HEAD = (
    b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
    b"Content-Length: 784\r\n"
)
REQUESTS = {
    "kept": HEAD + b"\r\n" + bytes(784),
    "fresh": HEAD + b"Connection: close\r\n\r\n" + bytes(784),
}
"""Senders on a connection that stays, and on a new one each time."""

COUNTING = """
import os
from wire.connection import Connection
receive = Connection.data_received
reads = os.open(f"reads.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def data_received(self, data):
    ports = self.server[1], self.client[1]
    os.write(reads, b"%d %d %d\\n" % (*ports, len(data)))
    receive(self, data)
Connection.data_received = data_received
"""
"""Notes both ports and the number of bytes of each read."""


class Asking(threading.Thread):
    """Asks over one connection after another until nobody listens."""

    def __init__(self, port):
        super().__init__()
        self.port = port
        self.start()

    def run(self):
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
            except ConnectionError:
                return
            with connection:
                self.use(connection)


class Client(Asking):
    """Sends requests of HTTP/1.1, one after another, over kept or fresh connections."""

    def __init__(self, port, request):
        self.request = request
        self.answered = Counter()
        """Requests with an answer, by the client's port."""
        self.cut, self.wrong = [], []
        """Ports of connections that ended where an answer was due; statuses."""
        super().__init__(port)

    def use(self, connection):
        mine, closes = connection.getsockname()[1], False
        while not closes:
            answer = HTTPResponse(connection)
            try:
                connection.sendall(self.request)
                answer.begin()
                answer.read()
            except ConnectionError:
                self.cut.append(mine)
                return
            self.answered[mine] += 1
            self.wrong += [answer.status] * (answer.status != 200)
            closes = answer.will_close


def read_bytes(folder, port):
    """Bytes that the service has read on this port, by the client's port."""
    found = Counter()
    for path in folder.glob("reads.*"):
        for line in path.read_text().splitlines():
            own, client, size = map(int, line.split())
            if own == port:
                found[client] += size
    return found


class Http2Client(Asking):
    """Keeps eight requests open on a connection, by turns predictions and calls of gRPC."""

    ENDLESS = 2**31 - 1

    def __init__(self, port):
        self.answered = 0
        self.lost = []
        """Last stream, unanswered streams and frames of each connection that broke the promise."""
        self.cut = 0
        """Connections that ended before the service sent anything."""
        super().__init__(port)

    def use(self, connection):
        self._open, self._last, self._next, self._seen = set(), None, 1, Counter()
        try:
            connection.sendall(OPENING + h2.update(0, 1 << 30))
            with connection.makefile("rb") as received:
                while True:
                    if self._last is None and len(self._open) < 8:
                        connection.sendall(self._request())
                    elif not (head := received.read(9)):
                        break
                    else:
                        content = received.read(int.from_bytes(head[:3], "big"))
                        self._take(head, content)
                        if head[3] == h2.SETTINGS and not head[4] & h2.ACK:
                            connection.sendall(h2.ACKED)
        except ConnectionError:
            pass
        if not self._seen:
            self.cut += 1
        elif self._last in (None, self.ENDLESS) or any(one <= self._last for one in self._open):
            self.lost.append((self._last, self._open, self._seen))

    def _request(self):
        stream, self._next = self._next, self._next + 2
        self._open.add(stream)
        block, content = H2_REQUESTS[stream % 4 == 1]
        if stream == 1:  # the settings of the service ask for a smaller table: it is empty
            block = b"\x20" + block
        end = h2.data(stream, content, h2.END)
        return h2.headers(block, h2.WHOLE, stream) + end

    def _take(self, head, content):
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        self._seen[kind] += 1
        if kind == h2.GOAWAY:
            self._last = int.from_bytes(content[:4], "big")
            assert content[4:8] == bytes(4), content
        if kind == h2.HEADERS:
            fields = dict(Decoder().decode(content, raw=True))
            assert fields.get(b":status", b"200") == b"200", fields
            assert fields.get(b"grpc-status", b"0") == b"0", fields
        if kind in (h2.DATA, h2.HEADERS) and flags & h2.END:
            self._open.remove(stream)
            self.answered += 1


RAW = (b"content-type", b"application/octet-stream")
ONE_IMAGE = infer_request(np.zeros((1, 28, 28), np.uint8))
H2_REQUESTS = (
    (h2.block(RAW, method=b"POST", path=b"/predict"), bytes(784)),
    (call_headers(), message(ONE_IMAGE.SerializeToString())),
)
"""Header block and content."""


class GrpcClient(threading.Thread):
    """Makes one call after another by grpcio, until nobody listens."""

    def __init__(self, port):
        super().__init__()
        self.answered = 0
        self.ended = None
        """By which status."""
        self._port = port
        self.start()

    def run(self):
        with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            infer = Stub(channel).ModelInfer
            while not self.ended:
                try:
                    infer(ONE_IMAGE, timeout=PATIENCE_S)
                    self.answered += 1
                except grpc.RpcError as exc:
                    self.ended = exc.code()


def rounds():
    """A few stops always, and a hundred with `make faults`, half of them with two workers."""
    few = [(1, "0", "kept"), (2, "0", "fresh"), (1, "1", "kept")]
    return [
        pytest.param(
            *(1 + index % 2, ("0", "0", "1")[index % 3], ("kept", "fresh")[index // 2 % 2], index),
            marks=pytest.mark.long,
        )
        if index >= len(few)
        else (*few[index], index)
        for index in range(100)
    ]


@pytest.mark.parametrize(("workers", "grace_s", "kind", "index"), rounds())
def test_no_request_that_was_read_is_lost_when_it_stops_under_load(
    start, tmp_path, workers, grace_s, kind, index
):
    counting = program(COUNTING) if workers == 1 else workers_program(tmp_path, COUNTING)
    flags = ("--workers", str(workers), "--grace-s", grace_s, "--drain-timeout-s", "3600")
    service = start(*flags, program=counting).ready(workers)
    clients = [Client(service.port, REQUESTS[kind]) for _ in range(CLIENTS[kind])]
    others = [Http2Client(service.grpc_port), Http2Client(service.grpc_port)]
    caller = GrpcClient(service.grpc_port)
    until(lambda: sum(client.answered.total() for client in clients) > 50)
    until(lambda: min(client.answered for client in others) > 50 and caller.answered > 10)
    time.sleep(index % 10 * 0.007)  # at different moments of their requests
    service.signal()
    code = service.wait()
    for client in (*clients, *others, caller):
        client.join(PATIENCE_S)
        assert not client.is_alive()
    assert code == ExitCode.STOPPED
    answered = sum((client.answered for client in clients), Counter())  # ports come again
    lost = {
        port: (size, answered[port])
        for port, size in read_bytes(tmp_path, service.port).items()
        if size > answered[port] * len(REQUESTS[kind])
    }
    assert lost == {}, "bytes read, and requests answered"
    # The kernel resets a connection whose handshake ends while its queue is closed, a moment for
    # each worker. 16 clients met 4 resets where the queue was not emptied before (2026-11-22).
    assert sum(len(client.cut) for client in clients) <= workers
    assert not any(client.wrong for client in clients)
    for client in others:
        assert client.lost == []
    assert sum(client.cut for client in others) <= workers
    assert caller.ended is grpc.StatusCode.UNAVAILABLE
    assert "Traceback" not in service.log
    assert "ERROR" not in service.log
