"""How many requests may be open over HTTP/2 at a time, on all connections of the process."""

from __future__ import annotations

from typing import Any, Protocol

from wire.errors import Overloaded
from wire.turns import Series, Turns

MAX_OPEN_STREAMS = 8192
"""Requests that are open at a time."""

MAX_INFLATERS = 128
"""Compressed messages that arrive at a time: a decompressor takes 40 KB."""

MAX_ENDLESS_CALLS = 1024
"""Open calls that watch the health or use reflection: each has a task of its own, 10 KB."""


class Waiting(Protocol):
    """An exchange. Its connection ends it by `writer.give_way`."""

    writer: Any


class OpenStreams:
    """The requests of all connections: how many, and which may give way to others.

    Beyond `most` one gives way that waits for its client, or for others of its connection: of the
    connection with the most of these, the one that waits longest. A new one is refused if none
    does. Requests that are worked on are not ended.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0
        self._waiting: dict[Any, dict[Waiting, None]] = {}
        """Requests of each connection, the one that waits longest first."""
        self._with: dict[int, dict[Any, None]] = {}
        """The connections with so many that wait."""
        self._largest = 0

    def wait(self, exchange: Waiting) -> None:
        """It waits from now on."""
        waiting = self._waiting.setdefault(exchange.writer, {})
        if exchange in waiting:
            del waiting[exchange]
        else:
            self._move(exchange.writer, len(waiting), len(waiting) + 1)
        waiting[exchange] = None

    def go_on(self, exchange: Waiting) -> None:
        """It does not wait any more."""
        waiting = self._waiting.get(exchange.writer)
        if waiting is None or exchange not in waiting:
            return
        del waiting[exchange]
        self._move(exchange.writer, len(waiting) + 1, len(waiting))
        if not waiting:
            del self._waiting[exchange.writer]

    def _move(self, writer: Any, before: int, now: int) -> None:
        """The number of a connection's requests that wait has changed by one."""
        if before:
            del self._with[before][writer]
            if not self._with[before]:
                del self._with[before]
        if now:
            self._with.setdefault(now, {})[writer] = None
        if now > self._largest or self._largest not in self._with:
            self._largest = now

    def close(self, exchange: Waiting) -> None:
        """It is over."""
        self.count -= 1
        self.go_on(exchange)

    def open(self) -> bool:
        """Count another one. Returns: whether there is room for it."""
        self.count += 1
        if self.count <= self._most:
            return True
        if not self._largest:
            return False
        writer = next(iter(self._with[self._largest]))
        first = next(iter(self._waiting[writer]))
        self.go_on(first)
        writer.give_way(first)
        return True


class Places:
    """What all HTTP/2 connections of a process share the places of."""

    def __init__(self, turns: Turns) -> None:
        self.streams = OpenStreams(MAX_OPEN_STREAMS)
        self.endless_calls = OpenStreams(MAX_ENDLESS_CALLS)
        self.inflaters = OpenStreams(MAX_INFLATERS)
        self.inflations = Series(turns)
        """Compressed messages, of which one at a time is decompressed: it takes the memory."""


def too_many_open() -> Overloaded:
    """The error of a request that is one too many."""
    message = "requests: too many are open over HTTP/2; try again later"
    return Overloaded(message, retry_after_s=1)
