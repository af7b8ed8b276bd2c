"""Inference and metadata by the Open Inference Protocol over HTTP."""

from __future__ import annotations

import asyncio
import json
import struct

import numpy as np
import pytest

from service.api.infer import _INLINE_JSON_BYTES
from tests.service.http.doors import until

URL = "/v2/models/tiny/infer"
LENGTH = "Inference-Header-Content-Length"


def tensor(images, **changes):
    plain = {"name": "image", "datatype": "UINT8", "shape": [*images.shape]}
    return {**plain, "data": images.ravel().tolist(), **changes}


def without(entry, *keys):
    return {key: value for key, value in entry.items() if key not in keys}


def binary(document, *parts):
    """The body and its header of a request with binary tensors."""
    head = json.dumps(document).encode()
    return head + b"".join(parts), {LENGTH: str(len(head))}


async def infer(served, document, url=URL, **headers):
    return await served.client.post(url, content=json.dumps(document), headers=headers)


def outputs(answer):
    """The outputs of an answer, each as an array, and the JSON around them."""
    assert answer.status_code == 200, answer.text
    content = answer.content
    size = int(answer.headers.get(LENGTH, len(content)))
    document, rest = json.loads(content[:size]), content[size:]
    found = {}
    for output in document["outputs"]:
        kind = {"FP32": "<f4", "INT64": "<i8", "BYTES": object}[output["datatype"]]
        if (count := output.get("parameters", {}).get("binary_data_size")) is not None:
            own, rest = rest[:count], rest[count:]
            flat = _texts(own) if kind is object else np.frombuffer(own, kind)
        else:
            flat = np.array(output["data"], kind)
        found[output["name"]] = np.reshape(flat, output["shape"])
    assert rest == b""
    return found, document


def _texts(content):
    found = []
    while content:
        (size,) = struct.unpack_from("<I", content)
        found.append(content[4 : 4 + size].decode())
        content = content[4 + size :]
    return np.array(found, object)


@pytest.fixture
async def expected(served, images):
    """The probabilities of the five images, as /predict gives them."""
    answer = await served.post(images.tobytes(), accept="application/octet-stream")
    return np.frombuffer(answer.content, "<f4").reshape(5, 10)


BINARY_SIZE = {"binary_data_size": 5 * 784}
FORMS = {
    "flat": lambda images: (json.dumps({"inputs": [tensor(images)]}), {}),
    "nested": lambda images: (
        json.dumps({"inputs": [tensor(images, data=images.tolist())]}),
        {"Content-Type": "text/plain"},
    ),
    "nested with a channel": lambda images: (
        json.dumps(
            {
                "inputs": [
                    tensor(images, shape=[5, 1, 28, 28], data=images.reshape(5, 1, 28, 28).tolist())
                ]
            }
        ),
        {},
    ),
    "flat rows": lambda images: (
        json.dumps(
            {"inputs": [tensor(images, shape=[5, 784], data=images.reshape(5, 784).tolist())]}
        ),
        {},
    ),
    "FP32": lambda images: (
        json.dumps(
            {"inputs": [tensor(images, datatype="FP32", data=images.astype(float).tolist())]}
        ),
        {},
    ),
    "booleans beside the numbers": lambda images: (
        json.dumps({"inputs": [tensor(images)], "parameters": {"binary_data_output": False}}),
        {},
    ),
    "binary": lambda images: binary(
        {"inputs": [without(tensor(images, parameters=BINARY_SIZE), "data")]}, images.tobytes()
    ),
    "binary FP32": lambda images: binary(
        {
            "inputs": [
                without(
                    tensor(
                        images, datatype="FP32", parameters={"binary_data_size": 4 * images.size}
                    ),
                    "data",
                )
            ]
        },
        images.astype("<f4").tobytes(),
    ),
    "raw": lambda images: (images.tobytes(), {LENGTH: "0"}),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_every_form_gives_the_same_answer(served, images, expected, form):
    content, headers = form(images)
    answer = await served.client.post(URL, content=content, headers=headers)
    found, document = outputs(answer)
    np.testing.assert_array_equal(found["probabilities"], expected)
    np.testing.assert_array_equal(found["label"], expected.argmax(axis=1))
    assert [output["name"] for output in document["outputs"]] == ["probabilities", "label"]
    assert (document["model_name"], document["model_version"]) == ("tiny", "3")
    assert "id" not in document
    assert set(document["parameters"]) == {"queue_us", "compute_us"}


@pytest.mark.parametrize(
    ("flags", "whole", "are_binary"),
    [
        ((None, None), None, (False, False)),
        ((None, None), True, (True, True)),
        ((True, None), None, (True, False)),
        ((False, None), True, (False, True)),
    ],
)
async def test_each_output_comes_in_the_form_that_is_asked_for(
    served, images, expected, flags, whole, are_binary
):
    wanted = [
        {"name": name, **({} if flag is None else {"parameters": {"binary_data": flag}})}
        for name, flag in zip(("probabilities", "label"), flags, strict=True)
    ]
    document = {"inputs": [tensor(images)], "outputs": wanted, "id": "ä-1"}
    if whole is not None:
        document["parameters"] = {"binary_data_output": whole}
    answer = await infer(served, document)
    found, around = outputs(answer)
    np.testing.assert_array_equal(found["probabilities"], expected)
    np.testing.assert_array_equal(found["label"], expected.argmax(axis=1))
    assert around["id"] == "ä-1"
    assert tuple("data" not in output for output in around["outputs"]) == are_binary
    kind = "application/octet-stream" if any(are_binary) else "application/json"
    assert answer.headers["content-type"] == kind
    assert (LENGTH in answer.headers) == any(are_binary)


@pytest.mark.parametrize("is_binary", [False, True])
async def test_a_classification_names_the_best(served, images, expected, is_binary):
    parameters = {"classification": 3, "binary_data": is_binary}
    wanted = [{"name": "label"}, {"name": "probabilities", "parameters": parameters}]
    found, document = outputs(await infer(served, {"inputs": [tensor(images)], "outputs": wanted}))
    assert [output["datatype"] for output in document["outputs"]] == ["INT64", "BYTES"]
    best = np.argsort(-expected, axis=1)[:, :3]
    for row, indices, values in zip(found["probabilities"], best, expected, strict=True):
        assert row.tolist() == [f"{values[i]:f}:{i}:{i}" for i in indices]


@pytest.mark.parametrize("is_binary", [False, True])
async def test_many_images_have_one_answer(open_app, images, is_binary):
    many = np.concatenate([images] * 300)
    document = {"inputs": [tensor(many)], "parameters": {"binary_data_output": is_binary}}
    assert len(json.dumps(document)) > _INLINE_JSON_BYTES  # a decoding process reads it
    async with open_app(max_batch_rows=64) as served:
        found, _ = outputs(await infer(served, document))
        small, _ = outputs(await infer(served, {"inputs": [tensor(images)]}))
    assert found["label"].tolist() == small["label"].tolist() * 300
    # Batches of other sizes are summed in another order.
    np.testing.assert_allclose(
        found["probabilities"], np.concatenate([small["probabilities"]] * 300), atol=1e-5
    )


async def test_a_timeout_of_the_request_s_own_is_its_deadline(open_app, images, hold):
    async with open_app() as served:
        document = {"inputs": [tensor(images)], "parameters": {"timeout": 50_000}}
        answer = await infer(served, document)
        assert answer.status_code == 504
        assert answer.json() == {"error": "no answer within 50 ms"}
        hold.release()


ONE = np.zeros((1, 28, 28), np.uint8)
BAD = {
    "not JSON": (b"{", 400, "body: not JSON: "),
    "nothing": (b"", 400, "body: not JSON: "),
    "a list": (b"[]", 400, "body: got a list of 0, expected an object"),
    "no inputs": (b"{}", 400, "inputs: got nothing, expected a list of objects"),
    "inputs of nothing": ({"inputs": []}, 400, "inputs: got none, expected one tensor"),
    "an input that is a number": ({"inputs": [1]}, 400, "inputs[0]: got 1, expected an object, {"),
    "no name": ({"inputs": [without(tensor(ONE), "name")]}, 400, "inputs[0].name: got nothing"),
    "another name": ({"inputs": [tensor(ONE, name="x")]}, 400, "inputs[0].name: got 'x'"),
    "two inputs": ({"inputs": [tensor(ONE), tensor(ONE)]}, 400, "inputs[1].name: got 'image' a"),
    "no datatype": (
        {"inputs": [without(tensor(ONE), "datatype")]},
        400,
        "inputs[0].datatype: got nothing",
    ),
    "another datatype": (
        {"inputs": [tensor(ONE, datatype="FP64")]},
        400,
        "inputs[0].datatype: got 'FP64', expected one of UINT8, FP32",
    ),
    "no shape": ({"inputs": [without(tensor(ONE), "shape")]}, 400, "inputs[0].shape: got nothing"),
    "another shape": (
        {"inputs": [tensor(ONE, shape=[28, 28, 1])]},
        400,
        "inputs[0].shape: got [28, 28, 1], expected [n, 28, 28]",
    ),
    "a shape beyond int64": (
        {"inputs": [tensor(ONE, shape=[2**63, 28, 28])]},
        400,
        "inputs[0].shape: got [beyond int64, 28, 28]",
    ),
    "a shape whose product overflows": (
        {"inputs": [tensor(ONE, shape=[2**62, 28, 28])]},
        413,
        "inputs[0].shape: got 4611686018427387904 images, expected at most",
    ),
    "a shape of true": (
        {"inputs": [tensor(ONE, shape=[True, 28, 28])]},
        400,
        "inputs[0].shape: got [bool, 28, 28]",
    ),
    "no data": (
        {"inputs": [without(tensor(ONE), "data")]},
        400,
        "inputs[0].data: got nothing, expected numbers, or the parameter binary_data_size",
    ),
    "too few numbers": (
        {"inputs": [tensor(ONE, data=[0] * 783)]},
        400,
        "inputs[0].data: got 783 numbers, expected 784 for shape [1, 28, 28] of UINT8",
    ),
    "another nesting": (
        {"inputs": [tensor(ONE, data=[[0] * 784])]},
        400,
        "inputs[0].data: got lists nested as [1, 784], expected one flat list",
    ),
    "rows without the dimension of the images": (
        {"inputs": [tensor(ONE, data=ONE[0].tolist())]},
        400,
        "inputs[0].data: got lists nested as [28, 28], expected one flat list, or lists nested as "
        "the shape, [1, 28, 28]",
    ),
    "channels last": (
        {"inputs": [tensor(ONE[..., np.newaxis])]},
        400,
        "inputs[0].shape: got [1, 28, 28, 1], expected [n, 28, 28], [n, 1, 28, 28], [n, 784] or "
        "one image as [28, 28] or [784]; remove the channel axis",
    ),
    "floats of integers": (
        {"inputs": [tensor(ONE, data=[250.0] * 784)]},
        400,
        "inputs[0].data: got 250.0 at index 0 (image 0, row 0, column 0), expected integers 0 to "
        "255; for floats 0 to 255 send round(x)",
    ),
    "a document for /predict": (
        {"images": [[0] * 784]},
        400,
        "inputs: got nothing, expected a list of objects; images as /predict takes them go there",
    ),
    "a document for TensorFlow Serving": (
        {"instances": [[0] * 784]},
        400,
        "inputs: got nothing, expected a list of objects; TensorFlow Serving's requests go to /v1",
    ),
    "a picture": (b"\x89PNG\r\n\x1a\n", 400, "body: not JSON but image/png; it goes to /predict"),
    "pixels": (
        bytes(784),
        400,
        "body: not JSON: unexpected character, expected a JSON value: line 1 column 1 (char 0); "
        "the bytes of images alone need the header Inference-Header-Content-Length: 0",
    ),
    "lists of different lengths": (
        {"inputs": [tensor(ONE, shape=[2, 784], data=[[0], [0, 1]])]},
        400,
        "inputs[0].data: got lists of different lengths",
    ),
    "a number among lists": (
        {"inputs": [tensor(ONE, shape=[2, 784], data=[[0], 1])]},
        400,
        "inputs[0].data: got lists of different lengths",
    ),
    "more lists than the shape has": (
        {"inputs": [tensor(ONE, data=[[0], [0]])]},
        400,
        "inputs[0].data: got lists nested as [2, 1], expected one flat list, or lists nested as ",
    ),
    "a fraction": (
        {"inputs": [tensor(ONE, data=[0] * 30 + [0.5] + [0] * 753)]},
        400,
        "inputs[0].data: got 0.5 at index 30 (image 0, row 1, column 2), expected integers 0 to",
    ),
    "256": ({"inputs": [tensor(ONE, data=[256] * 784)]}, 400, "inputs[0].data: got 256 at index 0"),
    "-1": ({"inputs": [tensor(ONE, data=[-1] * 784)]}, 400, "inputs[0].data: got -1 at index 0"),
    "true": (
        {"inputs": [tensor(ONE, data=[0, True] * 392)]},
        400,
        "inputs[0].data: got true at index 1",
    ),
    "a text": ({"inputs": [tensor(ONE, data=["0"] * 784)]}, 400, "inputs[0].data: got '0' at"),
    "a fraction as FP32": (
        {"inputs": [tensor(ONE, datatype="FP32", data=[0.5] * 784)]},
        400,
        "inputs[0].data: got 0.5 at index 0 (image 0, row 0, column 0), expected whole numbers",
    ),
    "a huge number as FP32": (
        {"inputs": [tensor(ONE, datatype="FP32", data=[10**400] * 784)]},
        400,
        "",
    ),
    "parameters of a list": ({"inputs": [tensor(ONE)], "parameters": []}, 400, "parameters: got a"),
    "shared memory": (
        {"inputs": [tensor(ONE, parameters={"shared_memory_region": "x"})]},
        400,
        "inputs[0].parameters.shared_memory_region: got shared memory",
    ),
    "a long id": (
        {"inputs": [tensor(ONE)], "id": "x" * 1025},
        400,
        "id: got 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'..., expected a string of at most 1024",
    ),
    "numbers nested too deep": (
        {"inputs": [tensor(ONE, shape=[1, 784], data=[[[0]] * 784])]},
        400,
        "inputs[0].data: got a list of 1 at index 0",
    ),
    "no class of a classification": (
        {
            "inputs": [tensor(ONE)],
            "outputs": [{"name": "probabilities", "parameters": {"classification": 0}}],
        },
        400,
        "outputs[0].parameters.classification: got 0, expected at least 1",
    ),
    "much JSON": (
        {"inputs": [tensor(np.full((6000, 28, 28), 5, np.uint8))]},
        413,
        "body: got 14112",
    ),
    "a classification of many images": (
        {
            "inputs": [tensor(np.zeros((500, 28, 28), np.uint8))],
            "outputs": [{"name": "probabilities", "parameters": {"classification": 9}}],
        },
        413,
        "outputs[0].parameters.classification: got 9 classes of 500 images, expected at most",
    ),
    "an id that is a number": ({"inputs": [tensor(ONE)], "id": 1}, 400, "id: got 1, expected a st"),
    "an unknown output": (
        {"inputs": [tensor(ONE)], "outputs": [{"name": "digit"}]},
        400,
        "outputs[0].name: got 'digit', expected one of probabilities, label",
    ),
    "an output twice": (
        {"inputs": [tensor(ONE)], "outputs": [{"name": "label"}] * 2},
        400,
        "outputs[1].name: got 'label' a second time",
    ),
    "outputs that are an object": (
        {"inputs": [tensor(ONE)], "outputs": {}},
        400,
        "outputs: got an object of 0, expected a list",
    ),
    "binary_data of 1": (
        {"inputs": [tensor(ONE)], "outputs": [{"name": "label", "parameters": {"binary_data": 1}}]},
        400,
        "outputs[0].parameters.binary_data: got 1, expected true or false",
    ),
    "a classification of labels": (
        {
            "inputs": [tensor(ONE)],
            "outputs": [{"name": "label", "parameters": {"classification": 1}}],
        },
        400,
        "outputs[0].parameters.classification: got the output 'label'",
    ),
    "a negative classification": (
        {
            "inputs": [tensor(ONE)],
            "outputs": [{"name": "probabilities", "parameters": {"classification": -1}}],
        },
        400,
        "outputs[0].parameters.classification: got -1, expected a whole number from 0 to",
    ),
    "a timeout of a text": (
        {"inputs": [tensor(ONE)], "parameters": {"timeout": "5"}},
        400,
        "parameters.timeout: got '5', expected a whole number",
    ),
    "a binary tensor without its bytes": (
        {"inputs": [without(tensor(ONE, parameters={"binary_data_size": 784}), "data")]},
        400,
        "inputs[0].parameters.binary_data_size: got 784, expected the header Inference-Header-Con",
    ),
    "many objects": (
        b'{"a":[' + b"{}," * 40_000 + b"{}]}",
        400,
        "body: got more than 64 objects",
    ),
    "many lists": (b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", 413, "body: got more than"),
    "deep": (b'{"a":' * 2000 + b"1" + b"}" * 2000, 400, ""),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_body_is_refused_in_the_protocol_s_words(served, name):
    content, status, message = BAD[name]
    body = content if isinstance(content, bytes) else json.dumps(content)
    answer = await served.client.post(URL, content=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    assert answer.json()["error"].startswith(message)
    assert len(answer.json()["error"]) < 300


SIZED = without(tensor(ONE, parameters={"binary_data_size": 784}), "data")
BAD_BINARY = {
    "a length of letters": (b"{}", {LENGTH: "x"}, f"{LENGTH}: got 'x', expected the length"),
    "a negative length": (b"{}", {LENGTH: "-1"}, f"{LENGTH}: got '-1', expected the length"),
    "a length of many digits": (b"{}", {LENGTH: "9" * 40}, f"{LENGTH}: got '999999"),
    "a length beyond the body": (
        b"{}",
        {LENGTH: "3"},
        f"{LENGTH}: got 3, expected at most the 2 bytes",
    ),
    "a length beyond int64": (b"{}", {LENGTH: str(2**63)}, f"{LENGTH}: got 9223372036854775808, "),
    "a length within the JSON": (
        b'{"inputs":[]}',
        {LENGTH: "5"},
        "body: not JSON: ",
    ),
    "numbers beside bytes": (
        *binary({"inputs": [tensor(ONE, parameters={"binary_data_size": 784})]}, bytes(784)),
        "inputs[0].data: got numbers beside binary_data_size",
    ),
    "too few bytes": (
        *binary({"inputs": [SIZED]}, bytes(783)),
        "inputs[0].parameters.binary_data_size: got 784, expected at most 783",
    ),
    "bytes left over": (
        *binary({"inputs": [SIZED]}, bytes(785)),
        "body: got 1 bytes behind the last tensor",
    ),
    "bytes for no tensor": (
        *binary({"inputs": [tensor(ONE)]}, bytes(784)),
        "body: got 784 bytes behind the last tensor",
    ),
    "another size than the shape says": (
        *binary({"inputs": [{**SIZED, "shape": [2, 28, 28]}]}, bytes(784)),
        "inputs[0]'s binary data: got 784 bytes, expected 1568 for shape [2, 28, 28] of UINT8",
    ),
    "a size of a text": (
        *binary({"inputs": [{**SIZED, "parameters": {"binary_data_size": "784"}}]}, bytes(784)),
        "inputs[0].parameters.binary_data_size: got '784', expected a whole number",
    ),
    "raw bytes of no whole image": (bytes(785), {LENGTH: "0"}, "body: got 785 bytes, expected 784"),
    "no raw bytes": (b"", {LENGTH: "0"}, "body: got 0 bytes, expected 784 for each image"),
}


@pytest.mark.parametrize("name", BAD_BINARY)
async def test_bad_lengths_are_refused(served, name):
    body, headers, message = BAD_BINARY[name]
    answer = await served.client.post(URL, content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(message)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/v2/models/vgg/infer", "model 'vgg' is not loaded, expected one of tiny"),
        ("/v2/models/tiny/versions/4/infer", "version '4' of model 'tiny' is not loaded"),
        ("/v2/models//infer", "path: got '/v2/models//infer'"),
    ],
)
async def test_another_model_is_404_whatever_the_body(served, url, message):
    for document in ({"inputs": [tensor(ONE)]}, {}):
        answer = await infer(served, document, url)
        assert answer.status_code == 404
        assert answer.json()["error"].startswith(message)


async def test_over_a_connection_it_is_answered_without_the_application(open_app, images, expected):
    async with open_app() as served:
        for url in (URL, "/v2/models/tiny/versions/3/infer", "/v2/models/t%69ny/infer"):
            for form in FORMS.values():
                content, headers = form(images)
                answer = await served.client.post(url, content=content, headers=headers)
                found, _ = outputs(answer)
                np.testing.assert_array_equal(found["probabilities"], expected)
        assert await served.requests("ok") == 3 * len(FORMS)
        assert len(served.door.known) > 0
        for body, headers, message in BAD_BINARY.values():
            answer = await served.client.post(URL, content=body, headers=headers)
            assert answer.json()["error"].startswith(message)
        answer = await served.client.get(URL)
        assert answer.status_code == 405
        assert set(answer.json()) == {"error"}


async def test_failures_are_counted_for_the_model_of_the_path(served, images):
    for document in ({}, {"inputs": [tensor(images, shape=[6, 28, 28])]}):
        assert (await infer(served, document)).status_code == 400
    await infer(served, {}, "/v2/models/vgg/infer")
    stats = (await served.client.get("/v2/models/tiny/stats")).json()["model_stats"][0]
    assert stats["inference_stats"]["fail"]["count"] == 2
    assert await served.requests("invalid_input") == 2
    assert await served.requests("unknown_model") == 1


async def test_overload_is_429_with_the_time_after_which_to_retry(open_app, images, hold):
    async with open_app(max_queue_rows=5, max_images=5, max_batch_rows=4) as served:
        first = [asyncio.create_task(infer(served, {"inputs": [tensor(images)]})) for _ in range(3)]
        await until(lambda: any(task.done() for task in first))
        hold.release()
        answers = await asyncio.gather(*first)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert "rows wait" in refused[0].json()["error"]
    assert refused[0].headers["retry-after"]


async def test_metadata_is_that_of_grpc(served):
    answer = (await served.client.get("/v2/models/tiny")).json()
    assert answer == {
        "name": "tiny",
        "versions": ["3"],
        "platform": "lenet_safetensors",
        "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, 28, 28]}],
        "outputs": [
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, 10]},
            {"name": "label", "datatype": "INT64", "shape": [-1]},
        ],
    }
    assert (await served.client.get("/v2/models/tiny/versions/3")).json() == answer
    for url in ("/v2", "/v2/"):
        server = (await served.client.get(url)).json()
        assert server["name"] == "lenet-serve"
        assert "binary_tensor_data" in server["extensions"]


async def test_the_statistics_count_what_was_done(served, images):
    async def stats(url):
        answer = await served.client.get(url)
        assert answer.status_code == 200
        (found,) = answer.json()["model_stats"]
        return found

    before = await stats("/v2/models/tiny/stats")
    assert before["last_inference"] == 0
    for count in (1, 1, 3, 5):
        outputs(await infer(served, {"inputs": [tensor(images[:count])]}))
    await served.post(images[0].tobytes(), query="?model=tiny")
    await infer(served, {"inputs": [tensor(images)]})
    for url in ("/v2/models/stats", "/v2/models/tiny/versions/3/stats"):
        after = await stats(url)
        assert (after["name"], after["version"]) == ("tiny", "3")
        assert after["inference_count"] == 16
        # At most four images are in a batch here.
        assert after["execution_count"] == 8
        assert {
            one["batch_size"]: one["compute_infer"]["count"] for one in after["batch_stats"]
        } == {
            1: 5,
            4: 3,
        }
        parts = after["inference_stats"]
        assert parts["success"]["count"] == parts["queue"]["count"] == 6
        assert all(parts[name]["ns"] > 0 for name in ("success", "compute_infer", "compute_output"))
        stages = ("queue", "compute_input", "compute_infer", "compute_output")
        assert parts["success"]["ns"] >= sum(parts[name]["ns"] for name in stages)
        assert after["last_inference"] > 1e12


@pytest.mark.parametrize("path", ["", "/ready", "/config", "/stats"])
async def test_an_unknown_model_has_no_description(served, path):
    for url in (f"/v2/models/vgg{path}", f"/v2/models/tiny/versions/9{path}"):
        answer = await served.client.get(url)
        assert answer.status_code == 404
        assert "is not loaded" in answer.json()["error"]


async def test_readiness_is_the_service_s(served):
    for ready in (True, False):
        served.models.ready = ready
        status = 200 if ready else 503
        for url in (
            "/v2/health/ready",
            "/v2/models/tiny/ready",
            "/v2/models/tiny/versions/3/ready",
        ):
            answer = await served.client.get(url)
            assert (answer.status_code, answer.json()["ready"]) == (status, ready)
        live = await served.client.get("/v2/health/live")
        assert (live.status_code, live.json()["live"]) == (200, True)
    served.models.ready = True


async def test_the_configuration_has_what_triton_s_clients_read(served):
    config = (await served.client.get("/v2/models/tiny/config")).json()
    assert (config["name"], config["max_batch_size"]) == ("tiny", served.settings.max_images)
    assert config["input"] == [{"name": "image", "data_type": "TYPE_UINT8", "dims": [28, 28]}]
    assert [output["dims"] for output in config["output"]] == [[10], [1]]
