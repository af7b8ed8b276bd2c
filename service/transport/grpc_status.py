"""How a call of gRPC ends: its status, and the status of each error."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import IntEnum

from service.errors import (
    BodyTimeout,
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    InferenceFailed,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnsupportedMediaType,
)
from service.transport.http2_fields import literals

_log = logging.getLogger(__name__)

_MOST_MESSAGE_CHARACTERS = 500
"""The longest text of an error: clients drop metadata over 8 KiB, and a character may take 12."""


class StatusCode(IntEnum):
    """The codes that are used here; https://grpc.io/docs/guides/status-codes/."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Unimplemented(InvalidInput):
    """There is no such method, or it does not understand the call."""


class HeadersTooLarge(InvalidInput):
    """The metadata of a call exceeds its limit."""


class WrongCompressedFlag(InvalidInput):
    """A message is marked as compressed, and its call has no encoding. A code of the protocol's."""


_CODES: dict[type[ServiceError], StatusCode] = {
    InvalidInput: StatusCode.INVALID_ARGUMENT,
    TooLarge: StatusCode.INVALID_ARGUMENT,
    Unauthorized: StatusCode.UNAUTHENTICATED,
    Forbidden: StatusCode.PERMISSION_DENIED,
    UnsupportedMediaType: StatusCode.INVALID_ARGUMENT,
    UnknownModel: StatusCode.NOT_FOUND,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    BodyTimeout: StatusCode.DEADLINE_EXCEEDED,
    Cancelled: StatusCode.CANCELLED,
    Unavailable: StatusCode.UNAVAILABLE,
    InferenceFailed: StatusCode.INTERNAL,
    Unimplemented: StatusCode.UNIMPLEMENTED,
    HeadersTooLarge: StatusCode.RESOURCE_EXHAUSTED,
    WrongCompressedFlag: StatusCode.INTERNAL,
}

STATUS_NAMES = {"": "OK", ServiceError.code: "INTERNAL"} | {
    error.code: code.name for error, code in reversed(_CODES.items())
}
"""Status by error code, as traces say it; "" is that of an answer."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends."""

    code: StatusCode
    details: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    def block(self) -> bytes:
        """The header fields that say it."""
        fields = [(b"grpc-status", b"%d" % self.code)]
        if self.details:
            fields.append((b"grpc-message", _percent_encoded(self.details)))
        fields += [(name.encode(), value.encode()) for name, value in self.metadata]
        return literals(fields)


OK = Status(StatusCode.OK)


def status_of(error: ServiceError) -> Status:
    """The status of a call that failed.

    Metadata: `lenet-error-code`, `lenet-error-field` if a field is wrong, and
    `grpc-retry-pushback-ms` (gRFC A6, used by clients with a retry policy) if a retry may succeed.
    """
    metadata = [("lenet-error-code", error.code)]
    if error.field:
        field = error.field.encode("unicode_escape").decode()  # it may quote the client
        metadata.append(("lenet-error-field", field))
    if error.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(1000 * error.retry_after_s)))
    details = error.message
    if len(details) > _MOST_MESSAGE_CHARACTERS:
        details = f"{details[: _MOST_MESSAGE_CHARACTERS - 3]}..."
    return Status(_CODES.get(type(error), StatusCode.INTERNAL), details, tuple(metadata))


def internal_error(error: Exception) -> Status:
    """Log an unexpected error, and hide it from the client."""
    _log.error("a gRPC call failed", exc_info=error)
    return status_of(ServiceError("internal error; see the server log"))


def _percent_encoded(text: str) -> bytes:
    data = text.strip().encode("utf-8", "replace")
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in data
    )
