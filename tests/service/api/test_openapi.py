from __future__ import annotations

import base64
import contextlib
import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.api.schemas import (
    ExplainResponse,
    InferRequest,
    InferResponse,
    PredictRequest,
    PredictResponse,
    TensorflowColumns,
    TensorflowOutputs,
    TensorflowPredictions,
    TensorflowRows,
    example_seven,
)
from service.errors import STATUS
from service.forms.body import ACCEPTED

ROOT = Path(__file__).parents[3]
JSON, RAW = "application/json", "application/octet-stream"
SEVEN = 7
INFER, ROWS_OR_COLUMNS = "/v2/models/{model}/infer", "/v1/models/{model}:predict"
ANSWERS = {
    "/predict": (PredictResponse,),
    "/explain": (ExplainResponse,),
    INFER: (InferResponse,),
    ROWS_OR_COLUMNS: (TensorflowPredictions, TensorflowOutputs),
    "/invocations": (PredictResponse, TensorflowPredictions),
}


@pytest.fixture
async def api(served):
    return (await served.client.get("/openapi.json")).json()


def valid(document, *models):
    """Whether `document` is as one of `models` says, without any conversion."""
    for model in models:
        with contextlib.suppress(ValidationError):
            model.model_validate_json(json.dumps(document), strict=True)
            return True
    return False


async def test_every_example_is_answered_with_the_digit_it_shows_when_pasted(open_app):
    async with open_app(
        weights=ROOT / "weights", default_model="lenet", models=("lenet",), max_batch_rows=1
    ) as served:
        api = (await served.client.get("/openapi.json")).json()
        found = {path: [] for path in ANSWERS}
        for path, models in ANSWERS.items():
            content = api["paths"][path]["post"]["requestBody"]["content"]
            for name, example in content[JSON]["examples"].items():
                url = path.format(model="lenet")
                answer = await served.client.post(url, json=example["value"])
                assert answer.status_code == 200, (path, name)
                assert valid(answer.json(), *models), (path, name)
                found[path].append(answer.json())
    assert [answer["predictions"][0]["label"] for answer in found["/predict"]] == [SEVEN] * 4
    assert [answer["prediction"]["label"] for answer in found["/explain"]] == [SEVEN] * 4
    assert [answer["outputs"][1]["data"] for answer in found[INFER]] == [[SEVEN]]
    labels = [
        answer["outputs"]["label"][0] if "outputs" in answer else answer["predictions"][0]["label"]
        for answer in found[ROWS_OR_COLUMNS] + found["/invocations"]
    ]
    assert labels == [SEVEN] * 7


ROWS = example_seven()
FLAT = [pixel for row in ROWS for pixel in row]
TEXT = base64.b64encode(bytes(FLAT)).decode()
B64 = {"b64": TEXT}
WRONG = ([], {}, None, 7, "", [""], [ROWS[:27]], [FLAT[:-1]], [[*FLAT[:-1], 256]], [ROWS, [0.5]])


async def test_the_documented_bodies_are_those_that_the_service_takes(served):
    predict = [{"images": value} for value in (ROWS, FLAT, TEXT, [ROWS], [FLAT, TEXT, ROWS])]
    predict += [{"images": value} for value in WRONG] + [{}, {"images": FLAT, "x": 1}]
    named = [[{"image": one}] for one in (ROWS, FLAT, B64)]
    forms = [[ROWS], [FLAT] * 2, [B64], *named, [ROWS, FLAT], [TEXT], *WRONG]
    tensorflow = [{"instances": value} for value in forms]
    tensorflow += [{"inputs": value} for value in (*forms[:3], {"image": [ROWS]}, forms[6])]
    tensorflow += [{"instances": [FLAT], **other} for other in ({"inputs": [FLAT]}, {"x": 1})]
    tensorflow += [
        {"instances": [FLAT], "signature_name": name} for name in ("", "serving_default", "x")
    ]
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 784], "data": FLAT}
    infer = [{"inputs": [tensor], **more} for more in ({}, {"id": "x"}, {"id": 1}, {"outputs": 1})]
    infer += [{"inputs": [{**tensor, **more}]} for more in ({"name": "x"}, {"datatype": "FP64"})]
    infer += [{"inputs": [tensor] * 2}, {"inputs": []}, {}]
    for path, models, bodies in (
        ("/predict", (PredictRequest,), predict),
        ("/v1/models/tiny:predict", (TensorflowRows, TensorflowColumns), tensorflow),
        ("/v2/models/tiny/infer", (InferRequest,), infer),
    ):
        statuses = set()
        for body in bodies:
            status = (await served.client.post(path, json=body)).status_code
            assert (status == 200) == valid(body, *models), (path, str(body)[:100])
            statuses.add(status)
        assert statuses == {200, 400}


async def test_every_answer_is_documented_with_its_headers(api):
    for path, models in ANSWERS.items():
        responses = api["paths"][path]["post"]["responses"]
        # Only requests to the repository get 403. Clients never see 499: they have left.
        assert {int(status) for status in responses} == {200, *STATUS.values()} - {403, 499}
        good = responses.pop("200")
        assert {"X-Model-Version", "Server-Timing"} <= set(good["headers"])
        assert all(model.__name__ in json.dumps(good["content"][JSON]) for model in models)
        error = "ProtocolError" if path.startswith("/v") else "ErrorResponse"
        for status, response in responses.items():
            assert ("Retry-After" in response["headers"]) == (status in ("429", "503"))
            assert response["content"][JSON]["schema"]["$ref"].endswith(f"/{error}")
    assert api["paths"]["/predict"]["post"]["responses"]["500"]["description"] == (
        "internal or inference_failed"
    )


MODEL_PATHS = ("", "/ready", "/config", "/stats", "/infer")


async def test_every_route_is_documented_and_422_is_not(api):
    plain = {
        "/",
        "/predict",
        "/invocations",
        "/explain",
        "/healthz",
        "/readyz",
        "/ping",
        "/metrics",
        "/info",
    }
    server = {"/v2", "/v2/health/live", "/v2/health/ready", "/v1/models", "/v2/models"}
    repository = {f"/v2/repository/models/{{model}}/{verb}" for verb in ("load", "unload")}
    repository |= {"/v2/models/stats", "/v2/repository/index"}
    owners = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    models = {f"{owner}{path}" for owner in owners for path in MODEL_PATHS}
    tensorflow = [f"/v1/models/{{model}}{which}" for which in ("", "/versions/{version}")]
    tensorflow.append("/v1/models/{model}/labels/{version}")
    models |= {f"{owner}{path}" for owner in tensorflow for path in ("", ":predict", "/metadata")}
    assert set(api["paths"]) == plain | server | models | repository
    assert api["info"]["license"]["identifier"] == "Apache-2.0"
    text = json.dumps(api)
    assert '"422"' not in text
    assert "ValidationError" not in text


async def test_generated_clients_get_functions_with_short_names_and_bodies_they_can_build(api):
    operations = [one for path in api["paths"].values() for one in path.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+){0,3}", name) for name in names), names
    assert {"predict", "infer_by_version", "model_config", "server_ready", "load_model"} <= set(
        names
    )
    for one in operations:
        for kind, body in one.get("requestBody", {}).get("content", {}).items():
            # openapi-python-client 0.31 writes a module that is no Python for them.
            assert kind != "multipart/form-data" or "additionalProperties" not in body["schema"]


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/predict", set()),
        ("/invocations", set()),
        ("/explain", {"index", "biases", "noisy", "noise"}),
    ],
)
async def test_every_type_and_parameter_that_is_documented_is_taken(api, served, one, path, own):
    operation = api["paths"][path]["post"]
    assert set(operation["requestBody"]["content"]) == set(ACCEPTED)
    values = {"model": "tiny", "version": "3", "noisy": "dense1", "noise": "0.5"}
    query, headers = {}, {"Content-Type": RAW}
    for parameter in operation["parameters"]:
        name, schema = parameter["name"], parameter["schema"]
        assert parameter["description"]
        assert not parameter["required"]
        place = query if parameter["in"] == "query" else headers
        place[name] = str(schema["default"])
    assert set(query) == {"model", "version", "invert", "digits", "scale"} | own
    assert set(headers) == {"Content-Type", "X-Request-Timeout-Ms"}
    for asked in (query, {**query, **{name: values[name] for name in query if name in values}}):
        response = await served.client.post(path, content=one, params=asked, headers=headers)
        assert response.status_code == 200


async def test_the_document_is_made_once_and_sent_once_to_a_client_that_keeps_it(served):
    first, second = [await served.client.get("/openapi.json") for _ in range(2)]
    for answer in (first, second):
        del answer.headers["date"]
    assert (first.content, first.headers) == (second.content, second.headers)
    assert first.headers["content-type"] == JSON
    assert first.headers["content-encoding"] == "gzip"
    plain = await served.client.get("/openapi.json", headers={"Accept-Encoding": "identity"})
    assert plain.content == first.content
    assert "content-encoding" not in plain.headers
    known = {"If-None-Match": first.headers["etag"]}
    assert (await served.client.get("/openapi.json", headers=known)).status_code == 304


async def test_the_document_says_which_routes_need_a_key_where_there_are_keys(open_app):
    async with open_app() as served:
        document = (await served.client.get("/openapi.json")).json()
    assert "security" not in document
    async with open_app(api_keys="a-key-that-nobody-knows") as served:
        document = (await served.client.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"] == {
        "bearerAuth": {"type": "http", "scheme": "bearer"},
        "apiKeyAuth": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    assert document["security"] == [{"bearerAuth": []}, {"apiKeyAuth": []}]
    open_paths = {
        path
        for path, operations in document["paths"].items()
        if all(operation.get("security") == [] for operation in operations.values())
    }
    health = {"/healthz", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready"}
    assert open_paths == {"/", *health}
