"""Connections over time: order, limits, clients that leave or do not read, a stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import itertools
import random
import resource
import socket
import ssl
import struct
import threading
from pathlib import Path

import orjson
import pytest
import trustme
import uvloop

from service.api.schemas import ErrorResponse
from tests.service_process import PATIENCE_S
from tests.wire import doors
from tests.wire.doors import HUGE, MEBIBYTE, running, until
from tests.wire.test_http2 import (
    END,
    GOAWAY,
    HEADERS,
    PING,
    START,
    data,
    frames,
    get,
    ping,
    reset,
)
from tests.wire.test_http2 import post as h2_post
from wire import door
from wire.budget import UNUSED_BYTES
from wire.errors import Overloaded, TooLarge, Unavailable
from wire.gate import Gate
from wire.tls import CertificateFiles, ServedCertificate

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def post(body=b"", path=b"/fast", *lines):
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % (path, len(body))
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def error(answer, status):
    """The message of an answer that ends the connection."""
    assert answer[0] == status
    assert answer[1]["content-type"] == "application/json"
    assert answer[1]["connection"] == "close"
    found = ErrorResponse.model_validate(orjson.loads(answer[2]), strict=True).error
    assert (found.code, found.field) == ("invalid_input", "")
    return found.message


@pytest.fixture
async def server():
    async with running() as server:
        yield server


@pytest.fixture(params=["clear", "TLS"])
def tls(request, tmp_path):
    """Options of `running`: without TLS, and with it."""
    if request.param == "clear":
        return None, None
    authority = trustme.CA()
    leaf, files = (
        authority.issue_cert("localhost"),
        CertificateFiles(tmp_path / "a", tmp_path / "k"),
    )
    leaf.private_key_pem.write_to_path(files.key)
    leaf.cert_chain_pems[0].write_to_path(files.certificate)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return ServedCertificate(files), context


async def connect(server):
    """A client, and the server's side of its connection, whose reads a test can do itself."""
    before = set(server.door.connections)
    client = await server.open()
    await until(lambda: server.door.connections - before)
    (connection,) = server.door.connections - before
    return client, connection


async def opened_http2(client, connection):
    """The server's side of HTTP/2 behind the client's preface and settings."""
    client.send(START)
    await until(lambda: hasattr(connection.exchanges, "http2"))
    await until(lambda: not connection.exchanges.http2.opening)
    return connection.exchanges.http2


# Order


async def test_requests_of_a_connection_are_served_one_at_a_time_in_order(server):
    server.route.hold = True
    client = await server.open()
    client.send(post(b"1") + post(b"2") + post(b"app", b"/x") + GET + post(b"3"))
    for count, body in enumerate((b"1", b"2"), start=1):
        await until(lambda: server.route.held)
        assert len(server.route.calls) == count
        server.route.release()
        assert (await client.answer())[2] == body
    assert (await client.answer())[2] == b"app"
    assert (await client.answer())[2] == b""
    await until(lambda: server.route.held)
    server.route.release()
    assert (await client.answer())[2] == b"3"


async def test_other_connections_come_between_the_requests_of_a_busy_one(server):
    busy, other = await server.open(), await server.open()
    busy.send(post(b"", b"/fast?x=1") * 4000)
    await until(lambda: server.route.refused)
    other.send(post(b"other"))
    await until(lambda: server.route.calls)
    assert server.route.refused < 2000, "one read brings some 3,700 of them"
    assert (await other.answer())[0] == 200


# Large bodies, which are received where they belong

LARGE = random.Random(0).randbytes(1_000_000)
SMALL = post(b"0123456789")


def with_large_bodies(test):
    """Run `test(server)` on both event loops."""

    @pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def run(loop, monkeypatch):
        async def main():
            async with running() as server:
                await test(server)

        monkeypatch.setattr(doors, "MAX_BODY_BYTES", 1 << 24)
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())

    run.__name__ = test.__name__
    return run


async def half_sent(server):
    """A client that has sent half of a large body, the call and the server's connection."""
    client, connection = await connect(server)
    calls = server.route.calls
    calls.clear()
    client.send(post(LARGE)[: len(LARGE) // 2])
    await until(lambda: calls and calls[-1].arrived_bytes > 400_000)
    return client, calls[-1], connection


@with_large_bodies
async def test_a_large_body_is_whole_wherever_it_is_cut(server):
    cuts = random.Random(1)
    for _ in range(20):
        client, sent = await server.open(), post(LARGE) + SMALL + post(LARGE) + GET
        while sent:
            size = min(cuts.choice([1, 1000, 100_000, 1_000_000]), cuts.randrange(1, 1_000_001))
            client.send(sent[: max(size, 200)])
            sent = sent[max(size, 200) :]
            await asyncio.sleep(0.002 * cuts.randrange(2))
        bodies = [(await client.answer())[2] for _ in range(4)]
        assert bodies == [LARGE, b"0123456789", LARGE, b""]
    assert any(call.arrived_bytes == len(LARGE) for call in server.route.calls)


@with_large_bodies
async def test_an_idle_connection_holds_no_large_body(server):
    client, call, _ = await half_sent(server)
    client.send(post(LARGE)[len(LARGE) // 2 :])
    assert (await client.answer())[2] == LARGE
    call.body.append(0)  # impossible while a view of it is left


@with_large_bodies
async def test_a_client_that_leaves_amid_a_large_body_cancels_its_request(server):
    for leave in ("close", "write_eof"):
        client, call, connection = await half_sent(server)
        getattr(client.writer, leave)()
        await until(lambda call=call: call in server.route.cancelled)
        await until(lambda one=connection: one not in server.door.connections)


@with_large_bodies
async def test_a_large_body_whose_request_fails_is_forgotten_and_the_answer_comes(
    server,
):
    for fault, status in (("refused", 413), ("a bug", 500), ("given up", 503)):
        client, call, connection = await half_sent(server)
        if fault == "refused":
            call.fail(TooLarge("planted", field="body"))
        elif fault == "given up":
            connection.give_up(Unavailable("planted"))
        else:
            call.arrived = None
        client.send(post(LARGE)[len(LARGE) // 2 :])
        answer = await client.answer()
        assert (answer[0], answer[1]["connection"]) == (status, "close")
        assert connection.transport.get_protocol() is connection, "the memory is held"
        assert await client.rest() == b""


# Early answers


async def test_a_client_that_waits_is_refused_without_being_asked_for_its_body(server):
    server.route.is_unknown = True
    client = await server.open()
    client.send(post(b"abc", b"/fast", b"Expect: 100-continue")[:-3])
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (404, "close")
    assert await client.rest() == b""


async def test_a_preflight_keeps_its_connection():
    preflight = GET.replace(b"GET", b"OPTIONS").replace(
        b"a\r\n", b"a\r\nOrigin: http://b\r\nAccess-Control-Request-Method: POST\r\n", 1
    )
    async with running(gate=Gate(origins=("*",))) as server:
        client = await server.open()
        for request in (preflight, GET):
            client.send(request)
            status, headers, _ = await client.answer()
            assert (status, headers.get("connection")) == (200, None)


@pytest.mark.parametrize("length", [b"Content-Length: 34000000", b"Transfer-Encoding: chunked"])
async def test_an_early_413_is_seen_by_a_client_that_sends_on(server, length):
    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        try:
            body = bytes(34_000_000)
            name, value = length.decode().split(": ")
            chunked = "chunked" in value
            content = iter([body[: 10**6]] * 34) if chunked else body
            connection.request("POST", "/fast", content, {name: value}, encode_chunked=chunked)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    for _ in range(3):
        status, body = await asyncio.to_thread(ask)
        assert status == 413
        assert orjson.loads(body)["error"]["field"] == "body"


async def test_what_is_drained_after_an_early_answer_is_bounded(server):
    client = await server.open()
    client.send(post(b"", b"/fast").replace(b"Length: 0", b"Length: 9999999999"))
    assert (await client.answer())[0] == 413

    async def send_on():
        for _ in range(200):
            client.send(bytes(1 << 20))
            await client.writer.drain()

    with pytest.raises(ConnectionError):
        await send_on()


def test_the_body_of_a_refused_request_has_a_limited_time(run_virtually):
    async def main(_):
        async with running(header_timeout_s=0.2) as server:
            client = await server.open()
            client.send(post(bytes(5000), b"/fast?x=1")[:-4000])

            async def trickle():
                while True:
                    client.send(b"a")
                    await client.writer.drain()
                    await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            status, headers, _ = await client.answer()
            trickling.cancel()
            assert (status, headers["connection"]) == (400, "close")

    run_virtually(main)


async def test_a_client_that_ends_its_data_within_a_refused_body_gets_the_refusal(server):
    client = await server.open()
    client.send(post(bytes(1000), b"/fast?x=1")[:-10])
    await until(lambda: server.route.refused)
    client.writer.write_eof()
    assert (await client.answer())[0] == 400
    assert await client.rest() == b""


async def test_nothing_is_written_into_an_answer_that_has_begun(server):
    client = await server.open()
    client.send(
        b"POST /streams HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    )
    await client.reader.readuntil(b"first\r\n")
    client.send(b"zz\r\n")
    with contextlib.suppress(ConnectionError):
        assert await client.rest() == b""


# Time


async def test_large_headers_count_in_the_budget_while_they_arrive(server):
    client, connection = await connect(server)
    client.send(GET[:-2] + b"X: " + b"a" * 60_000)
    await until(lambda: connection.exchanges.http1.header_bytes > 60_000)
    assert server.door.budget.held_bytes > 60_000
    client.send(b"\r\n\r\n")
    assert (await client.answer())[0] == 200
    assert server.door.budget.held_bytes == 0


async def test_empty_lines_give_a_client_no_more_time(server):
    client, connection = await connect(server)
    for count in (1, 2):
        client.send(b"\r\n")
        await until(lambda: connection.exchanges.http1.header_bytes == 2 * count)  # noqa: B023
        connection.since_s -= 9
    connection.check_time(asyncio.get_running_loop().time())
    assert connection.transport.is_closing()


async def test_time_for_a_head_begins_with_it_when_an_empty_line_came_long_before(server):
    client, connection = await connect(server)
    client.send(post(b"abc") + b"\r\n")
    assert (await client.answer())[0] == 200
    http1 = connection.exchanges.http1
    await until(lambda: http1.header_bytes == 2)
    connection.since_s -= 12  # more than a head may take, and less than a connection may rest
    client.send(GET[:9])
    await until(lambda: http1.in_headers)
    connection.check_time(asyncio.get_running_loop().time())
    assert not connection.transport.is_closing()


async def test_a_fault_in_one_connections_times_leaves_the_others_theirs(caplog):
    async with running(header_timeout_s=0.04) as server:
        client, connection = await connect(server)
        connection.check_time = None  # raises TypeError
        for _ in range(2):
            slow = await server.open()
            slow.send(GET[:9])
            assert await slow.rest() == b""
    assert caplog.messages.count("a connection failed") == 1
    assert await client.rest() == b""


async def test_time_begins_anew_with_each_header_block_that_has_come_in_part(server):
    client, connection = await connect(server)
    http2 = await opened_http2(client, connection)
    asked = get(path=b"/fast")
    client.send(asked[:5])
    await until(lambda: http2.unfinished is not None)
    connection.exchanges._unfinished_s -= 9.9
    before, next_one = http2.unfinished, get(path=b"/fast", stream=3)
    client.send(asked[5:] + next_one[:5])
    await until(lambda: http2.unfinished != before)
    connection.check_time(connection.exchanges.active_s + 5)
    assert not connection.transport.is_closing()


async def with_bodies_that_wait(server, count):
    """A client with `count` bodies of 60,000 bytes behind as many requests as may run at a time."""
    client, connection = await connect(server)
    http2 = await opened_http2(client, connection)
    for stream in (1, 3, 5, 7):
        client.send(get(path=b"/waits", stream=stream))
    for stream in range(9, 9 + 2 * count, 2):
        client.send(h2_post(stream) + data(stream, bytes(15_000)) * 4)
    return client, http2


async def test_bodies_that_wait_for_the_application_count_until_the_connection_ends(server):
    client, http2 = await with_bodies_that_wait(server, 3)
    await until(lambda: http2.received_bytes == 3 * 60_000)
    assert server.door.budget.held_bytes == 3 * 60_000
    client.writer.transport.abort()
    await until(lambda: not server.door.connections)
    assert server.door.budget.held_bytes == 0
    assert http2.received_bytes == 0


async def test_a_body_over_http_2_is_not_late_while_the_application_has_some_of_it(server):
    client, connection = await connect(server)
    http2 = await opened_http2(client, connection)
    for stream in (1, 3, 5, 7):  # as many as the application answers at a time
        client.send(get(path=b"/waits", stream=stream))
    client.send(h2_post(9) + data(9, b"some"))
    await until(lambda: http2.received_bytes == 4)
    exchange = http2.streams[9].exchange
    exchange.since_s -= 1000
    connection.check_time(asyncio.get_running_loop().time())
    assert 9 in http2.streams
    client.send(reset(1))  # now the application takes it, and waits for the rest
    await until(lambda: http2.received_bytes == 0)
    connection.check_time(asyncio.get_running_loop().time())
    assert 9 in http2.streams
    exchange.since_s -= 1000
    connection.check_time(asyncio.get_running_loop().time())
    assert 9 not in http2.streams


async def test_a_client_of_http_2_is_not_asked_for_its_body_amid_its_answer(server):
    client, connection = await connect(server)
    http2 = await opened_http2(client, connection)
    expect = (b"expect", b"100-continue")
    client.send(h2_post(1, expect, path=b"/streams"))
    await until(lambda: http2.streams and http2.streams[1].exchange._begun)
    client.send(ping())
    kinds = []
    while PING not in kinds:
        head = await client.reader.readexactly(9)
        payload = await client.reader.readexactly(int.from_bytes(head[:3], "big"))
        kinds += [kind for kind, *_ in frames(head + payload)]
    assert kinds.count(HEADERS) == 1


async def test_a_reset_and_more_at_a_stop_end_the_connection_quietly(server, caplog):
    client, connection = await connect(server)
    http2 = await opened_http2(client, connection)
    client.send(get(path=b"/waits"))
    await server.events["waits"].wait()
    server.stop()
    await until(lambda: http2.ending)
    client.send(reset(1) + ping())
    assert await client.rest()
    assert caplog.messages == []


async def test_the_connection_that_keeps_most_ends_when_too_much_waits(server, caplog):
    for other in range(64):
        server.door.budget.keep(other, (UNUSED_BYTES - 590_000) // 64)
    _, http2 = await with_bodies_that_wait(server, 10)
    await until(lambda: not server.door.connections)
    assert server.door.budget.held_bytes == 0
    assert http2.received_bytes == 0
    assert not caplog.records


@pytest.mark.parametrize("tls", ["TLS"], indirect=True)
def test_clients_that_reset_after_their_hello_leave_nothing_behind(tls, caplog):
    greeting = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        tls[1].wrap_bio(ssl.MemoryBIO(), greeting, server_hostname="localhost").do_handshake()
    hello = greeting.read()

    def visit(port):
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(hello)

    async def main():
        async with running(tls) as server:
            await asyncio.to_thread(visit, server.port)
            await until(lambda: not server.door.connections)
            kept = [one for one in gc.get_objects() if type(one).__name__ == "SSLObject"]
            assert not kept

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert not caplog.records


@pytest.mark.parametrize("tls", ["TLS"], indirect=True)
@pytest.mark.parametrize("records", [1, 2])
def test_an_iteration_of_the_event_loop_answers_one_hello_when_many_arrive(tls, records):
    iteration, answered = 0, []

    def hello():
        outgoing = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            tls[1].wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
        found = outgoing.read()
        cuts = [5, *(100 for _ in range(records - 1)), len(found)]
        return [
            found[:3] + (end - begin).to_bytes(2, "big") + found[begin:end]
            for begin, end in itertools.pairwise(cuts)
        ]

    async def main():
        nonlocal iteration
        tls[0].context.sni_callback = lambda *_: answered.append(iteration)
        with contextlib.ExitStack() as stack:
            async with running(tls) as server:
                to = "127.0.0.1", server.port
                clients = [
                    stack.enter_context(socket.create_connection(to, PATIENCE_S)) for _ in range(20)
                ]
                hellos = [hello() for _ in clients]
                for record in range(records):
                    for client, parts in zip(clients, hellos, strict=True):
                        client.sendall(parts[record])
                    for _ in range(500):
                        iteration += 1
                        await asyncio.sleep(0)
                assert len(answered) == len(set(answered)) == 20
                for client in clients:
                    client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def visit(context, port, sent, behind=()):
    """Send `sent`, the end of TLS in the same write, then `behind`. Returns: the answers."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain:
        for step in (client.do_handshake, lambda: client.write(sent)):
            with contextlib.suppress(ssl.SSLWantReadError):
                step()
                continue
            plain.sendall(outgoing.read())
            incoming.write(plain.recv(65536))
            step()
        with contextlib.suppress(ssl.SSLWantReadError):
            client.unwrap()
        plain.sendall(outgoing.read())
        for piece in behind:
            plain.sendall(piece)
        with contextlib.suppress(ConnectionResetError):  # of what the server left unread
            while piece := plain.recv(65536):
                incoming.write(piece)
    answers = b""
    with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
        while piece := client.read(65536):
            answers += piece
    return answers


@pytest.mark.parametrize("tls", ["TLS"], indirect=True)
@pytest.mark.parametrize("sent", [b"", GET, GET[:-2], START], ids=["nothing", "all", "a part", "2"])
async def test_a_client_that_ends_tls_right_behind_its_handshake_is_not_logged(tls, sent, caplog):
    async with running(tls) as server:
        await asyncio.to_thread(visit, tls[1], server.port, sent)
        await until(lambda: not server.door.connections)
    assert not caplog.records


@pytest.mark.parametrize("tls", ["TLS"], indirect=True)
async def test_a_client_that_ends_tls_is_answered_what_it_has_sent(tls):
    chunks = b"1\r\nx\r\n" * 5_000
    sent = (
        b"POST /fast HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%s0\r\n\r\n" % chunks
    )
    async with running(tls) as server:
        answers = await asyncio.to_thread(visit, tls[1], server.port, sent)
    assert answers.startswith(b"HTTP/1.1 200"), answers[:100]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc: Linux")
@pytest.mark.parametrize("tls", ["TLS"], indirect=True)
async def test_what_follows_the_end_of_tls_is_not_kept(tls):
    def resident_pages():
        return int(Path("/proc/self/statm").read_text().split()[1])

    grown = []

    def junk():
        piece = bytes(1 << 20)
        yield piece
        before = resident_pages()
        for _ in range(64):
            yield piece
        grown.append(resident_pages() - before)
        release.set()

    release = threading.Event()

    async def app(scope, receive, send):
        await asyncio.to_thread(release.wait, PATIENCE_S)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with running(tls, app=app) as server:
        await asyncio.to_thread(visit, tls[1], server.port, GET, junk())
    assert grown[0] * resource.getpagesize() < 16 << 20


async def test_a_client_of_http_2_that_breaks_the_rules_is_told_and_not_read_on(server):
    client, connection = await connect(server)
    client.send(START + ping(stream=1))
    await until(lambda: connection.closing)
    assert not connection.transport.is_reading()
    assert b"PING on a stream" in await client.rest()
    await until(lambda: not server.door.connections)


@pytest.mark.parametrize("tls", ["TLS"], indirect=True)
@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"P", b"POST " * 50_000])
async def test_a_request_in_the_clear_is_a_400_where_tls_is_expected(tls, first, caplog):
    async with running((tls[0], None)) as server:
        client = await server.open()
        client.send(first)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in answer
        assert b"use https://" in answer
    assert not caplog.records


@pytest.mark.parametrize("tls", ["TLS"], indirect=True)
@pytest.mark.parametrize("first", [b"", b"\x16", b"get /", b"\0" * 100])
async def test_anything_else_in_the_clear_is_not_answered_where_tls_is_expected(tls, first):
    async with running((tls[0], None), header_timeout_s=0.1) as server:
        client = await server.open()
        client.send(first)
        assert not (await client.rest()).startswith(b"HTTP")  # at most an alert
        await until(lambda: not server.door.connections)


@pytest.mark.parametrize("end", ["idle", "half-closed", "stop"])
async def test_a_connection_with_an_unread_small_answer_is_given_up(end):
    async with running(write_timeout_s=0.1, keep_alive_s=0.2) as server:
        client = await server.open()
        client.writer.transport.pause_reading()
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(60):
            client.send(post(bytes(50_000)))
        await until(lambda: len(server.route.calls) > 5)
        if end == "half-closed":
            client.writer.write_eof()
        elif end == "stop":
            server.stop()
        await until(lambda: not server.door.connections)


async def test_answers_that_a_client_does_not_read_give_way_to_others(tls):
    async with running(tls) as server:
        budget = server.door.budget
        client = await server.open()
        client.writer.transport.pause_reading()
        client.send(GET.replace(b"/ ", b"/huge ", 1))
        await until(lambda: budget.held_bytes > len(HUGE) / 2)
        async with asyncio.timeout(PATIENCE_S):
            while server.door.connections:  # until it counts as slow
                budget.add(max(0, budget.max_bytes - budget.held_bytes))
                with contextlib.suppress(Overloaded):
                    budget.hold(784, 784)
                await asyncio.sleep(0.05)


@pytest.mark.states(
    "limits",
    "bytes that a client sends over HTTP/1.1 behind a request that is not answered",
    found="200 answers of 1 MiB that are not read: further requests do not begin",
)
@pytest.mark.parametrize("end", ["reads", "leaves"])
async def test_requests_for_the_application_begin_when_the_answers_before_are_read(tls, end):
    async with running(tls) as server:
        budget, begun = server.door.budget, server.events["begun"]
        client = await server.open()
        client.writer.transport.pause_reading()
        request = b"GET /mebibyte HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n" % (b"x" * 1000)
        client.send(request * 200)
        await until(lambda: budget.held_bytes)
        held_bytes = []
        for _ in range(1000):  # turns of the event loop, in which all 200 could begin
            held_bytes.append(budget.held_bytes)
            await asyncio.sleep(0)
        assert len(begun) < 30, "the sockets take some megabytes of answers"
        assert max(held_bytes) < 2 * len(MEBIBYTE)
        if end == "leaves":
            client.writer.transport.abort()
        else:
            client.writer.transport.resume_reading()
            for _ in range(200):
                status, _, body = await client.answer()
                assert (status, body) == (200, MEBIBYTE)
            assert len(begun) == 200
        await until(lambda: budget.held_bytes == 0)


async def test_a_client_that_reads_slowly_but_steadily_is_not_given_up():
    """900 s of the 1,000 s limit pass between two checks."""
    async with running(write_timeout_s=1000.0) as server:
        client, connection = await connect(server)
        client.send(GET.replace(b"/ ", b"/huge ", 1))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        left, looks, now_s = len(HUGE), 0, asyncio.get_running_loop().time()
        unread_bytes = connection.transport.get_write_buffer_size
        async with asyncio.timeout(PATIENCE_S):
            while before := unread_bytes():
                connection.check_time(now_s + 900 * looks)
                looks += 1
                while unread_bytes() == before:
                    left -= len(await client.reader.read(1 << 16))
                    await asyncio.sleep(0)
            left -= len(await client.reader.readexactly(left))
        assert looks > 10
        client.send(GET)
        assert (await client.answer())[0] == 200


def test_a_slow_reader_gets_everything_in_order_before_the_close(tls):
    async def read():
        async with running(tls) as server:
            client = await server.open()
            last = post(b"last", b"/fast", b"Connection: close")
            client.send(GET.replace(b"/ ", b"/huge ", 1) + post(b"after") + last)
            await until(lambda: server.door.budget.held_bytes > len(HUGE) / 2)
            status, _, body = await client.answer()
            assert (status, len(body)) == (200, len(HUGE))
            assert [(await client.answer())[2] for _ in range(2)] == [b"after", b"last"]
            assert await client.rest() == b""
            await until(lambda: server.door.budget.held_bytes == 0)

    # Write like the service: when asyncio closes TLS, it drops what is not encrypted yet.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read())


def test_large_bodies_and_answers_are_moved_in_turns_with_others(monkeypatch):
    turn, reads, writes = 0, [], []

    def count():
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(count)

    class Noting(door.Connection):
        def body_arrived(self, size):
            reads.append(turn)
            super().body_arrived(size)

        def write(self, piece):
            writes.append(turn)
            super().write(piece)

    async def main():
        async with running() as server:
            server.route.rest = [b"%d" % n for n in range(10)]
            client = await server.open()
            count()
            client.send(post(bytes(8_000_000)))
            assert (await client.answer())[2] == bytes(8_000_000) + b"0123456789"

    monkeypatch.setattr(doors, "MAX_BODY_BYTES", 1 << 24)
    monkeypatch.setattr(door, "Connection", Noting)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # which reads greedily
        runner.run(main())
    for turns in (reads, writes):
        assert len(turns) >= 10
        assert len(set(turns)) == len(turns)


async def test_a_client_that_leaves_between_two_pieces_of_its_answer_changes_nothing(server):
    server.route.rest = [b"2"] * 1000
    client = await server.open()
    client.send(post(b"1"))
    await client.reader.readuntil(b"1222")
    client.writer.transport.abort()
    await until(lambda: not server.door.connections)
    assert (await server.ask(post(b"1")))[2] == b"1" + b"2" * 1000


# Number of connections


async def test_connections_beyond_the_limit_are_closed_and_room_is_used_again():
    async with running(max_connections=2) as server:
        kept = [await server.open() for _ in range(2)]
        for client in kept:
            client.send(GET)
            assert (await client.answer())[0] == 200
        beyond = await server.open()
        beyond.send(GET)
        with contextlib.suppress(ConnectionResetError):
            assert await beyond.rest() == b""
        assert len(server.door.connections) == 2
        kept[0].send(GET)
        assert (await kept[0].answer())[0] == 200
        kept[1].writer.close()
        await until(lambda: len(server.door.connections) == 1)
        assert (await server.ask(GET))[0] == 200


# Clients that leave


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_half_closed_client_is_answered_what_it_sent_whole(server, version):
    server.route.hold, keep = True, b"Connection: keep-alive"
    client = await server.open()
    sent = post(b"whole", b"/fast", keep) + post(b"second", b"/fast", keep)
    client.send(sent.replace(b"1.1", version) + post(b"half")[:-2])
    await until(lambda: server.route.held)
    client.writer.write_eof()
    for body in (b"whole", b"second"):
        await until(lambda: server.route.held)
        if version == b"1.1":
            assert (await client.answer())[0] == 100, "asked whether it still reads"
        else:  # RFC 9110, 15.2: no 1xx to a client of HTTP/1.0
            await asyncio.sleep(0.05)
        server.route.release()
        assert (await client.answer())[::2] == (200, body)
    assert await client.rest() == b""


async def test_the_application_hears_of_a_client_that_leaves(server):
    client = await server.open()
    client.send(GET.replace(b"/ ", b"/waits ", 1))
    async with asyncio.timeout(PATIENCE_S):
        await server.events["waits"].wait()
        client.writer.close()
        await server.events["left"].wait()


@pytest.mark.parametrize(
    "sent", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
)
async def test_what_clients_do_wrong_is_not_logged(server, caplog, sent):
    assert "malformed HTTP request" in error(await server.ask(sent), 400)
    assert not caplog.records


# A stop


async def test_a_stop_answers_what_was_read_and_is_not_parsed_yet(server):
    server.route.hold = True
    client, connection = await connect(server)
    connection.data_received(post(bytes(900)) * 200)
    await until(lambda: server.route.held)
    server.stop()
    server.route.hold = False
    server.route.release()
    answers = [await client.answer() for _ in range(200)]
    assert ["connection" in headers for _, headers, _ in answers] == [False] * 199 + [True]
    assert await client.rest() == b""


LENGTH = (b"Content-Length", b"2")


@pytest.mark.parametrize(
    ("status", "headers", "pieces", "begun"),
    [
        (200, [(b"x", b"a\r\nset-cookie: b")], [b"ok"], False),
        (200, [(b"x", b"a\nb")], [], False),
        (200, [(b"x", b"a\0")], [], False),
        (200, [(b"x\r\ny", b"a")], [], False),
        (200, [(b"x y", b"a")], [], False),
        (200, [(b"", b"a")], [], False),
        (200, [(b"content-length", b"1_0")], [b"0123456789"], False),
        (200, [(b"content-length", b"-1")], [], False),
        (200, [(b"content-length", b"")], [], False),
        (200, [LENGTH, (b"content-length", b"3")], [b"ok"], False),
        (200, [LENGTH], [b"long"], False),
        (200, [LENGTH], [], False),
        (200, [LENGTH], [b"o"], True),
        (200, [LENGTH], [b"ok", b"long"], True),
        (304, [], [b"ok"], False),
    ],
)
async def test_an_answer_of_the_application_that_would_break_http_is_a_500_and_logged(
    server, caplog, status, headers, pieces, begun
):
    server.events["answer"] = status, headers, pieces
    client = await server.open()
    client.send(GET.replace(b"/ ", b"/answer ", 1))
    if begun:
        assert not (await client.rest()).endswith((b"\r\n\r\n", b"long"))
    else:
        answer = await client.answer()
        assert answer[0] == 500
        assert "set-cookie" not in answer[1]
    assert caplog.text.count("GET /answer failed") == 1
    server.events["answer"] = 200, [LENGTH, (b"X", b"a b")], [b"o", b"k"]
    answer = await server.ask(GET.replace(b"/ ", b"/answer ", 1))
    assert (answer[0], answer[1]["x"], answer[2]) == (200, "a b", b"ok")


async def test_fields_of_the_connection_are_not_the_applications(server):
    fields = [(b"Connection", b"close"), (b"Transfer-Encoding", b"gzip"), (b"upgrade", b"a")]
    server.events["answer"] = 200, [(b"x", b"y"), *fields], [b"ok"]
    client = await server.open()
    for _ in range(2):
        client.send(GET.replace(b"/ ", b"/answer "))
        status, headers, body = await client.answer()
        assert (status, body, headers["x"]) == (200, b"ok", "y")
        assert headers["transfer-encoding"] == "chunked"
        assert headers.keys().isdisjoint({"connection", "upgrade"})


@pytest.mark.parametrize("missing_bytes", [0, 1])
async def test_a_fault_of_our_own_is_a_500_and_logged(server, caplog, monkeypatch, missing_bytes):
    def fail(*_):
        raise AssertionError("bug: planted")

    monkeypatch.setattr(server.route, "open", fail)
    data = post(b"abc")
    status, headers, body = await server.ask(data[: len(data) - missing_bytes])
    assert (status, headers["connection"]) == (500, "close")
    assert orjson.loads(body)["error"]["code"] == "internal"
    assert "planted" in caplog.text


def test_a_stop_closes_idle_connections_at_once_and_busy_ones_after_their_next_request(
    run_virtually,
):
    async def main(_):
        async with running() as server:
            idle, busy = await server.open(), await server.open()
            for client in (idle, busy):
                client.send(GET)
                assert (await client.answer())[0] == 200
            await asyncio.sleep(0.25)
            busy.send(GET)
            assert (await busy.answer())[0] == 200
            server.stop()
            assert await idle.rest() == b""
            busy.send(GET)  # it could not know
            status, headers, _ = await busy.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await busy.rest() == b""

    run_virtually(main)


# Age


def test_an_old_connection_ends_with_its_next_answer(run_virtually):
    async def main(_):
        random.seed(1)
        async with running(max_connection_age_s=10) as server:
            clients = [await server.open() for _ in range(20)]
            ended = []
            for wait_s in (8.0, 2.5, 2.0):
                await asyncio.sleep(wait_s)
                for client in clients:
                    client.send(GET)
                found = [(client, await client.answer()) for client in clients]
                assert [answer[0] for _, answer in found] == [200] * len(clients)
                old = [client for client, answer in found if "connection" in answer[1]]
                for client in old:
                    assert await client.rest() == b""
                clients = [client for client in clients if client not in old]
                ended.append(len(old))
            young, some, rest = ended
            assert (young, not clients) == (0, True)
            assert min(some, rest) > 0, "all ended at the same time"

    run_virtually(main)


def test_an_old_connection_waits_for_a_client_that_reads_slowly(run_virtually):
    async def main(_):
        async with running(max_connection_age_s=10) as server:
            client, connection = await connect(server)
            client.writer.transport.pause_reading()
            await asyncio.sleep(1)
            client.send(GET.replace(b"/ ", b"/huge ", 1))
            await asyncio.sleep(14)
            assert connection.blocked_since_s, "all is sent"
            client.writer.transport.resume_reading()
            assert (await client.answer())[2] == HUGE

    run_virtually(main)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_old_connection_of_http_2_answers_what_has_begun(run_virtually, is_stopped):
    async def main(_):
        async with running(max_connection_age_s=10) as server:
            server.route.hold = True
            client, connection = await connect(server)
            await opened_http2(client, connection)
            client.send(h2_post(1, path=b"/fast") + data(1, b"abc", END))
            await asyncio.sleep(12.5)
            if is_stopped:
                server.stop()
                await asyncio.sleep(0.5)
            assert server.route.held, "a request was given up"
            server.route.release()
            found = list(frames(await client.rest()))
            kinds = [kind for kind, *_ in found]
            assert kinds.count(GOAWAY) == 2
            assert kinds.index(GOAWAY) < kinds.index(HEADERS)
            assert b"abc" in b"".join(payload for *_, payload in found)

    run_virtually(main)


async def test_answers_bear_the_date_of_the_second_in_which_they_are_sent():
    now_s = [1795341600.0]
    options = {"header_timeout_s": 0.04, "clock": lambda: now_s[0]}  # looked at every 10 ms
    async with running(**options) as server:
        client = await server.open()
        for date in ("Sun, 22 Nov 2026 10:00:00 GMT", "Sun, 22 Nov 2026 10:00:01 GMT"):
            await until(lambda: date.encode() in server.door.common_lines)  # noqa: B023
            client.send(post(b"x"))
            assert (await client.answer())[1]["date"] == date
            now_s[0] += 1
