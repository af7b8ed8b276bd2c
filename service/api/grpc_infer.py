"""`ModelInfer` and `ModelStreamInfer` of the Open Inference Protocol.

A stream has a request for each message, and answers them in their order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from service.errors import InvalidInput, ServiceError
from service.forms import open_inference_pb2 as pb
from service.forms.oip_proto import OipProtoForm
from service.request import Request, Requests, Wanted, Written
from service.transport.grpc import Call, GrpcExchange, timeout_s_of
from service.transport.grpc_status import Status, StatusCode, status_of
from service.transport.head import FastCall

_STREAM_AHEAD = 32
"""Requests of a stream that are worked on while the first of them is not written."""

_BYTES_OF_ONE = 400 * 1024
"""A request of a stream counts as another one for each so many bytes."""


@dataclass(frozen=True, slots=True)
class _InferMethod:
    """Shared by the two inference methods."""

    requests: Requests
    is_limited: ClassVar[bool] = True
    is_endless: ClassVar[bool] = False

    def read(self, headers: Mapping[str, str]) -> Wanted:
        """Read the options in the call's headers. Raises: InvalidInput."""
        longest_s = self.requests.timeout_s
        timeout_s = timeout_s_of(headers)
        limit_s = longest_s if timeout_s is None else min(timeout_s, longest_s)
        return Wanted(OipProtoForm(self.requests.limits.max_images), limit_s)

    def refused(self, error: ServiceError) -> None:
        """Count it."""
        self.requests.refused(error)


class ModelInfer(_InferMethod):
    """The method with one request and one answer."""

    __slots__ = ()

    def open(self, wanted: Wanted, exchange: GrpcExchange) -> Call:
        """Begin a call."""
        return _Single(self.requests, wanted, exchange)


class _Single:
    """A call of `ModelInfer`."""

    body_timeout_s = math.inf
    _received = False

    def __init__(self, requests: Requests, wanted: Wanted, exchange: GrpcExchange) -> None:
        self._exchange = exchange
        self._request = request = Request(requests, wanted, self._done)
        self.wait = request.wait_for_body
        self.fail = request.fail
        self.cancel = request.cancel

    def _done(self, outcome: Written | ServiceError) -> None:
        if isinstance(outcome, ServiceError):
            self._exchange.end(status_of(outcome))
        else:
            self._exchange.reply(outcome.content.body)

    def message(self, size: int | None) -> FastCall:
        """The request begins."""
        if self._received:
            raise InvalidInput("message: got a second, expected one request", field="message")
        self._received = True
        self._request.announce(size)
        return self._request

    def half_close(self) -> None:
        """It has to be there by now."""
        if not self._received:
            raise InvalidInput("message: got none, expected a request", field="message")

    def is_ahead(self) -> bool:
        """It never is."""
        return False

    def stop(self, error: ServiceError) -> None:
        """It is answered, if it has begun."""
        if not self._received:
            self.fail(error)


class ModelStreamInfer(_InferMethod):
    """The method with a stream of requests, answered in their order, errors included."""

    __slots__ = ()

    def open(self, wanted: Wanted, exchange: GrpcExchange) -> Call:
        """Begin a call."""
        return _Stream(self.requests, self.read({}), exchange)


@dataclass(slots=True)
class _Slot:
    """The place of an answer."""

    count: int
    """How many requests it counts as."""
    message: bytes | None = None
    request: Request | None = field(default=None, repr=False)


class _Stream:
    """A call of `ModelStreamInfer`. Each request has the time that a call of `ModelInfer` has."""

    body_timeout_s = math.inf

    def __init__(self, requests: Requests, wanted: Wanted, exchange: GrpcExchange) -> None:
        self._requests, self._wanted, self._exchange = requests, wanted, exchange
        self._slots: deque[_Slot] = deque()
        self._count = 0
        self._last: Status | None = None
        """How the call ends when all is answered."""

    def message(self, size: int | None) -> FastCall:
        """The next request begins."""
        slot = _Slot(1 + (size or 0) // _BYTES_OF_ONE)
        request = Request(self._requests, self._wanted, partial(self._answered, slot))
        slot.request = request
        self._slots.append(slot)
        self._count += slot.count
        request.announce(size)
        return request

    def half_close(self) -> None:
        """There are no further requests."""
        self._last = self._last or Status(StatusCode.OK)
        self._write()

    def wait(self) -> None:
        """A request may come at any time."""

    def is_ahead(self) -> bool:
        """Whether many requests wait for their answers, or many answers for the client."""
        return (
            self._last is not None or self._count >= _STREAM_AHEAD or not self._exchange.is_read()
        )

    def stop(self, error: ServiceError) -> None:
        """Begin no further request."""
        self._last = self._last or status_of(error)
        self._write()

    def fail(self, error: ServiceError) -> None:
        """End the call: what the client sends cannot be read, or a stop takes too long."""
        slots = tuple(self._slots)
        self._last = status_of(error)
        if not slots:
            self._requests.refused(error)
        for slot in slots:
            if slot.request is not None:
                slot.request.fail(error)
        self._write()

    def cancel(self) -> None:
        """The client is gone."""
        for slot in self._slots:
            if slot.request is not None:
                slot.request.cancel()
        self._slots.clear()

    def _answered(self, slot: _Slot, outcome: Written | ServiceError) -> None:
        request, slot.request = slot.request, None
        response = pb.ModelStreamInferResponse()
        if isinstance(outcome, ServiceError):
            response.error_message = status_of(outcome).details
            response.infer_response.id = "" if request is None else request.asked.id or ""
        else:
            response.infer_response.MergeFromString(outcome.content.body)
        # Triton's clients may wait for it, as a model may give several answers to a request there.
        response.infer_response.parameters["triton_final_response"].bool_param = True
        slot.message = response.SerializeToString()
        self._write()

    def _write(self) -> None:
        """Write the answers that are next."""
        slots, ahead = self._slots, self.is_ahead()
        while slots and (message := slots[0].message) is not None:
            self._count -= slots.popleft().count
            self._exchange.write(message)
        if self._last is not None:
            if not slots:
                self._exchange.end(self._last)
        elif ahead and not self.is_ahead():
            self._exchange.read_on()
