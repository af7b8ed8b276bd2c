"""What test_triton_client.py runs in a process of its own: `triton_calls.py sync|aio PORT`.

tritonclient brings its own `inference.ModelInferRequest`, and protobuf allows one of each name in
a process. Images come on stdin, uint8 (n, 28, 28); what the client got goes to stdout as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException


def image_input(images, datatype="UINT8"):
    tensor = InferInput("image", list(images.shape), datatype)
    tensor.set_data_from_numpy(images)
    return tensor


def typed_input(images):
    # The client has no method for typed contents; its message has the field.
    tensor = InferInput("image", list(images.shape), "UINT8")
    tensor._get_tensor().contents.uint_contents.extend(images.ravel().tolist())
    return tensor


def raw(result):
    return {name: result.as_numpy(name).tolist() for name in ("probabilities", "label")}


def typed(result):
    # as_numpy reads raw answers only (tritonclient 2.73).
    share, label = (result.get_output(name).contents for name in ("probabilities", "label"))
    return {
        "probabilities": np.reshape(share.fp32_contents, (-1, 10)).tolist(),
        "label": list(label.int64_contents),
    }


def failure(error):
    return {"status": error.status(), "message": error.message()}


def call_sync(port, images):
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        seen = {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model ready": client.is_model_ready("tiny"),
            "other model ready": client.is_model_ready("vgg"),
            "server": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata("tiny", as_json=True),
            "raw": raw(client.infer("tiny", [image_input(images)], request_id="7")),
            "id": client.infer("tiny", [image_input(images)], request_id="7").get_response().id,
            "fp32": raw(client.infer("tiny", [image_input(images.astype(np.float32), "FP32")])),
            "typed": typed(client.infer("tiny", [typed_input(images)])),
        }
        wanted = [InferRequestedOutput("label")]
        result = client.infer("tiny", [image_input(images)], outputs=wanted)
        seen["labels only"] = result.as_numpy("label").tolist()
        seen["not asked for"] = result.as_numpy("probabilities")
        try:
            client.infer("vgg", [image_input(images)])
        except InferenceServerException as error:
            seen["failure"] = failure(error)
        done = asyncio.run(async_infer(client, images))
        seen["async"] = raw(done)
    return seen


async def async_infer(client, images):
    """The sync client's `async_infer`, which answers on a thread of its own."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def tell(result, error):
        loop.call_soon_threadsafe(answer.set_result, error or result)

    client.async_infer("tiny", [image_input(images)], tell)
    return await answer


async def call_aio(port, images):
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
        seen = {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model ready": await client.is_model_ready("tiny", "3"),
            "server": await client.get_server_metadata(as_json=True),
            "model": await client.get_model_metadata("tiny", as_json=True),
        }
        calls = (client.infer("tiny", [image_input(images[i : i + 1])]) for i in range(len(images)))
        singles = [raw(result) for result in await asyncio.gather(*calls)]
        seen["raw"] = {
            name: [row for single in singles for row in single[name]]
            for name in ("probabilities", "label")
        }
        try:
            await client.infer("tiny", [image_input(images[:, :, :27].copy())])
        except InferenceServerException as error:
            seen["failure"] = failure(error)
    return seen


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    images = np.frombuffer(sys.stdin.buffer.read(), np.uint8).reshape(-1, 28, 28)
    seen = call_sync(port, images) if kind == "sync" else asyncio.run(call_aio(port, images))
    json.dump(seen, sys.stdout)
