from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidInput
from service.rpc import open_inference_pb2 as pb
from service.rpc.wire import MAX_FIELDS, read_infer_request


def test_a_request_is_read_when_it_is_one(raw_request):
    request = raw_request(id="x" * 300, model_name="lenet")
    assert read_infer_request(request.SerializeToString()) == request


def test_fields_of_every_wire_type_are_passed_over_when_unknown():
    unknown = (
        b"\xf8\x7f\x96\x01" + b"\xf9\x7f" + bytes(8) + b"\xfa\x7f\x02hi" + b"\xfd\x7f" + bytes(4)
    )
    assert read_infer_request(unknown + b"\x0a\x02ab").model_name == "ab"


@pytest.mark.parametrize("field", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\x22\x00"])
def test_a_message_is_refused_unread_when_it_has_too_many_fields(field, monkeypatch):
    assert not isinstance(read_infer_request(field * MAX_FIELDS), InvalidInput)
    monkeypatch.delattr(pb, "ModelInferRequest")
    error = read_infer_request(field * (MAX_FIELDS + 1))
    assert isinstance(error, InvalidInput)
    assert "more than 64 fields" in error.message


@pytest.mark.parametrize(
    "message",
    [
        b"\x2a",
        b"\x2a\x05abcd",
        b"\x2a" + b"\xff" * 11,
        b"\x08\x80",
        b"\x2b\x2c",
        b"\x0a\x01\xff",
        b"\x00\x00",
        b"\xf9\x7f" + bytes(7),
    ],
)
def test_a_message_is_refused_when_it_is_broken(message):
    error = read_infer_request(message)
    assert isinstance(error, InvalidInput)
    assert error.field == "message"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_an_error_when_read(message):
    assert isinstance(read_infer_request(message), (pb.ModelInferRequest, InvalidInput))
