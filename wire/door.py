"""The front door: makes the protocol of each connection."""

from __future__ import annotations

import asyncio

from wire.connection import Connection
from wire.shared import Shared


class HttpService(Shared):
    """Makes the protocol of each connection when called."""

    def __call__(self, loop: asyncio.AbstractEventLoop | None = None) -> Connection:
        """The protocol of a new connection."""
        return Connection(self, loop or asyncio.get_running_loop())
