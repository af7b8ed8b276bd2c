"""The shapes of errors that are not `wire.answer`'s."""

from __future__ import annotations

import orjson

from wire.answer import JSON, Answer, headers_of
from wire.errors import Refusal
from wire.grpc_status import Status
from wire.grpc_status import status_of as transport_status_of


def plain_error_answer(error: Refusal) -> Answer:
    """`error` as the Open Inference Protocol and TensorFlow Serving have it: one string."""
    text = error.message.encode("utf-8", "replace").decode()
    return Answer(error.status, JSON, orjson.dumps({"error": text}), headers_of(error))


def status_of(error: Refusal) -> Status:
    """The status of a call that failed.

    Metadata: `lenet-error-code`, `lenet-error-field` if a field is wrong, and what the transport
    says.
    """
    metadata = [("lenet-error-code", error.code)]
    if error.field:
        field = error.field.encode("unicode_escape").decode()  # it may quote the client
        metadata.append(("lenet-error-field", field))
    return transport_status_of(error, metadata)
