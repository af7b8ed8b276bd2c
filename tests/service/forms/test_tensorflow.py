from __future__ import annotations

import base64
import contextlib
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.errors import InvalidInput, TooLarge
from service.forms.tensorflow import read_tensorflow_body

RANDOM = np.random.default_rng(1)
IMAGES = RANDOM.integers(0, 256, (3, 28, 28), np.uint8)


def b64(image):
    return {"b64": base64.b64encode(image.tobytes()).decode()}


FORMS = {
    "nested": IMAGES.tolist(),
    "flat": IMAGES.reshape(3, 784).tolist(),
    "one channel": IMAGES[..., np.newaxis].tolist(),
    "floats": IMAGES.astype(float).tolist(),
    "base64": [b64(image) for image in IMAGES],
    "named": [{"image": image.tolist()} for image in IMAGES],
    "named base64": [{"image": b64(image)} for image in IMAGES],
}


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
        ({"instances": [[0.5] * 784]}, "; for fractions 0 to 1 send round(255 * x)"),
        ({"instances": [[[[0, 0, 0]] * 28] * 28]}, "; send grey, one number a pixel, or send the"),
        ({"images": [[0] * 784]}, "; images as /predict takes them go there"),
        ({"instances": [{"b64": "iVBORw0KGgo="}]}, "8 bytes, image/png, expected 784: 28 rows of"),
        ({"instances": [[True] * 784]}, "instances: got true at index 0"),
        ({"instances": [{"b64": "AAAA"}]}, "instances[0].b64: got 3 bytes, expected 784"),
        ({"instances": [{"b64": "?"}]}, "instances[0].b64: got '?', expected a base64 string"),
        ({"instances": [{"b64": 7}]}, "instances[0].b64: got 7, expected a base64 string"),
        ({"instances": [{"x": 1}]}, "instances[0]: got 'x', expected {\"b64\": ...}"),
        ({"inputs": {"x": 1}}, "inputs: got 'x', expected {\"image\": ...}"),
        ({"instances": [[0] * 784], "signature_name": "other"}, "signature_name: got 'other'"),
        ([], "body: got"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_what_is_wrong(body, message):
    with pytest.raises(InvalidInput) as refused:
        read_tensorflow_body(json.dumps(body).encode(), 1000)
    assert message in refused.value.message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 300) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(("b64", "image", "x")), inner, max_size=2)
    ),
    max_leaves=20,
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(("instances", "inputs", "signature_name", "x")), VALUES)
    | st.sampled_from(sorted(FORMS)).flatmap(
        lambda form: st.tuples(st.integers(0, 2), VALUES).map(
            lambda put: {"instances": [*FORMS[form][: put[0]], put[1], *FORMS[form][put[0] :]]}
        )
    )
)
def test_any_json_is_images_or_an_error(document):
    text = json.dumps(document).encode()
    with contextlib.suppress(InvalidInput, TooLarge):
        images, _ = read_tensorflow_body(text, 4)
        assert images.dtype == np.uint8
        assert images.shape[1:] == (28, 28)
