"""What can go wrong with a request, without a transport: each transport has its own small map.

ServiceError
├── InvalidInput            the caller's bytes or values are wrong; names the field
├── TooLarge                the body or the number of images is over the limit
├── UnsupportedMediaType    a body of a type nobody here reads
├── UnknownModel            no such model or version is loaded
├── Overloaded              the queue is full; try again after `retry_after_s`
├── DeadlineExceeded        the caller's time ran out before the answer
│   └── BodyTimeout         while its body was still on the way
├── Cancelled               the caller went away
├── Unavailable             not ready, stopping, or the device is lost; try again
└── InferenceFailed         the batch failed for a reason of ours

OSError
└── CannotListen            the start: an address is taken or not this machine's
"""

from __future__ import annotations

from enum import IntEnum

from lenet.errors import (
    BackendUnavailable,
    DeviceError,
    GoldenMismatch,
    InvalidModel,
    InvalidWeightFile,
)


class ServiceError(Exception):
    """An answer that is not a prediction.

    `code` is from a closed set and stable for clients, `field` names what was wrong ("" if no
    single field was), `message` says what was found, what was expected and what to do.
    """

    code = "internal"

    def __init__(self, message: str, *, field: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidInput(ServiceError):
    """The request is malformed."""

    code = "invalid_input"


class TooLarge(ServiceError):
    """The request is over a size limit."""

    code = "too_large"


class UnsupportedMediaType(ServiceError):
    """The body's content type is none of those read here."""

    code = "unsupported_media_type"


class UnknownModel(ServiceError):
    """The named model or version is not loaded."""

    code = "unknown_model"


class Overloaded(ServiceError):
    """The queue has no room for these rows."""

    code = "overloaded"


class DeadlineExceeded(ServiceError):
    """The deadline passed before the answer was there."""

    code = "deadline_exceeded"


class BodyTimeout(DeadlineExceeded):
    """The body did not arrive in the time that a whole request may take."""

    code = "body_timeout"


class Cancelled(ServiceError):
    """The caller went away."""

    code = "cancelled"


class Unavailable(ServiceError):
    """The server cannot answer now and could a moment later."""

    code = "unavailable"


class InferenceFailed(ServiceError):
    """The batch that held these rows failed."""

    code = "inference_failed"


class CannotListen(OSError):
    """The service cannot listen where it is told to; the message names the address."""


class ExitCode(IntEnum):
    """What the process ends with; README.md tells them to whoever writes a supervisor."""

    STOPPED = 0
    SETTINGS = 2
    WEIGHTS = 3
    BACKEND = 4
    ADDRESS = 5
    WORKERS = 6
    DEVICE = 7


_WEIGHTS = (InvalidWeightFile, InvalidModel, GoldenMismatch)
FORESEEN = (*_WEIGHTS, BackendUnavailable, DeviceError, CannotListen)
"""The reasons not to start that have an exit code; any other error is a traceback and 1."""


def exit_code(error: Exception) -> ExitCode:
    """The code of a start that failed with `error`, one of `FORESEEN`."""
    if isinstance(error, _WEIGHTS):
        return ExitCode.WEIGHTS
    if isinstance(error, DeviceError) and error.sticky:
        return ExitCode.DEVICE
    if isinstance(error, BackendUnavailable | DeviceError):
        return ExitCode.BACKEND
    assert isinstance(error, CannotListen), f"bug: {error!r} has no exit code"
    return ExitCode.ADDRESS
