"""KServe's SDK over HTTP, with JSON and with binary tensors. `pip install kserve`."""

import asyncio
import sys
from pathlib import Path

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from PIL import Image

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "seven.png"


async def main(address: str) -> None:
    """Ask by JSON, then by bytes."""
    seven = np.asarray(Image.open(PICTURE))[np.newaxis]  # uint8 (1, 28, 28)
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    try:
        assert await client.is_server_ready(address)
        for binary in (False, True):
            image = InferInput("image", list(seven.shape), "UINT8")
            image.set_data_from_numpy(seven, binary_data=binary)
            request = InferRequest("lenet", [image], request_id="seven")
            answer = await client.infer(address, request, model_name="lenet")
            outputs = {one.name: one.as_numpy() for one in answer.outputs}
            print(outputs["label"][0], round(float(outputs["probabilities"].max()), 4))
    finally:
        await client.close()


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
