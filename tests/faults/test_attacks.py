"""Every attack of `attacks`, beside a client that is answered as if there were none."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.faults.attacks import ATTACKS, HEAD, MIB, SHORT, mangled
from tests.faults.checks import LIVE_WITHIN_S, loop_s
from tests.faults.clients import Known, opened, quantiles_ms, request
from tests.service_process import PATIENCE_S
from wire.turns import TURN_S

QUICK = ("bombs", "new-headers-480", "open", "reset", "unread-reflection", "window-settings")


ATTACKED_S = 20 * TURN_S
"""Maximum CPU time of the event loop before it answers beside an attack over HTTP/2.

An answer takes two to five iterations of the loop, and an attack may fill two turns of each. The
largest of an attack were 20 to 45 ms on two Xeon cores beside two busy processes (2026-11-28), and
165 and 1,275 with turns that do not end."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long)
        if name.startswith("HTTP/2") and name.split()[1] not in QUICK
        else name
        for name in ATTACKS
    ],
)
async def test_an_attack_costs_little_memory_and_nobodys_time(known, intact, name):
    do, moved, rss_bytes, extra_descriptors = ATTACKS[name]
    moved = None if moved is None else dict(moved)
    with intact(moved=moved, rss_bytes=rss_bytes, extra_descriptors=extra_descriptors) as watch:
        clock = partial(loop_s, known.service)
        async with known.pinged(clock, watch.grown_bytes) as (times_s, grown):
            await do(known)
        over_http2 = name.startswith("HTTP/2")
        assert max(times_s) < (ATTACKED_S if over_http2 else LIVE_WITHIN_S)
        assert max(grown) < 60_000_000
        if moved is not None:
            moved |= known.answered


async def test_short_attacks_side_by_side_leave_the_service_as_it_was(served, digits, intact, seed):
    known = Known(served, digits, seed=seed)
    with intact(rss_bytes=60_000_000, extra_descriptors=8):
        async with known.pinged():
            await asyncio.gather(*(do(known) for do in SHORT.values()), mangled(known, 1500))


def _by_http_client(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("POST", "/predict", body, {"Content-Type": "application/octet-stream"})
        return connection.getresponse().status


def _by_httpx(port, body):
    headers = {"Content-Type": "application/octet-stream"}
    url = f"http://127.0.0.1:{port}/predict"
    return httpx.post(url, content=body, headers=headers, timeout=PATIENCE_S).status_code


@pytest.mark.parametrize("client", [_by_http_client, _by_httpx], ids=["http.client", "httpx"])
def test_the_413_of_a_large_body_is_seen_by_clients_that_send_all_of_it(served, intact, client):
    with intact(moved={"http too_large": 5}):
        for _ in range(5):
            assert client(served.port, bytes(34 * MIB)) == 413


def test_the_429_of_large_bodies_is_seen_by_clients_that_send_all_of_them(served, intact):
    body = bytes(30_000_000)  # no multiple of 784: what is read whole is a 400
    clients = 16
    # The budget limits how many are read whole, and on a busy machine a slow one gives way to
    # others with 408. At most 60 MB of a burst may stay.
    moved = {f"http {code}": (0, clients) for code in ("invalid_input", "body_timeout")}
    moved["http overloaded"] = (1, clients)
    with intact(moved=moved, rss_bytes=60_000_000), ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(partial(_by_http_client, served.port), [body] * clients))
    assert set(found) <= {400, 408, 429}
    assert 429 in found


def test_five_stalled_uploads_refuse_no_healthy_request(start):
    limits = ("--max-body-bytes", str(2 * MIB), "--max-in-flight-bytes", str(8 * MIB))
    service = start(*limits).ready()
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            upload = stack.enter_context(opened(service.port, request(b"", length=2 * MIB)))
            upload.settimeout(0.2)
            with contextlib.suppress(OSError):  # one that is refused
                upload.sendall(bytes(2 * MIB - 1))
        statuses, until_s = set(), time.monotonic() + 3
        while time.monotonic() < until_s:
            with opened(service.port, request(bytes(700), length=784)) as healthy:
                time.sleep(0.01)  # in two pieces, so that it needs memory
                healthy.sendall(bytes(84))
                statuses.add(healthy.recv(1000).split()[1])
        assert statuses == {b"200"}
        # A large one waits a second at most, until the stalled ones count as slow.
        assert service.predict(1000)[0] == 200


@pytest.fixture
def many_files():
    """Raise the descriptor limit to its maximum, for thousands of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("2,000 connections and their clients need ulimit -Hn of 4,096, and it is lower")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


PARTS = (
    HEAD,
    request(bytes(100), b"X-Request-Timeout-Ms: 1500", length=784),
    request(bytes(1000), b"X-Request-Timeout-Ms: 1500", length=5_000_000),
    b"",
)
"""Beginnings of requests of which no more comes."""


async def _p99_ms(known, seconds):
    async with known.pinged(every_s=0) as (times_s, _):
        await asyncio.sleep(seconds)
    return quantiles_ms(times_s, 0.99)[0]


@pytest.mark.long
@pytest.mark.usefixtures("many_files")
async def test_2000_stalled_connections_change_the_p99_of_others_by_less_than_a_fifth(
    known, intact
):
    ratios = []
    with intact(rss_bytes=60_000_000):
        for _ in range(3):  # other programs disturb a p99; a slow service is slow each time
            quiet_ms = await _p99_ms(known, 4)
            stalled = [await known.connect() for _ in range(2000)]
            for number, connection in enumerate(stalled):
                await connection.send(PARTS[number % len(PARTS)])
            await asyncio.sleep(0.5)  # until they are accepted: not part of the measurement
            beside_ms = await _p99_ms(known, 2)  # before the first is given up, after 3 s
            for connection in stalled:
                connection.reset()
            ratios.append(beside_ms / max(quiet_ms, await _p99_ms(known, 4)))
            if ratios[-1] < 1.2:
                break
    assert ratios[-1] < 1.2, ratios


@pytest.mark.long
async def test_slow_headers_are_ended_after_their_ten_seconds(known, intact):
    async def dribble():
        async with await known.connect() as connection:
            await connection.send(HEAD)
            ending = asyncio.create_task(connection.answers())
            while not ending.done():
                await connection.send(b"a")
                await asyncio.wait({ending}, timeout=0.2)
            with contextlib.suppress(ConnectionResetError):
                assert [answer.status for answer in await ending] in ([], [408])

    began_s = time.monotonic()
    with intact():
        await asyncio.gather(*(dribble() for _ in range(100)))
    assert 8 < time.monotonic() - began_s < 15
