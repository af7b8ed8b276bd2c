from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path

import pytest

from service.api.openapi import (
    ErrorResponse,
    ExplainResponse,
    PredictResponse,
    example_seven,
)
from service.forms.body import ACCEPTED
from service.transport.answer import STATUS

ROOT = Path(__file__).parents[3]
SEVEN = 7
ANSWERS = {"/predict": PredictResponse, "/explain": ExplainResponse}


@pytest.fixture
async def api(served):
    return (await served.client.get("/openapi.json")).json()


@pytest.fixture
async def trained(open_app):
    """The service with the weights that are committed."""
    async with open_app(
        weights=ROOT / "weights", default_model="lenet", models=("lenet",), max_batch_rows=1
    ) as served:
        yield served


async def test_every_example_is_answered_with_the_digit_it_shows_when_pasted(trained):
    api = (await trained.client.get("/openapi.json")).json()
    content = api["paths"]["/predict"]["post"]["requestBody"]["content"]
    examples = [
        (kind, name, example["value"])
        for kind, entry in content.items()
        for name, example in entry.get("examples", {}).items()
    ]
    assert {kind for kind, _, _ in examples} == {"application/json"}
    assert len(examples) >= 2
    for kind, name, value in examples:
        response = await trained.post(json.dumps(value), kind)
        assert response.status_code == 200, name
        (prediction,) = PredictResponse.model_validate_json(response.content).predictions
        assert prediction.label == SEVEN, name
        assert prediction.confidence > 0.9


def conforms(value, schema):
    """Whether `value` is as `schema` says; the keywords that the document uses for bodies."""
    if "anyOf" in schema:
        return any(conforms(value, choice) for choice in schema["anyOf"])
    kind = schema["type"]
    if kind == "object":
        return (
            type(value) is dict
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(conforms(value[key], schema["properties"][key]) for key in value)
        )
    if kind == "array":
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        return (
            type(value) is list
            and least <= len(value) <= most
            and all(conforms(item, schema["items"]) for item in value)
        )
    if kind == "string":
        fits = type(value) is str and schema["minLength"] <= len(value) <= schema["maxLength"]
        return fits and re.search(schema["pattern"], value) is not None
    assert kind == "integer"
    return type(value) is int and schema["minimum"] <= value <= schema["maximum"]


ROWS = example_seven()
FLAT = [pixel for row in ROWS for pixel in row]
TEXT = base64.b64encode(bytes(FLAT)).decode()


@pytest.mark.parametrize(
    "images",
    [
        *(ROWS, FLAT, TEXT, [ROWS], [FLAT, TEXT, ROWS], [TEXT] * 3),
        *([], {}, None, 7, "", [""], [ROWS[:27]], [FLAT[:-1]], [[*FLAT[:-1], 256]], [ROWS, [0.5]]),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_the_documented_schema_allows_what_the_service_takes(api, served, images):
    content = api["paths"]["/predict"]["post"]["requestBody"]["content"]
    body = {"images": images}
    response = await served.post(json.dumps(body), "application/json")
    assert conforms(body, content["application/json"]["schema"]) == (response.status_code == 200)


@pytest.mark.parametrize(("path", "answer"), ANSWERS.items())
async def test_headers_examples_and_license_are_documented(api, path, answer):
    assert api["info"]["license"]["identifier"] == "Apache-2.0"
    responses = api["paths"][path]["post"]["responses"]
    assert set(responses["200"]["headers"]) == {"X-Model-Version", "Server-Timing"}
    for status, response in responses.items():
        assert ("Retry-After" in response.get("headers", ())) == (status in ("429", "503"))
        example = response["content"]["application/json"]["example"]
        if status == "200":
            answer.model_validate(example, strict=True)
        else:
            error = ErrorResponse.model_validate(example, strict=True).error
            assert STATUS[error.code] == int(status)


async def test_422_is_documented_nowhere(api):
    text = json.dumps(api)
    assert '"422"' not in text
    assert "ValidationError" not in text


MODEL_PATHS = ("", "/ready", "/config", "/stats", "/infer")


async def test_every_route_is_documented(api):
    plain = {"/", "/predict", "/explain", "/healthz", "/readyz", "/metrics", "/info"}
    server = {"/v2", "/v2/health/live", "/v2/health/ready"}
    repository = {f"/v2/repository/models/{{model}}/{verb}" for verb in ("load", "unload")}
    repository |= {"/v2/models/stats", "/v2/repository/index"}
    owners = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    models = {f"{owner}{path}" for owner in owners for path in MODEL_PATHS}
    tensorflow = ("/v1/models/{model}", "/v1/models/{model}/versions/{version}")
    models |= {f"{owner}{path}" for owner in tensorflow for path in ("", ":predict")}
    assert set(api["paths"]) == plain | server | models | repository


@pytest.mark.parametrize(("path", "answer"), ANSWERS.items())
async def test_every_answer_is_documented_in_the_one_shape(api, path, answer):
    responses = api["paths"][path]["post"]["responses"]
    # 403 is the repository's. 499 is for the log of a proxy: whoever would read it has left.
    assert {int(status) for status in responses} == {200, *STATUS.values()} - {403, 499}
    for status, response in responses.items():
        schema = response["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert schema == (answer.__name__ if status == "200" else "ErrorResponse")
    assert set(api["components"]["schemas"]["ErrorResponse"]["properties"]) == set(
        ErrorResponse.model_fields
    )


async def test_every_type_that_is_read_is_documented(api):
    content = api["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert set(content) == set(ACCEPTED)


@pytest.mark.parametrize(
    ("path", "own"), [("/predict", set()), ("/explain", {"index", "biases", "noisy", "noise"})]
)
async def test_every_parameter_that_is_documented_is_taken(api, served, one, path, own):
    parameters = api["paths"][path]["post"]["parameters"]
    values = {"model": "tiny", "version": "3", "X-Request-Timeout-Ms": "1000", "Accept": "*/*"}
    values |= {"noisy": "dense1", "noise": "0.5"}
    query, headers = {}, {"Content-Type": "application/octet-stream"}
    for parameter in parameters:
        name, schema = parameter["name"], parameter["schema"]
        assert parameter["description"]
        place = query if parameter["in"] == "query" else headers
        place[name] = schema["default"] if "default" in schema else values[name]
    assert set(query) == {"model", "version", "invert", "digits"} | own
    response = await served.client.post(path, content=one, params=query, headers=headers)
    assert response.status_code == 200
