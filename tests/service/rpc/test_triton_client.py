from __future__ import annotations

import asyncio
import importlib.util
import json
import sys

import numpy as np
import pytest

from lenet import reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient[grpc] is not installed"
)

# In a process of its own: tritonclient brings its own `inference.ModelInferRequest`, and protobuf
# allows one of each name in a process. Images come on stdin, uint8 (5, 28, 28).
PROGRAM = """
import asyncio, json, sys
import numpy as np
import tritonclient.grpc, tritonclient.grpc.aio
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

address = f"127.0.0.1:{sys.argv[1]}"
images = np.frombuffer(sys.stdin.buffer.read(), np.uint8).reshape(5, 28, 28)

def tensor(images, datatype="UINT8"):
    made = InferInput("image", list(images.shape), datatype)
    made.set_data_from_numpy(images)
    return made

def raw(result):
    return {name: result.as_numpy(name).tolist() for name in ("probabilities", "label")}

seen = {}
with tritonclient.grpc.InferenceServerClient(address) as client:
    seen["ready"] = [client.is_server_live(), client.is_server_ready()]
    seen["ready"] += [client.is_model_ready("tiny"), client.is_model_ready("vgg")]
    seen["server"] = client.get_server_metadata(as_json=True)["name"]
    seen["model"] = client.get_model_metadata("tiny", as_json=True)
    result = client.infer("tiny", [tensor(images)], request_id="7")
    seen["id"], seen["raw"] = result.get_response().id, raw(result)
    seen["fp32"] = raw(client.infer("tiny", [tensor(images.astype(np.float32), "FP32")]))
    # The client has no method for typed contents; its message has the field.
    typed = InferInput("image", [5, 28, 28], "UINT8")
    typed._get_tensor().contents.uint_contents.extend(images.ravel().tolist())
    share, label = (client.infer("tiny", [typed]).get_output(name).contents
                    for name in ("probabilities", "label"))
    seen["typed"] = {"probabilities": np.reshape(share.fp32_contents, (5, 10)).tolist(),
                     "label": list(label.int64_contents)}
    wanted = client.infer("tiny", [tensor(images)], outputs=[InferRequestedOutput("label")])
    seen["labels only"] = [wanted.as_numpy("label").tolist(), wanted.as_numpy("probabilities")]
    try:
        client.infer("vgg", [tensor(images)])
    except InferenceServerException as error:
        seen["failure"] = [error.status(), error.message()]

async def call():
    async with tritonclient.grpc.aio.InferenceServerClient(address) as client:
        calls = (client.infer("tiny", [tensor(images[i : i + 1])]) for i in range(5))
        return [raw(result) for result in await asyncio.gather(*calls)]

seen["aio"] = {name: [row for single in asyncio.run(call()) for row in single[name]]
               for name in ("probabilities", "label")}
json.dump(seen, sys.stdout)
"""

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


async def test_tritonclient_gets_its_answers(stub, images, tiny, random_weights):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(stub.port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(images.tobytes())
    assert process.returncode == 0, err.decode()
    seen = json.loads(out)
    assert seen["ready"] == [True, True, True, False]
    assert seen["server"] == "lenet-serve"
    assert seen["model"] == METADATA
    expected = reference.softmax(reference.logits(tiny, random_weights(tiny).tensors, images))
    for form in ("raw", "fp32", "typed", "aio"):
        # The CPU backend against NumPy, both float32.
        np.testing.assert_allclose(seen[form]["probabilities"], expected, atol=1e-5)
        assert seen[form]["label"] == expected.argmax(axis=1).tolist()
    assert seen["id"] == "7"
    assert seen["labels only"] == [seen["raw"]["label"], None]
    status, message = seen["failure"]
    assert status == "StatusCode.NOT_FOUND"
    assert "model 'vgg' is not loaded" in message
