"""Stops under load: no request that the service has read is lost."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter

import pytest

from service.errors import ExitCode
from tests.service_process import PATIENCE_S

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
from service import supervisor
from service.observe import metrics_files

def count_reads():
    from service.transport.connection import Connection
    receive = Connection.data_received
    reads = os.open(f"reads.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def data_received(self, data):
        os.write(reads, b"%d %d\\n" % (self.peer.client[1], len(data)))
        receive(self, data)
    Connection.data_received = data_received

work, prepare = supervisor._work, metrics_files.prepare

def prepare_and_count():
    prepare()  # before a library is imported
    count_reads()

def counting_work(*arguments):
    metrics_files.prepare = prepare_and_count
    work(*arguments)

def install(workers):
    if workers == 1:
        count_reads()
    else:
        supervisor._work = counting_work
"""
"""Notes the client's port and the number of bytes of each read."""


def program(workers):
    return (
        "-c",
        f"import sys, counting; counting.install({workers})\n"
        "from service.__main__ import main; sys.exit(main())",
    )


class Client:
    """Sends requests, one after another, over kept or fresh connections, until nobody listens."""

    def __init__(self, port, request):
        self.request = request
        self.answered = Counter()
        """Requests with an answer, by the client's port."""
        self.cut = []
        """Ports of connections that ended where an answer was due."""
        self.wrong = []
        self._port = port
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self):
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
            except ConnectionError:
                return
            with connection:
                self._use(connection)

    def _use(self, connection):
        mine = connection.getsockname()[1]
        while True:
            try:
                connection.sendall(self.request)
                answer = read_answer(connection)
            except ConnectionError:
                answer = b""
            if not answer:
                self.cut.append(mine)
                return
            self.answered[mine] += 1
            head = answer.partition(b"\r\n\r\n")[0].lower()
            if not head.startswith(b"http/1.1 200 "):
                self.wrong.append(answer)
            if b"connection: close" in head:
                return


def read_answer(connection):
    """An answer with its body; b"" if the connection ends before its first byte."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := connection.recv(65536)):
            assert data == b"", "an answer was cut in its middle"
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < length:
        part = connection.recv(65536)
        assert part, "an answer was cut in its middle"
        body += part
    return head + b"\r\n\r\n" + body


def read_bytes(folder):
    """Bytes that the service has read, by the client's port."""
    found = Counter()
    for path in folder.glob("reads.*"):
        for line in path.read_text().splitlines():
            port, size = map(int, line.split())
            found[port] += size
    return found


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
    (tmp_path / "counting.py").write_text(COUNTING)
    service = start(
        "--workers", str(workers), "--grace-s", grace_s, program=program(workers)
    ).ready(workers)
    clients = [Client(service.port, REQUESTS[kind]) for _ in range(CLIENTS[kind])]
    time.sleep(0.3 + index % 10 * 0.007)  # at different moments of their requests
    service.signal()
    code = service.wait()
    took_s = service.stopped_after_s()
    for client in clients:
        client.join()
    assert code == ExitCode.STOPPED
    assert took_s < float(grace_s) + 10 + 3
    answered = sum((client.answered for client in clients), Counter())  # ports come again
    lost = {
        port: (size, answered[port])
        for port, size in read_bytes(tmp_path).items()
        if size > answered[port] * len(REQUESTS[kind])
    }
    assert lost == {}, "bytes read, and requests answered"
    # The kernel resets a connection whose handshake ends while its queue is closed, a moment for
    # each worker. 16 clients met 4 resets where the queue was not emptied before (2026-11-22).
    assert sum(len(client.cut) for client in clients) <= workers
    assert not any(client.wrong for client in clients)
    assert answered.total() > 50
    assert "Traceback" not in service.log
    assert "ERROR" not in service.log
