"""Methods of gRPC with one request and one answer, made of a function of bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from wire.errors import INTERNAL, InvalidInput, Refusal
from wire.grpc import GrpcStream, Method

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

    def __init__(
        self,
        answer: Callable[[bytes], bytes],
        max_bytes: int,
        _options: object,
        exchange: GrpcStream,
    ) -> None:
        self._answer, self._max_bytes, self._exchange = answer, max_bytes, exchange
        self._body = b""
        self._has_begun = False

    def message(self, size: int | None) -> _Unary:
        if self._has_begun:
            raise InvalidInput("message: got a second, expected one request", field="message")
        self._has_begun = True
        self._check(size or 0)
        return self

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            expected = f"at most {self._max_bytes}"
            raise InvalidInput(f"message: got {size} bytes, expected {expected}", field="message")

    def data(self, data: bytes) -> None:
        self._body += data
        self._check(len(self._body))

    def room(self) -> None:
        """Returns None: messages are kept here."""

    def arrived(self, size: int) -> None:
        raise AssertionError("bug: no room was given")

    def wait_for_body(self) -> None:
        """Does nothing: `body_timeout_s` limits the time."""

    def complete(self, body: bytes | memoryview | None = None) -> None:
        try:
            found = self._answer(self._body if body is None else bytes(body))
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

    def is_ahead(self) -> bool:
        return False

    def stop(self, error: Refusal) -> None:
        if not self._has_begun:
            self.fail(error)

    def fail(self, error: Refusal) -> None:
        self._exchange.refuse(error)

    def cancel(self) -> None:
        """Nothing is held."""
