"""The service as KServe's runtime starts it, asked by KServe's SDK over each of its protocols."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.service_process import PROJECT, Service

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

RUNTIME = PROJECT / "deploy" / "kubernetes" / "overlays" / "kserve" / "runtime.yaml"
SEVEN = np.asarray(Image.open(PROJECT / "docs" / "images" / "seven.png"))
FILE = max((PROJECT / "weights" / "lenet").glob("*.safetensors"))
NAME = "digits"  # of the InferenceService

# In a process of its own: KServe's SDK needs other versions of much that the service uses.
# Arguments: name of the model, HTTP address, gRPC address, a file with the pixels of an image.
CLIENT = r"""
import asyncio, json, sys
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

name, http, grpc, path = sys.argv[1:]
pixels = np.fromfile(path, np.uint8).reshape(1, 28, 28)

def request():
    image = InferInput("image", [1, 28, 28], "UINT8")
    image.set_data_from_numpy(pixels, binary_data=True)
    return InferRequest(name, [image])

def label(answer):
    return [int(one.as_numpy()[0]) for one in answer.outputs if one.name == "label"]

async def over_v1():
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    ready = await client.is_model_ready(http, name)
    answer = await client.infer(http, {"instances": pixels.tolist()}, model_name=name)
    await client.close()
    return [ready, [one["label"] for one in answer["predictions"]]]

async def over_v2():
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    ready = await client.is_server_ready(http) and await client.is_model_ready(http, name)
    found = label(await client.infer(http, request(), model_name=name))
    await client.close()
    return [ready, found]

async def over_grpc():
    client = InferenceGRPCClient(grpc, timeout=PATIENCE_S)
    ready = await client.is_server_ready() and await client.is_model_ready(name)
    found = label(await client.infer(request()))
    await client.close()
    return [ready, found]

print(json.dumps([asyncio.run(over()) for over in (over_v1, over_v2, over_grpc)]))
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """`ask(service)` returns what the SDK says over v1, v2 and gRPC: ready, and the label."""
    python = os.environ.get("KSERVE_PYTHON")
    if python is None:
        if importlib.util.find_spec("kserve") is None:
            pytest.skip("kserve is not installed: name a Python that has it in KSERVE_PYTHON")
        python = sys.executable
    folder = tmp_path_factory.mktemp("client")
    (folder / "seven").write_bytes(SEVEN.tobytes())
    plain = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}

    def ask_(service):
        http, rpc = f"http://127.0.0.1:{service.port}", f"127.0.0.1:{service.grpc_port}"
        line = [python, "-c", CLIENT, NAME, http, rpc, str(folder / "seven")]
        done = subprocess.run(
            line, env=plain, cwd=folder, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask_


@pytest.fixture
def start_as_kserve(tmp_path):
    """`start_as_kserve(models, one_port)` is the service with the runtime's arguments.

    `models` is the folder that KServe mounts at /mnt/models.
    """
    (container,) = yaml.safe_load(RUNTIME.read_text())["spec"]["containers"]
    services = []

    def start(models, one_port):
        http, rpc = free_ports(2)
        for written, here in (
            ("{{.Name}}", NAME),
            ("/mnt/models", str(models)),
            ("--port=8080", f"--port={http}"),
            ("--grpc-port=9000", f"--grpc-port={http if one_port else rpc}"),
        ):
            assert any(written in argument for argument in container["args"])
            container["args"] = [one.replace(written, here) for one in container["args"]]
        services.append(Service(container["args"], tmp_path))
        return services[-1].ready()

    yield start
    for service in services:
        service.end()


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.mark.process
@pytest.mark.parametrize(
    ("stored", "one_port"),
    [("lenet/3.safetensors", False), ("model.safetensors", False), ("3.safetensors", True)],
)
def test_the_sdk_reads_a_seven_over_every_protocol(
    start_as_kserve, ask, tmp_path, stored, one_port
):
    path = tmp_path / "models" / stored
    path.parent.mkdir(parents=True)
    shutil.copy(FILE, path)
    service = start_as_kserve(tmp_path / "models", one_port)
    assert ask(service) == [[True, [7]]] * 3
    annotations = yaml.safe_load(RUNTIME.read_text())["spec"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == "8080"
    status, text = service.get(annotations["prometheus.kserve.io/path"])
    assert status == 200
    answered = re.findall(
        r'^lenet_requests_total{.*outcome="ok",protocol="(\w+)".*} (.*)$', text, re.M
    )
    assert answered == [("http", "2.0"), ("grpc", "1.0")]
    assert "unknown" not in service.log
