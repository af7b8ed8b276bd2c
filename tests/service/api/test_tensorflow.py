"""TensorFlow Serving's API, on real connections."""

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

PREDICT = "/v1/models/tiny:predict"
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


async def expected(served):
    headers = {"Content-Type": "application/octet-stream"}
    answer = await served.client.post("/predict", content=IMAGES.tobytes(), headers=headers)
    return answer.json()["predictions"]


async def test_predictions_by_row_are_those_of_predict(served):
    for form in FORMS.values():
        answer = await served.client.post(PREDICT, json={"instances": form})
        assert answer.status_code == 200, answer.text
        found = answer.json()["predictions"]
        for one, other in zip(found, await expected(served), strict=True):
            assert one == {"label": other["label"], "probabilities": other["probabilities"]}


async def test_a_number_with_an_exponent_is_a_number(served):
    numbers = [[100] * 784]
    plain = json.dumps({"instances": numbers})
    texts = plain, plain.replace("100", "1e2", 1)
    one, other = [await served.client.post(PREDICT, content=text) for text in texts]
    assert (one.status_code, one.json()) == (200, other.json())


async def test_outputs_by_column_are_those_of_predict(served):
    columns = [FORMS[form] for form in ("nested", "flat", "one channel", "floats", "base64")]
    for inputs in (*columns, {"image": FORMS["nested"]}):
        body = {"signature_name": "serving_default", "inputs": inputs}
        answer = await served.client.post("/v1/models/tiny/versions/3:predict", json=body)
        assert answer.status_code == 200, answer.text
        outputs, other = answer.json()["outputs"], await expected(served)
        assert outputs["label"] == [one["label"] for one in other]
        assert outputs["probabilities"] == [one["probabilities"] for one in other]


@pytest.mark.parametrize("key", ["instances", "inputs"])
async def test_many_images_are_decoded_elsewhere_and_answered_in_order(served, key):
    images = RANDOM.integers(0, 256, (600, 784), np.uint8)
    answer = await served.client.post(PREDICT, json={key: images.tolist()})
    assert answer.status_code == 200, answer.text
    headers = {"Content-Type": "application/octet-stream"}
    other = await served.client.post("/predict", content=images.tobytes(), headers=headers)
    labels = [one["label"] for one in other.json()["predictions"]]
    found = answer.json()
    if key == "inputs":
        assert found["outputs"]["label"] == labels
        assert len(found["outputs"]["probabilities"]) == 600
    else:
        assert [one["label"] for one in found["predictions"]] == labels


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


async def test_other_faults_have_their_status_in_the_same_form(served):
    answer = await served.client.post("/v1/x", json={})
    assert (answer.status_code, list(answer.json())) == (404, ["error"])
    for method in ("GET", "PUT"):
        answer = await served.client.request(method, PREDICT)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST, OPTIONS")
    for method, verb in (("POST", "classify"), ("GET", "regress"), ("POST", "")):
        answer = await served.client.request(method, f"/v1/models/tiny:{verb}")
        assert answer.status_code == 404
        assert f"'{verb or 'nothing'}' is not offered; predict is" in answer.json()["error"]


async def test_the_status_of_a_model_is_that_of_its_versions(served):
    for path in ("/v1/models/tiny", "/v1/models/tiny/versions/3"):
        answer = await served.client.get(path)
        assert answer.json() == {
            "model_version_status": [
                {
                    "version": "3",
                    "state": "AVAILABLE",
                    "status": {"error_code": "OK", "error_message": ""},
                }
            ],
            "name": "tiny",
            "ready": True,
        }
    for path in ("/v1/models/none", "/v1/models/tiny/versions/9"):
        assert (await served.client.get(path)).status_code == 404


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
