"""Which request gives way where too many are open."""

from __future__ import annotations

from wire.streams import OpenStreams


class Connection:
    """Notes the requests that gave way."""

    def __init__(self, streams):
        self.streams, self.ended = streams, []

    def give_way(self, exchange):
        self.ended.append(exchange)
        del self.streams[exchange]


class Request:
    waits = True

    def __init__(self, connection):
        self.writer = connection


def places(most):
    return OpenStreams(most, lambda request: request.waits)


def add(streams, request):
    streams[request] = None
    return len(streams) <= streams.most or streams.make_room(request)


def opened(streams, connection, count=1):
    requests = [Request(connection) for _ in range(count)]
    for request in requests:
        assert add(streams, request)
    return requests


def test_the_connection_with_the_most_that_wait_gives_way_first():
    streams = places(10)
    honest, others, flood = (Connection(streams) for _ in range(3))
    opened(streams, honest)
    opened(streams, others, 2)
    first, second, *_ = opened(streams, flood, 7)
    first.waits = False  # it is worked on
    opened(streams, others)
    assert (honest.ended, others.ended, flood.ended) == ([], [], [second])
    opened(streams, flood, 20)
    assert (honest.ended, others.ended, len(flood.ended)) == ([], [], 21)
    assert len(streams) == 10


def test_many_requests_are_looked_at_once_for_a_part_of_them():
    looks = []
    streams = OpenStreams(6400, lambda request: looks.append(request) or request.waits)
    flood, others = Connection(streams), Connection(streams)
    first = opened(streams, flood, 6400)
    others_requests = opened(streams, others, 1)
    first[1].waits = False
    del streams[first[2]]
    others_requests += opened(streams, others, 200)
    assert flood.ended == [first[0], *first[3:202]]
    assert len(looks) < 4 * 6400
    for request in (*first, *others_requests):
        request.waits = False
    for _ in range(1000):
        add(streams, busy := Request(others))
        busy.waits = False
    assert len(looks) < 16 * 6400
