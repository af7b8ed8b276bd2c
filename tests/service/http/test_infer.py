"""Inference and metadata by the Open Inference Protocol over HTTP."""

from __future__ import annotations

import asyncio
import json
import struct

import numpy as np
import pytest

from service.api.infer import _INLINE_JSON_BYTES
from service.errors import InvalidInput, TooLarge
from service.forms.oip_json import read_infer_body
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


def as_json(images, **changes):
    return json.dumps({"inputs": [tensor(images, **changes)]}), {}


def as_bytes(images, kind, datatype):
    content = images.astype(kind).tobytes()
    parameters = {"binary_data_size": len(content)}
    entry = without(tensor(images, datatype=datatype, parameters=parameters), "data")
    return binary({"inputs": [entry]}, content)


FORMS = {
    "flat": as_json,
    "nested": lambda images: as_json(images, data=images.tolist()),
    "nested with a channel": lambda images: as_json(
        images, shape=[5, 1, 28, 28], data=images.reshape(5, 1, 28, 28).tolist()
    ),
    "flat rows": lambda images: as_json(
        images, shape=[5, 784], data=images.reshape(5, 784).tolist()
    ),
    "FP32": lambda images: as_json(images, datatype="FP32", data=images.astype(float).tolist()),
    "binary": lambda images: as_bytes(images, "u1", "UINT8"),
    "binary FP32": lambda images: as_bytes(images, "<f4", "FP32"),
    "raw": lambda images: (images.tobytes(), {LENGTH: "0"}),
}


@pytest.mark.parametrize(
    "url", [URL, "/v2/models/tiny/versions/3/infer", "/v2/models/t%69ny/infer"]
)
async def test_every_form_gives_the_same_answer(served, images, expected, url):
    for form in FORMS.values():
        content, headers = form(images)
        answer = await served.client.post(url, content=content, headers=headers)
        found, document = outputs(answer)
        np.testing.assert_array_equal(found["probabilities"], expected)
        np.testing.assert_array_equal(found["label"], expected.argmax(axis=1))
        assert [output["name"] for output in document["outputs"]] == ["probabilities", "label"]
        assert (document["model_name"], document["model_version"]) == ("tiny", "3")
        assert "id" not in document
        assert set(document["parameters"]) == {"queue_us", "compute_us"}
    content, _ = as_json(images)
    answer = await served.client.post(url, content=content, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 200


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
SIZED = without(tensor(ONE, parameters={"binary_data_size": 784}), "data")


def one(*missing, **changes):
    """A document with one image, changed."""
    return {"inputs": [without(tensor(ONE, **changes), *missing)]}


def output(**entry):
    return one() | {"outputs": [{"name": "probabilities", **entry}]}


DATA, LISTS = "inputs[0].data: got", "inputs[0].data: got lists nested as"
BAD = [
    (b"{", "body: not JSON: "),
    (b"", "body: not JSON: "),
    ([], "body: got a list of 0, expected an object"),
    ({}, "inputs: got nothing, expected a list of objects"),
    ({"inputs": []}, "inputs: got none, expected one tensor"),
    ({"inputs": [1]}, "inputs[0]: got 1, expected an object, {"),
    (one("name"), "inputs[0].name: got nothing"),
    (one("datatype"), "inputs[0].datatype: got nothing"),
    (one("shape"), "inputs[0].shape: got nothing"),
    (one(shape=[2**63, 28, 28]), "inputs[0].shape: got [beyond int64, 28, 28]"),
    (one(shape=[True, 28, 28]), "inputs[0].shape: got [bool, 28, 28]"),
    (one(shape=[1, 28, 28, 1]), "inputs[0].shape: got [1, 28, 28, 1], expected [n, 28, 28], "),
    (one("data"), f"{DATA} nothing, expected numbers, or the parameter binary_data_size"),
    (one(data=[0] * 783), f"{DATA} 783 numbers, expected 784 for shape [1, 28, 28] of UINT8"),
    (one(data=[[0] * 784]), f"{LISTS} [1, 784], expected one flat list"),
    (one(data=ONE[0].tolist()), f"{LISTS} [28, 28], expected one flat list, or lists nested as "),
    (one(data=[[0], [0]]), f"{LISTS} [2, 1], expected one flat list, or lists nested as "),
    (one(shape=[2, 784], data=[[0], [0, 1]]), f"{DATA} lists of different lengths"),
    (one(shape=[2, 784], data=[[0], 1]), f"{DATA} lists of different lengths"),
    (one(shape=[1, 784], data=[[[0]] * 784]), f"{DATA} a list of 1 at index 0"),
    (one(data=[250.0] * 784), f"{DATA} 250.0 at index 0 (image 0, row 0, column 0), expected int"),
    (one(data=[0] * 30 + [0.5] + [0] * 753), f"{DATA} 0.5 at index 30 (image 0, row 1, column 2)"),
    (one(data=[256] * 784), f"{DATA} 256 at index 0"),
    (one(data=[-1] * 784), f"{DATA} -1 at index 0"),
    (one(data=[0, True] * 392), f"{DATA} true at index 1"),
    (one(data=["0"] * 784), f"{DATA} '0' at"),
    (one(datatype="FP32", data=[0.5] * 784), f"{DATA} 0.5 at index 0 (image 0, row 0, column 0)"),
    (one(datatype="FP32", data=[10**400] * 784), ""),
    (one(parameters={"shared_memory_region": "x"}), "inputs[0].parameters.shared_memory_region: g"),
    ({"inputs": [SIZED]}, "inputs[0].parameters.binary_data_size: got 784, expected the header"),
    (one() | {"parameters": []}, "parameters: got a"),
    (one() | {"parameters": {"timeout": "5"}}, "parameters.timeout: got '5', expected a whole"),
    (one() | {"id": "x" * 1025}, "id: got 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'..., expect"),
    (one() | {"id": 1}, "id: got 1, expected a st"),
    (one() | {"outputs": {}}, "outputs: got an object of 0, expected a list"),
    (one() | {"outputs": [{"name": "label"}] * 2}, "outputs[1].name: got 'label' a second time"),
    (output(name="digit"), "outputs[0].name: got 'digit', expected one of probabilities, label"),
    (output(parameters={"binary_data": 1}), "outputs[0].parameters.binary_data: got 1, expected"),
    (output(parameters={"classification": 0}), "outputs[0].parameters.classification: got 0, exp"),
    (output(parameters={"classification": -1}), "outputs[0].parameters.classification: got -1, e"),
    (
        {"images": [[0] * 784]},
        "inputs: got nothing, expected a list of objects; images as /predict",
    ),
    ({"instances": [[0] * 784]}, "inputs: got nothing, expected a list of objects; TensorFlow Ser"),
    (b"\x89PNG\r\n\x1a\n", "body: not JSON but image/png; it goes to /predict"),
    (bytes(784), "body: not JSON: unexpected character, expected a JSON value: line 1 column 1 "),
    (b'{"a":[' + b"{}," * 40_000 + b"{}]}", "body: got more than 64 objects"),
    (b'{"a":' * 2000 + b"1" + b"}" * 2000, ""),
]


def test_a_bad_body_is_refused_by_the_name_of_what_is_wrong():
    for document, message in BAD:
        body = document if type(document) is bytes else json.dumps(document).encode()
        with pytest.raises(InvalidInput) as refused:
            read_infer_body(body, None, 16)
        assert refused.value.message.startswith(message), (message, refused.value.message)
        assert len(refused.value.message) < 300


def test_too_much_is_refused_by_its_name():
    many = output(parameters={"classification": 9})
    many["inputs"] = [tensor(np.zeros((500, 28, 28), np.uint8))]
    for document, message in (
        (
            one(shape=[2**62, 28, 28]),
            "inputs[0].shape: got 4611686018427387904 images, expected at",
        ),
        (many, "outputs[0].parameters.classification: got 9 classes of 500 images, expected at mo"),
        (b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", "body: got more than"),
    ):
        body = document if type(document) is bytes else json.dumps(document).encode()
        with pytest.raises(TooLarge) as refused:
            read_infer_body(body, None, 500)
        assert refused.value.message.startswith(message)


SIZE = "inputs[0].parameters.binary_data_size: got"
BAD_BINARY = [
    (b"{}", 3, f"{LENGTH}: got 3, expected at most the 2 bytes"),
    (b"{}", 2**63, f"{LENGTH}: got 9223372036854775808, "),
    (b'{"inputs":[]}', 5, "body: not JSON: "),
    (one(parameters={"binary_data_size": 784}), 784, "inputs[0].data: got numbers beside binary_"),
    ({"inputs": [SIZED]}, 783, f"{SIZE} 784, expected at most 783"),
    ({"inputs": [SIZED]}, 785, "body: got 1 bytes behind the last tensor"),
    (one(), 784, "body: got 784 bytes behind the last tensor"),
    ({"inputs": [{**SIZED, "shape": [2, 28, 28]}]}, 784, "inputs[0]'s binary data: got 784 bytes"),
    ({"inputs": [{**SIZED, "parameters": {"binary_data_size": "784"}}]}, 784, f"{SIZE} '784', "),
    (bytes(785), 0, "body: got 785 bytes, expected 784"),
    (b"", 0, "body: got 0 bytes, expected 784 for each image"),
]


def test_bad_lengths_are_refused():
    for document, size, message in BAD_BINARY:
        body, length = document, size
        if type(document) is not bytes:  # then `size` is that of the tensors
            head = json.dumps(document).encode()
            body, length = head + bytes(size), len(head)
        with pytest.raises(InvalidInput) as refused:
            read_infer_body(body, length, 16)
        assert refused.value.message.startswith(message), (message, refused.value.message)


async def test_errors_have_the_protocol_s_form(served):
    many = {"inputs": [tensor(np.full((6000, 28, 28), 5, np.uint8))]}
    for document, headers, status, message in (
        ({}, {}, 400, "inputs: got nothing"),
        (many, {}, 413, "body: got 14112"),
        *(
            ({}, {LENGTH: text}, 400, f"{LENGTH}: got '{text[:9]}")
            for text in ("x", "-1", "9" * 40)
        ),
    ):
        answer = await infer(served, document, **headers)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"].startswith(message)
    answer = await served.client.get(URL)
    assert (answer.status_code, list(answer.json())) == (405, ["error"])


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


async def test_an_unknown_model_has_no_description(served):
    for path in ("", "/ready", "/config", "/stats"):
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
