"""`POST /predict` by httpx: a batch of images as raw bytes, with a deadline."""

import sys
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

SERVICE = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
PICTURES = Path(__file__).parents[1] / "docs" / "images"

seven = np.asarray(Image.open(PICTURES / "seven.png"))  # uint8 (28, 28), ink high
batch = np.stack([seven, np.roll(seven, 2, axis=1)])  # the second two pixels to the right
headers = {"Content-Type": "application/octet-stream", "X-Request-Timeout-Ms": "1000"}
with httpx.Client(base_url=SERVICE) as client:  # one connection for all requests
    answer = client.post("/predict", content=batch.tobytes(), headers=headers)
    answer.raise_for_status()
    for prediction in answer.json()["predictions"]:
        print(prediction["label"], f"{prediction['confidence']:.2%}")

    refused = client.post("/predict", content=b"a few bytes", headers=headers)
    print(refused.status_code, refused.json()["error"]["message"])
