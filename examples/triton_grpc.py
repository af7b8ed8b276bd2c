"""The Open Inference Protocol over gRPC, by Triton's client, many calls at the same time."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as triton
from PIL import Image

SERVICE = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
PICTURES = Path(__file__).parents[1] / "docs" / "images"


async def main() -> None:
    """Ask 32 times at once; the service puts the images into one batch."""
    seven = np.asarray(Image.open(PICTURES / "seven.png"))[np.newaxis]  # uint8 (1, 28, 28)
    image = triton.InferInput("image", list(seven.shape), "UINT8")
    image.set_data_from_numpy(seven)
    async with triton.InferenceServerClient(SERVICE) as client:
        calls = (client.infer("lenet", [image], client_timeout=1.0) for _ in range(32))
        labels = [result.as_numpy("label")[0] for result in await asyncio.gather(*calls)]
    print(labels[0], f"{len(set(labels))} different of {len(labels)}")


asyncio.run(main())
