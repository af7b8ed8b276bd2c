from __future__ import annotations

import grpc
import pytest

from service import errors
from service.rpc.servicer import status_of

CODES = {
    errors.InvalidInput: "INVALID_ARGUMENT",
    errors.TooLarge: "INVALID_ARGUMENT",
    errors.UnsupportedMediaType: "INVALID_ARGUMENT",
    errors.UnknownModel: "NOT_FOUND",
    errors.Overloaded: "RESOURCE_EXHAUSTED",
    errors.DeadlineExceeded: "DEADLINE_EXCEEDED",
    errors.Cancelled: "CANCELLED",
    errors.Unavailable: "UNAVAILABLE",
    errors.InferenceFailed: "INTERNAL",
}


def test_every_error_of_the_service_has_a_status_when_one_is_added():
    assert set(CODES) == set(errors.ServiceError.__subclasses__())


@pytest.mark.parametrize(("kind", "code"), CODES.items())
def test_an_error_keeps_its_sentence_and_its_code_when_it_becomes_a_status(kind, code):
    status = status_of(kind("the sentence"))
    assert (status.code, status.details) == (grpc.StatusCode[code], "the sentence")
    assert status.metadata == (("lenet-error-code", kind.code),)


def test_field_and_delay_travel_as_metadata_when_an_error_has_them():
    status = status_of(errors.Unavailable("stopping", field="inputs", retry_after_s=2))
    assert dict(status.metadata) == {
        "lenet-error-code": "unavailable",
        "lenet-error-field": "inputs",
        "grpc-retry-pushback-ms": "2000",
    }


def test_a_sentence_is_cut_when_it_would_not_fit_the_trailer():
    status = status_of(errors.UnknownModel("\U0001f600" * 10_000))
    assert len(status.details) == 500
    assert status.details.endswith("...")


def test_an_error_is_logged_and_hidden_when_it_is_not_the_service_s(caplog):
    status = status_of(KeyError("/etc/secret"))
    assert status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in status.details
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "secret" in caplog.text
