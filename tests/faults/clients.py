"""Clients that write bytes of their own making, and know what the service has to answer."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import socket
import struct
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lenet.context import Target, open_backend
from lenet.weightfile import WeightFile
from service.forms import open_inference_pb2 as pb
from tests.service_process import PATIENCE_S

WEIGHTS = Path(__file__).parents[2] / "weights"
"""The committed ones; `lenet` has two versions."""

RAW, JSON, NPY = b"application/octet-stream", b"application/json", b"application/x-npy"
ACCEPT = b"Accept: " + RAW

ROUNDING = 2e-6
"""How far two computations of a probability in float32 may differ: batches of other sizes are
summed in another order. The largest seen on the CPU is 4e-7 (ONNX Runtime 1.2x, 2026-11-22)."""


class Answer(NamedTuple):
    """`headers` have lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def probabilities(self):
        """Float32 (n, 10), of an answer in bytes or JSON."""
        assert self.status == 200, self
        if self.headers["content-type"].startswith("application/json"):
            rows = json.loads(self.body)["predictions"]
            found = np.array([row["probabilities"] for row in rows], np.float32)
            assert [row["label"] for row in rows] == found.argmax(axis=1).tolist()
            return found
        return np.frombuffer(self.body, "<f4").reshape(-1, 10)


def request(body=None, *lines, method=b"POST", path=b"/predict", kind=RAW, length=None):
    """The bytes of a request; `length` replaces the true Content-Length."""
    head = [method + b" " + path + b" HTTP/1.1", b"Host: a", *lines]
    if body is not None:
        size = len(body) if length is None else length
        head += [b"Content-Type: " + kind, b"Content-Length: %d" % size]
    return b"\r\n".join(head) + b"\r\n\r\n" + (body or b"")


def chunked(end, *lines, kind=RAW):
    """A POST in chunks; `end` are their bytes."""
    return request(None, b"Content-Type: " + kind, b"Transfer-Encoding: chunked", *lines) + end


def message(images, form, *lines):
    """A request for predictions in one of the forms RAW, JSON and NPY."""
    body = images.tobytes()
    if form == JSON:
        body = json.dumps({"images": images.reshape(-1, 784).tolist()}).encode()
    elif form == NPY:
        file = io.BytesIO()
        np.save(file, images)
        body = file.getvalue()
    return request(body, *lines, kind=form)


def infer_request(images, *, model="", raw=None, **changes):
    """A ModelInferRequest with raw contents; uint8 (n, 28, 28)."""
    tensor = {"name": "image", "datatype": "UINT8", "shape": images.shape, **changes}
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[pb.ModelInferRequest.InferInputTensor(**tensor)],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="probabilities")],
        raw_input_contents=[images.tobytes()] if raw is None else raw,
    )


def assert_same(found, expected):
    """The probabilities are those of these images; both float32 (n, 10)."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= ROUNDING, "an answer is not that of its image"


def quantiles_ms(seconds, *shares):
    """Percentiles of `seconds`, in milliseconds."""
    return [1e3 * float(np.quantile(seconds, share)) for share in shares]


class Ended(ConnectionError):
    """A connection ended where an answer could have begun."""


class Connection:
    """A connection of HTTP/1.1; `async with` resets what is left of it."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port, receive_buffer=None):
        with contextlib.ExitStack() as stack:
            plain = stack.enter_context(socket.socket())
            if receive_buffer is not None:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            plain.setblocking(False)
            await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
            stack.pop_all()
        return cls(*await asyncio.open_connection(sock=plain, limit=receive_buffer or 1 << 20))

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.writer.transport.abort()

    async def send(self, data):
        """All of it, or as much as is taken before the service ends the connection."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def ask(self, data):
        self.writer.write(data)
        return await self.answer()

    async def answer(self, pace_s=0.0):
        """The next answer, of which 8 KiB are read at a time where there is a pace.

        Raises:
            Ended: the connection ended where an answer could have begun.
            EOFError: it ended in an answer.
            ConnectionError: the service had unread bytes when it closed.
        """
        async with asyncio.timeout(PATIENCE_S):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as exc:
                if exc.partial:
                    raise
                raise Ended from exc
            first, *lines = head[:-4].decode("latin-1").split("\r\n")
            assert first.startswith("HTTP/1.1 "), first
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body, left = b"", int(headers.get("content-length", "0"))
            while left > 0:
                piece = await self.reader.readexactly(min(left, 8192) if pace_s else left)
                body, left = body + piece, left - len(piece)
                await asyncio.sleep(pace_s)
        assert_discreet(body)
        return Answer(int(first.split()[1]), headers, body)

    async def answers(self):
        """All answers to the end of the connection."""
        found = []
        with contextlib.suppress(Ended):
            while True:
                found.append(await self.answer())
        return found

    async def send_until_answered(self, piece, most_bytes):
        """Send `piece` again and again; returns the answer, and how many bytes were sent."""
        answer, sent = asyncio.create_task(self.answer()), 0
        while sent < most_bytes and not answer.done():
            sending = asyncio.create_task(self.send(piece))
            await asyncio.wait({answer, sending}, return_when=asyncio.FIRST_COMPLETED)
            sending.cancel()
            sent += len(piece)
        return await answer, sent

    def reset(self):
        """Close it by RST."""
        reset_at_close(self.writer.get_extra_info("socket"))
        self.writer.transport.abort()

    async def close(self):
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def reset_at_close(connection):
    """Let a socket close by RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def ask(port, data):
    """The answer to `data` on a connection of its own, where no event loop runs."""

    async def ask_():
        async with await Connection.open(port) as connection:
            return await connection.ask(data)

    return asyncio.run(ask_())


def opened(port, data):
    """A socket on which `data` was sent."""
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    connection.sendall(data)
    return connection


def assert_discreet(content):
    """No stack trace and no path of a module is shown to a client."""
    for hint in (b"Traceback", b'File "', b".py", b"site-packages"):
        assert hint not in content, content[:2000]


class Digits:
    """Images whose probabilities are known and differ from each other.

    `images`: uint8 (n, 28, 28), blends of two golden digits, so that no two answers are alike.

    `probabilities`: float32 (n, 10), each computed alone, without batches. Any two differ by more
    than 1e-4 somewhere, so that an answer that was mixed up is seen.
    """

    def __init__(self, count, seed=0):
        weights = WeightFile.read(WEIGHTS / "lenet" / "2.safetensors")
        self.golden = weights.golden
        plan = open_backend(Target("cpu")).plan(weights, 1)
        generator = np.random.default_rng(seed)
        self.images = np.empty((count, 28, 28), np.uint8)
        self.probabilities = np.empty((count, 10), np.float32)
        made = 0
        while made < count:
            first, second = generator.choice(self.golden.images, 2)
            share = generator.uniform(0.35, 0.65)
            noise = generator.integers(-25, 26, first.shape)
            image = np.clip(share * first + (1 - share) * second + noise, 0, 255).astype(np.uint8)
            (answer,) = plan.run(image[np.newaxis]).probabilities
            nearest = np.abs(self.probabilities[:made] - answer).max(axis=1).min(initial=1.0)
            if answer.max() < 0.98 and nearest > 1e-4:
                self.images[made], self.probabilities[made] = image, answer
                made += 1

    def computed_by(self, weights):
        """Probabilities of `images`, each computed alone with `weights`; float32 (n, 10)."""
        plan = open_backend(Target("cpu")).plan(weights, 1)
        return np.concatenate([plan.run(image[np.newaxis]).probabilities for image in self.images])


class Known:
    """A service, and what it has to answer to `digits`.

    `expected`: float32 (n, 10) by version, in the order of `digits.images`.
    """

    def __init__(self, service, digits, expected=None, seed=0):
        self.service, self.digits = service, digits
        self.expected = expected or {"2": digits.probabilities}
        self.random, self.generator = random.Random(seed), np.random.default_rng(seed)
        self.answered = Counter()
        """Right answers by protocol."""

    async def connect(self, **options):
        return await Connection.open(self.service.port, **options)

    def choose(self, *sizes):
        """Rows and their images, each another one where there are enough."""
        size, count = self.random.choice(sizes), len(self.digits.images)
        rows = self.generator.choice(count, size, replace=size > count)
        return rows, self.digits.images[rows]

    def judge(self, rows, answer):
        """`answer`, of HTTP or gRPC, is what the version that it names answers to `rows`."""
        over_http = isinstance(answer, Answer)
        if over_http:
            found, version = answer.probabilities, answer.headers["x-model-version"]
        else:
            found = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(-1, 10)
            version = answer.model_version
        assert_same(found, self.expected[version][rows])
        self.answered["http ok" if over_http else "grpc ok"] += 1

    @contextlib.asynccontextmanager
    async def pinged(self, clock=time.monotonic, watched=lambda: None, every_s=0.005):
        """Single images on one kept connection while the block runs; all are answered right.

        `clock`: seconds, `time.monotonic` or those that the service has worked.
        Yields: the seconds of each, and what `watched` returned behind each.
        """

        async def ping():
            async with await self.connect() as connection:
                while not over.is_set() or not times_s:
                    rows, images = self.choose(1)
                    began_s = clock()
                    answer = await connection.ask(request(images.tobytes(), ACCEPT))
                    times_s.append(clock() - began_s)
                    seen.append(watched())
                    self.judge(rows, answer)
                    await asyncio.sleep(every_s)

        over, times_s, seen = asyncio.Event(), [], []
        pinging = asyncio.create_task(ping())
        try:
            yield times_s, seen
        finally:
            over.set()
            await pinging
