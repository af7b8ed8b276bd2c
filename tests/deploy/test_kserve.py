"""The service as KServe's runtime starts it, asked by KServe's SDK over each of its protocols."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.deploy.proxies import free_ports
from tests.service_process import PATIENCE_S, PROJECT, Service

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
    client = InferenceGRPCClient(grpc, timeout=120)
    ready = await client.is_server_ready() and await client.is_model_ready(name)
    found = label(await client.infer(request()))
    await client.close()
    return [ready, found]

print(json.dumps([asyncio.run(over()) for over in (over_v1, over_v2, over_grpc)]))
"""


@pytest.fixture(scope="module")
def sdk():
    """A Python that has KServe's SDK."""
    if (python := os.environ.get("KSERVE_PYTHON")) is not None:
        return python
    if importlib.util.find_spec("kserve") is None:
        pytest.skip("kserve is not installed: name a Python that has it in KSERVE_PYTHON")
    return sys.executable


@pytest.mark.process
@pytest.mark.parametrize(
    ("stored", "one_port"),
    [("lenet/3.safetensors", False), ("model.safetensors", False), ("3.safetensors", True)],
)
def test_the_sdk_reads_a_seven_over_every_protocol(sdk, tmp_path, stored, one_port):
    path = tmp_path / "models" / stored
    path.parent.mkdir(parents=True)
    shutil.copy(FILE, path)
    (tmp_path / "seven").write_bytes(SEVEN.tobytes())
    spec = yaml.safe_load(RUNTIME.read_text())["spec"]
    http, rpc = free_ports(2)
    arguments = "\n".join(spec["containers"][0]["args"])
    for written, here in (
        ("{{.Name}}", NAME),
        ("/mnt/models", str(tmp_path / "models")),
        ("--port=8080", f"--port={http}"),
        ("--grpc-port=9000", f"--grpc-port={http if one_port else rpc}"),
    ):
        assert written in arguments
        arguments = arguments.replace(written, here)
    service = Service(arguments.split("\n"), tmp_path)
    try:
        service.ready()
        line = [sdk, "-c", CLIENT, NAME, f"http://127.0.0.1:{service.port}"]
        line += [f"127.0.0.1:{service.grpc_port}", str(tmp_path / "seven")]
        plain = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
        options = {"env": plain, "cwd": tmp_path, "capture_output": True, "text": True}
        done = subprocess.run(line, check=False, timeout=PATIENCE_S, **options)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == [[True, [7]]] * 3
        assert spec["annotations"]["prometheus.kserve.io/port"] == "8080"
        status, text = service.get(spec["annotations"]["prometheus.kserve.io/path"])
        assert status == 200
        series = r'^lenet_requests_total{.*outcome="ok",protocol="(\w+)".*} (.*)$'
        assert re.findall(series, text, re.M) == [("http", "2.0"), ("grpc", "1.0")]
        assert "unknown" not in service.log
    finally:
        service.end()
