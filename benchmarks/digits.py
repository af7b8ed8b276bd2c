"""Real digits as bodies of requests, with what must come back for them.

For each request it is known beforehand what the digits are and what the model itself takes them
for, so that a service that mixes up its callers' rows cannot hide behind a model's own mistakes.
It refuses to download: a folder with MNIST, or the ten golden images of the weight file.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray
from PIL import Image

from lenet.cpu import CpuBackend
from lenet.pixels import PIXELS, Images
from lenet.weightfile import WeightFile
from service.images import Limits, decode
from trainer.mnist import load

Format: TypeAlias = Literal["json", "raw", "npy", "png"]

_BATCH_ROWS = 256
_BOUNDARY = "digits-and-nothing-else"


@dataclass(frozen=True, slots=True, eq=False)
class LabelledDigits:
    """`images` uint8 (n, 28, 28), ink high; `labels` uint8 (n,), what they show; and whence."""

    images: Images
    labels: NDArray[np.uint8]
    source: str


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A body and what must come back: one label an image, in the order of the images.

    `own_labels` are those of the local model, `true_labels` those of the dataset.
    """

    body: bytes
    content_type: str
    own_labels: tuple[int, ...]
    true_labels: tuple[int, ...]


def read_digits(folder: Path | None, weights: WeightFile) -> LabelledDigits:
    """The MNIST test images of `folder`; without one, the golden images of `weights`.

    Raises:
        TrainerError: files are missing or broken; the message says which and what to do.
    """
    if folder is None:
        golden = weights.golden
        return LabelledDigits(golden.images, golden.labels, "golden images of the weight file")
    test = load(folder).test
    return LabelledDigits(test.images, test.labels, f"test images of {folder}")


def prepare_requests(
    digits: LabelledDigits, weights: WeightFile, form: Format, images_per_request: int
) -> list[PreparedRequest]:
    """Requests that together send every digit at least once, in the order of the dataset.

    The last one is filled up with the first digits again, and so is the only one where there are
    fewer digits than images in a request.
    """
    count = len(digits.images)
    requests = -(-count // images_per_request)
    rows = np.arange(requests * images_per_request).reshape(requests, -1) % count
    bodies = [encode(digits.images[chosen], form) for chosen in rows]
    if form == "png":
        # A picture is cropped, scaled and centred before the model sees it.
        limits = Limits(max_images=images_per_request)
        seen = np.concatenate([decode(body, kind, limits=limits) for kind, body in bodies])
        own = own_labels(weights, seen).reshape(rows.shape)
    else:
        own = own_labels(weights, digits.images)[rows]
    true = digits.labels[rows]
    return [
        PreparedRequest(body, kind, tuple(mine), tuple(right))
        for (kind, body), mine, right in zip(bodies, own.tolist(), true.tolist(), strict=True)
    ]


def own_labels(weights: WeightFile, images: Images) -> NDArray[np.int64]:
    """What the model takes `images` for, computed here on ONNX Runtime: int64 (n,)."""
    plan = CpuBackend().plan(weights, _BATCH_ROWS)
    starts = range(0, len(images), _BATCH_ROWS)
    return np.concatenate(
        [
            plan.run(images[start : start + _BATCH_ROWS]).probabilities.argmax(axis=1)
            for start in starts
        ]
    )


def encode(images: Images, form: Format) -> tuple[str, bytes]:
    """(content type, body) of a request for `images`."""
    images = np.ascontiguousarray(images)
    if form == "json":
        flat = images.reshape(-1, PIXELS)
        return "application/json", orjson.dumps({"images": flat}, option=orjson.OPT_SERIALIZE_NUMPY)
    if form == "raw":
        return "application/octet-stream", images.tobytes()
    if form == "npy":
        file = io.BytesIO()
        np.save(file, images, allow_pickle=False)
        return "application/x-npy", file.getvalue()
    pictures = [_png(image) for image in images]
    if len(pictures) == 1:
        return "image/png", pictures[0]
    head = (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="digit.png"\r\n'
        "Content-Type: image/png\r\n\r\n"
    ).encode()
    parts = b"".join(head + picture + b"\r\n" for picture in pictures)
    return f"multipart/form-data; boundary={_BOUNDARY}", parts + f"--{_BOUNDARY}--\r\n".encode()


def _png(image: Images) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
