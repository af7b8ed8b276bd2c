"""gRPC on HTTP/2: messages in DATA frames, metadata, deadlines, compression, statuses in trailers.

    HEADERS :path /package.Service/Method, grpc-timeout, grpc-encoding, metadata
    DATA    message, message, ...      each: compressed (1 byte), length (4 bytes), the bytes
    answer  HEADERS, DATA: messages, HEADERS: grpc-status, grpc-message, metadata
            or, of a call that fails before it has an answer, one HEADERS with the status

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from wire.errors import (
    InvalidInput,
    Overloaded,
    Refusal,
    StatusCode,
    shown,
)
from wire.exchange import Exchange
from wire.grpc_status import OK, Status
from wire.head import FastCall
from wire.http2_fields import literals, status_field
from wire.inflate import Inflater

if TYPE_CHECKING:
    from wire.budget import Budget
    from wire.http2_exchanges import Http2Exchanges
    from wire.http2_head import Http2Head
    from wire.web import _WebCall

_log = logging.getLogger(__name__)

Caller: TypeAlias = "GrpcStream | _WebCall"
"""Where the answers of a call go."""

PREFIX_BYTES = 5

_COPIED_BYTES = 16 * 1024
"""A message of fewer bytes is copied out of its frame: for it, a view costs more."""

_INFLATED_BYTES = 128 * 1024
"""Decompressed bytes in one turn of the event loop: 0.3 ms."""

_FIRST_BYTES = 16 * 1024
"""Decompressed bytes when a message arrives. The rest of all messages follows in turns."""

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

_OK_BLOCK = OK.block()

_BEGIN = status_field(200) + literals(
    ((b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"identity,deflate,gzip"))
)
"""The header block of every answer."""


def timeout_s_of(headers: Mapping[str, str]) -> float | None:
    """The time that a client gives its call, in seconds; None without a limit.

    A second and more is rounded up to a millisecond: most clients send what is left of one timeout.

    Raises: InvalidInput.
    """
    text = headers.get("grpc-timeout")
    if text is None:
        return None
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        raise InvalidInput(
            f"grpc-timeout: got {shown(text)}, expected up to 8 digits and one of H, M, S, m, u, n",
            field="grpc-timeout",
        )
    timeout_s = int(found[1]) * _UNITS_S[found[2]]
    return timeout_s if timeout_s < 1 else math.ceil(timeout_s * 1e3) / 1e3


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service.

    Args:
        read: reads the options in a call's headers, names in lower case. Equal ones are read once;
            timeouts are equal if `timeout_s_of` says the same of them. Raises Refusal.
        open: begins a call.
        refused: counts a call that failed at its headers.
        is_open: whether its calls need no key.
        is_limited: whether its calls wait for a batch, and are refused where too many are open.
        is_endless: whether they may go on for ever, and give way where too many are open.
    """

    read: Callable[[Mapping[str, str]], Any]
    open: Callable[[Any, Caller], Call]
    refused: Callable[[Refusal], None] = lambda _: None
    is_open: bool = False
    is_limited: bool = False
    is_endless: bool = False


class Call(Protocol):
    """One call of a method."""

    body_timeout_s: float
    """How long a message may take to arrive, and how long the client may send none."""

    def message(self, size: int | None) -> FastCall:
        """A message of `size` bytes begins, None if not known. Returns its receiver.

        Raises: Refusal.
        """

    def half_close(self) -> None:
        """The client sends no more messages. Raises: Refusal."""

    def wait(self) -> None:
        """No message is there for now. Raises: Refusal."""

    @property
    def is_ahead(self) -> bool:
        """Whether further messages have to wait."""

    def stop(self, error: Refusal) -> None:
        """The service stops: begin nothing new."""

    def fail(self, error: Refusal) -> None:
        """End the call with `error`."""

    def cancel(self) -> None:
        """The client is gone."""


class GrpcStream(Exchange):
    """A call of gRPC: takes messages out of its stream, and writes answers to it."""

    writer: Http2Exchanges
    head: Http2Head
    is_limited = False
    answered = False
    _call: Call | None = None
    _message: FastCall | None = None
    """Receives the message that arrives."""
    _left = 0
    """Bytes of that message still to be received."""
    _inflater: Inflater | None = None
    _ended = _begun = False
    _sent_bytes = 0

    def open(self) -> None:
        """Begin the call."""
        head, method = self.head, self.head.method_of_grpc
        self._unread = bytearray()
        """Received, unused bytes: less than a prefix, or messages that wait for the call."""
        if head.error is not None:
            if method is not None:
                method.refused(head.error)
            self.refuse(head.error)
            return
        assert method is not None, "bug: neither a method nor an error"
        self.is_limited = method.is_limited
        self._call = method.open(head.wanted, self)
        if method.is_endless:
            self.may_give_way = True
            endless = self.writer.places.endless_calls
            endless[self] = None
            if len(endless) > endless.most:
                endless.make_room(self)

    # Input.

    def data(self, data: bytes, end: bool) -> None:
        """The next bytes of the stream; `end`: the last."""
        call, size = self._call, len(data) - PREFIX_BYTES
        if call is None:  # it has failed
            self.writer.http2.taken(self.stream, len(data))
            return
        try:
            between = self._message is None and not self._unread and not call.is_ahead
            whole = size >= 0 and not data[0] and int.from_bytes(data[1:5], "big") == size
            if between and whole:  # the frequent case: a frame is a message
                self.since_s = self.writer.active_s
                self.writer.http2.taken(self.stream, len(data))
                message = call.message(size)
                message.complete(data[5:] if size < _COPIED_BYTES else memoryview(data)[5:])
                if end:
                    call.half_close()
                return
            self._ended = end
            self._unread += data
            self._read()
        except Refusal as exc:
            call.fail(exc)

    def wait(self) -> None:
        """All input was handled, and the request is not complete."""
        if self._message is not None:
            self._guard_message(self._message.wait_for_body)
        elif self._call is not None:
            self._guarded(self._call.wait)

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._call is not None:
            try:
                step()
            except Refusal as exc:
                self.fail(exc)
            except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
                self.writer.crash(self)

    def _guard_message(self, step: Callable[[], None]) -> None:
        """Run `step`. Its error is that of the message, which is read to its end and dropped."""
        message = self._message
        assert message is not None, "bug: no message"
        try:
            step()
        except Refusal as exc:
            if self._inflater is not None:
                self._forget_inflater()
                self.read_on()
            message.fail(exc)

    def read_on(self) -> None:
        """Take the messages that waited while the call was ahead."""
        self.writer.loop.call_soon(self._guarded, self._read)

    def _read(self) -> None:
        """Hand on what has arrived. Raises: Refusal."""
        data = memoryview(self._unread)
        position = 0
        try:
            while self._call is not None and not self._waits():
                if self._message is None:
                    if len(data) - position < PREFIX_BYTES:
                        break
                    self._begin(bytes(data[position : position + PREFIX_BYTES]))
                    position += PREFIX_BYTES
                piece = bytes(data[position : position + self._left])
                position += len(piece)
                self._left -= len(piece)
                self._guard_message(partial(self._receive, piece))
                if self._left and position == len(data):
                    break
        finally:
            data.release()
            waiting = 0 if self._inflater is None or position == 0 else self._inflater.input_bytes
            self.writer.http2.taken(self.stream, position - waiting)
            del self._unread[:position]
        if self._call is None or not self._ended:
            return
        if self._message is None and not self._unread:
            self._ended = False
            self._call.half_close()
        elif not self._waits():
            missing = self._left or PREFIX_BYTES - len(self._unread)
            raise InvalidInput(
                f"message: the request ended {missing} bytes before its message", field="message"
            )

    def _waits(self) -> bool:
        """Whether the call, or the decompressor, takes nothing for now."""
        if self._message is None:
            return self._call is not None and self._call.is_ahead
        return self._inflater is not None and self._inflater.busy

    def _begin(self, prefix: bytes) -> None:
        self.since_s = self.writer.active_s
        compressed, size = prefix[0], int.from_bytes(prefix[1:], "big")
        assert self._call is not None, "bug: no call"
        if compressed > 1:
            got = f"{compressed} as the first byte of a message"
            raise InvalidInput(f"message: got {got}, expected 0 or 1", field="message")
        if not compressed:
            self._message, self._left = self._call.message(size), size
        elif self.head.encoding == "identity":
            raise InvalidInput(
                "message: got a compressed message, expected grpc-encoding to say how",
                field="grpc-encoding",
                grpc_status=StatusCode.INTERNAL,
            )
        else:
            self._message, self._left = self._call.message(None), size
            self._inflater = Inflater(self.head.encoding, "message", "grpc-encoding")
            inflaters = self.writer.places.inflaters
            inflaters[self] = None
            if len(inflaters) > inflaters.most and not inflaters.make_room(self):
                text = "message: too many compressed ones arrive at a time; try again later"
                raise Overloaded(text, field="message", retry_after_s=1)

    @property
    def is_arriving(self) -> bool:
        """Whether a message arrives."""
        return self._left > 0

    def _receive(self, piece: bytes) -> None:
        message = self._message
        assert message is not None, "bug: no message"
        if self._inflater is not None:
            self._inflater.take(piece, last=not self._left)
            self._step(self._inflater, _FIRST_BYTES)
            if self._inflater.busy:
                self.writer.places.inflations.add(self._inflate)
            else:
                self._end_inflated()
            return
        if piece:
            message.data(piece)
        if not self._left:
            self._message = None
            message.complete()
        else:
            message.wait_for_body()

    def _step(self, inflater: Inflater, most_bytes: int) -> None:
        """Hand on up to `most_bytes` of a compressed message. Raises: Refusal."""
        message = self._message
        assert message is not None, "bug: no message"
        if found := inflater.step(most_bytes):
            message.data(found)
        message.wait_for_body()

    def _end_inflated(self) -> None:
        message = self._message
        if self._inflater is not None and self._inflater.complete and message is not None:
            self._message = None
            self._forget_inflater()
            message.complete()

    def _forget_inflater(self) -> None:
        self._inflater = None
        self.writer.places.inflaters.pop(self, None)

    def _inflate(self) -> bool:
        """Decompress a part; whether more is to be done."""
        inflater = self._inflater
        if inflater is None or not inflater.busy:
            return False
        before = inflater.input_bytes
        self._guarded(partial(self._guard_message, partial(self._step, inflater, _INFLATED_BYTES)))
        failed = self._inflater is not inflater
        self.writer.http2.taken(self.stream, before - (0 if failed else inflater.input_bytes))
        if not failed and not inflater.busy:
            self._guarded(self._inflated)
        return self._inflater is inflater and inflater.busy

    def _inflated(self) -> None:
        """The decompressor has no more to do for now. Raises: Refusal."""
        self._end_inflated()
        self._read()

    # Output.

    @property
    def budget(self) -> Budget:
        """Limits the memory of messages that arrive."""
        return self.writer.service.budget

    def reply(self, message: bytes) -> None:
        """The whole answer of a call with one."""
        if not self.answered:
            self.writer.http2.answer(self.stream, _BEGIN, framed(message), _OK_BLOCK)
            self._end(StatusCode.OK, len(message))

    def write(self, message: bytes) -> None:
        """One of several answers."""
        if self.answered:
            return
        if not self._begun:
            self._begun = True
            self.writer.http2.headers(self.stream, _BEGIN)
        self._sent_bytes += len(message)
        self.writer.http2.write(self.stream, framed(message))

    def is_read(self) -> bool:
        """Whether the client takes what is written."""
        return self.writer.is_read(self)

    async def drained(self) -> None:
        """Wait until the client has taken what is written."""
        while not self.answered and not self.is_read():
            await self.wait_until_sent()

    def end(self, status: Status = OK) -> None:
        """End the call."""
        if self.answered:
            return
        if self._begun:
            self.writer.http2.finish(self.stream, status.block())
        else:
            self.writer.http2.headers(self.stream, _BEGIN + status.block(), end=True)
        self._end(status.code, self._sent_bytes)

    def refuse(self, error: Refusal) -> None:
        """End the call with the status that tells `error`."""
        self.end(self.writer.service.gate.policy.status(error))

    def _end(self, status: StatusCode, size: int) -> None:
        # A cycle keeps this object until the collector comes, but not what it held.
        self.answered, self._call, self._message, self._unread = True, None, None, bytearray()
        if self._inflater is not None:
            self._forget_inflater()
        if self.may_give_way:
            self.writer.places.endless_calls.pop(self, None)
        if status is StatusCode.INTERNAL or self.writer.service.access is not None:
            self.log_call(status, size)

    # Called by the connection.

    def cancel(self) -> None:
        """The client is gone."""
        call = self._call
        if call is not None:
            self._end(StatusCode.CANCELLED, self._sent_bytes)
            call.cancel()
        super().sent()

    def fail(self, error: Refusal) -> None:
        """End the call with `error`."""
        if self._call is not None:
            self._call.fail(error)

    def stop(self, error: Refusal) -> None:
        """The service stops: what has begun is answered."""
        if self._call is not None:
            self._call.stop(error)

    def body_timeout_s(self) -> float:
        """How long a message may take to arrive. Requests for inference have deadlines."""
        return math.inf if self._call is None else self._call.body_timeout_s

    def sent(self) -> None:
        """The client has taken what was written."""
        super().sent()
        if self._call is not None and self._unread:
            self.read_on()


def framed(message: bytes) -> bytes:
    """A message with its prefix, not compressed."""
    return b"\0%b%b" % (len(message).to_bytes(4, "big"), message)
