"""Random and mutated requests for inference, over HTTP and gRPC, against a running service.

What each is to come to is known from a second reading of the request, that of the fuzz targets, and
from the network in float64: an answer, or an error of the client's. Never a fault of the service,
never another answer.
"""

from __future__ import annotations

import json
import random
import re
from contextlib import closing
from http.client import HTTPConnection

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lenet.reference import logits, softmax
from lenet.weightfile import WeightFile
from service.errors import ServiceError
from service.forms import open_inference_pb2 as pb
from tests.fuzz.infer import InferBodyTarget, reference
from tests.fuzz.rpc import MAX_IMAGES, GrpcTarget, decode

LENGTH = "Inference-Header-Content-Length"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
SHORT_US = 2_000_000
"""A request with a shorter deadline of its own may be late."""

requests = settings(
    max_examples=20_000,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Network:
    """What the service's model answers."""

    def __init__(self, path):
        self._weights = WeightFile.read(path)

    def probabilities(self, images):
        exact = {name: one.astype(np.float64) for name, one in self._weights.tensors.items()}
        return softmax(logits(self._weights.model, exact, images))


@pytest.fixture
def service(start):
    return start("--max-images", str(MAX_IMAGES), "--max-batch-rows", "16").ready()


@pytest.fixture
def network(tiny_weights):
    return Network(tiny_weights / "lenet" / "1.safetensors")


def flip(rng):
    """Changes bytes, as a fuzzer that is not guided."""

    def mutate(data):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(changed) + 1)
            changed[at : at + rng.choice((0, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 3)))
        return bytes(changed)

    return mutate


def random_images(rng):
    """Random pixels, and the fields of a tensor for them."""
    rows, datatype = rng.randint(1, MAX_IMAGES), rng.choice(("UINT8", "FP32"))
    shape = rng.choice(([rows, 28, 28], [rows, 1, 28, 28], [rows, 784]))
    pixels = np.frombuffer(rng.randbytes(784 * rows), np.uint8)
    values = pixels.astype("<f4" if datatype == "FP32" else np.uint8)
    return values, {"name": "image", "datatype": datatype, "shape": shape}


def random_document(rng):
    """A valid request with random pixels, its first line the length of the JSON."""
    kind = rng.choice(("flat", "nested", "binary", "raw"))
    values, tensor = random_images(rng)
    if kind == "raw":
        return b"0\n" + values.astype(np.uint8).tobytes()
    document = {"inputs": [tensor], "id": rng.choice((None, "7", "é"))}
    if rng.random() < 0.5:
        outputs = rng.sample([{"name": "label"}, {"name": "probabilities"}], rng.randint(1, 2))
        for output in outputs:
            if rng.random() < 0.4:
                output["parameters"] = {"binary_data": True}
        document["outputs"] = outputs
    if kind == "binary":
        content = values.tobytes()
        tensor["parameters"] = {"binary_data_size": len(content)}
        text = json.dumps(document).encode()
        return b"%d\n%s%s" % (len(text), text, content)
    tensor["data"] = values.reshape(tensor["shape"] if kind == "nested" else -1).tolist()
    return b"\n" + json.dumps(document).encode()


def check_http(response, body, expected, network):
    if expected is None:
        assert response.status in (400, 413), body
        assert list(json.loads(body)) == ["error"]
        return response.status
    images, identity, outputs, timeout_us = expected
    if response.status in (400, 413):  # counted before it is parsed
        assert "more" in json.loads(body)["error"]
        return response.status
    if response.status == 504:
        assert 0 < timeout_us < SHORT_US
        return response.status
    assert response.status == 200, body
    length = response.getheader(LENGTH)
    text, rest = (body, b"") if length is None else (body[: int(length)], body[int(length) :])
    document = json.loads(text)
    assert document.get("id") == identity
    assert [one["name"] for one in document["outputs"]] == [name for name, _, _ in outputs]
    probabilities = network.probabilities(images)
    for one, (name, binary, classes) in zip(document["outputs"], outputs, strict=True):
        rows, count = len(images), min(classes, 10) or 10
        if binary:
            size = one["parameters"]["binary_data_size"]
            content, rest = rest[:size], rest[size:]
            if classes:
                continue  # strings, whose order equal probabilities do not decide
            kind = np.int64 if name == "label" else np.float32
            values = np.frombuffer(content, kind).reshape(one["shape"])
        elif classes:
            values = np.array([float(text.split(":")[0]) for text in one["data"]])
            values = values.reshape(rows, count)
            best = -np.sort(-probabilities, axis=1)[:, :count]
            assert np.allclose(values, best, atol=1e-5)
            continue
        else:
            values = np.array(one["data"]).reshape(one["shape"])
        check_values(name, values, probabilities)
    assert not rest
    return 200


def check_values(name, values, probabilities):
    if name == "probabilities":
        assert np.abs(values - probabilities).max() < 1e-5
    else:  # where two classes are as likely, either is right
        rows = np.arange(len(probabilities))
        assert (probabilities[rows, values] > probabilities.max(axis=1) - 1e-5).all()


@pytest.mark.long
def test_twenty_thousand_requests_over_http_are_answered_or_refused_rightly(service, network):
    target = InferBodyTarget()
    seeds = list(target.seeds().values())
    connection = HTTPConnection("127.0.0.1", service.port, timeout=20)
    found = {}

    @requests
    @given(st.integers(0, 2**64 - 1))
    def check(seed):
        rng = random.Random(seed)
        data = rng.choice((rng.choice(seeds), random_document(rng)))
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            data = target.mutate(data, rng, flip(rng))[: target.max_bytes]
        line, _, body = data.partition(b"\n")
        size = int(line) if re.fullmatch(rb"\d{1,6}", line) else None
        headers = {} if size is None else {LENGTH: str(size)}
        connection.request("POST", "/v2/models/lenet/infer", body, headers)
        response = connection.getresponse()
        status = check_http(response, response.read(), reference(body, size), network)
        found[status] = found.get(status, 0) + 1

    with closing(connection):
        check()
    assert found[200] > 2_000
    assert found[400] > 2_000
    assert service.get("/readyz")[0] == 200
    assert "Traceback" not in service.log


@pytest.mark.long
def test_twenty_thousand_calls_over_grpc_are_answered_or_refused_rightly(service, network):
    target = GrpcTarget()
    seeds = list(target.seeds().values())
    found = {}

    def random_message(rng):
        values, fields = random_images(rng)
        tensor = pb.ModelInferRequest.InferInputTensor(**fields)
        request = pb.ModelInferRequest(model_name=rng.choice(("", "lenet")), inputs=[tensor])
        if rng.random() < 0.5:
            request.raw_input_contents.append(values.tobytes())
        else:
            contents = request.inputs[0].contents
            floats = fields["datatype"] == "FP32"
            field = contents.fp32_contents if floats else contents.uint_contents
            field.extend(values.tolist())
        return request.SerializeToString()

    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        infer = channel.unary_unary(METHOD, None, pb.ModelInferResponse.FromString)

        @requests
        @given(st.integers(0, 2**64 - 1))
        def check(seed):
            rng = random.Random(seed)
            data = rng.choice((rng.choice(seeds), random_message(rng)))
            for _ in range(rng.choice((0, 1, 1, 2, 3))):
                data = target.mutate(data, rng, flip(rng))
            try:
                images, wanted = decode(data)
            except ServiceError:
                expected = {"INVALID_ARGUMENT"}
            else:
                known = wanted.model in ("", "lenet") and wanted.version in ("", "1")
                expected = {"OK" if known else "NOT_FOUND"}
                if 0 < wanted.timeout_us < SHORT_US:
                    expected.add("DEADLINE_EXCEEDED")
            call = infer.future(data, timeout=20)
            status = call.code().name
            assert status in expected, call.details()
            if status == "OK":
                check_answer(call.result(), images, wanted, network)
            found[status] = found.get(status, 0) + 1

        check()
    assert found["OK"] > 2_000
    assert found["INVALID_ARGUMENT"] > 2_000
    assert service.get("/readyz")[0] == 200
    assert "Traceback" not in service.log


def check_answer(answer, images, wanted, network):
    assert answer.id == wanted.id
    assert [one.name for one in answer.outputs] == [one.name for one in wanted.outputs]
    probabilities = network.probabilities(images)
    for number, (one, asked) in enumerate(zip(answer.outputs, wanted.outputs, strict=True)):
        if asked.classes:
            continue
        if wanted.raw:
            kind = np.int64 if one.name == "label" else np.float32
            values = np.frombuffer(answer.raw_output_contents[number], kind)
        elif one.name == "label":
            values = np.array(one.contents.int64_contents)
        else:
            values = np.array(one.contents.fp32_contents)
        check_values(one.name, values.reshape(tuple(one.shape)), probabilities)
