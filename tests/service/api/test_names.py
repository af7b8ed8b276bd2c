"""The names of 47 classes in the answers of every door."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from lenet.model import IDENTITY, DenseBlock, Model
from service.forms import open_inference_pb2 as pb

NAMES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
IMAGES = np.random.default_rng(7).integers(0, 256, (20, 28, 28), np.uint8)
INPUT = {"name": "image", "shape": [20, 28, 28], "datatype": "UINT8"}
BEST = {"name": "probabilities", "parameters": {"classification": 1}}
BY_ROW = {"instances": IMAGES.tolist()}


@pytest.fixture
async def letters(open_app, weights, random_weights):
    file = random_weights(Model("letters", (DenseBlock(47, activation=IDENTITY),)))
    (weights / "letters").mkdir()
    named = replace(file, training=replace(file.training, labels=NAMES))
    named.write(weights / "letters/1.safetensors")
    async with open_app(default_model="letters", max_images=64, max_batch_rows=16) as served:
        yield served


def by_predict(answer):
    return [one["name"] for one in answer["predictions"]]


def by_column(answer):
    return answer["outputs"]["name"]


def by_classification(answer):
    return [text.split(":")[2] for text in answer["outputs"][0]["data"]]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/predict", {"images": IMAGES.tolist()}, by_predict),
        ("/v1/models/letters:predict", BY_ROW, by_predict),
        ("/v1/models/letters:predict", {"inputs": IMAGES.tolist()}, by_column),
        ("/invocations", BY_ROW, by_predict),
        (
            "/v2/models/letters/infer",
            {"inputs": [INPUT | {"data": IMAGES.ravel().tolist()}], "outputs": [BEST]},
            by_classification,
        ),
    ],
)
async def test_an_answer_over_http_has_the_names(letters, path, body, names):
    expected = await letters.client.post("/predict", json={"images": IMAGES.tolist()})
    labels = [one["label"] for one in expected.json()["predictions"]]
    assert len(set(labels)) >= 3
    answer = await letters.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert names(answer.json()) == [NAMES[label] for label in labels]


async def test_an_explanation_and_the_information_have_the_names(letters):
    content = {"content": IMAGES[0].tobytes()}
    headers = {"content-type": "application/octet-stream"}
    found = (await letters.client.post("/explain", headers=headers, **content)).json()
    assert found["prediction"]["name"] == NAMES[found["prediction"]["label"]]
    models = (await letters.client.get("/info")).json()["models"]
    assert [tuple(one["labels"]) for one in models if one["name"] == "letters"] == [NAMES]


async def test_the_names_are_an_output_of_the_signature(letters):
    found = (await letters.client.get("/v1/models/letters/metadata")).json()
    (signature,) = found["metadata"]["signature_def"]["signature_def"].values()
    assert signature["outputs"]["name"]["dtype"] == "DT_STRING"


async def test_a_shape_is_not_said_to_be_no_digit_where_classes_are_no_digits(letters):
    block = Image.new("L", (100, 100), 255)
    block.paste(0, (20, 20, 80, 80))
    block.save(file := io.BytesIO(), "PNG")
    for model, warned in (("tiny", True), ("letters", False)):
        for path in ("/predict", "/explain"):
            headers = {"content-type": "image/png"}
            answer = await letters.client.post(
                f"{path}?model={model}", content=file.getvalue(), headers=headers
            )
            assert answer.status_code == 200, answer.text
            assert ("warnings" in answer.json()) == warned


async def test_an_answer_over_grpc_has_the_names(letters):
    tensor = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8")
    tensor.shape.extend(IMAGES.shape)
    request = pb.ModelInferRequest(model_name="letters", inputs=[tensor])
    request.raw_input_contents.append(IMAGES.tobytes())
    for name in ("label", "probabilities"):
        request.outputs.add(name=name)
    request.outputs[1].parameters["classification"].int64_param = 1
    async with letters.connect() as stub:
        labels, best = (await stub.ModelInfer(request)).raw_output_contents
    expected = [NAMES[label] for label in np.frombuffer(labels, "<i8")]
    # Each element is its length in 4 bytes, then text as 0.123456:20:K.
    assert re.findall(rb"\.\d{6}:\d+:(.)", best) == [name.encode() for name in expected]
