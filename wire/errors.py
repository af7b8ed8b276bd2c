"""Errors that are told to a client, with their status over HTTP and over gRPC, and of the start.

Refusal
├── InvalidInput            malformed bytes or values; `field` names which
│   └── ProtocolError       it breaks HTTP's rules; `status` says which
├── Unauthorized            no right key came with the request
├── Forbidden               the key that came may not do this, or nobody may
├── BodyTimeout             the body did not arrive in time
├── TooLarge                the body exceeds its limit
├── Overloaded              there is no room; retry after `retry_after_s`
└── Unavailable             starting or stopping; retry

InvalidCertificate          the files of a certificate cannot be used

OSError
└── CannotListen            an address is in use or not on this machine
"""

from __future__ import annotations

import json
from enum import IntEnum


class StatusCode(IntEnum):
    """The codes of gRPC that are used here; https://grpc.io/docs/guides/status-codes/."""

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


class Refusal(Exception):
    """An error that is told to the client. A service derives its own errors from it.

    Attributes:
        code: from a closed set, stable for clients.
        status: over HTTP.
        grpc_status: over gRPC, where the protocol asks for another one than that of the class.
        message: what was received, what was expected, what to do.
        field: the part of the request that is wrong; "" if no single part is.
        retry_after_s: when a retry may succeed.
    """

    code, status, grpc_status = "internal", 500, StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after_s: int | None = None,
        grpc_status: StatusCode | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        if grpc_status is not None:
            self.grpc_status = grpc_status


class InvalidInput(Refusal):
    """The request is malformed."""

    code, status, grpc_status = "invalid_input", 400, StatusCode.INVALID_ARGUMENT


class ProtocolError(InvalidInput):
    """The request breaks HTTP's rules, which have a status for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unauthorized(Refusal):
    """The request came without a right key."""

    code, status, grpc_status = "unauthorized", 401, StatusCode.UNAUTHENTICATED


class Forbidden(Refusal):
    """The request may not be made with this key, or not at all."""

    code, status, grpc_status = "forbidden", 403, StatusCode.PERMISSION_DENIED


class BodyTimeout(Refusal):
    """The body did not arrive in time."""

    code, status, grpc_status = "body_timeout", 408, StatusCode.DEADLINE_EXCEEDED


class TooLarge(Refusal):
    """The request exceeds a size limit. In gRPC a retry would not help, as in Triton."""

    code, status, grpc_status = "too_large", 413, StatusCode.INVALID_ARGUMENT


class Overloaded(Refusal):
    """There is no room for this request now."""

    code, status, grpc_status = "overloaded", 429, StatusCode.RESOURCE_EXHAUSTED


class Unavailable(Refusal):
    """The server cannot answer now; a retry may succeed."""

    code, status, grpc_status = "unavailable", 503, StatusCode.UNAVAILABLE


class InvalidCertificate(Exception):
    """The certificate or its key cannot be used; the message names the flag and the file."""


class CannotListen(OSError):
    """An address cannot be listened on; the message names it."""


INTERNAL = "internal error; see the server log"
"""The message of an unexpected error, which is hidden from the client."""

STOPPING = "the service is stopping; send this to another instance"
STOPPED = "the service stopped before the answer; send this to another instance"


_SHOWN_CHARACTERS = 40


def shown(value: object, characters: int = _SHOWN_CHARACTERS) -> str:
    """A client's value for a message, cut after `characters`; a container by its length alone."""
    if isinstance(value, list | dict):
        return f"{'a list' if type(value) is list else 'an object'} of {len(value)}"
    if isinstance(value, str):
        return repr(value[:characters]) + ("..." if len(value) > characters else "")
    return json.dumps(value)
