"""`ModelInfer` and `ModelStreamInfer` of the Open Inference Protocol.

A stream has a request for each message, and answers them in their order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from service.api.errors import status_of
from service.errors import InvalidInput
from service.forms import open_inference_pb2 as pb
from service.forms.form import Content
from service.forms.oip_proto import SCALE, OipProtoForm
from service.forms.pixels import SCALES, scale_of
from service.observe.traces import Operation, grpc_operation, parent_of
from service.request import Request, Requests, TimesS, Wanted
from wire.errors import Refusal
from wire.grpc import Call, Caller, Method, timeout_s_of
from wire.grpc_status import OK, Status
from wire.head import FastCall
from wire.ids import Ids

SERVICE = "inference.GRPCInferenceService"

_STREAM_AHEAD = 32
"""Requests of a stream that are worked on while the first of them is not written."""

# Triton's clients may wait for it, as a model may give several answers to a request there.
_LAST = {"triton_final_response": pb.InferParameter(bool_param=True)}
_FINAL = pb.ModelInferResponse(parameters=_LAST).SerializeToString()
_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2
"""The tag of an answer in a message of a stream."""

_BYTES_OF_ONE = 400 * 1024
"""A request of a stream counts as another one for each so many bytes."""


def infer_methods(requests: Requests) -> dict[str, Method]:
    """The two methods, by name."""
    forms = {scale: OipProtoForm(requests.limits, scale) for scale in SCALES}

    def read(operation: Operation, headers: Mapping[str, str]) -> Wanted:
        limit_s, timeout_s = requests.timeout_s, timeout_s_of(headers)
        if timeout_s is not None:
            limit_s = min(timeout_s, limit_s)
        parent = parent_of(Ids.read(headers).trace, headers.get("tracestate", ""))
        form = forms[scale_of(headers.get(SCALE, "byte"), SCALE)]
        return Wanted(form, limit_s, operation, parent)

    def method(name: str, open_call: Callable[[Requests, Wanted, Caller], Call]) -> Method:
        reading = partial(read, grpc_operation(f"{SERVICE}/{name}"))
        return Method(reading, partial(open_call, requests), requests.refused, is_limited=True)

    return {
        "ModelInfer": method("ModelInfer", _Single),
        "ModelStreamInfer": method("ModelStreamInfer", _Stream),
    }


class _Single(Request):
    """A call of `ModelInfer`, and its request. A stop lets it end if the request has begun."""

    __slots__ = ("_received",)

    body_timeout_s = math.inf
    is_ahead = False

    def __init__(self, requests: Requests, wanted: Wanted, exchange: Caller) -> None:
        Request.__init__(self, requests, wanted, exchange)
        self._received = False

    def reply(self, content: Content, rest: list[bytes], times_s: TimesS) -> None:
        self._to.reply(content.body)

    def reply_error(self, error: Refusal) -> None:
        self._to.end(status_of(error))

    def message(self, size: int | None) -> FastCall:
        if self._received:
            raise InvalidInput("message: got a second, expected one request", field="message")
        self._received = True
        self.announce(size)
        return self

    def half_close(self) -> None:
        if not self._received:
            raise InvalidInput("message: got none, expected a request", field="message")

    def wait(self) -> None:
        self.wait_for_body()

    def stop(self, error: Refusal) -> None:
        if not self._received:
            self.fail(error)


class _Streamed(Request):
    """A request of a stream, and the place of its answer.

    Attributes:
        places: how many requests it counts as.
        message: the answer, once it is made.
    """

    __slots__ = ("message", "places")

    def __init__(self, requests: Requests, wanted: Wanted, stream: _Stream, places: int) -> None:
        Request.__init__(self, requests, wanted, stream)
        self.places = places
        self.message: bytes | None = None

    def reply(self, content: Content, rest: list[bytes], times_s: TimesS) -> None:
        body = content.body + _FINAL  # fields that follow each other are one message
        self.message = _varint(_RESPONSE) + _varint(len(body)) + body
        self._to.write()

    def reply_error(self, error: Refusal) -> None:
        response = pb.ModelStreamInferResponse(
            error_message=status_of(error).details,
            infer_response=pb.ModelInferResponse(id=self.asked.id or "", parameters=_LAST),
        )
        self.message = response.SerializeToString()
        self._to.write()


class _Stream:
    """A call of `ModelStreamInfer`.

    Each request, which may come at any time, has the time that a call of `ModelInfer` has.
    """

    body_timeout_s = math.inf

    def __init__(self, requests: Requests, wanted: Wanted, exchange: Caller) -> None:
        self._requests, self._exchange = requests, exchange
        self._wanted = replace(wanted, timeout_s=requests.timeout_s)
        self._open: deque[_Streamed] = deque()
        """The requests that are not answered, or wait for those before them."""
        self._places = 0
        self._last: Status | None = None
        """How the call ends when all is answered."""

    def message(self, size: int | None) -> FastCall:
        places = 1 + (size or 0) // _BYTES_OF_ONE
        request = _Streamed(self._requests, self._wanted, self, places)
        self._open.append(request)
        self._places += places
        request.announce(size)
        return request

    def half_close(self) -> None:
        self._last = self._last or OK
        self.write()

    def wait(self) -> None: ...

    @property
    def is_ahead(self) -> bool:
        # Many requests wait for their answers, or many answers for the client.
        full = self._places >= _STREAM_AHEAD or not self._exchange.is_read()
        return self._last is not None or full

    def stop(self, error: Refusal) -> None:
        self._last = self._last or status_of(error)
        self.write()

    def fail(self, error: Refusal) -> None:
        unanswered = tuple(self._open)
        self._last = status_of(error)
        if not unanswered:
            self._requests.refused(error)
        for request in unanswered:
            request.fail(error)
        self.write()

    def cancel(self) -> None:
        for request in self._open:
            request.cancel()
        self._open.clear()

    def write(self) -> None:
        """Write the answers that are next."""
        unanswered, ahead = self._open, self.is_ahead
        while unanswered and (message := unanswered[0].message) is not None:
            self._places -= unanswered.popleft().places
            self._exchange.write(message)
        if self._last is not None:
            if not unanswered:
                self._exchange.end(self._last)
        elif ahead and not self.is_ahead:
            self._exchange.read_on()


def _varint(value: int) -> bytes:
    """`value` as protobuf writes lengths: seven bits a byte, lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
