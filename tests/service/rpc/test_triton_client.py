from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from lenet import reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient[grpc] is not installed"
)


@pytest.fixture
def triton(stub, images):
    """`triton("sync"|"aio")`: what Triton's client got from the server."""

    async def run(kind):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("triton_calls.py")),
            kind,
            str(stub.port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate(images.tobytes())
        assert process.returncode == 0, err.decode()
        return json.loads(out)

    return run


@pytest.fixture
def probabilities(images, tiny, random_weights):
    weights = random_weights(tiny)
    return reference.softmax(reference.logits(weights.model, weights.tensors, images))


def agree(answer, probabilities):
    # The CPU backend against NumPy, both float32.
    np.testing.assert_allclose(answer["probabilities"], probabilities, atol=1e-5)
    assert answer["label"] == probabilities.argmax(axis=1).tolist()


METADATA = {
    "name": "tiny",
    "versions": ["3"],
    "platform": "lenet_safetensors",
    "inputs": [{"name": "image", "datatype": "UINT8", "shape": ["-1", "28", "28"]}],
    "outputs": [
        {"name": "probabilities", "datatype": "FP32", "shape": ["-1", "10"]},
        {"name": "label", "datatype": "INT64", "shape": ["-1"]},
    ],
}


async def test_triton_s_client_gets_its_answers_when_synchronous(triton, probabilities):
    seen = await triton("sync")
    assert (seen["live"], seen["ready"], seen["model ready"]) == (True, True, True)
    assert seen["other model ready"] is False
    assert seen["server"]["name"] == "lenet-serve"
    assert seen["model"] == METADATA
    for form in ("raw", "fp32", "typed", "async"):
        agree(seen[form], probabilities)
    assert seen["id"] == "7"
    assert seen["labels only"] == seen["raw"]["label"]
    assert seen["not asked for"] is None
    assert seen["failure"]["status"] == "StatusCode.NOT_FOUND"
    assert "model 'vgg' is not loaded" in seen["failure"]["message"]


async def test_triton_s_client_gets_its_answers_when_asynchronous(triton, probabilities):
    seen = await triton("aio")
    assert (seen["live"], seen["ready"], seen["model ready"]) == (True, True, True)
    assert seen["server"]["name"] == "lenet-serve"
    assert seen["model"] == METADATA
    agree(seen["raw"], probabilities)
    assert seen["failure"]["status"] == "StatusCode.INVALID_ARGUMENT"
    assert seen["failure"]["message"].startswith("inputs[0].shape: got [5, 28, 27]")
