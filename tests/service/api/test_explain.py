from __future__ import annotations

import asyncio
import base64
import io
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from lenet import explanation
from lenet.explanation import Change, explain
from lenet.model import DenseBlock, Model
from lenet.reference import logits, softmax
from lenet.weightfile import WeightFile
from service.api import explain as module
from service.api.explain import layers_of
from service.api.routes import read_predict
from service.api.schemas import ExplainResponse, InfoResponse
from service.errors import InferenceFailed, InvalidInput
from service.forms.form import NOTHING
from service.forms.reader import Limits
from service.pictures.judge import verdicts
from tests.conftest import draw_weights
from tests.documented import documented
from tests.pictures import PNG, encoded, seven
from tests.service.api.test_app import JSON, RAW
from tests.service_process import PATIENCE_S
from tests.wire.doors import until

ROOT = Path(__file__).parents[3]
LENET = ROOT / "weights/lenet/2.safetensors"


class Held:
    """Explanations begin, and compute each layer when `release` is called."""

    def __init__(self, monkeypatch):
        self._released, self.begun, self.layers = threading.Semaphore(0), 0, 0

        def explain(*arguments):
            self.begun += 1
            for layer in explanation.explain(*arguments):
                assert self._released.acquire(timeout=PATIENCE_S), "nobody released a layer"
                self.layers += 1
                yield layer

        monkeypatch.setattr(module, "explain", explain)

    def release(self, layers=1000):
        self._released.release(layers)


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
        ("&noisy=conv2&noise=15e-1", Change(noisy="conv2", noise=1.5)),
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


async def test_what_was_considered_in_a_picture_is_in_its_explanation_alone(post):
    grey = np.full((512, 512), 240, np.uint8)
    glyph = np.array(Image.open(io.BytesIO(seven(112)))) == 255
    boxes = [(116, 196, 128, 184), (116, 196, 328, 384)]  # of two sevens in a line
    for top, _, left, _ in boxes:
        grey[top - 16 : top + 96, left - 28 : left + 84][glyph] = 40
    for top, left in np.ndindex(4, 8):  # crosses that are too small for digits beside them
        part = grey[250 + 60 * top :, 30 + 60 * left :]
        part[12:18, :30] = part[:30, 12:18] = 40
    found = answer(await post(encoded(grey), PNG, "?digits=several&invert=true"))
    assert [one.chosen for one in found.candidates] == [True] * 2 + [False] * 22
    for image, box, one in zip(found.images, boxes, found.candidates, strict=False):
        top, bottom, left, right = box
        np.testing.assert_allclose(one.box, np.array(box) / 512, atol=2 / 512)
        alone = encoded(grey[top - 20 : bottom + 20, left - 40 : right + 40])
        said = answer(await post(alone, PNG))
        assert said.candidates == []  # it is taken as it is
        np.testing.assert_allclose(pixels(image), pixels(said.images[0]), atol=2)
    seen = np.stack([pixels(one.image) for one in found.candidates])
    judged = [(one.digit, one.mark) for one in found.candidates]
    np.testing.assert_allclose(verdicts(seen), judged, atol=1e-4)
    scribble = np.full((200, 200), 255, np.uint8)
    scribble[20:50, 20:80] = scribble[120:180, 100:110] = scribble[150:160, 80:190] = 0
    marks = answer(await post(encoded(scribble), PNG)).candidates
    assert [one.chosen for one in marks] == [True, *[False] * (len(marks) - 1)]
    assert len(marks) > 1  # those apart from what was taken
    head = b"digits=several&invert=true", {"content-type": PNG}, {}, Limits(64)
    assert read_predict(*head)[0].decode(encoded(grey), lambda _: None).asked is NOTHING


def pixels(text):
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(28, 28)


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
        "one each of model, version, invert, digits, scale, index, biases, noisy, noise",
    ),
]


async def test_a_wrong_parameter_is_a_400_that_names_it(served, post, refusal, one):
    for query, field, words in WRONG_QUERIES:
        error = refusal(await post(one, query=f"?{query}"), 400, "invalid_input")
        assert error.field == field
        assert words in error.message
    assert served.requests("invalid_input") == len(WRONG_QUERIES)


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
    assert served.value("lenet_explanation_duration_seconds_count") == 1
    assert served.value("lenet_request_duration_seconds_count", protocol="http") == 0
    assert served.value("lenet_stage_duration_seconds_count", stage="compute") == 0
    assert served.value("lenet_images_total", model="tiny", version="3") == 0
    assert served.requests("ok") == 0


@pytest.mark.states(
    "limits",
    "explanations that wait in a worker",
    found="explanations behind one that is held, until one is refused",
)
async def test_too_many_explanations_are_a_429_and_predictions_go_on(
    served, post, refusal, held, one
):
    (most,) = map(int, documented("explanations that wait in a worker"))
    asked = {asyncio.create_task(post(one)) for _ in range(1 + most + 1)}
    (refused,), accepted = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    error = refusal(await refused, 429, "overloaded")
    assert error.message == f"{most} explanations wait, and no more may; try again later"
    assert (await refused).headers["retry-after"] == "1"
    assert served.requests("overloaded") == 1
    assert (await served.post(one)).status_code == 200
    in_time = served.service.fast_routes[b"POST", b"/predict"].requests.watched
    left = accepted.pop()
    left.cancel()
    await until(lambda: len(in_time) == most)
    assert served.requests("cancelled") == 1
    accepted.add(asyncio.create_task(post(one)))
    held.release()
    assert [one.status_code for one in await asyncio.gather(*accepted)] == [200] * (1 + most)


async def test_a_deadline_ends_one_that_waits_and_one_that_is_computed(
    served, post, refusal, held, one
):
    asked = [asyncio.create_task(post(one, x_request_timeout_ms="40")) for _ in range(2)]
    for response in await asyncio.gather(*asked):
        error = refusal(response, 504, "deadline_exceeded")
        assert error.message == "no answer within 40 ms"
    assert served.requests("deadline_exceeded") == 2
    held.release()
    answer(await post(one))
    assert held.begun == 2  # the one that waited never began


async def test_a_client_that_leaves_ends_its_explanation(
    open_app, weights, random_weights, held, one
):
    (weights / "mlp").mkdir()
    random_weights("mlp").write(weights / "mlp/1.safetensors")
    async with open_app() as served:
        in_time = served.service.fast_routes[b"POST", b"/predict"].requests.watched
        asked, kind = [], {"Content-Type": RAW}
        for count in (1, 2, 3):
            post = served.client.post("/explain?model=mlp", content=one, headers=kind)
            asked.append(asyncio.create_task(post))
            await until(lambda: held.begun == 1 and len(in_time) == count)  # noqa: B023
        computed, waiting, last = asked
        computed.cancel()
        waiting.cancel()
        await until(lambda: len(in_time) == 1)
        assert served.requests("cancelled") == 2
        held.release()
        layers = answer(await last).layers
    assert (held.begun, held.layers) == (2, 1 + len(layers))


def zeros(parameter):
    name, shape = parameter
    return name, np.zeros(shape, np.float32)


@pytest.mark.states(
    "limits",
    "images in a request for an explanation; operations of a network",
    found="networks of a hidden unit more and less: 784 + 10 multiplications each",
)
def test_a_network_of_too_many_operations_is_refused(tiny, images):
    most = int(documented("images in a request for an explanation")[1])
    units = most // 794
    networks = [Model("m", (DenseBlock(count), *tiny.blocks)) for count in (units, units + 1)]
    largest, larger = (
        SimpleNamespace(model=model, tensors=dict(map(zeros, model.parameters().items())))
        for model in networks
    )
    _, layers = layers_of(largest, images[:1], Change(), lambda: False)
    assert [layer.kind for layer in layers] == ["dense", "logits"]
    with pytest.raises(InvalidInput, match=f"expected at most {most} of a model"):
        layers_of(larger, images[:1], Change(), lambda: False)


def test_values_that_are_not_finite_fail(tiny, images):
    weights = draw_weights(Model("m", (DenseBlock(3), *tiny.blocks)))
    weights.tensors["dense1.bias"] = np.full(3, 3e38, np.float32)
    weights.tensors["dense2.weight"] = np.full((10, 3), 3e38, np.float32)
    with pytest.raises(InferenceFailed, match="layer dense2 computes values"):
        layers_of(weights, images[:1], Change(), lambda: False)
