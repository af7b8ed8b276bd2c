"""Clients that write bytes of their own making and read what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import select
import socket
import struct
import time
from typing import NamedTuple

import numpy as np

from service.forms import open_inference_pb2 as pb
from tests.service_process import PATIENCE_S

RAW = b"application/octet-stream"


class Answer(NamedTuple):
    """`headers` have lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes


def request(body=None, *lines, method=b"POST", path=b"/predict", kind=RAW, length=None):
    """The bytes of a request; `length` replaces the true Content-Length."""
    head = [method + b" " + path + b" HTTP/1.1", b"Host: a", *lines]
    if body is not None:
        head += [
            b"Content-Type: " + kind,
            b"Content-Length: %d" % (len(body) if length is None else length),
        ]
    return b"\r\n".join(head) + b"\r\n\r\n" + (body or b"")


def chunked(end, *lines, kind=RAW):
    """A POST in chunks; `end` are their bytes."""
    return request(None, b"Content-Type: " + kind, b"Transfer-Encoding: chunked", *lines) + end


class Connection:
    """A TCP connection to the service; to be used with `with`."""

    def __init__(self, port, receive_buffer=None):
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE_S)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        """All of it, or as much as is taken before the service ends the connection."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def answer(self, method=b"GET"):
        """The next answer; None at the end of the connection.

        Raises:
            ConnectionResetError: the service had unread bytes when it closed.
        """
        while b"\r\n\r\n" not in self._read:
            if not self._receive():
                assert not self._read, f"an answer that ends in the middle: {self._read[:200]!r}"
                return None
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = re.fullmatch(r"HTTP/1.1 (\d{3}) .*", first)
        assert status, first
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = 0
        if method != b"HEAD" and status[1] not in ("100", "204"):
            length = int(headers["content-length"])
        while len(self._read) < length:
            assert self._receive(), "an answer that ends in its body"
        body, self._read = self._read[:length], self._read[length:]
        assert_discreet(body)
        return Answer(int(status[1]), headers, body)

    def answers(self):
        """All answers to the end of the connection."""
        return list(iter(self.answer, None))

    def readable(self, timeout_s=0.0):
        """Whether something can be read, or the end was reached."""
        return bool(self._read) or bool(select.select([self.socket], [], [], timeout_s)[0])

    def half_close(self):
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self):
        """Close it by RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _receive(self):
        data = self.socket.recv(1 << 18)
        self._read += data
        return data


def ask(port, data, method=b"GET"):
    """The answer to `data` on a connection of its own."""
    with Connection(port) as connection:
        connection.send(data)
        return connection.answer(method)


def assert_discreet(content):
    """No stack trace and no path of a module is shown to a client."""
    for hint in (b"Traceback", b'File "', b".py", b"site-packages"):
        assert hint not in content, content[:2000]


def quantiles_ms(seconds, *shares):
    """Percentiles of `seconds`, in milliseconds."""
    return [1e3 * float(np.quantile(seconds, share)) for share in shares]


class Pinger:
    """Single images on one kept connection, checked and timed, between the steps of a test.

    `clock`: seconds, `time.monotonic` or those that the service has worked.
    """

    def __init__(self, port, image, expected, accept=b"Accept: " + RAW, clock=time.monotonic):
        self._clock = clock
        self._connection = Connection(port)
        self._message = request(image.tobytes(), accept)
        self._expected = expected
        self.times_s = []
        self.statuses = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.socket.close()

    def once(self):
        began_s = self._clock()
        self._connection.send(self._message)
        answer = self._connection.answer()
        self.times_s.append(self._clock() - began_s)
        self.statuses.append(answer.status)
        if answer.status == 200:
            found = np.frombuffer(answer.body, "<f4").reshape(-1, 10)
            assert_same(found, self._expected)
        return answer.status

    def run(self, seconds, every_s=0.0):
        """Ask for `seconds`, a request each `every_s`; returns p50 and p99 in milliseconds."""
        before, end_s = len(self.times_s), time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.once()
            if every_s:
                time.sleep(every_s)
        return quantiles_ms(self.times_s[before:], 0.5, 0.99)


ROUNDING = 2e-6
"""How far two computations of a probability in float32 may differ: batches of other sizes are
summed in another order. The largest seen on the CPU is 4e-7 (ONNX Runtime 1.2x, 2026-11-22)."""


def assert_same(found, expected):
    """The probabilities are those of these images; both float32 (n, 10)."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= ROUNDING, "an answer is not that of its image"


def infer_request(images, *, model="", **changes):
    """A ModelInferRequest with raw contents; uint8 (n, 28, 28)."""
    tensor = {"name": "image", "datatype": "UINT8", "shape": images.shape}
    raw = [images.tobytes()]
    if "raw" in changes:
        raw = changes.pop("raw")
    contents = changes.pop("contents", None)
    tensor = pb.ModelInferRequest.InferInputTensor(**{**tensor, **changes})
    if contents:
        tensor.contents.uint_contents.extend(contents)
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[tensor],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="probabilities")],
        raw_input_contents=raw,
    )


class AsyncConnection:
    """An asyncio `Connection`: many on one event loop, one request at a time on each."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port):
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    async def ask(self, data):
        self.writer.write(data)
        return await self.answer()

    async def answer(self):
        """The next answer; None at the end of the connection.

        Raises:
            ConnectionError: the service reset the connection.
        """
        async with asyncio.timeout(PATIENCE_S):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as exc:
                if exc.partial:
                    raise
                return None
            first, *lines = head[:-4].decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        assert_discreet(body)
        return Answer(int(first.split()[1]), headers, body)

    def reset(self):
        """Close it by RST."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def close(self):
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
