"""A call of gRPC on a stream of HTTP/2, as an exchange that `GrpcExchange` reads and answers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from service.errors import ServiceError
from service.transport.exchange import Exchange
from service.transport.grpc import GrpcExchange
from service.transport.grpc_status import Status, StatusCode, status_of
from service.transport.http2 import Stream
from service.transport.http2_head import Http2Head

if TYPE_CHECKING:
    from service.transport.http2_exchanges import Http2Exchanges

_log = logging.getLogger(__name__)


class GrpcStream(Exchange):
    """A call of gRPC."""

    writer: Http2Exchanges
    stream: Stream
    head: Http2Head
    _call: GrpcExchange | None = None

    @property
    def is_limited(self) -> bool:  # type: ignore[override]
        """Probes are not."""
        method = self.head.method_of_grpc
        return method is not None and method.is_limited

    def open(self) -> None:
        """Begin the call."""
        head = self.head
        if head.error is not None:
            if head.method_of_grpc is not None:
                head.method_of_grpc.refused(head.error)
            GrpcExchange(self).end(status_of(head.error))
            return
        assert head.method_of_grpc is not None, "bug: neither a method nor an error"
        self._call = GrpcExchange(self, head.encoding)
        self._call.open(head.method_of_grpc, head.wanted)
        if head.method_of_grpc.is_endless:
            self.may_give_way = True
            self.writer.door.endless_calls.open()
            for places in (self.writer.door.endless_calls, self.writer.door.open_streams):
                places.wait(self)

    def closed(self) -> None:
        """The stream is over."""
        if self.may_give_way:
            self.writer.door.endless_calls.close(self)

    def data(self, data: bytes, end: bool) -> None:
        """Hand it on."""
        if self._call is not None:
            if not end:
                self.since_s = self.writer.active_s
            self._call.data(data, end)
        else:
            self.writer.http2.taken(self.stream, len(data))

    def wait(self) -> None:
        """Limit its time and memory."""
        if self._call is not None:
            self._call.wait()

    def sent(self) -> None:
        """The client takes what is written again."""
        super().sent()
        if self._call is not None:
            self._call.sent()

    def stop(self, error: ServiceError) -> None:
        """The service stops: finish what has begun."""
        if self._call is not None:
            self._call.stop(error)

    def fail(self, error: ServiceError) -> None:
        """End the call with `error`."""
        if self._call is not None:
            self._call.fail(error)

    def cancel(self) -> None:
        """The client is gone."""
        call, self._call = self._call, None
        super().sent()
        if call is not None:
            call.cancel()
            self.log("CANCELLED", 0, self._method, "grpc")

    def body_timeout_s(self) -> float:
        """How long the client may send nothing."""
        return math.inf if self._call is None else self._call.body_timeout_s()

    @property
    def _method(self) -> str:
        return self.head.path.rpartition(b"/")[2].decode("latin-1")

    # Called by the exchange.

    def begin(self, block: bytes, end: bool) -> None:
        """Write the header block of the answer; `end`: it is all."""
        if self.stream.sending:
            self.writer.http2.headers(self.stream, block, end)

    def whole(self, block: bytes, body: bytes, trailers: bytes) -> None:
        """A whole answer."""
        if self.stream.sending:
            self.writer.http2.answer(self.stream, block, body, trailers)

    def write(self, *pieces: bytes) -> None:
        """The next bytes."""
        if self.stream.sending:
            self.writer.http2.write(self.stream, pieces)

    def finish(self, trailers: bytes) -> None:
        """The end of the answer."""
        if self.stream.sending:
            self.writer.http2.finish(self.stream, trailers)

    def took(self, size: int) -> None:
        """Bytes of the request are used."""
        if size and self.stream.buffered:
            self.writer.http2.taken(self.stream, size)

    def is_read(self) -> bool:
        """Whether the client takes what is written."""
        return not self.stream.unsent and self.writer.is_read()

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the next turn of the event loop."""
        self.writer.peer.loop.call_soon(self._run, call)

    def _run(self, call: Callable[[], None]) -> None:
        if self._call is not None:
            call()

    def in_turn(self, step: Callable[[], bool]) -> None:
        """Call once in each turn of the event loop, when the work before it is done."""
        self.writer.door.turns.add(lambda: self._call is not None and step())

    def ended(self, status: Status, size: int) -> None:
        """The answer is complete."""
        self._call = None
        if status.code is StatusCode.INTERNAL and self.head.ids:
            found, ids = status.code.name, self.head.ids
            _log.error("%s was answered with %s: %s", self._method, found, ids, extra=ids.fields)
        self.log(status.code.name, size, self._method, "grpc")
