"""Inference and metadata by the Open Inference Protocol over HTTP."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from service.forms.oip_json import _NOW_JSON_BYTES

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


def forms(images):
    """Bodies of the same images, and their headers."""
    floats, channel = images.astype("<f4"), images.reshape(5, 1, 28, 28)
    sized = {name: {"binary_data_size": one.nbytes} for name, one in (("u", images), ("f", floats))}
    of_floats = {"datatype": "FP32", "parameters": sized["f"]}
    rest = {"parameters": {"binary_data_output": False}}
    for headers, entry, more in (
        ({}, tensor(images), {}),
        ({"Content-Type": "text/plain"}, tensor(images, data=images.tolist()), {}),
        ({}, tensor(channel, data=channel.tolist()), {}),
        ({}, tensor(images.reshape(5, 784), data=images.reshape(5, 784).tolist()), {}),
        ({}, tensor(images, datatype="FP32", data=floats.tolist()), {}),
        ({}, tensor(images), rest),
    ):
        yield json.dumps({"inputs": [entry], **more}), headers
    entry = without(tensor(images, parameters=sized["u"]), "data")
    yield binary({"inputs": [entry]}, images.tobytes())
    yield binary({"inputs": [without(tensor(images, **of_floats), "data")]}, floats.tobytes())
    yield images.tobytes(), {LENGTH: "0"}


async def test_every_form_gives_the_same_answer(served, images, expected):
    for content, headers in forms(images):
        answer = await served.client.post(URL, content=content, headers=headers)
        found, document = outputs(answer)
        np.testing.assert_array_equal(found["probabilities"], expected)
        np.testing.assert_array_equal(found["label"], expected.argmax(axis=1))
        assert [output["name"] for output in document["outputs"]] == ["probabilities", "label"]
        assert (document["model_name"], document["model_version"]) == ("tiny", "3")
        assert "id" not in document
        assert set(document["parameters"]) == {"queue_us", "compute_us"}


async def test_each_output_comes_in_the_form_that_is_asked_for(served, images, expected):
    for own, whole, are_binary in (
        ({}, {}, (False, False)),
        ({}, {"binary_data_output": True}, (True, True)),
        ({"binary_data": True}, {}, (True, False)),
        ({"binary_data": False}, {"binary_data_output": True}, (False, True)),
    ):
        wanted = [{"name": "probabilities", "parameters": own}, {"name": "label"}]
        document = {"inputs": [tensor(images)], "outputs": wanted, "id": "ä-1"}
        answer = await infer(served, {**document, "parameters": whole})
        found, around = outputs(answer)
        np.testing.assert_array_equal(found["probabilities"], expected)
        np.testing.assert_array_equal(found["label"], expected.argmax(axis=1))
        assert around["id"] == "ä-1"
        assert tuple("data" not in output for output in around["outputs"]) == are_binary
        kind = "application/octet-stream" if any(are_binary) else "application/json"
        assert answer.headers["content-type"] == kind
        assert (LENGTH in answer.headers) == any(are_binary)


async def test_a_model_without_a_name_is_one_named_infer(served):
    answer = await served.client.post("/v2/models//infer", content=b"{}")
    assert answer.status_code == 405
    assert "/v2/models/infer" in answer.json()["error"]


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


@pytest.mark.parametrize("is_binary", [False, True])
async def test_many_images_have_one_answer(open_app, images, is_binary):
    many = np.concatenate([images] * 60)
    document = {"inputs": [tensor(many)], "parameters": {"binary_data_output": is_binary}}
    assert len(json.dumps(document)) > _NOW_JSON_BYTES  # a decoding process reads it
    async with open_app(max_batch_rows=64) as served:
        found, _ = outputs(await infer(served, document))
        small, _ = outputs(await infer(served, {"inputs": [tensor(images)]}))
    assert found["label"].tolist() == small["label"].tolist() * 60
    # Batches of other sizes are summed in another order.
    np.testing.assert_allclose(
        found["probabilities"], np.concatenate([small["probabilities"]] * 60), atol=1e-5
    )
