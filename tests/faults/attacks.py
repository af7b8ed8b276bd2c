"""What clients do to a service that it must survive, for tests and for the soak.

An attack is an async function of a `Known` service that fails where the service answers otherwise
than it has to.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import grpc
import numpy as np

from benchmarks.grpc_stub import Stub
from tests.faults import http2
from tests.faults.checks import cpu_s, decoding, samples, serving, total
from tests.faults.clients import (
    ACCEPT,
    JSON,
    Known,
    chunked,
    infer_request,
    request,
)
from tests.fuzz.target import mutated
from tests.pictures import FORM, long_form
from tests.service_process import PATIENCE_S
from tests.wire.test_http1 import ROWS

PNG = b"image/png"
MIB = 1 << 20
S_PER_MB = 0.05
START_S = 3.0
"""CPU time; a decoding process may have to be started first, which takes 0.2 s."""


class Attack(NamedTuple):
    """What clients do, and what it may cost.

    Attributes:
        do: sends, and checks what is answered.
        moved, rss_bytes, extra_descriptors: of `unharmed`; the first without answers that are ok.
    """

    do: Callable[[Known], Awaitable[None]]
    moved: dict[str, int] | None = None
    rss_bytes: int = 24 << 20
    extra_descriptors: int = 0


# Requests that are refused


async def _refused(known, status, data):
    async with await known.connect() as connection:
        answer = await connection.ask(data)
        assert answer.status == status, (data[:100], answer)


ONE = bytes(784)
LARGE_JSON = {
    "100,000 lists": (400, lambda: b'{"images":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a million keys": (
        400,
        lambda: b"{" + b",".join(b'"%d":0' % key for key in range(1_000_000)) + b"}",
    ),
    # They need more memory than a decoding process may use.
    "a string of 30 MB": (413, lambda: b'{"images":"' + b"a" * 30_000_000 + b'"}'),
    "30 MB of zeros": (413, lambda: b'{"images":[' + b"0," * 15_000_000 + b"0]}"),
}
"""Status and body."""


@contextlib.asynccontextmanager
async def channels(port, count=1):
    """Channels that share no connection, ready."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        opened = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(count)]
        for channel in opened:
            await stack.enter_async_context(channel)
            await asyncio.wait_for(channel.channel_ready(), PATIENCE_S)
        yield opened


async def status(call):
    """How `call` ends: the name of its status."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def _calls(known, expected, *asked, timeout_s=PATIENCE_S):
    """Calls on a connection of their own, and their statuses."""
    async with channels(known.service.grpc_port) as (channel,):
        for one in asked:
            found = await status(Stub(channel).ModelInfer(one, timeout=timeout_s))
            if found in ("UNAVAILABLE", "CANCELLED"):
                raise ConnectionError(found)
            assert found in expected, one


async def wrong_calls(known):
    image = np.zeros((1, 28, 28), np.uint8)
    for changes in ({"shape": (-1, 28, 28)}, {"shape": (2**62 + 1, 28, 28)}, {"raw": [b""]}):
        await _calls(known, ("INVALID_ARGUMENT",), infer_request(image, **changes))
    await _calls(known, ("INVALID_ARGUMENT",), infer_request(image, datatype="FP64"))
    await _calls(known, ("NOT_FOUND",), infer_request(image, model="vgg"))


REQUESTS = [data.replace(b" /fast ", b" /predict ") for data, _ in ROWS.values()]


async def mangled(known, cases=20):
    """Those of wire's table, mangled as by the fuzzer: a 4xx, or the end of the connection."""
    for _ in range(cases):
        data = mutated(known.random.choice(REQUESTS), known.random, 4000, REQUESTS)
        received = b""
        async with await known.connect() as connection, asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                connection.writer.write(data)
                connection.writer.write_eof()
                received = await connection.reader.read()
        assert b"Traceback" not in received
        found = {*re.findall(rb"^HTTP/1\.1 (\d{3}) ", received, re.MULTILINE)}
        wrong = {one for one in found if one[:1] == b"5"} - {b"501", b"505"}
        assert not wrong, (data, received[:500])


# Bodies without an end


class Flood(NamedTuple):
    """The beginning of a request, what follows again and again, and when that has to end."""

    begin: bytes
    piece: bytes
    status: int
    most_bytes: int


async def _flood(known, flood):
    async with await known.connect() as connection:
        await connection.send(flood.begin)
        most_bytes = flood.most_bytes + len(flood.piece)
        answer, sent = await connection.send_until_answered(flood.piece, most_bytes)
        assert answer.status == flood.status
        assert sent <= flood.most_bytes


FLOODS = {
    # 64 KiB are allowed. The rest is on its way, in buffers of the sockets.
    "trailers": Flood(chunked(b"0\r\n"), b"X: 1\r\n" * 20_000, 400, 20 * MIB),
    "chunk extensions": Flood(chunked(b""), b"1;" + b"a" * 100_000, 400, 20 * MIB),
    "a length over the limit": Flood(request(b"", length=10 << 30), bytes(MIB), 413, 16 * MIB),
    "chunks over the limit": Flood(
        *(chunked(b""), b"100000\r\n" + bytes(MIB) + b"\r\n", 413, 48 * MIB)
    ),
    # Refused by its name: nothing is moved.
    "a coding": Flood(
        *(request(b"", b"Content-Encoding: br", length=10 * MIB), bytes(MIB), 415, 10 * MIB)
    ),
}


async def tiny_chunks(known):
    """90 images in 70,560 chunks."""
    rows, images = known.choose(90)
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in images.tobytes()) + b"0\r\n\r\n"
    async with await known.connect() as connection:
        known.judge(rows, await connection.ask(chunked(pieces, ACCEPT)))


async def compressed_bombs(known, count=20):
    """Each is 1 GiB decompressed."""
    bomb = request(gzip.compress(bytes(1 << 30), 1), b"Content-Encoding: gzip", kind=JSON)
    for _ in range(count):
        await _refused(known, 413, bomb)


# Many requests on a connection


async def pipelined(known, count=2000, size=1):
    """Requests that are sent, 300 KB at a time, before the answers are read."""
    asked = [known.choose(size) for _ in range(count)]
    data = b"".join(request(images.tobytes(), ACCEPT) for _, images in asked)
    async with await known.connect() as connection:
        sending = asyncio.create_task(connection.send(data))
        for rows, _ in asked:
            known.judge(rows, await connection.answer())
        await sending


async def garbage_behind(known):
    """What follows a request takes no answer from it."""
    garbage = b"GARBAGE\r\n\r\n"
    for together in (True, False):
        async with await known.connect() as connection:
            rows, images = known.choose(64)
            await connection.send(request(images.tobytes(), ACCEPT) + garbage * together)
            await connection.send(garbage * (not together))
            known.judge(rows, await connection.answer())
            assert [one.status for one in await connection.answers()] == [400]


UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAA")


async def ignored(known):
    """An upgrade and a trailer are ignored, and the body is read."""
    rows, images = known.choose(1)
    body = images.tobytes()
    trailer = b"310\r\n%b\r\n0\r\nX-Request-Timeout-Ms: never\r\n\r\n" % body
    async with await known.connect() as connection:
        for data in (request(body, ACCEPT, *UPGRADE), chunked(trailer, ACCEPT)):
            known.judge(rows, await connection.ask(data))


async def scrapes(known):
    """A hundred, whose Accept takes long to read."""
    accept = b"Accept: " + b"application/openmetrics-text;q=0.1, " * 1500 + b"*/*"
    async with await known.connect() as connection:
        for _ in range(100):
            data = request(None, accept, method=b"GET", path=b"/metrics")
            assert (await connection.ask(data)).status == 200


# Slow clients


async def slow_sender(known):
    """Sends for two seconds."""
    rows, images = known.choose(1, 64)
    data = request(images.tobytes(), ACCEPT)
    async with await known.connect() as connection:
        for start in range(0, len(data), len(data) // 20 + 1):
            await connection.send(data[start : start + len(data) // 20 + 1])
            await asyncio.sleep(0.1)
        known.judge(rows, await connection.answer())


async def _stalled(known, length, sent=100):
    """A body of which no more than a byte comes now and then: it is given up at its deadline."""
    async with await known.connect() as connection:
        head = request(bytes(sent), b"X-Request-Timeout-Ms: 1500", length=length)
        answer, _ = asyncio.create_task(connection.answer()), await connection.send(head)
        while not answer.done():
            await connection.send(b"a")
            await asyncio.wait({answer}, timeout=0.1)
        assert (await answer).status == 408


async def _idle(known, data=b""):
    """A connection on which no request ends, for two seconds."""
    async with await known.connect() as connection:
        await connection.send(data)
        for _ in range(20):
            await connection.send(b"a" * bool(data))
            await asyncio.sleep(0.1)


HEAD = b"POST /predict HTTP/1.1\r\nHost: a\r\nX: "


async def crowd(known):
    """A hundred slow clients at once."""
    bodies = [_stalled(known, length) for length in (784, 5_000_000) for _ in range(25)]
    others = [_idle(known, data) for data in (HEAD, b"") for _ in range(25)]
    await asyncio.gather(*bodies, *others)


async def slow_reader(known):
    """Takes a second for the answer to 2,000 images."""
    rows, images = known.choose(2000)
    async with await known.connect(receive_buffer=4096) as connection:
        await connection.send(request(images.tobytes(), ACCEPT))
        known.judge(rows, await connection.answer(pace_s=0.1))


async def two_seconds():
    await asyncio.sleep(2)


async def never_reads(known, data, count, meanwhile=two_seconds):
    """`count` connections on which `data` is sent and nothing read until `meanwhile` is over."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            opening = known.connect(receive_buffer=4096)
            connection = await stack.enter_async_context(await opening)
            connection.writer.transport.pause_reading()
            connection.writer.write(data)
        await meanwhile()


async def explanations_unread(known):
    """5.6 MB of answers on a connection; the kernel takes 3 MB, and the rest is not computed."""

    def explained():
        return total(samples(known.service), "lenet_explanation_duration_seconds_count")

    async def until_none_moves():
        began, found = -1, await asyncio.to_thread(explained)
        while found > began:
            await asyncio.sleep(0.5)
            began, found = found, await asyncio.to_thread(explained)
        assert found - before < 4 * 200

    before = await asyncio.to_thread(explained)
    await never_reads(known, request(ONE, path=b"/explain") * 200, 4, until_none_moves)


# Clients that leave


async def leaving(known):
    """Resets a connection, or cancels a call, while it is worked on."""
    _, images = known.choose(1, 16, 300)
    wait_s = known.random.expovariate(1 / 0.005)
    if known.random.random() < 0.3:
        async with channels(known.service.grpc_port) as (channel,):
            call = Stub(channel).ModelInfer(infer_request(images), timeout=PATIENCE_S)
            await asyncio.sleep(wait_s)
            call.cancel()
            return
    connection, data = await known.connect(), request(images.tobytes())
    connection.writer.write(data[: known.random.randrange(1, len(data) + 1)])
    await asyncio.sleep(wait_s)
    connection.reset()


async def hurried(known):
    """Has a deadline of 1 ms."""
    rows, images = known.choose(1, 16, 64)
    async with await known.connect() as connection:
        hurry = b"X-Request-Timeout-Ms: 1"
        answer = await connection.ask(request(images.tobytes(), ACCEPT, hurry))
        if answer.status not in (408, 504):
            known.judge(rows, answer)


async def hurried_calls(known, count=50):
    """Deadlines of 1 to 6 ms, which pass as the client leaves."""
    for turn in range(count):
        asked = infer_request(known.choose(1)[1])
        await _calls(known, ("OK", "DEADLINE_EXCEEDED"), asked, timeout_s=0.001 * (1 + turn % 6))


async def abandoned_forms(known):
    """Six forms whose decoding takes 4 s each."""
    body = long_form()
    for _ in range(6):
        connection = await known.connect()
        await connection.send(request(body, kind=FORM.encode()))
        connection.reset()


# HTTP/2

ENDED = ("new-headers-480", "reset", "window-settings")
"""Attacks whose connections are ended, whatever else they would take."""


async def over_http2(known, kind):
    """Two connections for 1.5 s, or until one that has to be ended is.

    Of processes of their own: with threads of this one, whoever measures how soon others are
    answered waits for its interpreter, while the service works on the attack.
    """
    port, end_s = known.service.grpc_port, time.monotonic() + PATIENCE_S
    run = asyncio.get_running_loop().run_in_executor
    pool = ProcessPoolExecutor(2, get_context("spawn"))
    try:
        while True:
            attacks = (run(pool, http2.attack, port, kind, 1.5) for _ in range(2))
            connections = sum(await asyncio.gather(*attacks))
            if kind not in ENDED or connections > 2:
                return
            assert time.monotonic() < end_s, "no connection was ended"
    finally:
        # Apart from this thread, which would not read an answer while it waits.
        await asyncio.to_thread(pool.shutdown)


async def _large_json(known, status, make):
    """Refused in time that is linear in its bytes."""
    service, body = known.service, make()
    began_s = cpu_s(*serving(service), *decoding(service))
    await _refused(known, status, request(body, kind=JSON))
    took_s = cpu_s(*serving(service), *decoding(service)) - began_s
    assert took_s < START_S + S_PER_MB * len(body) / 1e6


DOCUMENT = request(method=b"GET", path=b"/openapi.json")
TOO_LARGE, UNSUPPORTED = {"http too_large": 1}, {"http unsupported_media_type": 1}
MOVED = {413: TOO_LARGE, 415: UNSUPPORTED}
SHORT = {
    "wrong calls": wrong_calls,
    "mangled requests": mangled,
    "pipelined": partial(pipelined, count=20, size=5),
    "garbage behind": garbage_behind,
    "upgrade and trailer": ignored,
    "slow sender": slow_sender,
    "stalled sender": partial(_stalled, length=784),
    "slow reader": slow_reader,
    "leaving": leaving,
    "hurried": hurried,
    "hurried calls": hurried_calls,
}
"""For the soak, where they run beside each other."""

ATTACKS = {
    # 60 MB are the promise for any burst of refused bodies, and what a body of 30 MB may take.
    **{
        name: Attack(
            partial(_large_json, status=status, make=make),
            *(TOO_LARGE if status == 413 else {"http invalid_input": 1}, 60_000_000, 8),
        )
        for name, (status, make) in LARGE_JSON.items()
    },
    **{
        name: Attack(partial(_flood, flood=flood), MOVED.get(flood.status))
        for name, flood in FLOODS.items()
    },
    "tiny chunks": Attack(tiny_chunks, {}, 8 * MIB),
    "compressed bombs": Attack(compressed_bombs, {"http too_large": 20}, 60_000_000, 8),
    "pipelined megabytes": Attack(pipelined, {}),
    "scrapes": Attack(scrapes, {}),
    "a hundred slow clients": Attack(crowd, {"http body_timeout": 50}),
    # 300 KB of JSON each.
    "unread answers": Attack(
        partial(never_reads, data=request(ONE * 2000), count=4), None, 60_000_000
    ),
    "unread explanations": Attack(explanations_unread, None, 60_000_000),
    # 256 KiB of requests each, whose answers would be hundreds of MB.
    "unread documents": Attack(
        partial(never_reads, data=DOCUMENT * ((256 << 10) // len(DOCUMENT)), count=20),
        *(None, 40_000_000),
    ),
    "abandoned forms": Attack(abandoned_forms, None, 60_000_000, 8),
    **{
        f"HTTP/2 {kind}": Attack(partial(over_http2, kind=kind), None, 60_000_000)
        for kind in http2.ATTACKS
    },
}
