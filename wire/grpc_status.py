"""How a call of gRPC ends: its status, in fields of its trailers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wire.errors import Refusal, StatusCode
from wire.http2_fields import literals

_MOST_MESSAGE_CHARACTERS = 500
"""The longest text of an error: clients drop metadata over 8 KiB, and a character may take 12."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends."""

    code: StatusCode
    details: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    def fields(self) -> list[tuple[bytes, bytes]]:
        """The fields of the trailers that say it."""
        fields = [(b"grpc-status", b"%d" % self.code)]
        if self.details:
            fields.append((b"grpc-message", _percent_encoded(self.details)))
        fields += [(name.encode(), value.encode()) for name, value in self.metadata]
        return fields

    def block(self) -> bytes:
        """The header block of these fields over HTTP/2."""
        return literals(self.fields())


OK = Status(StatusCode.OK)


def status_of(error: Refusal, metadata: Iterable[tuple[str, str]] = ()) -> Status:
    """The status of a call that failed.

    To `metadata` comes `grpc-retry-pushback-ms` (gRFC A6, used by clients with a retry policy) if a
    retry may succeed.
    """
    found = list(metadata)
    if error.retry_after_s is not None:
        found.append(("grpc-retry-pushback-ms", str(1000 * error.retry_after_s)))
    details = error.message
    if len(details) > _MOST_MESSAGE_CHARACTERS:
        details = f"{details[: _MOST_MESSAGE_CHARACTERS - 3]}..."
    return Status(error.grpc_status, details, tuple(found))


def _percent_encoded(text: str) -> bytes:
    data = text.strip().encode("utf-8", "replace")
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in data
    )
