"""The model of the plain services, and the forms in which they receive images and answer.

Each process of a plain service loads the weight file that the variable BASELINE_WEIGHTS names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import orjson

from lenet.onnx_graph import IMAGES, PROBABILITIES, onnx_model
from lenet.pixels import PIXELS, Images
from lenet.weightfile import WeightFile

WEIGHTS_VARIABLE = "BASELINE_WEIGHTS"


class Model:
    """ONNX Runtime with one thread, on the ONNX file that `python -m trainer export` writes."""

    def __init__(self, weights: WeightFile | None = None) -> None:
        weights = weights or WeightFile.read(Path(os.environ[WEIGHTS_VARIABLE]))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            onnx_model(weights).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def predict(self, images: Images) -> list[dict[str, Any]]:
        """A prediction per image, in the form of our answers."""
        probabilities = self._session.run([PROBABILITIES], {IMAGES: images})[0]
        labels = probabilities.argmax(axis=1).tolist()
        # A response model of pydantic costs 6 us more (EPYC, 2026-11-20).
        return [
            {"label": label, "confidence": row[label], "probabilities": row}
            for label, row in zip(labels, probabilities.tolist(), strict=True)
        ]


def images_of_json(body: bytes) -> Images:
    """The images of {"images": [...]}; raises as `images_of_lists`, and KeyError without them."""
    return images_of_lists(orjson.loads(body)["images"])


def images_of_lists(images: list[Any]) -> Images:
    """Images of 784 integers or 28 rows of 28 each.

    `bytes` also checks the range of each pixel; no faster way was found.

    Raises:
        ValueError: an image has another shape, or a pixel is outside 0..255.
        TypeError: a pixel is not an integer.
    """
    pixels = [
        bytes(image) if len(image) == PIXELS else b"".join(map(bytes, image)) for image in images
    ]
    return np.frombuffer(b"".join(pixels), np.uint8).reshape(len(images), 28, 28)


def images_of_bytes(body: bytes) -> Images:
    """The images of 784 bytes each.

    Raises:
        ValueError: the length is no multiple of 784.
    """
    return np.frombuffer(body, np.uint8).reshape(-1, 28, 28)


def answer(predictions: list[dict[str, Any]]) -> bytes:
    """The body of an answer."""
    return orjson.dumps({"predictions": predictions})
