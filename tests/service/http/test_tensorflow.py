"""TensorFlow Serving's API, on real connections."""

from __future__ import annotations

import base64

import numpy as np
import pytest

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


@pytest.mark.parametrize("form", FORMS)
async def test_predictions_by_row_are_those_of_predict(served, form):
    answer = await served.client.post(PREDICT, json={"instances": FORMS[form]})
    assert answer.status_code == 200, answer.text
    found = answer.json()["predictions"]
    for one, other in zip(found, await expected(served), strict=True):
        assert one == {"label": other["label"], "probabilities": other["probabilities"]}


@pytest.mark.parametrize("form", ["nested", "flat", "one channel", "floats", "base64", "object"])
async def test_outputs_by_column_are_those_of_predict(served, form):
    inputs = {"image": FORMS["nested"]} if form == "object" else FORMS[form]
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
async def test_a_wrong_body_is_a_400_that_names_what_is_wrong(served, body, message):
    answer = await served.client.post(PREDICT, json=body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert message in answer.json()["error"]


async def test_other_faults_have_their_status_in_the_same_form(served):
    one = {"instances": FORMS["flat"]}
    for path in ("/v1/models/none:predict", "/v1/models/tiny/versions/9:predict", "/v1/x"):
        for body in (one, {}):
            answer = await served.client.post(path, json=body)
            assert answer.status_code == 404
            assert list(answer.json()) == ["error"]
    for method in ("GET", "PUT"):
        answer = await served.client.request(method, PREDICT)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST, OPTIONS")
    for method, verb in (("POST", "classify"), ("GET", "regress"), ("POST", "")):
        answer = await served.client.request(method, f"/v1/models/tiny:{verb}")
        assert answer.status_code == 404
        assert f"'{verb or 'nothing'}' is not offered; predict is" in answer.json()["error"]
    answer = await served.client.post(PREDICT, json=one, headers={"X-Request-Timeout-Ms": "0"})
    assert answer.status_code == 400


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
            ]
        }
    for path in ("/v1/models/none", "/v1/models/tiny/versions/9"):
        assert (await served.client.get(path)).status_code == 404
