"""Clients that make the service hold memory."""

from __future__ import annotations

import contextlib
import socket
import time

from tests.service_process import PATIENCE_S

MIB = 1 << 20
LIMITS = ("--max-body-bytes", str(2 * MIB), "--max-in-flight-bytes", str(8 * MIB))
ROWS = 1000
"""Images of a large valid request, 784 kB."""


def connect(service):
    return socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)


def head(length):
    return (
        b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


def test_five_stalled_uploads_refuse_no_healthy_request(start):
    service = start(*LIMITS).ready()
    with contextlib.ExitStack() as stack:
        uploads = [stack.enter_context(connect(service)) for _ in range(5)]
        for upload in uploads:
            upload.settimeout(0.2)
            with contextlib.suppress(OSError):  # one that is refused
                upload.sendall(head(2 * MIB) + bytes(2 * MIB - 1))
        statuses = []
        until_s = time.monotonic() + 3
        while time.monotonic() < until_s:
            with connect(service) as healthy:  # in two pieces, so that it needs memory
                healthy.sendall(head(784) + bytes(700))
                time.sleep(0.01)
                healthy.sendall(bytes(84))
                statuses.append(healthy.recv(1000).split()[1])
        assert set(statuses) == {b"200"}, statuses
        # A large one waits a second at most, until the stalled ones count as slow.
        assert service.predict(ROWS)[0] == 200
