"""Methods of gRPC with one request and one answer, made of a function of bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from wire.budget import SMALL_BYTES
from wire.errors import INTERNAL, BodyTimeout, InvalidInput, Refusal
from wire.grpc import Caller, Method

_log = logging.getLogger(__name__)

_MESSAGE_S = 10.0
"""Maximum seconds in which a request arrives."""


def unary(answer: Callable[[bytes], bytes], max_bytes: int = 4 << 20) -> Method:
    """The method that answers the message of a request by `answer`, called in the event loop.

    A `Refusal` that it raises is the status of the call; any other exception is INTERNAL.
    """
    return Method(lambda _: None, partial(_Unary, answer, max_bytes))


class _Unary:
    """One call, and the receiver of its message."""

    body_timeout_s = _MESSAGE_S
    is_ahead = False

    def __init__(
        self,
        answer: Callable[[bytes], bytes],
        max_bytes: int,
        _options: object,
        exchange: Caller,
    ) -> None:
        self._answer, self._max_bytes, self._exchange = answer, max_bytes, exchange
        self._budget = exchange.budget
        self._body = bytearray()
        self._announced_bytes = 0
        self._has_begun = self._is_watched = self._has_ended = False

    def message(self, size: int | None) -> _Unary:
        if self._has_begun:
            raise InvalidInput("message: got a second, expected one request", field="message")
        self._has_begun, self._announced_bytes = True, size or 0
        self._check(self._announced_bytes)
        return self

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            expected = f"at most {self._max_bytes}"
            raise InvalidInput(f"message: got {size} bytes, expected {expected}", field="message")

    def data(self, data: bytes) -> None:
        size = len(self._body) + len(data)
        self._check(size)
        self._budget.hold(len(data), whole := max(self._announced_bytes, size))
        if self._has_ended:  # evicted, to make room for itself
            self._budget.release(len(data))
            return
        self._body += data
        if whole > SMALL_BYTES and not self._is_watched:
            self._is_watched = True
            self._budget.watch(self)

    @property
    def moved_bytes(self) -> int:
        """How many bytes of the message were received."""
        return len(self._body)

    def evict(self) -> None:
        """The message arrives slowly while memory is short: fail."""
        self.fail(
            BodyTimeout(
                "message: upload too slow while other requests need the memory, got "
                f"{self.moved_bytes} bytes so far; send it faster",
                field="message",
            )
        )

    def _end(self) -> None:
        self._has_ended = True
        if self._is_watched:
            self._budget.unwatch(self)
        self._budget.release(len(self._body))
        self._body = bytearray()

    def room(self) -> None:
        """Returns None: messages are kept here."""

    def arrived(self, size: int) -> None:
        raise AssertionError("bug: no room was given")

    def wait_for_body(self) -> None:
        """Does nothing: `body_timeout_s` limits the time."""

    def complete(self, body: bytes | memoryview | None = None) -> None:
        if self._has_ended:
            return
        message = bytes(self._body if body is None else body)
        self._end()
        try:
            found = self._answer(message)
        except Refusal as exc:
            self.fail(exc)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            _log.exception("a gRPC call failed")
            self.fail(Refusal(INTERNAL))
        else:
            self._exchange.reply(found)

    def half_close(self) -> None:
        if not self._has_begun:
            raise InvalidInput("message: got none, expected a request", field="message")

    def wait(self) -> None:
        """Does nothing: `body_timeout_s` limits the time."""

    def stop(self, error: Refusal) -> None:
        if not self._has_begun:
            self.fail(error)

    def fail(self, error: Refusal) -> None:
        self._end()
        self._exchange.refuse(error)

    def cancel(self) -> None:
        self._end()
