"""Requests as other servers' clients and examples make them, 1,000 digits of MNIST each.

The 95 % interval of what they read right contains the test accuracy in the weight file.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import requests

from lenet.weightfile import WeightFile
from tests.pictures import encoded
from tests.service_process import PATIENCE_S, PROJECT, committed
from trainer.evaluation import wilson

STEP = 100
"""Images of a request."""

HEALTH, VERTEX = "/v1/endpoints/7/deployedModels/9", "/v1/endpoints/7/deployedModels/9:predict"
UNIT = {"scale": "unit"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """The service, as Vertex AI starts it."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("AIP_HTTP_PORT", "8080")
        changed.setenv("AIP_HEALTH_ROUTE", HEALTH)
        changed.setenv("AIP_PREDICT_ROUTE", VERTEX)
        with committed(tmp_path_factory.mktemp("service"), "--models", "lenet") as service:
            yield service


@pytest.fixture(scope="module")
def check(mnist):
    """`check(labels)`: so many of the 1,000 are right."""
    weights = max((PROJECT / "weights/lenet").glob("*.safetensors"), key=lambda one: int(one.stem))
    accuracy = WeightFile.read(weights).training.accuracy

    def check_(labels):
        assert len(labels) == 1000
        low, high = wilson(int((np.array(labels) == mnist[1][::10]).sum()), len(labels))
        assert low <= accuracy <= high

    return check_


@pytest.fixture(scope="module")
def images(mnist):
    return mnist[0][::10]


@pytest.fixture(scope="module")
def pictures(images):
    return [encoded(image) for image in images]


def parts(rows):
    return [rows[first : first + STEP] for first in range(0, len(rows), STEP)]


# Programs with libraries of these servers, which bring protobuf messages of equal names. Arguments:
# the HTTP address, the gRPC address, a file with the pictures in base64.
BEGIN = """
import base64, io, json, sys
import numpy as np
from PIL import Image

http_address, rpc_address, path = sys.argv[1:]
files = [base64.b64decode(text) for text in json.load(open(path))]
images = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
labels = {}
"""
TRITON = """
import tritonclient.grpc as rpc, tritonclient.http as http
unit = images.astype(np.float32) / 255
FORMS = {
    "Triton's image client": (np.array(files, np.object_)[:, None], "BYTES", None),
    "OpenVINO's image client": (np.array(files, np.object_), "BYTES", None),
    "ToTensor": (unit[:, None], "FP32", {"scale": "unit"}),
    "Keras": (unit[..., None], "FP32", {"scale": "unit"}),
}
for kind, address in ((http, http_address), (rpc, rpc_address)):
    with kind.InferenceServerClient(address) as client:
        for name, (array, datatype, parameters) in FORMS.items():
            found = labels[f"{name}, {kind.__name__}"] = []
            for first in range(0, len(array), 100):
                part = array[first : first + 100]
                tensor = kind.InferInput("image", list(part.shape), datatype)
                tensor.set_data_from_numpy(part)
                if name.startswith("Triton"):
                    best = kind.InferRequestedOutput("probabilities", class_count=1)
                    result = client.infer("lenet", [tensor], outputs=[best])
                    texts = result.as_numpy("probabilities").ravel()
                    found += [int(text.decode().split(":")[1]) for text in texts]
                else:
                    result = client.infer("lenet", [tensor], parameters=parameters)
                    found += result.as_numpy("probabilities").argmax(axis=1).tolist()
"""
OPENVINO = """
import ovmsclient
client = ovmsclient.make_http_client(http_address)
found = labels["ovmsclient"] = []
for first in range(0, len(files), 100):
    outputs = client.predict({"image": files[first : first + 100]}, "lenet", timeout=60.0)
    found += outputs["label"].tolist()
"""


@pytest.mark.parametrize(
    ("package", "program"), [("tritonclient", TRITON), ("ovmsclient", OPENVINO)]
)
def test_a_program_with_a_client_s_library(serving, check, pictures, tmp_path, package, program):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    path = tmp_path / "pictures.json"
    path.write_text(json.dumps([base64.b64encode(one).decode() for one in pictures]))
    addresses = f"127.0.0.1:{serving.port}", f"127.0.0.1:{serving.grpc_port}"
    text = f"{BEGIN}{program}\njson.dump(labels, sys.stdout)"
    done = subprocess.run(
        [sys.executable, "-c", text, *addresses, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    for labels in json.loads(done.stdout).values():
        check(labels)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def csv(images):
    file = io.StringIO()
    np.savetxt(file, images.reshape(len(images), -1), "%d", ",")
    return file.getvalue()


def instances(rows, **more):
    return json.dumps({"instances": rows, **more})


def b64(files):
    return [{"b64": base64.b64encode(one).decode()} for one in files]


def unit(images):
    return images.astype(np.float32) / 255


# Path, content type, and the body of a part of the images, or of the pictures.
JSON, PREDICT = "application/json", "/v1/models/lenet:predict"
OF_PICTURES = {
    "TensorFlow Serving's example": (PREDICT, None, lambda part: instances(b64(part))),
    "SageMaker, b64": ("/invocations", JSON, lambda part: instances(b64(part))),
    "Vertex AI, b64": (VERTEX, JSON, lambda part: instances(b64(part))),
}
OF_IMAGES = {
    "SageMaker, JSON": ("/invocations", JSON, lambda part: instances(part.tolist())),
    "SageMaker, npy": ("/invocations", "application/x-npy", npy),
    "SageMaker, CSV": ("/invocations", "text/csv", csv),
    "Vertex AI": (VERTEX, JSON, lambda part: instances(part.tolist(), parameters={})),
    "Vertex AI, ToTensor": (
        *(VERTEX, JSON),
        lambda part: instances(unit(part)[:, None].tolist(), parameters=UNIT),
    ),
    "TensorFlow Serving, Keras": (
        *(PREDICT, None),
        lambda part: instances(unit(part)[..., None].tolist(), parameters=UNIT),
    ),
    "npy, ToTensor": (
        *("/predict?scale=unit", "application/x-npy"),
        lambda part: npy(unit(part)[:, None]),
    ),
}


@pytest.mark.parametrize("name", [*OF_PICTURES, *OF_IMAGES])
def test_requests_of_an_example(serving, check, images, pictures, name):
    path, kind, body = {**OF_PICTURES, **OF_IMAGES}[name]
    headers = {"Content-Type": kind} if kind else None  # requests sends none with a text
    labels = []
    with requests.Session() as session:
        for part in parts(pictures if name in OF_PICTURES else images):
            url = f"http://127.0.0.1:{serving.port}{path}"
            answer = session.post(url, data=body(part), headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            labels += [one["label"] for one in answer.json()["predictions"]]
    check(labels)


def test_a_picture_by_each_request_as_an_endpoint_of_sagemaker_gets_it(serving, check, pictures):
    origin, labels = f"http://127.0.0.1:{serving.port}", []
    with requests.Session() as session:
        assert session.get(f"{origin}/ping", timeout=PATIENCE_S).status_code == 200
        assert session.get(f"{origin}{HEALTH}", timeout=PATIENCE_S).status_code == 200
        for file in pictures:
            headers = {"Content-Type": "image/png", "Accept": "application/json"}
            url = f"{origin}/invocations"
            answer = session.post(url, data=file, headers=headers, timeout=PATIENCE_S)
            labels.append(answer.json()["predictions"][0]["label"])
    check(labels)
