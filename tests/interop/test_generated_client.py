"""A client that openapi-python-client generates from the OpenAPI document."""

from __future__ import annotations

import shutil
import subprocess
import sys

import httpx
import pytest

from tests.service_process import committed

GENERATOR = shutil.which("openapi-python-client")
_USE = """
import importlib, pkgutil, sys
import lenet_serve_client as package
from lenet_serve_client import Client
for module in pkgutil.walk_packages(package.__path__, "lenet_serve_client."):
    importlib.import_module(module.name)
from lenet_serve_client.api.operations import server_info
from lenet_serve_client.api.predict import predict
from lenet_serve_client.models import PredictRequest
with Client(base_url=sys.argv[1]) as client:
    images = PredictRequest.from_dict({"images": [[0] * 784]})
    (one,) = predict.sync(client=client, body=images).predictions
    assert len(one.probabilities) == 10
    assert server_info.sync(client=client).default_model
"""


@pytest.mark.skipif(GENERATOR is None, reason="openapi-python-client is not on PATH")
def test_the_generated_python_client_imports_and_predicts(tmp_path):
    document, client = tmp_path / "openapi.json", tmp_path / "client"
    with committed(tmp_path, "--models", "lenet") as service:
        origin = f"http://127.0.0.1:{service.port}"
        document.write_bytes(httpx.get(f"{origin}/openapi.json").content)
        subprocess.run(
            [GENERATOR, "generate", "--path", document, "--output-path", client],
            check=True,
            capture_output=True,
        )
        command = [sys.executable, "-c", _USE, origin]
        done = subprocess.run(command, cwd=client, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
