"""TensorFlow Serving's API, on real connections."""

from __future__ import annotations

import base64
import json

import numpy as np

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
    return (await served.post(IMAGES.tobytes())).json()["predictions"]


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


async def test_many_images_are_decoded_elsewhere_and_answered_in_order(served):
    images = RANDOM.integers(0, 256, (100, 784), np.uint8)
    answer = await served.client.post(PREDICT, json={"inputs": images.tolist()})
    assert answer.status_code == 200, answer.text
    other = await served.post(images.tobytes())
    labels = [one["label"] for one in other.json()["predictions"]]
    assert answer.json()["outputs"]["label"] == labels


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
                    "version_labels": [],
                }
            ],
            "name": "tiny",
            "ready": True,
        }
    for path in ("/v1/models/none", "/v1/models/tiny/versions/9", "/v1/models/none/metadata"):
        assert (await served.client.get(path)).status_code == 404


async def test_a_label_stands_where_a_version_does(open_app, weights, write):
    write("tiny/4", seed=4)
    (weights / "tiny" / "labels.json").write_text('{"canary": 3}')
    tensor = {"name": "image", "datatype": "UINT8", "shape": [3, 784]}
    async with open_app(versions="latest:2") as served:
        client = served.client
        answer = await served.client.post(
            "/v1/models/tiny/labels/canary:predict", json={"instances": FORMS["nested"]}
        )
        known = await client.post("/predict?version=3", json={"images": FORMS["nested"]})
        assert answer.headers["x-model-version"] == known.json()["version"] == "3"
        for one, other in zip(
            answer.json()["predictions"], known.json()["predictions"], strict=True
        ):
            assert one["probabilities"] == other["probabilities"]
        infer = {"inputs": [tensor | {"data": IMAGES.ravel().tolist()}]}
        found = await client.post("/v2/models/tiny/versions/canary/infer", json=infer)
        assert found.json()["model_version"] == "3"
        found = (await client.get("/v1/models/tiny/labels/canary/metadata")).json()
        assert found["model_spec"]["version"] == "3"
        for path, names in (
            ("/labels/canary", {"3": ["canary"]}),
            ("", {"4": [], "3": ["canary"]}),
        ):
            found = (await client.get(f"/v1/models/tiny{path}")).json()["model_version_status"]
            assert {one["version"]: one["version_labels"] for one in found} == names
        found = (await client.get("/info")).json()["models"]
        assert {one["version"]: one["version_labels"] for one in found} == names
        for path in ("/v1/models/tiny/labels/stable", "/v1/models/tiny/labels/stable/metadata"):
            assert (await client.get(path)).status_code == 404


async def test_the_metadata_of_a_model_is_a_signature_that_tensorflow_reads(served):
    for path in ("/v1/models/tiny/metadata", "/v1/models/tiny/versions/3/metadata"):
        found = (await served.client.get(path)).json()
        assert found["model_spec"] == {"name": "tiny", "signature_name": "", "version": "3"}
        (signature,) = found["metadata"]["signature_def"]["signature_def"].values()
        tensors = {
            name: (one["dtype"], [int(side["size"]) for side in one["tensor_shape"]["dim"]])
            for name, one in (signature["inputs"] | signature["outputs"]).items()
        }
        assert tensors == {
            "image": ("DT_UINT8", [-1, 28, 28]),
            "probabilities": ("DT_FLOAT", [-1, 10]),
            "label": ("DT_INT64", [-1]),
        }


async def test_the_names_of_the_models_are_listed(open_app):
    async with open_app(model_alias="digits") as served:
        doubled = f"http://127.0.0.1:{served.port}//v2/models/"
        for path in ("/v1/models", "/v2/models", doubled):
            assert (await served.client.get(path)).json() == {"models": ["tiny", "digits"]}
