"""The supervisor's end and the workers' ends of what shares connections out, without processes."""

from __future__ import annotations

import contextlib
import selectors
import socket

import pytest

from wire.listener import allow_connections, reserve
from wire.sharing import AT_ONCE, Sharing, take


class Worker:
    """A worker's end: what it has taken, and how many of them have ended."""

    def __init__(self, inbox):
        self.inbox, self.taken, self.closed = inbox, [], 0

    def take(self):
        self.taken += take(self.inbox.source)
        return len(self.taken) - self.closed

    def end(self, number):
        self.closed += number
        self.inbox.count_closed(self.closed)


class Shared:
    """Workers that share one port, and the clients that have connected to it."""

    def __init__(self, stack):
        self.stack = stack
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.ports = (stack.enter_context(reserve("127.0.0.1", 0)),)
        self.address = self.ports[0][0].getsockname()
        self.sharing = Sharing(self.ports, self.selector)
        self.alive = set()
        stack.callback(lambda: [self.kill(worker) for worker in tuple(self.alive)])

    def worker(self):
        """One that serves."""
        worker = Worker(self.sharing.add())
        allow_connections(self.ports[0])
        worker.inbox.begin()
        self.turn()
        self.alive.add(worker)
        self.stack.callback(lambda: [one.close() for one in worker.taken])
        return worker

    def kill(self, worker):
        self.alive.remove(worker)
        self.sharing.remove(worker.inbox)

    def connect(self, number=1):
        for _ in range(number):
            self.stack.enter_context(socket.create_connection(self.address))

    def turn(self):
        """Run the supervisor's loop while there is work."""
        while events := self.selector.select(0):
            self.sharing.share({key.fileobj for key, _ in events})


@pytest.fixture
def shared():
    with contextlib.ExitStack() as stack:
        yield Shared(stack)


@pytest.mark.parametrize(("workers", "connections"), [(4, 32), (2, 4), (3, 1), (1, 9)])
@pytest.mark.parametrize("at_once", [True, False])
def test_connections_are_shared_out_evenly(shared, workers, connections, at_once):
    found = [shared.worker() for _ in range(workers)]
    for _ in range(1 if at_once else connections):
        shared.connect(connections if at_once else 1)
        shared.turn()
    now = [worker.take() for worker in found]
    assert sum(now) == connections
    assert max(now) - min(now) <= 1


def test_the_worker_whose_connections_have_ended_gets_the_next(shared):
    first, second = shared.worker(), shared.worker()
    shared.connect(8)
    shared.turn()
    assert first.take() == second.take() == 4
    second.end(3)
    shared.connect(3)
    shared.turn()
    assert (first.take(), second.take()) == (4, 4)


def test_short_connections_go_to_every_worker_in_turn(shared):
    workers = [shared.worker() for _ in range(3)]
    for _ in range(6):
        shared.connect()
        shared.turn()
        for worker in workers:
            worker.end(worker.take())
    assert [len(worker.taken) for worker in workers] == [2, 2, 2]


def test_what_a_dead_worker_has_not_taken_goes_to_the_others_and_a_new_one_gets_the_next(shared):
    dead, other = shared.worker(), shared.worker()
    shared.connect(8)
    shared.turn()
    shared.kill(dead)
    assert other.take() == 8
    new = shared.worker()
    shared.connect(8)
    shared.turn()
    assert (new.take(), other.take()) == (8, 8)


def test_a_worker_that_takes_nothing_keeps_no_connection_from_others(shared):
    shared.worker()
    other = shared.worker()
    for _ in range(3 * AT_ONCE):
        shared.connect()
        shared.turn()
        other.end(other.take())
    assert len(other.taken) == 3 * AT_ONCE - 1


def test_connections_wait_when_no_worker_has_room(shared):
    worker = shared.worker()
    connections = 400
    shared.connect(connections)
    for _ in range(2 * connections // AT_ONCE):
        shared.sharing.share(key.fileobj for key, _ in shared.selector.select(0))
    assert shared.sharing.stuck
    while worker.take() < connections:
        shared.sharing.share(key.fileobj for key, _ in shared.selector.select(0))
    assert not shared.sharing.stuck


def test_connections_are_refused_while_no_worker_serves(shared):
    with pytest.raises(ConnectionRefusedError):
        shared.connect()
    worker = shared.worker()
    shared.connect()
    shared.turn()
    shared.kill(worker)
    with pytest.raises(ConnectionRefusedError):
        shared.connect()
    worker = shared.worker()
    shared.connect()
    shared.turn()
    assert worker.take() == 1


def test_at_the_end_the_workers_get_what_has_waited_and_are_told(shared):
    worker = shared.worker()
    shared.connect(AT_ONCE + 1)
    shared.sharing.close()
    with pytest.raises(ConnectionRefusedError):
        shared.connect()
    worker.take()
    assert worker.take() == AT_ONCE + 1
    with pytest.raises(EOFError):
        worker.take()
