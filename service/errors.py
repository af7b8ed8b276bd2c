"""Errors of a request and of the start, independent of a transport.

HTTP and gRPC map each error to a status of their own: `transport.answer`, `transport.grpc_status`.

ServiceError
├── InvalidInput            malformed bytes or values; `field` names which
├── TooLarge                the body or the number of images exceeds its limit
├── UnsupportedMediaType    the body's content type or encoding cannot be read
├── UnknownModel            the requested model or version is not loaded
├── Unauthorized            no right key came with the request
├── Forbidden               the key that came may not do this, or nobody may
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

import json
from enum import IntEnum
from typing import Any

from lenet.errors import (
    BackendUnavailable,
    DeviceError,
    GoldenMismatch,
    InvalidModel,
    InvalidWeightFile,
)


class ServiceError(Exception):
    """An error that is reported to the client.

    Attributes:
        code: from a closed set, stable for clients.
        message: what was received, what was expected, what to do.
        field: the part of the request that is wrong; "" if no single part is.
        retry_after_s: when a retry may succeed.
        asked: what could be read of a body that is refused, see `service.forms.form`.
    """

    code = "internal"
    asked: Any = None

    def __init__(self, message: str, *, field: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidInput(ServiceError):
    """The request is malformed."""

    code = "invalid_input"


class TooLarge(ServiceError):
    """The request exceeds a size limit."""

    code = "too_large"


class UnsupportedMediaType(ServiceError):
    """The body's content type or encoding is not supported."""

    code = "unsupported_media_type"


class UnknownModel(ServiceError):
    """The requested model or version is not loaded."""

    code = "unknown_model"


class Unauthorized(ServiceError):
    """The request came without a right key."""

    code = "unauthorized"


class Forbidden(ServiceError):
    """The request may not be made with this key, or not at all."""

    code = "forbidden"


class Overloaded(ServiceError):
    """A queue has no room for this request."""

    code = "overloaded"


class DeadlineExceeded(ServiceError):
    """The deadline passed before the answer was ready."""

    code = "deadline_exceeded"


class BodyTimeout(DeadlineExceeded):
    """The body did not arrive before the deadline."""

    code = "body_timeout"


class Cancelled(ServiceError):
    """The client disconnected or cancelled."""

    code = "cancelled"


class Unavailable(ServiceError):
    """The server cannot answer now; a retry may succeed."""

    code = "unavailable"


class InferenceFailed(ServiceError):
    """The batch that held this request failed."""

    code = "inference_failed"


class InvalidCertificate(Exception):
    """The certificate or its key cannot be used; the message names the flag and the file."""


class CannotListen(OSError):
    """An address cannot be listened on; the message names it."""


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
    return Unavailable("the service is stopping; send this to another instance", retry_after_s=1)


def stopped() -> Unavailable:
    """The error of a request that is not answered at the end of the drain."""
    return Unavailable(
        "the service stopped before the answer; send this to another instance", retry_after_s=1
    )


_SHOWN_CHARACTERS = 40


def invalid(field: str, got: str, expected: str) -> InvalidInput:
    """The error "FIELD: got GOT, expected EXPECTED"."""
    return InvalidInput(f"{field}: got {got}, expected {expected}", field=field)


def shown(value: object, characters: int = _SHOWN_CHARACTERS) -> str:
    """A client's value for a message, cut after `characters`; a container by its length alone."""
    if isinstance(value, list | dict):
        return f"{'a list' if type(value) is list else 'an object'} of {len(value)}"
    if isinstance(value, str):
        return repr(value[:characters]) + ("..." if len(value) > characters else "")
    return json.dumps(value)
