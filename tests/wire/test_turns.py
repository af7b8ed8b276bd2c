"""Turns: how long an event loop works for connections before it looks for others."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from tests.wire.doors import running, until
from tests.wire.test_connection import GET, connect
from tests.wire.test_http2 import START, get
from wire.turns import TURN_S, Series, Turns


class Clock:
    """Each look at it takes `step_s`."""

    def __init__(self, step_s=0.0):
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self):
        self.now_s += self.step_s
        return self.now_s


async def test_there_is_time_until_a_turn_is_over_and_again_in_the_next():
    clock, begun = Clock(), []
    turns = Turns(begun.append, clock)
    assert turns.has_time()
    clock.now_s += 0.9 * TURN_S
    assert turns.has_time()
    clock.now_s += 0.2 * TURN_S
    assert not turns.has_time()
    assert turns.has_time(small=True)
    clock.now_s += TURN_S
    assert not turns.has_time(small=True)
    await asyncio.sleep(0)
    assert turns.has_time()
    assert begun == [0.0, clock.now_s]


async def test_what_waits_is_done_in_order_and_shares_turns():
    clock, done = Clock(), []
    turns = Turns(clock=clock)

    def step(name, times):
        left = [times]

        def work():
            done.append(name)
            clock.now_s += 0.6 * TURN_S
            left[0] -= 1
            return left[0] > 0

        return work

    turns.add(step("a", 3))
    turns.add(step("b", 1))
    turns.add(step("c", 1))
    assert not done
    seen = []
    while len(done) < 5:
        await asyncio.sleep(0)
        seen.append("".join(done))
    assert seen == ["ab", "abca", "abcaa"]


async def test_the_steps_of_a_series_are_done_one_after_another_beside_others():
    clock, done = Clock(), []
    turns = Turns(clock=clock)
    series = Series(turns)

    def step(name, times):
        left = [times]

        def work():
            done.append(name)
            clock.now_s += TURN_S
            left[0] -= 1
            return left[0] > 0

        return work

    series.add(step("a", 2))
    series.add(step("b", 1))
    turns.add(step("x", 3))
    while len(done) < 6:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert "".join(done) == "axaxbx"


async def test_a_step_that_fails_does_not_hold_up_those_behind_it():
    turns, done = Turns(), []
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: reported.append(found))

    def fails():
        raise ValueError

    turns.add(fails)
    turns.add(lambda: done.append(1) or False)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == [1]
    assert isinstance(reported[0]["exception"], ValueError)


async def test_connections_that_send_at_the_same_time_are_served_in_several_turns():
    """All of them are ready in one iteration of the event loop: nothing runs between the sends."""
    iteration, begun = 0, []

    def count():
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(count)

    turns = Turns(lambda _: begun.append(iteration), Clock(0.4 * TURN_S))
    async with running(turns=turns) as server:
        clients = [await server.open() for _ in range(40)]
        count()
        for client in clients[:20]:
            client.send(GET)
        for client in clients[20:]:
            client.send(START + get(path=b"/"))
        await until(lambda: len(server.events["begun"]) == 40)
        served = begun[:]
        for client in clients[:20]:
            assert (await client.answer())[0] == 200
        assert server.door.budget.held_bytes == 0
    assert len(served) >= 40 / 4
    assert len(set(served)) == len(served)


@pytest.mark.parametrize("sent", [GET, START + get(path=b"/")], ids=["HTTP/1.1", "HTTP/2"])
async def test_nothing_is_done_for_a_client_that_reset_before_its_turn(sent):
    async with running() as server:
        client = await server.open()
        await until(lambda: server.door.connections)
        steps = []
        server.door.turns.has_time = lambda _=False: False
        server.door.turns.add = steps.append
        client.send(sent)
        await until(lambda: steps)
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()
        await until(lambda: client.writer.transport.is_closing() and sock.fileno() < 0)
        assert steps[0]() is False
        await until(lambda: not server.door.connections)
        assert server.door.budget.held_bytes == 0
        assert not server.events["begun"]


class Held:
    """Turns that are over, whose steps a test takes."""

    def __init__(self, server):
        self.steps, self.turns = [], server.door.turns
        self.turns.has_time = lambda _=False: False
        self.turns.add = self.steps.append

    def step(self):
        assert self.steps.pop(0)() is False

    def over(self):
        del self.turns.has_time, self.turns.add
        for step in self.steps:
            self.turns.add(step)


@pytest.mark.parametrize("sent", [GET, START + get(path=b"/")], ids=["HTTP/1.1", "HTTP/2"])
async def test_requests_that_wait_for_their_turn_are_answered_at_a_stop(sent):
    async with running() as server:
        client, connection = await connect(server)
        if sent is not GET:
            client.send(START)
            await until(lambda: getattr(connection.exchanges, "http2", None) is not None)
            sent = sent.removeprefix(START)
        connection.since_s -= 60  # it has been idle
        held = Held(server)
        client.send(sent)
        await until(lambda: connection.waits)
        server.stop()
        await asyncio.sleep(0.3)  # the grace of an idle connection, and of the first GOAWAY
        assert not connection.transport.is_closing()
        held.over()
        await until(lambda: server.events["begun"])
        assert b"200" in await client.rest() if sent is GET else await client.rest()


async def test_a_connection_is_not_closed_for_its_time_while_what_came_waits():
    async with running() as server:
        client, connection = await connect(server)
        held = Held(server)
        client.send(GET)
        await until(lambda: connection.waits)
        connection.check_time(connection.since_s + 3600)
        assert not connection.transport.is_closing()
        held.over()
        assert (await client.answer())[0] == 200


async def test_a_connection_that_fails_in_its_turn_is_closed(caplog):
    async with running() as server:
        client, connection = await connect(server)
        held = Held(server)
        client.send(GET)
        await until(lambda: connection.waits)
        connection.exchanges.receive = None
        held.step()
        await until(lambda: not server.door.connections)
    assert "a connection failed" in caplog.text
