"""What an error is called in gRPC.

The status map follows Triton where Triton's clients act on it, with one difference: a full queue
is RESOURCE_EXHAUSTED, so that a client can tell "send less" from UNAVAILABLE, "send elsewhere".
An image too many is INVALID_ARGUMENT as in Triton, not RESOURCE_EXHAUSTED: sending it again would
not help. It refuses to tell a client anything about an error that is not a `ServiceError`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from service.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
    UnknownModel,
    UnsupportedMediaType,
)

_log = logging.getLogger(__name__)

_CODES: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    TooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedMediaType: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}
_LONGEST_DETAILS = 500
"""Characters. Trailing metadata over 8 KiB is dropped by the client, each character may take 12."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends: code, sentence, trailing metadata.

    The metadata is `lenet-error-code`, `lenet-error-field` if a field was wrong, and
    `grpc-retry-pushback-ms` (gRFC A6, obeyed by clients with a retry policy) if a later try may
    succeed.
    """

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...]


def status_of(error: Exception) -> Status:
    """The status of `error`; one that is no `ServiceError` is logged here and hidden there."""
    if not isinstance(error, ServiceError):
        _log.error("a gRPC call failed unexpectedly", exc_info=error)
        error = ServiceError("internal error; the server's log says more")
    metadata = [("lenet-error-code", error.code)]
    if error.field:
        metadata.append(("lenet-error-field", error.field))
    if error.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(1000 * error.retry_after_s)))
    details = error.message
    if len(details) > _LONGEST_DETAILS:
        details = f"{details[: _LONGEST_DETAILS - 3]}..."
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    return Status(code, details, tuple(metadata))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the call of `context` with the status of `error`."""
    status = status_of(error)
    await context.abort(status.code, status.details, status.metadata)
