from __future__ import annotations

import json

import pytest

from service.errors import InvalidInput
from service.forms.reader import Limits, Reader
from service.forms.tensorflow import read_tensorflow_body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, 'body: got nothing, expected "instances" or "inputs"'),
        ({"instances": [], "inputs": []}, "body: got 'inputs' and 'instances', expected"),
        ({"instances": []}, "instances: got no image, expected a list of images"),
        ({"instances": 7}, "instances: got 7, expected a list of images"),
        ({"instances": [0] * 784}, "instances: got lists nested as [784], expected a list of"),
        ({"instances": [[0] * 28] * 28}, "instances: got lists nested as [28, 28], expected"),
        ({"instances": [[0] * 783]}, "instances.shape: got [1, 783], expected"),
        ({"instances": [[0] * 784, [0] * 783]}, "instances: got lists of different lengths"),
        ({"instances": [[0] * 783 + [256]]}, "instances: got 256 at index 783 (image 0, row 27"),
        ({"instances": [[0.5] * 784]}, "; fractions 0 to 1 need the parameter scale=unit"),
        ({"instances": [[[[0, 0, 0]] * 28] * 28]}, "; send grey, one number a pixel, or send the"),
        ({"images": [[0] * 784]}, "; images as /predict takes them go there"),
        ({"instances": [[True] * 784]}, "instances: got true at index 0"),
        (
            {"instances": [{"b64": "AAAA"}]},
            "instances[0].b64: got base64 of 3 bytes, expected the file",
        ),
        (
            {"instances": [{"b64": "?"}]},
            "instances[0].b64: got '?', expected the file of a picture",
        ),
        ({"instances": [{"b64": 7}]}, "instances[0].b64: got 7, expected the file of a picture"),
        ({"instances": [{"x": 1}]}, "instances[0]: got 'x', expected {\"b64\": ...}"),
        ({"inputs": {"x": 1}}, "inputs: got 'x', expected {\"image\": ...}"),
        ({"instances": [[0] * 784], "signature_name": "other"}, "signature_name: got 'other'"),
        ({"instances": [[0] * 784], "parameters": 7}, "parameters: got 7, expected an object"),
        ({"instances": [[0] * 784], "params": 7}, "params: got 7, expected an object"),
        (
            {"instances": [[0] * 784], "parameters": {"scale": "x"}},
            "parameters.scale: got 'x', expected one of byte, unit",
        ),
        ([], "body: got"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_what_is_wrong(body, message):
    with pytest.raises(InvalidInput) as refused:
        read_tensorflow_body(json.dumps(body).encode(), Reader(Limits(1000)))
    assert message in refused.value.message
