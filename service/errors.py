"""Errors of a request and of the start, independent of a transport.

Those of a request are `Refusal`s of the transport, which names some kinds itself. Each has a status
over HTTP and one over gRPC.

Refusal
├── Unauthorized            no right key came with the request
├── Forbidden               the key that came may not do this, or nobody may
└── ServiceError
    ├── InvalidInput            malformed bytes or values; `field` names which
    ├── TooLarge                the body or the number of images exceeds its limit
    ├── UnsupportedMediaType    the body's content type or encoding cannot be read
    ├── UnknownModel            the requested model or version is not loaded
    ├── Overloaded              a queue is full; retry after `retry_after_s`
    ├── DeadlineExceeded        the deadline passed before the answer was ready
    │   └── BodyTimeout         the deadline passed before the body had arrived
    ├── Cancelled               the client disconnected or cancelled
    ├── Unavailable             starting, stopping, or the device is lost; retry
    └── InferenceFailed         the batch failed on the server's side

InvalidCertificate          the files of a certificate cannot be used

OSError
└── CannotListen            an address is in use or not on this machine
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from lenet.errors import (
    BackendUnavailable,
    DeviceError,
    GoldenMismatch,
    InvalidModel,
    InvalidWeightFile,
)
from wire import errors as wire
from wire.errors import (
    CannotListen,
    Forbidden,
    InvalidCertificate,
    Refusal,
    StatusCode,
    Unauthorized,
)
from wire.errors import shown as shown


class ServiceError(Refusal):
    """An error of the service that is reported to the client.

    Attributes:
        asked: what could be read of a body that is refused, see `service.forms.form`.
    """

    asked: Any = None


class InvalidInput(wire.InvalidInput, ServiceError):
    """The request is malformed."""


class TooLarge(wire.TooLarge, ServiceError):
    """The request exceeds a size limit."""


class UnsupportedMediaType(ServiceError):
    """The body's content type or encoding is not supported."""

    code, status, grpc_status = "unsupported_media_type", 415, StatusCode.INVALID_ARGUMENT


class UnknownModel(ServiceError):
    """The requested model or version is not loaded."""

    code, status, grpc_status = "unknown_model", 404, StatusCode.NOT_FOUND


class Overloaded(wire.Overloaded, ServiceError):
    """A queue has no room for this request."""


class DeadlineExceeded(ServiceError):
    """The deadline passed before the answer was ready."""

    code, status, grpc_status = "deadline_exceeded", 504, StatusCode.DEADLINE_EXCEEDED


class BodyTimeout(wire.BodyTimeout, DeadlineExceeded):
    """The body did not arrive before the deadline."""


class Cancelled(ServiceError):
    """The client disconnected or cancelled."""

    code, status, grpc_status = "cancelled", 499, StatusCode.CANCELLED


class Unavailable(wire.Unavailable, ServiceError):
    """The server cannot answer now; a retry may succeed."""


class InferenceFailed(ServiceError):
    """The batch that held this request failed."""

    code = "inference_failed"


_KINDS = (
    *(InvalidInput, Unauthorized, Forbidden, UnknownModel, BodyTimeout, TooLarge),
    *(UnsupportedMediaType, Overloaded, Cancelled, ServiceError, InferenceFailed, Unavailable),
    DeadlineExceeded,
)
STATUS = {kind.code: kind.status for kind in _KINDS}
"""HTTP status by error code. 422 is not used."""
GRPC_STATUS = {kind.code: kind.grpc_status.name for kind in _KINDS}
"""gRPC status by error code."""


class ExitCode(IntEnum):
    """Exit codes of the process; documented in docs/operations.md for supervisors."""

    STOPPED = 0
    SETTINGS = 2
    WEIGHTS = 3
    BACKEND = 4
    ADDRESS = 5
    WORKERS = 6
    DEVICE = 7
    DESCRIPTORS = 8


_WEIGHTS = (InvalidWeightFile, InvalidModel, GoldenMismatch)
STARTUP_ERRORS = (*_WEIGHTS, BackendUnavailable, DeviceError, CannotListen, InvalidCertificate)
"""Start-up failures with an exit code; any other exception ends in a traceback and exit code 1."""


def exit_code(error: Exception) -> ExitCode:
    """The exit code for `error`, one of `STARTUP_ERRORS`."""
    if isinstance(error, _WEIGHTS):
        return ExitCode.WEIGHTS
    if isinstance(error, DeviceError) and error.sticky:
        return ExitCode.DEVICE
    if isinstance(error, BackendUnavailable | DeviceError):
        return ExitCode.BACKEND
    if isinstance(error, InvalidCertificate):
        return ExitCode.SETTINGS
    assert isinstance(error, CannotListen), f"bug: {error!r} has no exit code"
    return ExitCode.ADDRESS


def stopping() -> Unavailable:
    """The error of a request that the stopping service cannot answer."""
    return Unavailable(wire.STOPPING, retry_after_s=1)


def stopped() -> Unavailable:
    """The error of a request that is not answered at the end of the drain."""
    return Unavailable(wire.STOPPED, retry_after_s=1)


def invalid(field: str, got: str, expected: str) -> InvalidInput:
    """The error "FIELD: got GOT, expected EXPECTED"."""
    return InvalidInput(f"{field}: got {got}, expected {expected}", field=field)
