from __future__ import annotations

import asyncio
import base64
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from lenet.explanation import Change, explain
from lenet.reference import logits, softmax
from lenet.weightfile import WeightFile
from service.api.schemas import ExplainResponse, InfoResponse
from service.engine import explainer
from tests.conftest import draw_weights
from tests.documented import documented
from tests.service.engine.test_explainer import Held
from tests.service.http.test_app import FORM, JPEG, JSON, NPY, PNG, RAW, as_json, form, npy, picture
from tests.wire.doors import until

ROOT = Path(__file__).parents[3]
LENET = ROOT / "weights/lenet/2.safetensors"


@pytest.fixture
def post(served):
    """`post(body, type, "?index=1")`: the answer of /explain."""

    async def post(body, content_type=RAW, query="", **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await served.client.post(
            f"/explain{query}", content=body, headers={"Content-Type": content_type, **named}
        )

    return post


@pytest.fixture
def held(monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.release()


def answer(response):
    assert response.status_code == 200, response.text
    return ExplainResponse.model_validate_json(response.content, strict=True)


def expected_layers(weights, image, change):
    """The result of `lenet.explanation` in the answer's form."""
    for layer in explain(weights, image, change):
        found = {"name": layer.name, "kind": layer.kind, "shape": list(layer.shape)}
        if layer.kind == "logits":
            # The shortest number that reads as the same float32.
            yield {**found, "values": [float(str(value)) for value in layer.logits]}
        else:
            data = base64.b64encode(layer.data).decode()
            yield {**found, "low": layer.low, "high": layer.high, "data": data}


@pytest.mark.parametrize(
    ("query", "change"),
    [
        ("", Change()),
        ("&biases=off", Change(biases=False)),
        ("&biases=on&noisy=conv2&noise=1.5", Change(noisy="conv2", noise=1.5)),
        ("&noisy=conv2&noise=15e-1", Change(noisy="conv2", noise=1.5)),
        ("&noisy=&noise=0", Change()),
    ],
)
async def test_a_committed_model_is_explained_as_it_answers(open_app, query, change):
    weights = WeightFile.read(LENET)
    images = weights.golden.images
    async with open_app(weights=ROOT / "weights", models=("lenet",), default_model="") as served:
        body, kind = images.tobytes(), {"Content-Type": RAW}
        response = await served.client.post(f"/explain?index=3{query}", content=body, headers=kind)
        predicted = (await served.post(body)).json()["predictions"][3]
    found = answer(response)
    assert (found.model, found.version, found.index) == ("lenet", "2", 3)
    assert found.images == [base64.b64encode(image).decode() for image in images.reshape(-1, 784)]
    document = response.json()
    assert document["layers"] == list(expected_layers(weights, images[3:4], change))
    if change == Change():
        reference = softmax(logits(weights.model, weights.tensors, images))[3]
        np.testing.assert_allclose(found.prediction.probabilities, reference, atol=1e-6)
        # NumPy's float32 beside ONNX Runtime's.
        prediction = document["prediction"]
        np.testing.assert_allclose(
            prediction.pop("probabilities"), predicted.pop("probabilities"), atol=1e-5
        )
        assert prediction == pytest.approx(predicted, abs=1e-5)
    assert [(layer.name, layer.kind, layer.shape) for layer in found.layers] == [
        ("conv1", "filters", [20, 1, 5, 5]),
        ("conv1", "convolution", [20, 24, 24]),
        ("conv1", "pooling", [20, 12, 12]),
        ("conv2", "convolution", [50, 8, 8]),
        ("conv2", "pooling", [50, 4, 4]),
        ("dense1", "dense", [500]),
        ("dense2", "logits", [10]),
    ]


BODIES = (
    (JSON, lambda images: as_json(images.tolist())),
    (RAW, lambda images: images.tobytes()),
    (NPY, npy),
    (FORM, lambda images: form(*((RAW, image.tobytes()) for image in images))),
    (PNG, lambda _: picture("PNG")),
    (JPEG, lambda _: picture("JPEG")),
)


async def test_every_form_of_body_is_explained_as_it_is_predicted(served, post, images):
    for content_type, encode in BODIES:
        body = encode(images)
        found = answer(await post(body, content_type))
        (predicted, *others) = (await served.post(body, content_type)).json()["predictions"]
        assert found.prediction.probabilities == pytest.approx(predicted["probabilities"], abs=1e-5)
        assert len(found.images) == 1 + len(others)
        if content_type not in (PNG, JPEG):
            assert b"".join(map(base64.b64decode, found.images)) == images.tobytes()


async def test_pixels_are_inverted_as_for_a_prediction(post, one):
    found = answer(await post(one, query="?invert=true&model=tiny&version=3"))
    assert base64.b64decode(found.images[0]) == bytes(255 - pixel for pixel in one)


async def test_a_class_with_a_name_is_named(open_app, tmp_path, tiny, one):
    weights = draw_weights(tiny)
    names = tuple(f"class {label}" for label in range(10))
    (tmp_path / "named/tiny").mkdir(parents=True)
    training = dataclasses.replace(weights.training, labels=names)
    dataclasses.replace(weights, training=training).write(tmp_path / "named/tiny/1.safetensors")
    async with open_app(weights=tmp_path / "named") as served:
        kind = {"Content-Type": RAW}
        found = answer(await served.client.post("/explain", content=one, headers=kind))
    assert found.prediction.name == f"class {found.prediction.label}"


WRONG_QUERIES = [
    ("index=1", "index", "got 1, expected 0 to 0, as the request has 1 images"),
    ("index=-1", "index", "got '-1', expected the number of an image"),
    ("index=", "index", "got ''"),
    ("index=0000000", "index", "got '0000000'"),
    ("biases=false", "biases", "got 'false', expected on or off"),
    ("noisy=conv1&noise=1", "noisy", "got 'conv1', expected one of dense1"),
    ("noisy=dense1", "noise", "got none"),
    ("noise=0.1", "noisy", "got none"),
    ("noisy=dense1&noise=10.001", "noise", "'10.001', expected a number from 0 to 10"),
    ("noisy=dense1&noise=nan", "noise", "got 'nan'"),
    ("noisy=dense1&noise=1e999", "noise", "got '1e999'"),
    ("noisy=dense1&noise=-1", "noise", "got '-1'"),
    ("noisy=dense1&noise=%C2%B2", "noise", "got "),
    ("noise=0&noise=0", "noise", "given twice"),
    (
        "layer=1",
        "layer",
        "one each of model, version, invert, digits, index, biases, noisy, noise",
    ),
]


async def test_a_wrong_parameter_is_a_400_that_names_it(served, post, refusal, one):
    for query, field, words in WRONG_QUERIES:
        error = refusal(await post(one, query=f"?{query}"), 400, "invalid_input")
        assert error.field == field
        assert words in error.message
    assert await served.requests("invalid_input") == len(WRONG_QUERIES)


@pytest.mark.states(
    "limits",
    "images in a request for an explanation; operations of a network",
    found="as many images, and one more",
)
async def test_more_images_than_the_limit_are_a_413(post, refusal, one):
    most = int(documented("images in a request for an explanation")[0])
    assert len(answer(await post(most * one)).images) == most
    error = refusal(await post((most + 1) * one), 413, "too_large")
    assert f"got {most + 1} images, expected at most {most}" in error.message


async def test_an_unknown_model_and_a_broken_body_are_refused_as_for_a_prediction(
    served, post, one
):
    for body, query in ((one, "?model=vgg"), (one[1:], ""), (b"", "")):
        refused, expected = await post(body, query=query), await served.post(body, query=query)
        assert refused.status_code in (400, 404)
        assert (refused.status_code, refused.json()) == (expected.status_code, expected.json())


async def test_it_is_404_when_it_is_turned_off(open_app, refusal, one):
    async with open_app(explain="off") as served:
        response = await served.client.post("/explain", content=one, headers={"Content-Type": RAW})
        info = InfoResponse.model_validate_json((await served.client.get("/info")).content)
        paths = (await served.client.get("/openapi.json")).json()["paths"]
    assert (
        "turned off; start the service with --explain on"
        in refusal(response, 404, "not_found").message
    )
    assert not info.explain
    assert "/explain" not in paths


async def test_an_explanation_is_counted_apart_from_predictions(served, post, one):
    response = await post(one, query="?model=tiny", accept="application/octet-stream")
    assert response.headers["content-type"] == JSON
    assert response.headers["x-model-version"] == "3"
    timing = response.headers["server-timing"]
    assert [entry.partition(";")[0] for entry in timing.split(", ")] == [
        *("decode", "queue", "compute", "encode", "total", "batch")
    ]
    assert timing.endswith('batch;desc="1"')
    assert await served.value("lenet_explanation_duration_seconds_count") == 1
    assert await served.value("lenet_request_duration_seconds_count", protocol="http") == 0
    assert await served.value("lenet_stage_duration_seconds_count", stage="compute") == 0
    assert await served.value("lenet_images_total", model="tiny", version="3") == 0
    assert await served.requests("ok") == 0


async def test_too_many_explanations_are_a_429_and_predictions_go_on(
    served, post, refusal, held, one, monkeypatch
):
    monkeypatch.setattr(explainer, "MAX_WAITING", 1)
    begin, accepted = explainer.Explained.begin, []
    monkeypatch.setattr(
        explainer.Explained, "begin", lambda *of: (begin(*of), accepted.append(of)), raising=False
    )
    asked = [asyncio.create_task(post(one)) for _ in range(2)]
    await until(lambda: held.begun and len(accepted) == 2)
    response = await post(one)
    refusal(response, 429, "overloaded")
    assert response.headers["retry-after"] == "1"
    assert (await served.post(one)).status_code == 200
    assert (
        await served.value(
            "lenet_requests_total", model="tiny", version="3", protocol="http", outcome="overloaded"
        )
        == 1
    )
    held.release()
    assert [one.status_code for one in await asyncio.gather(*asked)] == [200, 200]


async def test_a_deadline_that_passes_meanwhile_is_a_504(served, post, refusal, held, one):
    error = refusal(await post(one, x_request_timeout_ms="20"), 504, "deadline_exceeded")
    assert error.message == "no answer within 20 ms"
    assert await served.requests("deadline_exceeded") == 1
    held.release()
    answer(await post(one))


async def test_a_client_that_leaves_ends_its_explanation(served, held, one):
    route = served.service.fast_routes[b"POST", b"/explain"]
    replies = []
    left, waiting, last = (
        route.open(route.read(b"", {"content-type": RAW}), replies.append) for _ in range(3)
    )
    for call in (left, waiting, last):
        call.complete(one)
    await until(lambda: held.begun == 1)
    left.cancel()
    waiting.cancel()
    held.release()
    await until(lambda: replies)
    assert (held.begun, held.layers) == (2, 2)  # the one that waited did not begin
    assert await served.requests("cancelled") == 2
