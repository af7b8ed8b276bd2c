"""How many requests may be open over HTTP/2 at a time, on all connections of the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain, islice
from typing import Any, Protocol

from wire.errors import Overloaded
from wire.turns import Series, Turns

MAX_OPEN_STREAMS = 8192
"""Requests that are open at a time."""

MAX_INFLATERS = 128
"""Compressed messages that arrive at a time: a decompressor takes 40 KB."""

MAX_ENDLESS_CALLS = 1024
"""Open calls that watch the health or use reflection: each has a task of its own, 10 KB."""

_PART = 64
"""All are looked at once for each such part of them that is opened: 8,192 take 2 ms."""


class Waiting(Protocol):
    """An exchange. Its connection ends it by `writer.give_way`."""

    writer: Any


class OpenStreams(dict[Waiting, None]):
    """Requests of all connections, of which those that wait may give way to others.

    Who opens one adds it, and calls `make_room` if they are more than `most`. Then one gives way
    for which `waits` is true, because it waits for its client or for others of its connection: of
    the connection with the most of these, the one that was opened first. A new one is refused if
    none does. Requests that are worked on are not ended.
    """

    def __init__(self, most: int, waits: Callable[[Any], bool] = lambda _: True) -> None:
        self.most, self._waits = most, waits
        self._first: deque[Waiting] = deque()
        """Those that give way first."""
        self._refused = 0
        """How many are refused before all are looked at again."""

    def make_room(self, new: Waiting) -> bool:
        """Have one give way. Returns: whether one did, or `new` is to be refused."""
        while True:
            while self._first:
                exchange = self._first.popleft()
                if exchange in self and self._waits(exchange):
                    exchange.writer.give_way(exchange)
                    return True
            if self._refused > 0:
                self._refused -= 1
                return False
            waiting: dict[Any, list[Waiting]] = {}
            for exchange in self:
                if exchange is not new and self._waits(exchange):
                    waiting.setdefault(exchange.writer, []).append(exchange)
            most_first = sorted(waiting.values(), key=len, reverse=True)
            part = max(1, self.most // _PART)
            self._first.extend(islice(chain.from_iterable(most_first), part))
            self._refused = part - len(self._first) - 1
            if not self._first:
                return False


class Places:
    """What all HTTP/2 connections of a process share the places of."""

    def __init__(self, turns: Turns) -> None:
        self.streams = OpenStreams(
            MAX_OPEN_STREAMS, lambda exchange: exchange.writer.waits(exchange)
        )
        self.endless_calls = OpenStreams(MAX_ENDLESS_CALLS)
        self.inflaters = OpenStreams(MAX_INFLATERS, lambda exchange: exchange.is_arriving)
        self.inflations = Series(turns)
        """Compressed messages, of which one at a time is decompressed: it takes the memory."""


def too_many_open() -> Overloaded:
    """The error of a request that is one too many."""
    message = "requests: too many are open over HTTP/2; try again later"
    return Overloaded(message, retry_after_s=1)
