from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from service.errors import InvalidInput, TooLarge
from service.forms.reader import Limits, Reader
from service.forms.tensors import (
    InputTensor,
    RequestedOutput,
    answer,
    check_parameters,
    read_images,
    requested_outputs,
)
from tests.documented import documented

MAX_IMAGES = 16
READER = Reader(Limits(MAX_IMAGES))
SHAPES = {
    "batch": lambda n: (n, 28, 28),
    "flat batch": lambda n: (n, 784),
    "channels": lambda n: (n, 1, 28, 28),
}


def uint8(shape=(1, 28, 28), data=bytes(784), **changes):
    return replace(InputTensor("image", "UINT8", shape, data, "data"), **changes)


def refused(*inputs, kind=InvalidInput):
    with pytest.raises(kind) as caught:
        read_images(inputs, READER)
    assert caught.value.message.startswith(f"{caught.value.field}: got ")
    return caught.value


def drawn(n):
    return np.random.default_rng(n).integers(0, 256, (n, 28, 28), np.uint8)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("n", [1, 3, MAX_IMAGES])
@pytest.mark.parametrize("form", ["uint8", "fp32", "uint32 numbers", "fp32 numbers"])
def test_images_come_out_as_sent_when_the_shape_is_known(shape, n, form):
    images = drawn(n)
    datatype, data = {
        "uint8": ("UINT8", images.tobytes()),
        "fp32": ("FP32", memoryview(images.astype("<f4").tobytes())),
        "uint32 numbers": ("UINT8", images.ravel().astype(np.uint32)),
        "fp32 numbers": ("FP32", images.ravel().astype(np.float32)),
    }[form]
    read = read_images([uint8(shape(n), data, datatype=datatype)], READER)
    assert read.dtype == np.uint8
    assert read.flags.c_contiguous
    np.testing.assert_array_equal(read, images)


@pytest.mark.parametrize("shape", [(28, 28), (784,), [784]])
def test_one_image_is_a_batch_of_one_when_the_batch_dimension_is_left_out(shape):
    images = drawn(1)
    np.testing.assert_array_equal(read_images([uint8(shape, images.tobytes())], READER), images)


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((), "[]"),
        ((-1, 28, 28), "[-1, 28, 28]"),
        ((0, 28, 28), "[0, 28, 28]"),
        ((0, 784), "[0, 784]"),
        ((1, 28), "[1, 28]"),
        ((1, 28, 27), "[1, 28, 27]"),
        ((1, 3, 28, 28), "[1, 3, 28, 28]"),
        ((1, 1, 1, 28, 28), "[1, 1, 1, 28, 28]"),
        ((28, 28, 3), "[28, 28, 3]"),
        ((2**40, 2**40), f"[{2**40}, {2**40}]"),
        ((2**63, 28, 28), "[beyond int64, 28, 28]"),
        ((10**5000, 28, 28), "[beyond int64, 28, 28]"),
        ((True, 28, 28), "[bool, 28, 28]"),
        ((1.0, 28, 28), "[float, 28, 28]"),
        (("1", 28, 28), "[str, 28, 28]"),
        ((1,) * 10**6, "[1, 1, 1, 1, 1, ...]"),
    ],
)
def test_a_shape_is_refused_when_it_is_none_of_an_image(shape, shown):
    error = refused(uint8(shape))
    assert error.field == "inputs[0].shape"
    assert f"got {shown}, expected" in error.message


@pytest.mark.parametrize("rows", [MAX_IMAGES + 1, 2**62, 2**63 - 1])
def test_too_many_images_are_refused_when_the_shape_says_so_whatever_the_bytes(rows):
    error = refused(uint8((rows, 28, 28)), kind=TooLarge)
    assert error.field == "inputs[0].shape"
    assert f"expected at most {MAX_IMAGES}" in error.message


@pytest.mark.parametrize(
    ("datatype", "data", "got", "expected"),
    [
        ("UINT8", bytes(783), "783 bytes", "784"),
        ("UINT8", bytes(1568), "1568 bytes", "784"),
        ("FP32", bytes(784), "784 bytes", "3136"),
        ("UINT8", bytes(3136), "3136 bytes", "784"),
        ("FP32", bytes(3137), "3137 bytes", "3136"),
        ("FP32", np.zeros(783, np.float32), "783 numbers", "784"),
        ("UINT8", np.zeros(0, np.uint32), "0 numbers", "784"),
    ],
)
def test_data_are_refused_when_they_do_not_fit_the_shape(datatype, data, got, expected):
    error = refused(uint8(data=data, datatype=datatype, source="raw_input_contents[0]"))
    assert error.field == "raw_input_contents[0]"
    assert f"got {got}, expected {expected} for shape [1, 28, 28] of {datatype}" in error.message
    other = {"784 bytes": "UINT8 or INT8", "3136 bytes": "FP32 or INT32"}.get(got)
    assert error.message.endswith(f"; so many are {other}: state that as the datatype") == (
        other is not None
    )


@pytest.mark.parametrize("value", [-1.0, 0.5, 256.0, 1e30, np.nan, np.inf, -np.inf, 254.99998])
@pytest.mark.parametrize("image", [1, 33])
def test_a_float_is_refused_with_its_place_when_it_is_no_pixel(value, image):
    values = np.zeros((40, 28, 28), np.float32)
    values[image, 3, 4] = value
    for data in (values.astype("<f4").tobytes(), values.ravel().tolist()):
        with pytest.raises(InvalidInput) as caught:
            read_images([uint8((40, 28, 28), data, datatype="FP32")], Reader(Limits(40)))
        assert caught.value.field == "data"
        place = f"at index {784 * image + 28 * 3 + 4} (image {image}, row 3, column 4)"
        assert place in caught.value.message
        assert ("scale=unit" in caught.value.message) == (value == 0.5)


def test_a_number_is_refused_when_it_exceeds_255():
    values = np.zeros(784, np.uint32)
    values[5] = 256
    message = refused(uint8(data=values)).message
    assert "got 256 at index 5" in message
    assert message.endswith("; they go up to 256: scale them to 0 to 255")


@pytest.mark.parametrize("datatype", ["", "uint8", "FP8", "STRING", "x" * 10**6])
def test_a_datatype_is_refused_when_it_is_none_of_the_protocol(datatype):
    error = refused(uint8(datatype=datatype))
    assert error.field == "inputs[0].datatype"
    assert "expected one of UINT8, FP16" in error.message
    assert len(error.message) < 250


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ((), "inputs"),
        ((uint8(name="images"),), "inputs[0].name"),
        ((uint8(), uint8()), "inputs[1].name"),
        ((uint8(), uint8(name="mask")), "inputs[1].name"),
    ],
)
def test_inputs_are_refused_when_they_are_not_exactly_the_image(inputs, field):
    assert refused(*inputs).field == field


@pytest.mark.parametrize(
    ("names", "outputs"),
    [
        ([], ()),
        (["label", "probabilities"], ("label", "probabilities")),
        (["label"], ("label",)),
    ],
)
def test_outputs_come_in_the_order_of_the_request(names, outputs):
    found = requested_outputs(map(RequestedOutput, names), 1)
    assert tuple(one.name for one in found) == outputs


@pytest.mark.parametrize(
    ("names", "field"),
    [(["digit"], "outputs[0].name"), (["label", "label"], "outputs[1].name")],
)
def test_outputs_are_refused_when_unknown_or_named_twice(names, field):
    with pytest.raises(InvalidInput) as caught:
        requested_outputs(map(RequestedOutput, names), 1)
    assert caught.value.field == field


def test_only_probabilities_can_be_classified():
    with pytest.raises(InvalidInput) as caught:
        requested_outputs([RequestedOutput("label", classes=3)], 1)
    assert caught.value.field == "outputs[0].parameters.classification"


@pytest.mark.states(
    "limits",
    "bytes of a request to the repository; characters of an `id`; classifications",
    found="as many classifications, and an image more",
)
@pytest.mark.parametrize("classes", [1, 10, 10**9])
def test_a_classification_of_many_images_is_refused(classes):
    wanted = RequestedOutput("probabilities", classes=classes)
    rows = int(documented("bytes of a request to the repository")[2]) // min(classes, 256)
    assert requested_outputs([wanted], rows) == (wanted,)
    with pytest.raises(TooLarge, match=f"got {classes} classes of {rows + 1} images"):
        requested_outputs([wanted], rows + 1)


def test_shared_memory_is_refused():
    with pytest.raises(InvalidInput) as caught:
        check_parameters({"shared_memory_region": 1}, "outputs[0]")
    assert caught.value.field == "outputs[0].parameters.shared_memory_region"


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 2), (9, 3)])
def test_a_classification_has_the_best_classes_as_text(count, columns):
    probabilities = np.array([[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]], np.float32)
    outputs = (RequestedOutput("probabilities", classes=count),)
    version = SimpleNamespace(labels=("nought", "one", "zw\u00f6lf"))
    batch = SimpleNamespace(probabilities=probabilities)
    answered = SimpleNamespace(batch=batch, row=0, rows=2, version=version)
    (tensor,) = answer(answered, outputs)
    assert (tensor.datatype, tensor.shape) == ("BYTES", (2, columns))
    rows = [
        [b"0.500000:1:one", b"0.250000:0:nought", "0.250000:2:zw\u00f6lf".encode()],
        [b"1.000000:0:nought", b"0.000000:1:one", "0.000000:2:zw\u00f6lf".encode()],
    ]
    expected = [one for row in rows for one in row[:columns]]
    assert tensor.values == expected
    assert tensor.to_bytes() == b"".join(len(one).to_bytes(4, "little") + one for one in expected)
