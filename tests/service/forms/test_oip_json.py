"""Bodies of the Open Inference Protocol that are refused; test_tensors has the tensors."""

from __future__ import annotations

import json

import pytest

from service.errors import InvalidInput, TooLarge
from service.forms.oip_json import read_infer_body
from service.forms.reader import Limits, Reader

READER = Reader(Limits(16_384))
IMAGE = {"name": "image", "datatype": "UINT8", "shape": [1, 28, 28], "data": [0] * 784}
SIZED = {"name": "image", "datatype": "UINT8", "shape": [1, 28, 28]}


def one(**changes):
    return {"inputs": [{**IMAGE, **changes}]}


def sized(size=784, **changes):
    return {"inputs": [{**SIZED, "parameters": {"binary_data_size": size}, **changes}]}


def asking(**output):
    return {"inputs": [IMAGE], "outputs": [output]}


BODIES = [
    (b"{", "body: not JSON: "),
    (b"[]", "body: got a list of 0, expected an object"),
    (b"\x89PNG\r\n\x1a\n", "body: not JSON but image/png; it goes to /predict"),
    (bytes(784), "body: not JSON: unexpected character, expected a JSON value: line 1 column 1 "),
    (b'{"a":[' + b"{}," * 40_000 + b"{}]}", "body: got 40002 objects, expected at most 64"),
    (b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", "body: got 2000002 lists, expected"),
    (b'{"a":' * 2000 + b"1" + b"}" * 2000, "body"),
    ({}, "inputs: got nothing, expected a list of objects"),
    ({"inputs": []}, "inputs: got none, expected one tensor"),
    ({"inputs": [1]}, "inputs[0]: got 1, expected an object, {"),
    ({"images": [[0] * 784]}, "inputs: got nothing, expected a list of objects; images as /predic"),
    ({"instances": [[0]]}, "inputs: got nothing, expected a list of objects; TensorFlow Serving"),
    ({"inputs": [{}]}, "inputs[0].name: got nothing"),
    ({"inputs": [IMAGE, IMAGE]}, "inputs[1].name: got 'image' a"),
    (one(shape=7), "inputs[0].shape: got 7, expected a list of integers"),
    (one(shape=[True, 28, 28]), "inputs[0].shape: got [bool, 28, 28]"),
    (one(shape=[2**63, 28, 28]), "inputs[0].shape: got [beyond int64, 28, 28]"),
    ({"inputs": [SIZED]}, "inputs[0].data: got nothing, expected numbers, or the parameter"),
    (one(data=[0] * 783), "inputs[0].data: got 783 numbers, expected 784 for shape [1, 28, 28]"),
    (one(data=[[0] * 784]), "inputs[0].data: got lists nested as [1, 784], expected one flat list"),
    (one(shape=[2, 784], data=[[0], [0, 1]]), "inputs[0].data: got lists of different lengths"),
    (one(shape=[2, 784], data=[[0], 1]), "inputs[0].data: got lists of different lengths"),
    (one(shape=[1, 784], data=[[[0]] * 784]), "inputs[0].data: got a list of 1 at index 0"),
    (one(data=[0] * 30 + [0.5] + [0] * 753), "inputs[0].data: got 0.5 at index 30 (image 0, row 1"),
    (
        one(data=[250.0] * 784),
        "inputs[0].data: got 250.0 at index 0 (image 0, row 0, column 0), ex",
    ),
    (
        one(data=[[0] * 28] * 28),
        "inputs[0].data: got lists nested as [28, 28], expected one flat l",
    ),
    (one(data=[0, True] * 392), "inputs[0].data: got true at index 1"),
    (one(data=["0"] * 784), "inputs[0].data: got '0' at"),
    (one(datatype="FP32", data=[10**400] * 784), "body"),
    (one(parameters=[]), "inputs[0].parameters: got a"),
    (one(parameters={"shared_memory_region": "x"}), "inputs[0].parameters.shared_memory_region"),
    ({"inputs": [IMAGE], "parameters": []}, "parameters: got a"),
    ({"inputs": [IMAGE], "parameters": {"timeout": "5"}}, "parameters.timeout: got '5', expected"),
    ({"inputs": [IMAGE], "id": 1}, "id: got 1, expected a string"),
    ({"inputs": [IMAGE], "id": "x" * 1025}, "id: got 'xxx"),
    ({"inputs": [IMAGE], "outputs": {}}, "outputs: got an object of 0, expected a list"),
    (asking(name="digit"), "outputs[0].name: got 'digit', expected one of probabilities, label"),
    (asking(name="label", parameters={"binary_data": 1}), "outputs[0].parameters.binary_data: got"),
    (
        asking(name="probabilities", parameters={"classification": 0}),
        "outputs[0].parameters.classification: got 0, expected at least 1",
    ),
    (
        asking(name="probabilities", parameters={"classification": -1}),
        "outputs[0].parameters.classification: got -1, expected a whole number from 0 to",
    ),
    (
        sized(),
        "inputs[0].parameters.binary_data_size: got 784, expected the header Inference-Heade",
    ),
]


@pytest.mark.parametrize(("content", "message"), BODIES)
def test_a_body_is_refused_in_the_words_of_the_protocol(content, message):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises((InvalidInput, TooLarge)) as caught:
        read_infer_body(body, None, READER)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 300


def test_floats_are_answered_with_the_conversion_that_fits():
    with pytest.raises(InvalidInput, match="expected integers 0 to 255; for floats 0 to 255 send"):
        read_infer_body(json.dumps(one(data=[250.0] * 784)).encode(), None, READER)
    with pytest.raises(InvalidInput, match="expected whole numbers"):
        read_infer_body(json.dumps(one(datatype="FP32", data=[0.5] * 784)).encode(), None, READER)


@pytest.mark.parametrize(
    ("document", "rest", "message"),
    [
        (one(parameters={"binary_data_size": 784}), 784, "inputs[0].data: got numbers beside bina"),
        (sized(), 783, "inputs[0].parameters.binary_data_size: got 784, expected at most 783"),
        (sized(), 785, "body: got 1 bytes behind the last tensor"),
        (one(), 784, "body: got 784 bytes behind the last tensor"),
        (sized(shape=[2, 28, 28]), 784, "inputs[0]'s binary data: got 784 bytes, expected 1568"),
        (sized("784"), 784, "inputs[0].parameters.binary_data_size: got '784', expected a whole"),
        (None, 785, "body: got 785 bytes, expected 784"),
        (None, 0, "body: got 0 bytes, expected 784 for each image, or"),
    ],
)
def test_bytes_behind_the_json_are_refused_when_they_do_not_fit_it(document, rest, message):
    head = b"" if document is None else json.dumps(document).encode()
    with pytest.raises(InvalidInput) as caught:
        read_infer_body(head + bytes(rest), len(head), READER)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("size", [3, 2**63])
def test_a_length_beyond_the_body_is_refused(size):
    with pytest.raises(InvalidInput, match=f"got {size}, expected at most the 2 bytes"):
        read_infer_body(b"{}", size, READER)
