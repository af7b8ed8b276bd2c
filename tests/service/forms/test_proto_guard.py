from __future__ import annotations

import pytest

from service.errors import InvalidInput
from service.forms import open_inference_pb2 as pb
from service.forms.form import Asked
from service.forms.oip_proto import OipProtoForm
from service.forms.proto_guard import read_infer_request
from service.forms.reader import Limits
from tests.documented import documented

LIMITS_ROW = "fields of a gRPC message; its bytes besides pixels; its integers"
MAX_FIELDS, MAX_OTHER_BYTES, MAX_NUMBERS = map(int, documented(LIMITS_ROW))


def test_fields_of_every_wire_type_are_passed_over_when_unknown():
    unknown = (
        b"\xf8\x7f\x96\x01" + b"\xf9\x7f" + bytes(8) + b"\xfa\x7f\x02hi" + b"\xfd\x7f" + bytes(4)
    )
    not_inputs = b"\x28\x05"  # their number, a number's type
    assert read_infer_request(unknown + not_inputs + b"\x0a\x02ab").model_name == "ab"


def delimited(tag, value):
    """The field whose one-byte tag is `tag`."""
    head, size = bytes([tag]), len(value)
    while size > 127:
        head += bytes([size & 127 | 128])
        size >>= 7
    return head + bytes([size]) + value


def as_request(fields):
    return fields


def as_input(fields):
    return delimited(0x2A, fields)


def as_contents(fields):
    return as_input(delimited(0x2A, fields))


def refused_unread(message, monkeypatch):
    monkeypatch.delattr(pb, "ModelInferRequest")
    error = read_infer_request(message)
    assert isinstance(error, InvalidInput)
    assert error.field == "message"
    assert len(error.message) < 200
    return error.message


@pytest.mark.parametrize(
    ("field", "put", "others"),
    [
        pytest.param(b"\x2a\x00", as_request, 0, id="inputs"),
        pytest.param(b"\x32\x00", as_request, 0, id="outputs"),
        pytest.param(b"\x3a\x00", as_request, 0, id="raw_input_contents"),
        pytest.param(b"\x22\x00", as_request, 0, id="parameters"),
        pytest.param(b"\x22\x00", as_input, 1, id="inputs' parameters"),
        pytest.param(b"\x2a\x00", as_input, 1, id="inputs' contents"),
        pytest.param(b"\x18\x01", as_input, 1, id="shape not packed"),
        pytest.param(b"\x42\x00", as_contents, 2, id="bytes_contents"),
        pytest.param(b"\x22\x00", as_contents, 2, id="uint_contents in packs"),
        pytest.param(b"\x20\x01", as_contents, 2, id="uint_contents not packed"),
        pytest.param(b"\x35" + bytes(4), as_contents, 2, id="fp32_contents not packed"),
    ],
)
@pytest.mark.states("limits", LIMITS_ROW, found="messages of as many fields, and one more")
def test_a_message_is_refused_unread_when_it_has_too_many_fields(field, put, others, monkeypatch):
    most = MAX_FIELDS - others
    assert not isinstance(read_infer_request(put(field * most)), InvalidInput)
    message = refused_unread(put(field * (most + 1)), monkeypatch)
    assert f"more than {MAX_FIELDS} fields" in message


def test_a_message_of_fields_without_a_number_is_malformed_at_once(monkeypatch):
    assert "not a ModelInferRequest" in refused_unread(bytes(1 << 20), monkeypatch)


def test_fields_are_counted_together_when_they_are_spread_over_inputs(monkeypatch):
    inputs = as_input(b"\x22\x00" * (MAX_FIELDS // 4)) * 4
    assert "fields" in refused_unread(inputs, monkeypatch)


@pytest.mark.parametrize(
    ("tag", "put"),
    [
        pytest.param(0x0A, as_request, id="model_name"),
        pytest.param(0x22, as_request, id="parameters"),
        pytest.param(0x32, as_request, id="outputs"),
        pytest.param(0x7A, as_request, id="unknown"),
        pytest.param(0x1A, as_input, id="shape"),
        pytest.param(0x22, as_input, id="inputs' parameters"),
        pytest.param(0x3A, as_input, id="unknown in an input"),
        pytest.param(0x7A, as_contents, id="unknown in contents"),
    ],
)
@pytest.mark.states("limits", LIMITS_ROW, found="messages of two halves, and a byte more")
def test_a_message_is_refused_unread_when_too_much_of_it_is_no_pixel(tag, put, monkeypatch):
    half = MAX_OTHER_BYTES // 2
    message = put(delimited(tag, bytes(half)) + delimited(tag, bytes(half + 1)))
    words = f"more than {MAX_OTHER_BYTES} bytes besides the pixels"
    assert words in refused_unread(message, monkeypatch)


CONTENTS = [field.name for field in pb.InferTensorContents.DESCRIPTOR.fields]


@pytest.mark.parametrize("name", [*CONTENTS, "raw_input_contents"])
def test_pixels_are_read_when_they_are_many(name):
    count = MAX_OTHER_BYTES + 1
    if name == "raw_input_contents":
        request = pb.ModelInferRequest(raw_input_contents=[bytes(count)])
    else:
        many = [bytes(count)] if name == "bytes_contents" else [1] * count
        contents = pb.InferTensorContents(**{name: many})
        tensor = pb.ModelInferRequest.InferInputTensor(name="image", contents=contents)
        request = pb.ModelInferRequest(inputs=[tensor])
    assert read_infer_request(request.SerializeToString()) == request


@pytest.mark.states("limits", LIMITS_ROW, found="messages of as many numbers, and one more")
def test_a_message_is_refused_unread_when_it_has_too_many_numbers(monkeypatch):
    few = b"\x07" * (MAX_NUMBERS - 600)
    most = delimited(0x22, b"\xff\x01" * 600) + delimited(0x22, few)
    request = read_infer_request(as_contents(most))
    assert len(request.inputs[0].contents.uint_contents) == MAX_NUMBERS
    message = refused_unread(as_contents(most + delimited(0x22, b"\x07")), monkeypatch)
    assert f"more than {MAX_NUMBERS} integers" in message


def test_the_numbers_of_one_image_are_read_when_they_are_not_packed():
    request = read_infer_request(as_contents(b"\x20\xff\x01" * 784))
    assert list(request.inputs[0].contents.uint_contents) == [255] * 784


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
        b"\x2a\x03\x2a\x02a",
        b"\x2a\x02\x22\x01\x00",
    ],
)
def test_a_message_is_refused_when_it_is_broken(message):
    error = read_infer_request(message)
    assert isinstance(error, InvalidInput)
    assert error.field == "message"


def test_a_refused_request_is_identified_when_it_was_parsed():
    numbers = delimited(0x22, b"\x01" * 70_000)  # packed, of no number of images
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="image", datatype="UINT8", shape=[1, 28, 28]
    )
    content = tensor.SerializeToString() + delimited(0x2A, numbers)
    message = pb.ModelInferRequest(model_name="lenet", id="7").SerializeToString()
    with pytest.raises(InvalidInput) as caught:
        OipProtoForm(Limits(1)).decode(message + as_input(content), lambda _: None)
    assert caught.value.asked == Asked("lenet", "", "7")
