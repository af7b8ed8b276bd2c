"""What a connection does over time: order, limits, clients that leave or do not read, a stop."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import random
import socket
import ssl

import orjson
import pytest
import trustme
import uvloop

from service.api.openapi import ErrorResponse
from service.errors import Overloaded, TooLarge, Unavailable
from service.process.tls import CertificateFiles, ServedCertificate
from service.transport import connection
from tests.service.http import doors
from tests.service.http.doors import HUGE, MAX_BODY_BYTES, MEBIBYTE, running, until

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
    """For `running`: without TLS, and with it."""
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


async def learn(server, *requests):
    """Send whole requests once, so that their header sections are known."""
    for request in requests:
        assert (await server.ask(request))[0] == 200
        assert request[: request.find(b"\r\n\r\n") + 4] in server.door.known
    server.route.calls.clear()
    server.route.reads = 0


# Order


async def test_answers_come_in_the_order_of_their_requests(server):
    server.route.hold = True
    client = await server.open()
    client.send(post(b"1") + post(b"2") + post(b"app", b"/x") + post(b"3"))
    await until(lambda: len(server.route.held) == 3)
    server.route.release(reverse=True)
    assert [(await client.answer())[2] for _ in range(4)] == [b"1", b"2", b"app", b"3"]


async def test_requests_of_one_connection_are_worked_on_at_the_same_time(server):
    server.route.hold = True
    client = await server.open()
    client.send(b"".join(post(b"%d" % n) for n in range(30)))
    await until(lambda: len(server.route.held) == 30)
    server.route.release()
    assert [(await client.answer())[2] for _ in range(30)] == [b"%d" % n for n in range(30)]


async def test_reading_pauses_when_a_client_runs_far_ahead(server):
    server.route.hold = True
    client = await server.open()
    body = bytes(8000)
    client.send(b"".join(post(body) for _ in range(2000)))
    await until(lambda: len(server.route.held) >= 64)
    await asyncio.sleep(0.05)
    assert len(server.route.held) <= 64 + (1 << 14) / len(body), "64 and what 16 KiB hold"
    server.route.hold = False
    server.route.release()
    for _ in range(2000):
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("kind", ["fast", "application"])
async def test_garbage_behind_a_request_is_answered_after_it(server, kind):
    server.route.hold = True
    client = await server.open()
    client.send(post(b"good", b"/fast" if kind == "fast" else b"/") + b"GARBAGE\r\n\r\n")
    if kind == "fast":
        await until(lambda: server.route.held)
        server.route.release()
    assert (await client.answer())[2] == b"good"
    assert "malformed" in error(await client.answer(), 400)
    assert await client.rest() == b""


async def test_equal_headers_are_read_once_and_others_are_not_mixed_up(server):
    client = await server.open()
    for n in range(5):
        client.send(post(b"%d" % n))
        assert (await client.answer())[2] == b"%d" % n
    assert await server.ask(post(b"5")) == await server.ask(post(b"5", b"/fast"))
    assert server.route.reads == 1
    client.send(post(b"abc", b"/fast", b"X: 1"))
    assert (await client.answer())[2] == b"abc"
    assert server.route.reads == 2
    assert (await server.ask(post(b"abc", b"/fast", b"X: 2")))[0] == 200
    assert [dict(call.wanted).get("x") for call in server.route.calls[-2:]] == ["1", "2"]


async def test_the_cache_of_headers_is_bounded(server):
    client = await server.open()
    for n in range(1500):
        client.send(post(b"a", b"/fast", b"X: %d" % n))
        assert (await client.answer())[0] == 200
        assert 0 < len(server.door.known) <= 512
    large = post(b"a", b"/fast", b"X: " + b"a" * 5000)
    client.send(large)
    assert (await client.answer())[0] == 200
    assert max(map(len, server.door.known)) < 5000


# Known header sections: those of whole requests, which the parser does not see again

KNOWN = post(b"0123456789")
HEAD_BYTES = len(KNOWN) - 10


async def test_a_known_request_is_answered_alike_wherever_it_is_cut(server):
    expected = await server.ask(KNOWN)
    await learn(server, KNOWN)
    for cut in range(1, len(KNOWN)):
        client, connection = await connect(server)
        for _ in range(2):
            connection.data_received(KNOWN[:cut])
            connection.data_received(KNOWN[cut:])
            assert await client.answer() == expected
        client.send(GET)
        assert (await client.answer())[0] == 200
        client.writer.close()
    # Cut within its header section, it is parsed, but for the first P of a connection: until the
    # rest comes it may be that of HTTP/2's preface.
    assert server.route.reads == 2 * (HEAD_BYTES - 1) - 1


async def test_a_known_request_may_come_byte_by_byte(server):
    await learn(server, KNOWN)
    client, connection = await connect(server)
    for _ in range(3):
        connection.data_received(KNOWN[:HEAD_BYTES])
        for byte in KNOWN[HEAD_BYTES:]:
            connection.data_received(bytes([byte]))
        assert (await client.answer())[2] == b"0123456789"
    assert (len(server.route.calls), server.route.reads) == (3, 0)


async def test_what_follows_a_known_request_is_the_next_wherever_it_is_cut(server):
    other = post(b"other", b"/fast", b"X: 1")
    await learn(server, KNOWN, other)
    for behind, answers in (
        (KNOWN + other, [b"0123456789", b"other"]),
        (GET + KNOWN, [b"", b"0123456789"]),
        (post(b"new", b"/fast", b"X: 2") + other, [b"new", b"other"]),
    ):
        data = KNOWN + behind
        for cut in range(1, len(data) + 1):
            client, connection = await connect(server)
            connection.data_received(data[:cut])
            if cut < len(data):
                connection.data_received(data[cut:])
            found = [(await client.answer())[2] for _ in range(3)]
            assert found == [b"0123456789", *answers], cut
            client.writer.close()


KNOWN_IN = {
    "a body": ([post(KNOWN)[: -len(KNOWN)], KNOWN], KNOWN),
    "an application's body": ([post(KNOWN, b"/")[: -len(KNOWN)], KNOWN], KNOWN),
    "a chunk": (
        [
            b"POST /fast HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"%x\r\n" % len(KNOWN),
            KNOWN,
            b"\r\n0\r\n\r\n",
        ],
        KNOWN,
    ),
    "a header": ([b"POST / HTTP/1.1\r\nX: ", KNOWN], b"0123456789"),
    "a request line": ([b"POST /a?", b"b HTTP/1.1\r\nX: ", KNOWN], b"0123456789"),
}


@pytest.mark.parametrize("name", KNOWN_IN)
@pytest.mark.parametrize("all_known", [False, True])
async def test_a_known_request_within_another_is_not_one(server, name, all_known):
    pieces, expected = KNOWN_IN[name]
    await learn(server, KNOWN, *([post(KNOWN)] if all_known else []))
    client, connection = await connect(server)
    for piece in pieces:
        connection.data_received(piece)
    assert (await client.answer())[2] == expected
    connection.data_received(KNOWN)
    assert (await client.answer())[2] == b"0123456789"
    assert KNOWN[HEAD_BYTES:] in [call.body for call in server.route.calls]
    assert len(server.route.calls) == 2 - (expected != KNOWN or name == "an application's body")


def old(*lines):
    return post(b"abc", b"/fast", *lines).replace(b"1.1", b"1.0", 1)


NOT_KNOWN = {
    "behind an empty line": [b"\r\n" + KNOWN],
    "behind empty lines": [b"\r\n\r\n" + KNOWN],
    "with a line that ends in LF": [KNOWN.replace(b"a\r\n", b"a\n", 1)],
    "with lines that end in LF": [KNOWN.replace(b"\r\n", b"\n")],
    "with LF alone at its end": [KNOWN.replace(b"\r\n\r\n", b"\r\n\n") + b"\r\n\r\n"],
    "in pieces": [KNOWN[:20], KNOWN[20:]],
    "for the application": [post(b"abc", b"/")],
    "without a body": [post()],
    "chunked": [b"POST /fast HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    "that waits": [post(b"abc", b"/fast", b"Expect: 100-continue")],
    "that closes": [post(b"abc", b"/fast", b"Connection: close")],
    "that closes, of two options": [post(b"abc", b"/fast", b"Connection: x, Close")],
    "of HTTP/1.0": [old()],
    "of HTTP/1.0 that closes after all": [old(b"Connection: close, keep-alive")],
    "refused": [post(b"abc", b"/fast?x=1")],
    "too large": [post(b"", b"/fast").replace(b"Length: 0", b"Length: 9999999")],
    "malformed": [KNOWN.replace(b"Host", b"Ho st")],
    "with two hosts": [post(b"abc", b"/fast", b"Host: b")],
    "before another": [KNOWN + KNOWN],
    "before a part of another": [KNOWN + KNOWN[:20]],
    "behind another": [GET + KNOWN],
}


@pytest.mark.parametrize("name", NOT_KNOWN)
async def test_header_sections_of_such_requests_are_not_kept(server, name):
    client, connection = await connect(server)
    for piece in NOT_KNOWN[name]:
        connection.data_received(piece)
    assert (await client.answer())[0] in (100, 200, 400, 413)
    await asyncio.sleep(0)
    assert not server.door.known


@pytest.mark.parametrize("path", [b"/fast", b"/"])
@pytest.mark.parametrize("inner", [False, True])
async def test_a_header_section_is_not_kept_for_that_of_a_request_behind_it(server, path, inner):
    first, second = post(b"abc", path), post(bytes(5000))[:-5000]
    attacker, connection = await connect(server)
    if inner:  # the first is the body of another
        connection.data_received(post(first)[: -len(first)])
    connection.data_received(first + second)
    assert (await attacker.answer())[2] == (first if inner else b"abc")
    for section, head in server.door.known.items():
        assert b"Content-Length: %d\r\n" % head.length in section
        assert section.startswith(b"POST %s " % head.path)
    assert (await server.ask(first))[2] == b"abc"


async def test_known_requests_of_http_1_0_keep_their_connection_alike(server):
    request = old(b"Connection: keep-alive")
    client = await server.open()
    answers = []
    for _ in range(3):
        client.send(request)
        answers.append(await client.answer())
    assert server.route.reads == 1
    assert answers[0][1]["connection"] == "keep-alive"
    assert answers[0] == answers[1] == answers[2]


async def test_a_known_request_waits_its_turn_behind_those_that_are_not_parsed_yet(server):
    other = post(b"other", b"/fast", b"X: " + b"a" * 67)
    await learn(server, KNOWN, other)
    _, connection = await connect(server)
    assert (1 << 14) % len(other) == 0, "a slice of the parser ends between two requests"
    connection.data_received(other * 1000)
    connection.data_received(KNOWN)
    await until(lambda: len(server.route.calls) == 1001)
    assert server.route.calls[-1].body == b"0123456789"


@pytest.mark.parametrize(
    "last",
    [
        b"POST /fast HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 1\r\n\r\n1",
        b"POST /fast HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1\r\n1\r\n0\r\nConnection: close\r\n\r\n",
    ],
    ids=["header", "trailer"],
)
async def test_a_known_request_after_the_last_one_is_not_worked_on(server, last):
    await learn(server, post(b"x"))
    server.route.hold = True
    client = await server.open()
    client.send(last)
    await until(lambda: len(server.route.held) == 1)
    client.send(post(b"y"))
    await asyncio.sleep(0.05)
    assert len(server.route.calls) == 1
    server.route.release()
    assert (await client.answer())[2] == b"1"


async def test_a_connection_whose_only_request_was_known_may_be_idle(server):
    await learn(server, KNOWN)
    client, connection = await connect(server)
    connection.data_received(KNOWN)
    await client.answer()
    now_s = asyncio.get_running_loop().time()
    connection.check_time(now_s + server.door.keep_alive_s - 1)
    assert not connection.transport.is_closing()
    connection.check_time(now_s + server.door.keep_alive_s + 1)
    assert connection.transport.is_closing()


async def test_reading_pauses_when_known_requests_run_far_ahead_one_by_one(server):
    await learn(server, KNOWN)
    server.route.hold = True
    client, connection = await connect(server)
    for count in range(1, 101):
        connection.data_received(KNOWN)
        assert connection.transport.is_reading() == (count <= 64)
    server.route.hold = False
    server.route.release()
    for _ in range(100):
        assert (await client.answer())[2] == b"0123456789"
    assert connection.transport.is_reading()


async def test_a_known_request_after_a_pause_has_all_the_time_of_a_new_one(server):
    await learn(server, KNOWN)
    server.route.hold = True
    loop = asyncio.get_running_loop()
    client, connection = await connect(server)
    await asyncio.sleep(0.05)
    connection.data_received(KNOWN)
    connection.data_received(KNOWN[:-1])
    began_s = loop.time()
    server.route.calls[1].fail(TooLarge("refused early"))
    connection.check_time(began_s + server.door.header_timeout_s - 0.02)
    server.route.release()
    assert (await client.answer())[2] == b"0123456789"
    assert (await client.answer())[0] == 413


# Large bodies behind a known header section, which are received where they belong

LARGE = random.Random(0).randbytes(1_000_000)


def with_large_bodies(test):
    """Run `test(server)` on both event loops; a request with `LARGE` is known."""

    @pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def run(loop, monkeypatch):
        async def main():
            async with running() as server:
                await learn(server, post(LARGE))
                await test(server)

        monkeypatch.setattr(doors, "MAX_BODY_BYTES", 1 << 24)
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())

    run.__name__ = test.__name__
    return run


async def half_sent(server):
    """A client that has sent half of a large body, the call and the server's connection."""
    client, connection = await connect(server)
    client.send(post(LARGE)[: len(LARGE) // 2])
    await until(lambda: server.route.calls and server.route.calls[-1].arrived_bytes > 400_000)
    return client, server.route.calls[-1], connection


async def refused(client, status):
    """The next answer has this status and is the last."""
    answer = await client.answer()
    assert (answer[0], answer[1]["connection"]) == (status, "close")
    assert await client.rest() == b""


@with_large_bodies
async def test_a_large_body_is_whole_wherever_it_is_cut(server):
    cuts = random.Random(1)
    for _ in range(20):
        client, sent = await server.open(), post(LARGE) + KNOWN + post(LARGE) + GET
        while sent:
            size = min(cuts.choice([1, 1000, 100_000, 1_000_000]), cuts.randrange(1, 1_000_001))
            client.send(sent[: max(size, 200)])
            sent = sent[max(size, 200) :]
            await asyncio.sleep(0.002 * cuts.randrange(2))
        bodies = [(await client.answer())[2] for _ in range(4)]
        assert bodies == [LARGE, KNOWN[HEAD_BYTES:], LARGE, b""]
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
async def test_a_large_body_that_is_refused_midway_is_dropped_and_the_answer_comes(server):
    client, call, connection = await half_sent(server)
    call.fail(TooLarge("planted", field="body"))
    assert connection.transport.get_protocol() is connection, "the memory is held"
    client.send(post(LARGE)[len(LARGE) // 2 :])
    await refused(client, 413)


@with_large_bodies
async def test_a_large_body_is_dropped_in_its_turn(server):
    server.route.hold = True
    client, connection = await connect(server)
    client.send(KNOWN)
    await until(lambda: server.route.held)
    client.send(post(LARGE)[: len(LARGE) // 2])
    await until(lambda: server.route.calls[-1].arrived_bytes > 400_000)
    server.route.calls[-1].fail(TooLarge("planted", field="body"))
    assert connection.transport.get_protocol() is connection, "the memory is held"
    client.send(post(LARGE)[len(LARGE) // 2 :])
    await asyncio.sleep(0.05)
    server.route.release()
    assert (await client.answer())[2] == KNOWN[HEAD_BYTES:]
    await refused(client, 413)


@with_large_bodies
async def test_a_fault_amid_a_large_body_loses_no_answer_before_it(server):
    server.route.hold = True
    client, connection = await connect(server)
    client.send(KNOWN)
    await until(lambda: server.route.held)
    client.send(post(LARGE)[: len(LARGE) // 2])
    await until(lambda: server.route.calls[-1].arrived_bytes > 400_000)
    server.route.calls[-1].arrived = None  # as a fault of ours
    client.send(post(LARGE)[len(LARGE) // 2 :])
    await until(lambda: connection.transport.get_protocol() is connection)
    server.route.release()
    assert (await client.answer())[2] == KNOWN[HEAD_BYTES:]
    await refused(client, 500)


@with_large_bodies
async def test_a_client_that_ends_amid_a_large_body_gets_the_answer_before_it(server):
    server.route.hold = True
    client, connection = await connect(server)
    client.send(KNOWN)
    await until(lambda: server.route.held)
    client.send(post(LARGE)[: len(LARGE) // 2])
    await until(lambda: server.route.calls[-1].arrived_bytes > 400_000)
    client.writer.write_eof()
    await until(lambda: server.route.cancelled)
    assert connection.transport.get_protocol() is connection, "the memory is held"
    server.route.release()
    assert (await client.answer())[2] == KNOWN[HEAD_BYTES:]
    assert await client.rest() == b""


@with_large_bodies
async def test_a_large_body_is_read_to_its_end_when_the_server_stops(server):
    client, _, _ = await half_sent(server)
    server.stop()
    client.send(post(LARGE)[len(LARGE) // 2 :])
    answer = await client.answer()
    assert (answer[1]["connection"], answer[2]) == ("close", LARGE)


@with_large_bodies
async def test_a_large_body_is_answered_when_the_stop_takes_too_long(server):
    client, _, _ = await half_sent(server)
    server.stop()
    server.door.give_up(Unavailable("planted"))
    await refused(client, 503)


# Framing


async def test_a_trailer_is_never_read_as_a_header(server):
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"3\r\nabc\r\n0\r\nX-Late: 1\r\nContent-Type: text/html\r\n\r\n"
    client = await server.open()
    for path in (b"/headers", b"/fast"):
        client.send(head % path + body)
        assert b"late" not in (await client.answer())[2].lower()
    assert "x-late" not in server.route.calls[0].wanted
    client.send(GET.replace(b"/ ", b"/headers ", 1))
    assert (await client.answer())[2] == b"host: a", "a trailer went to the next request"


@pytest.mark.parametrize("flood", [b"0\r\n" + b"X: 1\r\n" * 400_000, b"3;" + b"a" * 2_000_000])
async def test_trailers_and_chunk_extensions_are_bounded(server, flood):
    client = await server.open()
    client.send(b"POST /fast HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await until(lambda: server.route.waited.is_set())
    client.send(flood)
    assert "beside the body" in error(await client.answer(), 400)


async def test_small_chunks_are_no_flood(server):
    client = await server.open()
    client.send(b"POST /fast HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(20):
        client.send(b"1\r\nx\r\n" * 2000)
        await client.writer.drain()
    client.send(b"0\r\n\r\n")
    assert len((await client.answer())[2]) == 40_000


async def test_a_large_body_is_not_counted_as_the_headers_behind_it(server):
    client = await server.open()
    client.send(post(bytes(78_000)) + GET[:20])
    assert len((await client.answer())[2]) == 78_000
    client.send(GET[20:])
    assert (await client.answer())[0] == 200


async def test_headers_that_do_not_end_are_refused_at_their_limit(server):
    client = await server.open()
    client.send(GET + b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000)
    assert (await client.answer())[0] == 200
    client.send(b"a" * 100_000)
    assert "more than 65536 bytes" in error(await client.answer(), 431)


async def test_a_request_for_an_upgrade_keeps_its_body(server):
    lines = b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"
    data = post(b"abcdef", b"/fast", *lines)
    client = await server.open()
    for cut in (len(data), len(data) - 3, 20):
        client.send(data[:cut])
        await asyncio.sleep(0.01)
        client.send(data[cut:] + GET)
        assert (await client.answer())[2] == b"abcdef"
        assert (await client.answer())[0] == 200
    client.send(data.replace(b"/fast", b"/"))
    assert (await client.answer())[2] == b"abcdef"


@pytest.mark.parametrize("path", [b"/fast", b"/"])
async def test_a_client_that_waits_is_asked_for_its_body(server, path):
    data = post(b"abc", path, b"Expect: 100-continue")
    client = await server.open()
    client.send(data[:-3])
    assert (await client.answer())[0] == 100
    client.send(b"abc")
    assert (await client.answer())[2] == b"abc"


async def test_a_client_that_waits_behind_another_request_is_asked_in_its_turn(server):
    server.route.hold = True
    client = await server.open()
    data = post(b"abc", b"/fast", b"Expect: 100-continue")
    client.send(post(b"first") + data[:-3])
    await until(lambda: server.route.held)
    server.route.release()
    assert (await client.answer())[2] == b"first"
    assert (await client.answer())[0] == 100
    client.send(data[-3:])
    await until(lambda: server.route.held)
    server.route.release()
    assert (await client.answer())[2] == b"abc"


# Early answers


@pytest.mark.parametrize("length", [b"Content-Length: 34000000", b"Transfer-Encoding: chunked"])
async def test_an_early_413_is_seen_by_a_client_that_sends_on(server, length):
    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
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


async def test_a_refused_request_keeps_its_connection_when_its_body_is_small(server):
    client = await server.open()
    client.send(post(b"abc", b"/fast?x=1"))
    status, headers, _ = await client.answer()
    assert (status, headers.get("connection")) == (400, None)
    client.send(GET)
    assert (await client.answer())[0] == 200


async def test_a_refused_request_of_unknown_length_is_answered_at_once(server):
    client = await server.open()
    client.send(b"POST /fast?x=1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (400, "close")


async def test_the_body_of_a_refused_request_has_a_limited_time():
    async with running(header_timeout_s=0.2) as server:
        client = await server.open()
        client.send(post(bytes(5000), b"/fast?x=1")[:-4000])

        async def trickle():
            while True:
                client.send(b"a")
                await client.writer.drain()
                await asyncio.sleep(0.02)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(trickle(), 20)


async def test_an_early_answer_is_written_to_a_half_closed_client(server):
    server.route.hold = True
    client = await server.open()
    client.send(post(b"1") + post(b"", b"/fast").replace(b"Length: 0", b"Length: 9999999"))
    await until(lambda: server.route.held)
    client.writer.write_eof()
    await asyncio.sleep(0.05)
    server.route.release()
    answers = [await client.answer() for _ in range(3)]
    assert [answer[0] for answer in answers if answer[0] != 100] == [200, 413]


async def test_nothing_is_written_into_an_answer_that_has_begun(server):
    client = await server.open()
    client.send(
        b"POST /streams HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    )
    await client.reader.readuntil(b"first\r\n")
    client.send(b"zz\r\n")
    with contextlib.suppress(ConnectionError):
        assert await client.rest() == b""


async def test_other_connections_come_between_the_requests_of_a_busy_one(server):
    busy, other = await server.open(), await server.open()
    busy.send(post(b"", b"/fast?x=1") * 4000)
    await until(lambda: server.route.refused)
    other.send(post(b"other"))
    await until(lambda: server.route.calls)
    assert server.route.refused < 2000, "one read brings some 3,700 of them"
    assert (await other.answer())[0] == 200


async def test_an_answer_before_the_body_ends_the_connection(server):
    client = await server.open()
    client.send(post(bytes(5000), b"/early")[:-100])
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (200, "close")
    client.send(bytes(100))
    assert await client.rest() == b""


async def test_a_body_over_the_limit_is_refused_where_it_passes_it(server):
    client = await server.open()
    client.send(b"POST /fast HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n" % 50_000 + bytes(50_000) + b"\r\n"
    for _ in range(MAX_BODY_BYTES // 50_000):
        client.send(chunk)
    await asyncio.sleep(0.02)
    assert not client.reader._buffer
    client.send(chunk)
    assert (await client.answer())[0] == 413


# Time


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"G", GET[:-2]])
@pytest.mark.parametrize("used", [False, True])
async def test_headers_that_do_not_end_are_given_up(sent, used):
    async with running(header_timeout_s=0.1, keep_alive_s=60.0) as server:
        client = await server.open()
        if used:
            client.send(GET)
            assert (await client.answer())[0] == 200
        client.send(sent)
        if used and sent in (b"", b"\r\n"):  # idle, and that is allowed
            await asyncio.sleep(0.3)
            client.send(GET)
            assert (await client.answer())[0] == 200
        else:
            with pytest.raises((ConnectionError, AssertionError)):
                assert await client.rest()


async def test_slow_headers_do_not_gain_time_by_coming_byte_by_byte():
    async with running(header_timeout_s=0.1) as server:
        client = await server.open()

        async def trickle():
            for byte in GET[:-2] * 1000:
                client.send(bytes([byte]))
                await client.writer.drain()
                await asyncio.sleep(0.01)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(trickle(), 20)


async def test_an_idle_connection_is_closed_after_its_time():
    async with running(keep_alive_s=0.1) as server:
        client = await server.open()
        client.send(GET)
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""


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


async def test_a_client_that_does_not_read_is_given_up(tls):
    async with running(tls, write_timeout_s=0.1, header_timeout_s=0.2) as server:
        client = await server.open()
        client.writer.transport.pause_reading()
        client.send(GET.replace(b"/ ", b"/huge ", 1))
        await until(lambda: server.state.connections)
        await until(lambda: not server.state.connections)


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
        await until(lambda: not server.state.connections)


async def test_answers_that_a_client_does_not_read_give_way_to_others(tls):
    async with running(tls) as server:
        budget = server.door.budget
        client = await server.open()
        client.writer.transport.pause_reading()
        client.send(GET.replace(b"/ ", b"/huge ", 1))
        await until(lambda: budget.held_bytes > len(HUGE) / 2)
        async with asyncio.timeout(20):
            while server.state.connections:  # until it counts as slow
                budget.add(max(0, budget.max_bytes - budget.held_bytes))
                with contextlib.suppress(Overloaded):
                    budget.hold(784, 784)
                await asyncio.sleep(0.05)


async def test_answers_behind_one_that_is_not_made_are_held_until_they_are_written():
    async with running() as server:
        server.route.hold = True
        client = await server.open()
        client.send(b"".join(post(bytes(1000)) for _ in range(5)))
        await until(lambda: len(server.route.held) == 5)
        first, *others = server.route.held
        for call in others:
            call.answer()
        assert server.door.budget.held_bytes > 4 * 1000
        first.answer()
        assert server.door.budget.held_bytes == 0
        for _ in range(5):
            assert (await client.answer())[0] == 200


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
    """Of 1,000 s without any progress, 900 pass between two looks."""
    async with running(write_timeout_s=1000.0) as server:
        client, connection = await connect(server)
        client.send(GET.replace(b"/ ", b"/huge ", 1))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        left, looks, now_s = len(HUGE), 0, asyncio.get_running_loop().time()
        unread_bytes = connection.transport.get_write_buffer_size
        async with asyncio.timeout(20):
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


async def test_a_client_that_does_not_read_on_is_given_up_at_its_time():
    async with running(write_timeout_s=1000.0) as server:
        client, connection = await connect(server)
        client.writer.transport.pause_reading()
        client.send(GET.replace(b"/ ", b"/huge ", 1))
        await until(connection.transport.get_write_buffer_size)
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.05)  # what the sockets take
        for after_s in (0, 900):
            connection.check_time(began_s + after_s)
            assert not connection.transport.is_closing()
        connection.check_time(began_s + 1001)
        assert connection.transport.is_closing()


def test_a_slow_reader_gets_everything_in_order_before_the_close(tls):
    async def read():
        async with running(tls, write_timeout_s=0.5) as server:
            client = await server.open()
            last = post(b"last", b"/fast", b"Connection: close")
            client.send(GET.replace(b"/ ", b"/huge ", 1) + post(b"after") + last)
            await asyncio.sleep(0.2)
            assert server.door.budget.held_bytes > len(HUGE) / 2
            status, _, body = await client.answer()
            assert (status, len(body)) == (200, len(HUGE))
            assert [(await client.answer())[2] for _ in range(2)] == [b"after", b"last"]
            assert await client.rest() == b""
            await until(lambda: server.door.budget.held_bytes == 0)

    # As the service does: when asyncio closes TLS, it drops what is not encrypted yet.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read())


def test_large_bodies_and_answers_are_moved_in_turns_with_others(monkeypatch):
    turn, reads, writes = 0, [], []

    def count():
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(count)

    class Noting(connection.Connection):
        def data_received(self, data):
            reads.append(turn)
            super().data_received(data)

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
    monkeypatch.setattr(connection, "Connection", Noting)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # which reads greedily
        runner.run(main())
    for turns in (reads, writes):
        assert len(turns) >= 10
        assert len(set(turns)) == len(turns)


async def test_an_answer_in_pieces_keeps_the_order_of_answers(server):
    server.route.hold, server.route.rest = True, [b"2", b"3"]
    client = await server.open()
    client.send(post(b"a1") + post(b"b1") + post(b"c", b"/x"))
    await until(lambda: len(server.route.held) == 2)
    server.route.release(reverse=True)
    assert [(await client.answer())[2] for _ in range(3)] == [b"a123", b"b123", b"c"]


async def test_a_client_that_leaves_between_two_pieces_of_its_answer_changes_nothing(server):
    server.route.rest = [b"2"] * 1000
    client = await server.open()
    client.send(post(b"1"))
    await client.reader.readuntil(b"1222")
    client.writer.transport.abort()
    await until(lambda: not server.door.connections)
    assert (await server.ask(post(b"1")))[2] == b"1" + b"2" * 1000


# Their number


async def test_connections_beyond_the_limit_are_closed_and_room_is_used_again():
    async with running(max_connections=2) as server:
        kept = [await server.open() for _ in range(2)]
        for client in kept:
            client.send(GET)
            assert (await client.answer())[0] == 200
        beyond = await server.open()
        with contextlib.suppress(ConnectionResetError):
            assert await beyond.rest() == b""
        assert len(server.door.connections) == len(server.state.connections) == 2
        kept[0].send(GET)
        assert (await kept[0].answer())[0] == 200
        kept[1].writer.close()
        await until(lambda: len(server.door.connections) == 1)
        assert (await server.ask(GET))[0] == 200


# Clients that leave


async def test_a_half_closed_client_is_answered(server):
    server.route.hold = True
    client = await server.open()
    client.send(post(b"abc"))
    client.writer.write_eof()
    await until(lambda: server.route.held)
    await asyncio.sleep(0.05)
    assert not server.route.cancelled
    server.route.release()
    assert (await client.answer())[0] == 100, "asked whether it still reads"
    assert (await client.answer())[2] == b"abc"
    assert await client.rest() == b""


@pytest.mark.parametrize("known", [False, True])
async def test_a_half_closed_client_is_answered_what_it_sent_whole(server, known):
    if known:
        await learn(server, post(b"whole"), post(b"half"))
    server.route.hold = True
    client = await server.open()
    client.send(post(b"whole") + post(b"half")[:-2])
    await until(lambda: server.route.held and server.route.waited.is_set())
    client.writer.write_eof()
    await until(lambda: server.route.cancelled)
    server.route.release()
    answers = [await client.answer()]
    if answers[0][0] == 100:
        answers.append(await client.answer())
    assert answers[-1][2] == b"whole"
    assert await client.rest() == b""


async def test_a_half_closed_client_of_the_application_is_answered(server):
    client = await server.open()
    client.send(GET + post(b"abc", b"/"))
    client.writer.write_eof()
    assert (await client.answer())[0] == 200
    assert (await client.answer())[2] == b"abc"
    assert await client.rest() == b""


@pytest.mark.parametrize("how", ["closes", "resets"])
async def test_a_client_that_leaves_cancels_its_requests(server, how):
    server.route.hold = True
    client = await server.open()
    client.send(post(b"1") + post(b"2"))
    await until(lambda: len(server.route.held) == 2)
    if how == "closes":
        client.writer.close()
    else:
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )
        client.writer.transport.abort()
    await until(lambda: len(server.route.cancelled) == 2)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("end", ["half-closes", "closes"])
async def test_a_client_that_leaves_amid_its_body_cancels_its_request(server, known, end):
    if known:
        await learn(server, post(b"abc"))
    client = await server.open()
    client.send(post(b"abc")[:-1])
    await until(lambda: server.route.waited.is_set())
    if end == "closes":
        client.writer.close()
    else:
        client.writer.write_eof()
    await until(lambda: server.route.cancelled)
    if end == "half-closes":
        assert await client.rest() == b""


async def test_the_application_hears_of_a_client_that_leaves(server):
    client = await server.open()
    client.send(GET.replace(b"/ ", b"/waits ", 1))
    async with asyncio.timeout(20):
        await server.events["waits"].wait()
        client.writer.close()
        await server.events["left"].wait()


async def test_an_application_that_fails_is_a_500(server, caplog):
    status, _, body = await server.ask(GET.replace(b"/ ", b"/fails ", 1))
    assert status == 500
    assert orjson.loads(body)["error"]["code"] == "internal"
    assert "planted" in caplog.text


@pytest.mark.parametrize(
    "sent", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
)
async def test_what_clients_do_wrong_is_not_logged(server, caplog, sent):
    assert "malformed HTTP request" in error(await server.ask(sent), 400)
    assert not caplog.records


# A stop


@pytest.mark.parametrize("known", [False, True])
async def test_a_stop_answers_what_has_begun_and_closes(server, known):
    if known:
        await learn(server, post(b"1"), post(b"22"))
    server.route.hold = True
    busy, arriving = await server.open(), await server.open()
    busy.send(post(b"1"))
    await until(lambda: server.route.held)
    arriving.send(post(b"22")[:-1])
    await until(lambda: server.route.waited.is_set())
    server.stop()
    arriving.send(b"2")
    await until(lambda: len(server.route.held) == 2)
    server.route.release()
    for client, body in ((busy, b"1"), (arriving, b"22")):
        status, headers, found = await client.answer()
        assert (status, headers["connection"], found) == (200, "close", body)
        assert await client.rest() == b""


async def test_a_stop_closes_a_connection_whose_answer_was_made_before_it(server):
    server.route.hold = True
    client = await server.open()
    client.send(post(b"1") + post(b"2"))
    await until(lambda: len(server.route.held) == 2)
    first, second = server.route.held
    second.answer()
    server.stop()
    first.answer()
    assert [(await client.answer())[2] for _ in range(2)] == [b"1", b"2"]
    assert await client.rest() == b""


async def test_a_stop_answers_what_was_read_and_is_not_parsed_yet(server):
    server.route.hold = True
    client, connection = await connect(server)
    request = post(bytes(1024 - len(post(bytes(900))) + 900))  # 16 in what is parsed at a time
    connection.data_received(request * 200)
    await until(lambda: len(server.route.held) == 80)
    server.stop()
    server.route.hold = False
    server.route.release()
    answers = [await client.answer() for _ in range(200)]
    assert ["connection" in headers for _, headers, _ in answers] == [False] * 199 + [True]
    assert await client.rest() == b""


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("missing_bytes", [0, 1])
async def test_a_fault_of_our_own_is_a_500_and_logged(
    server, caplog, monkeypatch, known, missing_bytes
):
    def fail(*_):
        raise AssertionError("bug: planted")

    if known:
        await learn(server, post(b"abc"))
    monkeypatch.setattr(server.route, "open", fail)
    data = post(b"abc")
    status, headers, body = await server.ask(data[: len(data) - missing_bytes])
    assert (status, headers["connection"]) == (500, "close")
    assert orjson.loads(body)["error"]["code"] == "internal"
    assert "planted" in caplog.text


async def test_a_stop_closes_idle_connections_at_once_and_busy_ones_after_their_next_request(
    server,
):
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


async def test_a_half_closed_client_of_http_1_0_gets_no_interim_answer(server, monkeypatch):
    monkeypatch.setattr("service.transport.connection._PROBE_S", 0.2)
    server.route.hold = True
    client = await server.open()
    old = post(b"2", b"/fast", b"Connection: keep-alive").replace(b"1.1", b"1.0", 1)
    client.send(post(b"1") + old)
    await until(lambda: len(server.route.held) == 2)
    client.writer.write_eof()
    await asyncio.sleep(0.05)
    server.route.held[0].answer()
    assert (await client.answer())[2] == b"1"
    await asyncio.sleep(0.3)
    server.route.held[1].answer()
    assert (await client.answer())[0] == 200, "RFC 9110, 15.2: no 1xx to a client of HTTP/1.0"
