"""Many connections at the same moment: how long each waits for its first answer.

On epoll and plain sockets: a client of asyncio would use more of the cores that it shares with the
server than the server does.
"""

from __future__ import annotations

import contextlib
import math
import re
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class BurstFailed(Exception):
    """A connection broke, an answer was not 200, or some did not come in time."""


@dataclass(frozen=True, slots=True)
class FirstAnswers:
    """Times of all connections from connect() to the complete answer."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    started_s: float
    unsent: bytes
    received: bytes = b""


def first_answers(
    url: str,
    path: str,
    content_type: str,
    bodies: Sequence[bytes],
    connections: int,
    timeout_s: float = 30.0,
) -> FirstAnswers:
    """Open so many connections at once, and send one of `bodies` in turn on each.

    Raises:
        BurstFailed: not every connection got its answer.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    requests = [_request(path, content_type, body) for body in bodies]
    waits_ms: list[float] = []
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        sockets = [stack.enter_context(socket.socket()) for _ in range(connections)]
        deadline_s = time.monotonic() + timeout_s
        for number, opened in enumerate(sockets):
            opened.setblocking(False)
            connection = _Connection(opened, time.monotonic(), requests[number % len(requests)])
            opened.connect_ex((host, int(port)))
            selector.register(opened, selectors.EVENT_WRITE, connection)
        while len(waits_ms) < connections:
            ready = selector.select(deadline_s - time.monotonic())
            if not ready:
                raise BurstFailed(
                    f"{connections - len(waits_ms)} of {connections} connections got no answer "
                    f"within {timeout_s:g} s"
                )
            for key, _ in ready:
                try:
                    done = _advance(selector, key.data)
                except OSError as exc:
                    raise BurstFailed(f"a connection to {url} broke: {exc}") from exc
                if done:
                    waits_ms.append(1e3 * (time.monotonic() - key.data.started_s))
                    selector.unregister(key.fileobj)
    waits_ms.sort()
    p50_ms, p99_ms = (waits_ms[math.ceil(part * connections) - 1] for part in (0.5, 0.99))
    return FirstAnswers(p50_ms, p99_ms, waits_ms[-1])


def _request(path: str, content_type: str, body: bytes) -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: burst", f"Content-Type: {content_type}"
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _advance(selector: selectors.BaseSelector, connection: _Connection) -> bool:
    """Send or receive what is possible; whether the answer is complete."""
    if connection.unsent:
        sent = connection.socket.send(connection.unsent)
        connection.unsent = connection.unsent[sent:]
        if not connection.unsent:
            selector.modify(connection.socket, selectors.EVENT_READ, connection)
        return False
    data = connection.socket.recv(65536)
    connection.received += data
    head, end, body = connection.received.partition(b"\r\n\r\n")
    if not data or (end and b" 200 " not in head[:13]):
        raise BurstFailed(f"got {connection.received[:100]!r}, expected an answer with status 200")
    length = _LENGTH.search(head)
    return bool(end and length and len(body) >= int(length[1]))
