"""Bodies and paths of clouds: SageMaker, MLflow and Vertex AI."""

from __future__ import annotations

import base64

import numpy as np
import orjson
import pytest

from tests.pictures import PNG, encoded
from tests.service.api.test_app import NPY, RAW, npy

JSON = "application/json"
BAR = encoded(np.pad(np.zeros((60, 10), np.uint8), 30, constant_values=255))


def text(image):
    return base64.b64encode(image.tobytes()).decode()


BY_ROW = {
    "instances": lambda images: {"instances": images.tolist()},
    "instances with white space": lambda images: orjson.dumps(
        {"instances": images.tolist()}, option=orjson.OPT_INDENT_2
    ).replace(b'"instances":', b'"instances" :'),
    "named instances": lambda images: {"instances": [{"image": one.tolist()} for one in images]},
    "base64": lambda images: {"instances": [{"b64": text(one)} for one in images]},
    "inputs, as MLflow has them": lambda images: {"inputs": images.tolist()},
    "many": lambda images: {"inputs": np.tile(images, (40, 1, 1)).tolist()},
}
AS_PREDICT = {
    "images": (JSON, lambda images: orjson.dumps({"images": images.tolist()})),
    "texts that look like a name": (JSON, lambda images: b'{"images":["%s"]}' % b"instances"),
    "bytes": (RAW, lambda images: images.tobytes()),
    "npy": (NPY, npy),
    "picture": (PNG, lambda images: BAR),
}


@pytest.mark.parametrize("form", BY_ROW)
async def test_an_invocation_with_instances_is_answered_by_row(served, images, form):
    content = BY_ROW[form](images)
    content = content if isinstance(content, bytes) else orjson.dumps(content)
    answer = await served.client.post(
        "/invocations", content=content, headers={"Content-Type": JSON}
    )
    assert (answer.status_code, list(answer.json())) == (200, ["predictions"]), answer.text
    expected = (await served.post(images.tobytes())).json()["predictions"]
    found = answer.json()["predictions"]
    assert found == [
        {"label": one["label"], "probabilities": one["probabilities"]} for one in expected
    ] * (len(found) // len(images))


@pytest.mark.parametrize("form", AS_PREDICT)
async def test_any_other_invocation_is_a_prediction(served, images, form):
    kind, encode = AS_PREDICT[form]
    answers = [
        await served.client.post(
            f"{path}?version=3", content=encode(images), headers={"Content-Type": kind}
        )
        for path in ("/invocations", "/predict")
    ]
    assert answers[0].status_code == answers[1].status_code
    assert answers[0].json() == answers[1].json()


async def test_an_invocation_of_a_multi_model_endpoint_is_refused_by_name(served, one, refusal):
    headers = {"Content-Type": RAW, "X-Amzn-SageMaker-Target-Model": "digits.tar.gz"}
    answer = await served.client.post("/invocations", content=one, headers=headers)
    error = refusal(answer, 400, "invalid_input")
    assert error.field == "X-Amzn-SageMaker-Target-Model"
    assert "got 'digits.tar.gz', expected none" in error.message


@pytest.mark.parametrize(
    ("predict", "health"),
    [
        (
            "/v1/endpoints/1/deployedModels/2:predict",
            "/v1/endpoints/1/deployedModels/2",
        ),
        ("/predict", "/health"),
        ("/v1/models/tiny:predict", "/v1/models/tiny"),
    ],
)
async def test_vertex_s_variables_are_further_paths(open_app, images, monkeypatch, predict, health):
    monkeypatch.setenv("AIP_PREDICT_ROUTE", predict)
    monkeypatch.setenv("AIP_HEALTH_ROUTE", health)
    async with open_app() as served:
        expected = (await served.post(images.tobytes())).json()["predictions"]
        for path in (predict, f"{predict}/"):  # on a connection, and through the application
            answer = await served.client.post(path, json={"instances": images.tolist()})
            assert answer.status_code == 200, answer.text
            (found,) = answer.json().values()
            assert [one["label"] for one in found] == [one["label"] for one in expected]
        assert (await served.client.get(health)).json()["ready"]
        served.models.ready = False
        status = (await served.client.get(health)).status_code
        assert status == (200 if health == "/v1/models/tiny" else 503)
        served.models.ready = True
