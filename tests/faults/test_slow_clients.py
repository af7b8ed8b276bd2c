"""Clients that send slowly, stop in the middle or never read, beside one that does neither."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from functools import partial

import pytest

from tests.faults.checks import loop_s, resident_bytes, samples, total, unharmed, until
from tests.faults.clients import Connection, Pinger, ask, request
from tests.service_process import PATIENCE_S

ATTEMPTS = 3
"""Other programs on the machine disturb a p99; a slow service is slow in each attempt."""


@pytest.fixture
def many_files():
    """Raise the descriptor limit to its maximum, for thousands of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _begin(connection, kind):
    """Send a part of a request, of which more comes by `_go_on`."""
    if kind == "headers":
        connection.send(b"POST /predict HTTP/1.1\r\nHost: a\r\nX: ")
    elif kind == "body":
        connection.send(request(bytes(100), b"X-Request-Timeout-Ms: 1500", length=784))
    elif kind == "large body":
        connection.send(request(bytes(1000), b"X-Request-Timeout-Ms: 1500", length=5_000_000))


KINDS = ("headers", "body", "large body", "nothing")


@pytest.fixture
def stall(served):
    """`stall(100)` opens so many connections, a quarter of each kind; [(kind, connection)]."""
    with contextlib.ExitStack() as stack:

        def stall_(count):
            stalled = []
            for number in range(count):
                kind = KINDS[number % len(KINDS)]
                connection = stack.enter_context(Connection(served.port))
                _begin(connection, kind)
                stalled.append((kind, connection))
            return stalled

        yield stall_


def _dribble(stalled):
    """A byte more on each connection that sends at all."""
    for kind, connection in stalled:
        if kind != "nothing":
            connection.send(b"a")


def test_a_hundred_slow_clients_keep_nobody_waiting_and_are_ended(served, digits, intact, stall):
    moved = {"http ok": (200, 100_000), "http body_timeout": 50}
    with (
        intact(moved=moved, extra_descriptors=0),
        Pinger(
            served.port, digits.images[0], digits.probabilities[:1], clock=partial(loop_s, served)
        ) as pinger,
    ):
        stalled = stall(100)
        end_s = time.monotonic() + PATIENCE_S
        waiting = [connection for kind, connection in stalled if "body" in kind]
        while waiting or len(pinger.times_s) < 200:
            assert time.monotonic() < end_s, "a body that does not come is not given up"
            pinger.run(0.1)
            _dribble(stalled)
            for connection in [one for one in waiting if one.readable()]:
                answer = connection.answer()
                assert answer.status == 408
                assert json.loads(answer.body)["error"]["code"] == "body_timeout"
                waiting.remove(connection)
        assert set(pinger.statuses) == {200}
        assert max(pinger.times_s) < 1.0
        for _, connection in stalled:
            connection.socket.close()


@pytest.mark.long
def test_2000_stalled_connections_change_the_p99_of_others_by_less_than_a_fifth(
    served, digits, intact, stall, many_files
):
    if many_files < 4096:
        pytest.skip("2,000 connections and their clients need ulimit -Hn of 4,096, and it is lower")
    ratios = []
    with (
        intact(rss_bytes=60_000_000, extra_descriptors=0),
        Pinger(served.port, digits.images[0], digits.probabilities[:1]) as pinger,
    ):
        for _ in range(ATTEMPTS):
            (_, quiet_ms) = pinger.run(4)
            stalled = stall(2000)
            time.sleep(0.5)  # until they are accepted: not part of the measurement
            (_, beside_ms) = pinger.run(2)  # before the first is given up, after 3 s
            for _, connection in stalled:
                connection.socket.close()
            (_, after_ms) = pinger.run(4)
            ratios.append(beside_ms / max(quiet_ms, after_ms))
            if ratios[-1] < 1.2:
                break
        assert set(pinger.statuses) == {200}
    assert ratios[-1] < 1.2, ratios


@pytest.mark.long
def test_slow_headers_are_ended_after_their_ten_seconds(served, intact, stall):
    with intact():
        stalled = [pair for pair in stall(400) if pair[0] == "headers"]
        began_s = time.monotonic()
        while any(not connection.readable() for _, connection in stalled):
            assert time.monotonic() < began_s + 15
            _dribble(stalled)
            time.sleep(0.2)
        assert time.monotonic() - began_s > 8
        for _, connection in stalled:
            with contextlib.suppress(ConnectionResetError):
                assert [answer.status for answer in connection.answers()] in ([], [408])


def test_clients_that_never_read_hold_nobody_up(served, digits, intact):
    large = request(digits.rows([row % 300 for row in range(2000)])[0])  # 300 KB of JSON
    # 5.6 MB of answers; the kernel takes 3 MB, and the rest waits in the service.
    many = request(digits.images[0].tobytes(), path=b"/explain") * 200

    def explained():
        return total(samples(served), "lenet_explanation_duration_seconds_count")

    before = explained()
    with (
        intact(rss_bytes=60_000_000),
        Pinger(
            served.port, digits.images[0], digits.probabilities[:1], clock=partial(loop_s, served)
        ) as pinger,
        contextlib.ExitStack() as stack,
    ):
        for sent in (large, many) * 4:
            silent = stack.enter_context(Connection(served.port, receive_buffer=4096))
            silent.send(sent)
        began, found = -1, explained()
        while found > began:  # until no answer moves
            pinger.run(0.5)
            began, found = found, explained()
        assert found - before < 4 * 200, "the kernel took all answers"
        assert set(pinger.statuses) == {200}
        # 8,000 images take half a second of another thread.
        assert max(pinger.times_s) < 1.0


def test_pipelined_requests_whose_answers_are_never_read_take_little_memory(
    start_committed, digits
):
    """Each of 20 connections sends 256 KiB of them, whose answers would be hundreds of MB."""
    service = start_committed().ready()
    document = request(method=b"GET", path=b"/openapi.json")
    assert ask(service.port, document).status == 200  # makes the document, which is kept
    sent = document * ((256 << 10) // len(document))
    with (
        # 20 MB, mostly requests that were parsed; the allocator keeps them for the next ones.
        unharmed(service, digits.golden, moved=None, rss_bytes=40_000_000) as watch,
        Pinger(service.port, digits.images[0], digits.probabilities[:1]) as pinger,
    ):
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                silent = stack.enter_context(Connection(service.port, receive_buffer=4096))
                silent.socket.setblocking(False)
                silent.socket.send(sent)
            pinger.run(3.0)
            grown = resident_bytes(service) - watch.resident_bytes
            assert grown < 60_000_000, f"RSS grew by {grown >> 10} KiB"
            # Each connection has an unread answer, and requests that are not parsed yet.
            assert total(samples(service), "lenet_in_flight_bytes") < 16 << 20
        assert set(pinger.statuses) == {200}
        until(lambda: not total(samples(service), "lenet_in_flight_bytes"))
