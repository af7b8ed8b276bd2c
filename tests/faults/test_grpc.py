"""gRPC of a real process: memory, ten thousand calls, silence, stops, certificates."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import signal
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from benchmarks.grpc_stub import Stub
from service.errors import ExitCode
from service.forms import open_inference_pb2 as pb
from tests.faults import http2
from tests.faults.attacks import channels, status
from tests.faults.checks import loop_s, outcomes, resident_bytes, samples, serving, until
from tests.faults.clients import infer_request, reset_at_close
from tests.service.test_every_route import Certificates
from tests.service_process import PATIENCE_S
from tests.wire import test_http2 as h2
from wire.http2 import MAX_STREAMS
from wire.streams import MAX_OPEN_STREAMS

MB = 1e6
BUDGET_BYTES = 128 * 1024 * 1024
OK, EXHAUSTED, UNAVAILABLE = "OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE"
INVALID, LATE = "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"
IMAGE = np.zeros((1, 28, 28), np.uint8)
ONE = infer_request(IMAGE)
LARGE = infer_request(np.zeros((16384, 28, 28), np.uint8))
"""12.8 MB, 12 KB compressed."""

GZIP = grpc.Compression.Gzip


async def statuses(opened, count, asked, timeout_s=PATIENCE_S, compression=None):
    """Make `count` calls at once; how many ended with which status."""
    stubs, options = [Stub(channel) for channel in opened], {"compression": compression}
    calls = [
        stubs[number % len(stubs)].ModelInfer(asked, timeout=timeout_s, **options)
        for number in range(count)
    ]
    return collections.Counter(await asyncio.gather(*map(status, calls)))


def counted(service):
    """Requests over gRPC by outcome; they are flushed each second."""
    found = outcomes(samples(service)).items()
    grpc_ = {key.removeprefix("grpc "): count for key, count in found if key.startswith("grpc ")}
    return collections.Counter(grpc_)


@contextlib.asynccontextmanager
async def bounded(service, peak_bytes, left_bytes=60 * MB):
    """Inside, the process grows by at most `peak_bytes` and answers /healthz; it keeps little."""

    def probe_s():
        """CPU time of the event loop until it answers; on a thread, which no call holds up."""
        began_s = loop_s(service)
        assert service.get("/healthz")[0] == 200
        return loop_s(service) - began_s

    async def watch():
        while not over.is_set():
            probes_s.append(await asyncio.to_thread(probe_s))
            grown.append(resident_bytes(service.process.pid) - before)
            await asyncio.sleep(0.005)

    over, probes_s, grown = asyncio.Event(), [], []
    before = resident_bytes(service.process.pid)
    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        over.set()
        await watching
    assert max(grown) < peak_bytes
    assert max(probes_s) < 1
    until(lambda: resident_bytes(service.process.pid) - before < left_bytes)


async def test_memory_is_bounded_when_many_large_messages_come_at_once(start):
    service = start().ready()
    async with channels(service.grpc_port, 8) as opened:
        await statuses(opened, 1, LARGE)
        for _ in range(2):
            # Beside the budget: what arrives while the event loop copies messages that are there
            # (20 ms each), three copies of one, and two messages in the queue of images. Measured
            # 205 to 306 MB in all on two shared cores, 2026-11-22; 1,500 MB without admission.
            async with bounded(service, BUDGET_BYTES + 200 * MB):
                found = await statuses(opened, 64, LARGE)
            # Those that arrive slowly, while others need the memory, are late.
            assert set(found) <= {OK, EXHAUSTED, LATE}
            assert found[OK] >= 2
    assert "Traceback" not in service.log


async def test_memory_is_bounded_when_many_small_messages_are_large_ones_compressed(start):
    service = start().ready()
    async with channels(service.grpc_port, 8) as opened:
        assert await statuses(opened, 1, LARGE, compression=GZIP) == {OK: 1}
        async with bounded(service, 100 * MB):  # one after another is decompressed
            found = await statuses(opened, 32, LARGE, compression=GZIP)
        assert set(found) <= {OK, EXHAUSTED}
        assert found[OK] >= 2
        async with bounded(service, 60 * MB):  # larger than a message may be
            too_large = infer_request(IMAGE, raw=[bytes(40_000_000)])
            found = await statuses(opened, 8, too_large, compression=GZIP)
        assert set(found) <= {INVALID, EXHAUSTED}


async def test_refused_messages_leave_nothing_behind(start):
    service = start().ready()
    wrong = infer_request(IMAGE, raw=[bytes(12_800_000)])
    async with channels(service.grpc_port) as opened:
        await statuses(opened, 1, wrong)
        async with bounded(service, BUDGET_BYTES):
            for _ in range(32):
                assert await statuses(opened, 1, wrong) == {INVALID: 1}
    until(lambda: counted(service) == {"invalid_input": 33})


async def test_every_call_is_answered_and_counted_when_ten_thousand_come_at_once(start):
    service = start("--max-queue-rows", "512", "--max-images", "512").ready()
    async with channels(service.grpc_port, 10) as opened:
        found = await statuses(opened, 10_000, ONE)
    assert set(found) <= {OK, EXHAUSTED}
    expected = +collections.Counter(ok=found[OK], overloaded=found[EXHAUSTED])
    until(lambda: counted(service) == expected)


async def test_other_calls_are_answered_when_silent_ones_take_every_place(start):
    service = start().ready()
    count = MAX_OPEN_STREAMS // MAX_STREAMS + 2
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(http2.connect(service.grpc_port)) for _ in range(count)]
        async with channels(service.grpc_port) as opened:
            for connection in silent:
                connection.sendall(http2.OPENING + http2.SILENT)
                assert await statuses(opened, 1, ONE) == {OK: 1}
            assert service.get("/healthz")[0] == 200
            first = b""
            while h2.field(b"grpc-status", b"8") not in first:  # who waits longest gives way
                data = silent[0].recv(1 << 16)
                assert data
                first += data
        silent_calls = count * http2.SILENT_CALLS
        until(lambda: counted(service)["overloaded"] >= silent_calls - MAX_OPEN_STREAMS)

    def ended():
        found = counted(service)
        return found["overloaded"] + found["cancelled"]

    until(lambda: ended() >= silent_calls)
    assert ended() == silent_calls
    assert set(counted(service)) == {"ok", "overloaded", "cancelled"}


async def test_streams_that_send_nothing_do_not_delay_a_stop(start):
    service = start("--drain-timeout-s", "3600").ready()
    method = "/inference.GRPCInferenceService/ModelInfer"
    async with channels(service.grpc_port, 2) as opened:
        streams = [opened[number % 2].stream_unary(method)() for number in range(40)]
        ends = [asyncio.create_task(status(stream)) for stream in streams]
        assert await statuses(opened, 1, ONE) == {OK: 1}
        service.signal()
        assert set(await asyncio.gather(*ends)) == {UNAVAILABLE}
    assert service.wait() == ExitCode.STOPPED


@pytest.mark.parametrize(
    ("count", "workers"),
    [(6000, 1), pytest.param(20_000, 2, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("mutual", [False, True], ids=["TLS", "mutual TLS"])
def test_clients_that_come_and_go_over_tls_do_not_end_the_process(
    start, tmp_path, count, workers, mutual
):
    certificates = Certificates(tmp_path)
    flags = [*certificates.flags, "--workers", str(workers)]
    flags += ["--tls-client-ca", str(certificates.ca)] * mutual
    service = start(*flags).ready(workers)
    context, greeting = certificates.context(client=mutual), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), greeting, server_hostname="localhost").do_handshake()
    hello = greeting.read()
    numbers, failures = itertools.count(), []

    def visit():
        while (number := next(numbers)) < count and not failures:
            sent = (b"GET / HTTP/1.1\r\n\r\n", b"", hello[:100], hello, hello, None)[number % 6]
            try:
                address = ("127.0.0.1", service.grpc_port)
                with socket.create_connection(address, PATIENCE_S) as connection:
                    if sent is not None:
                        connection.sendall(sent)
                        if number % 6 == 4:
                            reset_at_close(connection)
                    else:
                        context.wrap_socket(connection, server_hostname="localhost").close()
            except OSError as exc:
                failures.append(exc)

    pids, lines = serving(service), len(service.lines)
    before = resident_bytes(*pids)
    with ThreadPoolExecutor(8) as pool:
        for one in [pool.submit(visit) for _ in range(8)]:
            one.result()
    assert failures == []
    assert resident_bytes(*pids) - before < 60 * MB
    assert service.lines[lines:] == []
    credentials = certificates.credentials(client=mutual)
    with grpc.secure_channel(f"localhost:{service.grpc_port}", credentials) as channel:
        assert Stub(channel).ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S).live
    assert service.process.poll() is None
    assert len(service.started_workers()) == (workers if workers > 1 else 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_call_is_lost_when_the_certificate_is_renewed(start, tmp_path, workers):
    certificates = Certificates(tmp_path)
    service = start(*certificates.flags, "--workers", str(workers)).ready(workers)
    ended, failures, answered = threading.Event(), [], collections.Counter()
    target, credentials = f"localhost:{service.grpc_port}", certificates.credentials()
    options = [("grpc.use_local_subchannel_pool", 1)]

    def call(kept):
        """Calls on one connection, or on a new one each."""
        while not ended.is_set():
            with grpc.secure_channel(target, credentials, options) as channel:
                infer, again = Stub(channel).ModelInfer, True
                while again and not ended.is_set():
                    try:
                        infer(ONE, timeout=PATIENCE_S)
                    except grpc.RpcError as error:
                        failures.append(error)
                    answered[kept] += 1
                    again = kept

    with ThreadPoolExecutor(3) as pool:
        for kept in (True, True, False):
            pool.submit(call, kept)
        try:
            for number in range(1, 11):
                certificates.renew()
                service.signal(signal.SIGHUP)
                service.wait_for("certificate: read again", workers * number)
                enough = answered[False] + 2
                until(lambda enough=enough: answered[False] >= enough or failures)
        finally:
            ended.set()
    assert failures == []
    assert "Traceback" not in service.log
