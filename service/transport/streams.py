"""How many requests may be open over HTTP/2 at a time, on all connections of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from service.errors import Overloaded

if TYPE_CHECKING:
    from service.transport.exchange import Exchange
    from service.transport.http2_exchanges import Http2Exchanges

MAX_OPEN_STREAMS = 8192
"""Requests that are open at a time."""

MAX_INFLATERS = 256
"""Compressed messages that arrive at a time: a decompressor takes 40 KB."""

MAX_ENDLESS_CALLS = 1024
"""Open calls that watch the health or use reflection: each has a task of its own, 10 KB."""


class OpenStreams:
    """The requests of all connections: how many, and which may give way to others.

    Beyond `most` the one gives way that waits longest for its client, or for others of its
    connection; a new one is refused if none does. Requests that are worked on are not ended.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0
        self._waiting: dict[Exchange, None] = {}

    def wait(self, exchange: Exchange) -> None:
        """It waits from now on."""
        self._waiting.pop(exchange, None)
        self._waiting[exchange] = None

    def go_on(self, exchange: Exchange) -> None:
        """It does not wait any more."""
        self._waiting.pop(exchange, None)

    def close(self, exchange: Exchange) -> None:
        """It is over."""
        self.count -= 1
        self._waiting.pop(exchange, None)

    def open(self) -> bool:
        """Count another one. Returns: whether there is room for it."""
        self.count += 1
        if self.count <= self._most:
            return True
        if not self._waiting:
            return False
        first = next(iter(self._waiting))
        del self._waiting[first]
        cast("Http2Exchanges", first.writer).give_way(first)
        return True


def too_many_open() -> Overloaded:
    """The error of a request that is one too many."""
    message = "requests: too many are open over HTTP/2; try again later"
    return Overloaded(message, retry_after_s=1)
