"""The shipped weights, served: all 10,000 MNIST test images over HTTP and gRPC."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path

import grpc
import numpy as np
import orjson
import pytest

from benchmarks.grpc_stub import Stub
from lenet.weightfile import WeightFile
from service.forms import open_inference_pb2 as pb

pytestmark = pytest.mark.process  # the 10,000 test images

ROOT = Path(__file__).parents[2]
BATCH = 500


@pytest.fixture
def served(start):
    return start("--weights", str(ROOT / "weights")).ready()


def over_http(port, images, content_type, accept):
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    for start in range(0, len(images), BATCH):
        part = images[start : start + BATCH]
        body = part.tobytes()
        if content_type == "application/json":
            body = orjson.dumps({"images": part}, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"Content-Type": content_type, "Accept": accept}
        connection.request("POST", "/predict", body, headers)
        response = connection.getresponse()
        assert response.status == 200
        yield response.read()
    connection.close()


def over_grpc(port, images):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = Stub(channel)
        for start in range(0, len(images), BATCH):
            part = images[start : start + BATCH]
            tensor = pb.ModelInferRequest.InferInputTensor(
                name="image", datatype="UINT8", shape=part.shape
            )
            request = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[part.tobytes()])
            yield stub.ModelInfer(request, timeout=30).raw_output_contents[0]


def test_all_test_images_are_classified_as_accurately_as_the_weight_file_says(mnist, served):
    images, labels = mnist
    json, binary = "application/json", "application/octet-stream"
    answers = over_http(served.port, images, json, json)
    found = [one["label"] for answer in answers for one in orjson.loads(answer)["predictions"]]
    accuracy = np.count_nonzero(np.array(found) == labels) / len(labels)
    newest = max((ROOT / "weights/lenet").glob("*.safetensors"), key=lambda path: int(path.stem))
    assert accuracy == WeightFile.read(newest).training.accuracy
    assert accuracy >= 0.992

    probabilities = b"".join(over_http(served.port, images, binary, binary))
    assert b"".join(over_grpc(served.grpc_port, images)) == probabilities
    assert np.frombuffer(probabilities, "<f4").reshape(-1, 10).argmax(axis=1).tolist() == found
