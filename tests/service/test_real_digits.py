"""The shipped weights, served: all 10,000 MNIST test images over HTTP and gRPC."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import orjson
import pytest

from lenet.weightfile import WeightFile

ROOT = Path(__file__).parents[2]
BATCH = 500

TRITON_CLIENT = """
import io, sys
import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput

images = np.load(io.BytesIO(sys.stdin.buffer.read()))
answers = []
with InferenceServerClient(f"127.0.0.1:{sys.argv[1]}") as client:
    for start in range(0, len(images), int(sys.argv[2])):
        part = images[start : start + int(sys.argv[2])]
        tensor = InferInput("image", list(part.shape), "UINT8")
        tensor.set_data_from_numpy(part)
        answers.append(client.infer("lenet", [tensor]).as_numpy("probabilities"))
np.save(sys.stdout.buffer, np.concatenate(answers))
"""


@pytest.fixture
def served(start):
    return start("--weights", str(ROOT / "weights")).ready()


def predict(port, images, content_type, accept):
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


def test_accuracy_is_what_the_weight_file_says_when_all_test_images_are_posted(mnist, served):
    images, labels = mnist
    answers = predict(served.port, images, "application/json", "application/json")
    found = [one["label"] for answer in answers for one in orjson.loads(answer)["predictions"]]
    accuracy = np.count_nonzero(np.array(found) == labels) / len(labels)
    newest = max((ROOT / "weights/lenet").glob("*.safetensors"), key=lambda path: int(path.stem))
    assert accuracy == WeightFile.read(newest).training.accuracy
    assert accuracy >= 0.992


def test_tritonclient_gets_the_same_bits_as_predict_when_it_asks_for_all(mnist, served):
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("tritonclient[grpc] is not installed")
    images, _ = mnist
    binary = "application/octet-stream"
    over_http = np.frombuffer(b"".join(predict(served.port, images, binary, binary)), "<f4")
    packed = io.BytesIO()
    np.save(packed, images)
    # In a process of its own: its messages bear the same names as ours.
    client = subprocess.run(
        [sys.executable, "-c", TRITON_CLIENT, str(served.grpc_port), str(BATCH)],
        input=packed.getvalue(),
        capture_output=True,
        check=True,
    )
    over_grpc = np.load(io.BytesIO(client.stdout))
    np.testing.assert_array_equal(over_grpc, over_http.reshape(len(images), 10))
