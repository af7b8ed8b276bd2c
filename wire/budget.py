"""The memory that clients can make this process hold, over all transports together."""

from __future__ import annotations

import asyncio
from typing import Protocol

from wire.errors import Overloaded

SMALL_BYTES = 256 * 1024
"""A body up to this size is small: 330 images as bytes, 100 in JSON."""

_LARGE_SHARE = 0.75
"""The part of the budget that bodies which are not small may fill. The rest is for small ones."""

UNUSED_BYTES = 32 * 1024 * 1024
"""Maximum bytes that connections have received and not used yet; beyond it those that keep most are
ended."""

_CHECK_S = 1.0
_SLOW_BYTES = 64 * 1024
"""A transfer is slow while it moves less than this in `_CHECK_S`."""


class Transfer(Protocol):
    """A large body that is being received, or answers that are being sent; hashed by identity."""

    @property
    def moved_bytes(self) -> int:
        """How much has been received or sent."""

    def evict(self) -> None:
        """End it and release what it holds: others need the memory."""


class Budget:
    """Bytes of bodies and messages being received or decoded, and of answers waiting to be sent.

    At most `max_bytes` together: a body beyond it is refused. Answers may pass it, and so may bytes
    that connections have received and not used, of which there are at most `UNUSED_BYTES`.

    A body that arrives whole and is decoded at once is not counted, nor are images that wait for
    their batch: their number has a limit of its own. Belongs to an event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = self._most_held_bytes = 0
        self._kept: dict[Transfer, int] = {}
        self._kept_bytes = 0
        self._transfers: dict[Transfer, int] = {}
        """`moved_bytes` of each transfer at the last check."""
        self._slow: set[Transfer] = set()
        self._checking = False

    def limit_bytes(self, whole: int) -> int:
        """How many bytes may be held, that of a body of `whole` bytes included, when it comes."""
        return self.max_bytes if whole <= SMALL_BYTES else int(_LARGE_SHARE * self.max_bytes)

    def hold(self, size: int, whole: int) -> None:
        """Hold `size` more bytes of a body that announces `whole` bytes, or has so many so far.

        Raises:
            Overloaded: there is no room for them.
        """
        limit = self.limit_bytes(whole)
        while self._slow and self.held_bytes + size > limit:
            transfer = self._slow.pop()
            self.unwatch(transfer)
            transfer.evict()
        if self.held_bytes + size > limit:
            raise Overloaded(
                f"body: {self.held_bytes} bytes of requests and answers are in flight, and "
                f"{size} more would pass the limit of {limit}; try again later",
                field="body",
                retry_after_s=1,
            )
        self.add(size)

    def add(self, size: int) -> None:
        """Hold `size` more bytes that cannot be refused, see the class; fewer if negative."""
        self.held_bytes += size
        self._most_held_bytes = max(self._most_held_bytes, self.held_bytes)

    def has_shrunk(self, size: int) -> bool:
        """Whether `size` bytes less are held than at most since the last time it was true."""
        if self._most_held_bytes - self.held_bytes < size:
            return False
        self._most_held_bytes = self.held_bytes
        return True

    def keep(self, keeper: Transfer, size: int) -> None:
        """Count the `size` bytes that a connection has received and not used.

        The one that keeps most is ended when all together keep more than `UNUSED_BYTES`, which
        frees at least what `keeper` has added.
        """
        before = self._kept.pop(keeper, 0)
        if size:
            self._kept[keeper] = size
        self._kept_bytes += size - before
        if size > before and self._kept_bytes > UNUSED_BYTES:
            max(self._kept, key=self._kept.__getitem__).evict()

    def release(self, size: int) -> None:
        """Stop holding `size` bytes."""
        self.held_bytes -= size
        assert self.held_bytes >= 0, "bug: more is released than was held"

    def watch(self, transfer: Transfer) -> None:
        """Evict `transfer` when it is slow and others need the memory."""
        self._transfers[transfer] = transfer.moved_bytes
        if not self._checking:
            self._checking = True
            asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def unwatch(self, transfer: Transfer) -> None:
        """Forget `transfer`: it is complete, or ended."""
        self._transfers.pop(transfer, None)
        self._slow.discard(transfer)

    def _check(self) -> None:
        for transfer, before in self._transfers.items():
            moved = self._transfers[transfer] = transfer.moved_bytes
            if moved - before < _SLOW_BYTES:
                self._slow.add(transfer)
            else:
                self._slow.discard(transfer)
        self._checking = bool(self._transfers)
        if self._checking:
            asyncio.get_running_loop().call_later(_CHECK_S, self._check)
