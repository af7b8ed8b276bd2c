"""The Open Inference Protocol over HTTP, by Triton's client: images and answers as bytes."""

import sys
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from PIL import Image

SERVICE = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8000"
PICTURES = Path(__file__).parents[1] / "docs" / "images"

seven = np.asarray(Image.open(PICTURES / "seven.png"))[np.newaxis]  # uint8 (1, 28, 28)
image = triton.InferInput("image", list(seven.shape), "UINT8")
image.set_data_from_numpy(seven)
best = triton.InferRequestedOutput("probabilities", class_count=3)
label = triton.InferRequestedOutput("label")
with triton.InferenceServerClient(SERVICE) as client:
    result = client.infer("lenet", [image], outputs=[label, best])
    names = [text.decode() for text in result.as_numpy("probabilities")[0]]  # "VALUE:INDEX:NAME"
    print(result.as_numpy("label")[0], *names)
