"""Which request gives way where too many are open."""

from __future__ import annotations

import random

import pytest

from wire.streams import OpenStreams


class Connection:
    """Notes the requests that gave way."""

    def __init__(self, streams):
        self.streams, self.ended = streams, []

    def give_way(self, exchange):
        self.ended.append(exchange)
        self.streams.close(exchange)


class Request:
    def __init__(self, connection):
        self.writer = connection


def opened(streams, connection, count=1):
    requests = [Request(connection) for _ in range(count)]
    for request in requests:
        assert streams.open()
        streams.wait(request)
    return requests


def test_the_connection_with_the_most_that_wait_gives_way_first():
    streams = OpenStreams(10)
    honest, others, flood = (Connection(streams) for _ in range(3))
    opened(streams, honest)
    opened(streams, others, 2)
    first, second, *_ = opened(streams, flood, 7)
    streams.wait(first)  # it has come further: the second waits longest
    opened(streams, others)
    assert (honest.ended, others.ended, flood.ended) == ([], [], [second])
    opened(streams, flood, 20)
    assert (honest.ended, others.ended, len(flood.ended)) == ([], [], 21)


def test_a_request_is_refused_where_none_waits():
    streams = OpenStreams(1)
    (only,) = opened(streams, Connection(streams))
    streams.go_on(only)
    assert not streams.open()


@pytest.mark.parametrize("seed", range(5))
def test_the_one_that_gives_way_is_of_the_largest_connection_whatever_came_before(seed):
    rng, streams, waiting = random.Random(seed), OpenStreams(40), {}
    connections = [Connection(streams) for _ in range(6)]
    running = []
    for _ in range(2000):
        connection = rng.choice(connections)
        match rng.randrange(4):
            case 0 | 1:
                most = max(waiting.values(), default=0)
                before = [len(one.ended) for one in connections]
                full = streams.count >= 40
                if full and not most:
                    continue
                (request,) = opened(streams, connection)
                ended = [
                    one
                    for one, count in zip(connections, before, strict=True)
                    if len(one.ended) > count
                ]
                assert len(ended) == full
                for one in ended:
                    assert waiting[one] == most
                    waiting[one] -= 1
                    running = [each for each in running if each is not one.ended[-1]]
                waiting[connection] = waiting.get(connection, 0) + 1
                running.append(request)
            case 2 if running:
                request = running.pop(rng.randrange(len(running)))
                waiting[request.writer] -= 1
                streams.close(request)
            case 3 if running:
                streams.wait(rng.choice(running))
