"""gRPC on HTTP/2: messages in DATA frames, metadata, deadlines, compression, statuses in trailers.

    HEADERS :path /package.Service/Method, grpc-timeout, grpc-encoding, metadata
    DATA    message, message, ...      each: compressed (1 byte), length (4 bytes), the bytes
    answer  HEADERS, DATA: messages, HEADERS: grpc-status, grpc-message, metadata
            or, of a call that fails before it has an answer, one HEADERS with the status

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from service.errors import (
    InvalidInput,
    ServiceError,
    shown,
)
from service.transport.grpc_status import (
    OK,
    Status,
    WrongCompressedFlag,
)
from service.transport.head import FastCall
from service.transport.http2 import literals, status_field

_log = logging.getLogger(__name__)

PREFIX_BYTES = 5

_COPIED_BYTES = 16 * 1024
"""A message of fewer bytes is copied out of its frame: for it, a view costs more."""

_INFLATED_BYTES = 128 * 1024
"""Decompressed bytes in one turn of the event loop: 0.3 ms."""

_FIRST_BYTES = 16 * 1024
"""Decompressed bytes when a message arrives. The rest of all messages follows in turns."""

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

_WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""The argument `wbits` of zlib for each `grpc-encoding`."""

ENCODINGS = ("identity", *_WINDOW_BITS)


_OK_BLOCK = OK.block()

_BEGIN = status_field(200) + literals(
    ((b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"identity,deflate,gzip"))
)
"""The header block of every answer."""


def timeout_s_of(headers: Mapping[str, str]) -> float | None:
    """The time that a client gives its call, in seconds; None without a limit.

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
    return int(found[1]) * _UNITS_S[found[2]]


class Method(Protocol):
    """One method of a service."""

    @property
    def is_limited(self) -> bool:
        """Whether its calls wait for a batch, and are refused where too many are open."""
        ...

    @property
    def is_endless(self) -> bool:
        """Whether its calls may go on for ever, and give way where too many are open."""
        ...

    def read(self, headers: Mapping[str, str]) -> Any:
        """Read the options in a call's headers, names in lower case. Equal ones are read once.

        Raises: ServiceError.
        """
        ...

    def refused(self, error: ServiceError) -> None:
        """A call failed at its headers: count it."""
        ...

    def open(self, wanted: Any, exchange: GrpcExchange) -> Call:
        """Begin a call."""
        ...


class Call(Protocol):
    """One call of a method."""

    body_timeout_s: float
    """How long the client may send nothing while its request is not complete."""

    def message(self, size: int | None) -> FastCall:
        """A message of `size` bytes begins, None if not known. Returns its receiver.

        Raises: ServiceError.
        """
        ...

    def half_close(self) -> None:
        """The client sends no more messages. Raises: ServiceError."""
        ...

    def wait(self) -> None:
        """No message is there for now. Raises: ServiceError."""
        ...

    def is_ahead(self) -> bool:
        """Whether further messages have to wait."""
        ...

    def stop(self, error: ServiceError) -> None:
        """The service stops: begin nothing new."""
        ...

    def fail(self, error: ServiceError) -> None:
        """End the call with `error`."""
        ...

    def cancel(self) -> None:
        """The client is gone."""
        ...


class Answers(Protocol):
    """Writes the answers of an exchange to its stream."""

    def begin(self, block: bytes, end: bool) -> None:
        """The header block of the answer; `end`: it is all."""
        ...

    def whole(self, block: bytes, body: bytes, trailers: bytes) -> None:
        """A whole answer."""
        ...

    def write(self, *pieces: bytes) -> None:
        """The next bytes of the answer."""
        ...

    def finish(self, trailers: bytes) -> None:
        """The end of the answer."""
        ...

    def took(self, size: int) -> None:
        """Bytes of the request are used, and the client may send others."""
        ...

    def is_read(self) -> bool:
        """Whether the client takes what is written."""
        ...

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the next turn of the event loop, unless the stream has ended."""
        ...

    def in_turn(self, step: Callable[[], bool]) -> None:
        """Call once in each turn of the event loop, when the work before it is done.

        Ends when `step` returns False, or the stream.
        """
        ...

    def ended(self, status: Status, size: int) -> None:
        """The answer is complete: for the access log."""
        ...


class GrpcExchange:
    """One call on a stream: takes messages out of the stream, and writes answers to it.

    `encoding` is the call's `grpc-encoding`, one of `ENCODINGS`.
    """

    __slots__ = (
        "_answers",
        "_begun",
        "_call",
        "_drained",
        "_ended",
        "_inflater",
        "_left",
        "_message",
        "_sent_bytes",
        "_unread",
        "answered",
        "encoding",
    )

    def __init__(self, answers: Answers, encoding: str = "identity") -> None:
        self._answers = answers
        self.encoding = encoding
        self._call: Call | None = None
        self._message: FastCall | None = None
        """Receives the message that arrives."""
        self._left = 0
        """Bytes of that message still to be received."""
        self._inflater: _Inflater | None = None
        self._unread = bytearray()
        """Received, unused bytes: less than a prefix, or messages that wait for the call."""
        self._drained: asyncio.Event | None = None
        self._ended = self._begun = self.answered = False
        self._sent_bytes = 0

    def open(self, method: Method, wanted: Any) -> None:
        """Begin the call."""
        self._call = method.open(wanted, self)

    # Input.

    def data(self, data: bytes, end: bool) -> None:
        """The next bytes of the stream; `end`: the last."""
        call, size = self._call, len(data) - PREFIX_BYTES
        if call is None:  # it has failed
            self._answers.took(len(data))
            return
        try:
            between = self._message is None and not self._unread and not call.is_ahead()
            whole = size >= 0 and not data[0] and int.from_bytes(data[1:5], "big") == size
            if between and whole:  # the frequent case: a frame is a message
                message = call.message(size)
                self._answers.took(len(data))
                message.complete(data[5:] if size < _COPIED_BYTES else memoryview(data)[5:])
                if end:
                    call.half_close()
                return
            self._ended = end
            self._unread += data
            self._read()
        except ServiceError as exc:
            call.fail(exc)

    def wait(self) -> None:
        """All input was handled, and the request is not complete."""
        if self._message is not None:
            self.guard_message(self._message.wait_for_body)
        elif self._call is not None:
            self._guarded(self._call.wait)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ServiceError as exc:
            if self._call is not None:
                self._call.fail(exc)

    def guard_message(self, step: Callable[[], None]) -> None:
        """Run `step`. Its error is that of the message, which is read to its end and dropped."""
        message = self._message
        assert message is not None, "bug: no message"
        try:
            step()
        except ServiceError as exc:
            if self._inflater is not None:
                self._inflater = None
                self.read_on()
            message.fail(exc)

    def read_on(self) -> None:
        """Take the messages that waited while the call was ahead."""
        self._answers.soon(lambda: self._guarded(self._read))

    def _read(self) -> None:
        """Hand on what has arrived. Raises: ServiceError."""
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
                self.guard_message(partial(self._receive, piece))
                if self._left and position == len(data):
                    break
        finally:
            data.release()
            waiting = 0 if self._inflater is None or position == 0 else self._inflater.input_bytes
            self._answers.took(position - waiting)
            del self._unread[:position]
        if self._call is None:
            self._answers.took(len(self._unread))
            self._unread.clear()
            return
        if not self._ended:
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
            return self._call is not None and self._call.is_ahead()
        return self._inflater is not None and self._inflater.busy

    def _begin(self, prefix: bytes) -> None:
        compressed, size = prefix[0], int.from_bytes(prefix[1:], "big")
        assert self._call is not None, "bug: no call"
        if compressed > 1:
            got = f"{compressed} as the first byte of a message"
            raise InvalidInput(f"message: got {got}, expected 0 or 1", field="message")
        if not compressed:
            self._message, self._left = self._call.message(size), size
        elif self.encoding == "identity":
            raise WrongCompressedFlag(
                "message: got a compressed message, expected grpc-encoding to say how",
                field="grpc-encoding",
            )
        else:
            self._message, self._left = self._call.message(None), size
            self._inflater = _Inflater(self._message, self.encoding)

    def _receive(self, piece: bytes) -> None:
        message = self._message
        assert message is not None, "bug: no message"
        if self._inflater is not None:
            self._inflater.take(piece, last=not self._left)
            if self._inflater.busy:
                self._answers.in_turn(self._inflate)
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

    def _end_inflated(self) -> None:
        message = self._message
        if self._inflater is not None and self._inflater.complete and message is not None:
            self._message = self._inflater = None
            message.complete()

    def _inflate(self) -> bool:
        """Decompress a part; whether more is to be done."""
        inflater = self._inflater
        if inflater is None or not inflater.busy:
            return False
        before = inflater.input_bytes
        self.guard_message(partial(inflater.step, _INFLATED_BYTES))
        failed = self._inflater is not inflater
        self._answers.took(before - (0 if failed else inflater.input_bytes))
        if not failed and not inflater.busy:
            self._guarded(self._inflated)
        return self._inflater is inflater and inflater.busy

    def _inflated(self) -> None:
        """The decompressor has no more to do for now. Raises: ServiceError."""
        self._end_inflated()
        self._read()

    # Output.

    def reply(self, message: bytes) -> None:
        """The whole answer of a call with one."""
        if self.answered:
            return
        self._end()
        size = len(message)
        prefix = b"\0" + size.to_bytes(4, "big")
        self._answers.whole(_BEGIN, prefix + message, _OK_BLOCK)
        self._answers.ended(OK, size)

    def write(self, message: bytes) -> None:
        """One of several answers."""
        if self.answered:
            return
        if not self._begun:
            self._begun = True
            self._answers.begin(_BEGIN, False)
        self._sent_bytes += len(message)
        self._answers.write(b"\0" + len(message).to_bytes(4, "big"), message)

    def is_read(self) -> bool:
        """Whether the client takes what is written."""
        return self._answers.is_read()

    async def drained(self) -> None:
        """Wait until the client has taken what is written."""
        while not self.answered and not self._answers.is_read():
            self._drained = event = asyncio.Event()
            await event.wait()

    def end(self, status: Status = OK) -> None:
        """End the call."""
        if self.answered:
            return
        self._end()
        if self._begun:
            self._answers.finish(status.block())
        else:
            self._answers.begin(_BEGIN + status.block(), True)
        self._answers.ended(status, self._sent_bytes)

    def _end(self) -> None:
        self.answered = True
        self._call = self._message = self._inflater = None

    # Called by the connection.

    def cancel(self) -> None:
        """The client is gone."""
        call, self._call = self._call, None
        self._message = self._inflater = None
        if call is not None:
            self.answered = True
            call.cancel()

    def fail(self, error: ServiceError) -> None:
        """End the call with `error`."""
        if self._call is not None:
            self._call.fail(error)

    def stop(self, error: ServiceError) -> None:
        """The service stops: what has begun is answered."""
        if self._call is not None:
            self._call.stop(error)

    def body_timeout_s(self) -> float:
        """How long it may be silent. Requests for inference have deadlines of their own."""
        return math.inf if self._call is None else self._call.body_timeout_s

    def sent(self) -> None:
        """The client has taken what was written."""
        if self._drained is not None:
            self._drained.set()
        if self._call is not None and self._unread:
            self.read_on()


class _Inflater:
    """Turns a compressed message into the bytes of the message, a part at a time."""

    def __init__(self, message: FastCall, encoding: str) -> None:
        self._message = message
        self._decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
        self._input = b""
        self._last = False
        self.busy = False
        """Whether `step` has to be called before more is taken."""
        self.complete = False

    @property
    def input_bytes(self) -> int:
        """Bytes that are not decompressed, still counted in the flow-control windows."""
        return len(self._input)

    def take(self, piece: bytes, last: bool) -> None:
        """The next bytes. Raises: ServiceError."""
        self._input, self._last = self._input + piece, last
        self.step(_FIRST_BYTES)

    def step(self, most_bytes: int) -> None:
        """Make up to `most_bytes` of the message. Raises: ServiceError."""
        self.busy = False
        try:
            found = self._decompressor.decompress(self._input, most_bytes)
        except zlib.error:
            message = "message: not compressed as grpc-encoding says"
            raise InvalidInput(message, field="message") from None
        if self._decompressor.unused_data:
            raise InvalidInput("message: bytes behind its compressed end", field="message")
        self._input = self._decompressor.unconsumed_tail
        if found:
            self._message.data(found)
        self._message.wait_for_body()
        if self._decompressor.eof:
            self._input = b""
        self.busy = bool(self._input) or (len(found) == most_bytes and not self._decompressor.eof)
        if self._last and not self.busy:
            if not self._decompressor.eof:
                raise InvalidInput("message: its compressed bytes end too early", field="message")
            self.complete = True
