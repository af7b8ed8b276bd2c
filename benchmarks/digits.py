"""Requests with real digits, and checks of the answers to them.

The digits are MNIST's from a folder, or the ten golden images of a weight file. Each request knows
the true labels and the labels that the model predicts. So a service that mixes up the rows of
its callers is distinguished from a model that makes mistakes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import orjson
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from PIL import Image

from lenet.cpu import CpuBackend
from lenet.pixels import PIXELS, Images
from lenet.weightfile import WeightFile
from service.forms import open_inference_pb2 as pb
from service.forms.body import decode
from service.forms.reader import Limits
from trainer.mnist import load

Format: TypeAlias = Literal["json", "raw", "npy", "png", "grpc"]
"""Form of a request; "grpc": a message of ModelInfer with a tensor as raw bytes."""

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"

JSON, BINARY = "application/json", "application/octet-stream"
"""Content types of requests and answers."""

_BATCH_ROWS = 256
_BOUNDARY = "digits-and-nothing-else"
_SUM_TOLERANCE = 1e-3
"""How far probabilities may sum from 1: ten float32 numbers rounded to a device's precision."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelledDigits:
    """`images`: uint8 (n, 28, 28), ink high. `labels`: uint8 (n,). `source`: for people."""

    images: Images
    labels: NDArray[np.uint8]
    source: str


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A body and the labels of its images, in their order.

    `own_labels` are predicted by the local model, `true_labels` are the dataset's.
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
    """Requests that send every digit at least once, in the order of the dataset.

    The last request is filled with the first digits again.
    """
    count = len(digits.images)
    requests = -(-count // images_per_request)
    rows = np.arange(requests * images_per_request).reshape(requests, -1) % count
    bodies = [encode(digits.images[chosen], form, weights.model.name) for chosen in rows]
    if form == "png":
        # The service crops, scales and centres a picture before the model sees it.
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
    """The labels that the model predicts for `images`, on ONNX Runtime: int64 (n,)."""
    plan = CpuBackend().plan(weights, _BATCH_ROWS)
    starts = range(0, len(images), _BATCH_ROWS)
    return np.concatenate(
        [
            plan.run(images[start : start + _BATCH_ROWS]).probabilities.argmax(axis=1)
            for start in starts
        ]
    )


def encode(images: Images, form: Format, model: str = "lenet") -> tuple[str, bytes]:
    """(content type, body) of a request for `images`; a message of gRPC names the `model`."""
    images = np.ascontiguousarray(images)
    if form == "json":
        flat = images.reshape(-1, PIXELS)
        return JSON, orjson.dumps({"images": flat}, option=orjson.OPT_SERIALIZE_NUMPY)
    if form == "raw":
        return BINARY, images.tobytes()
    if form == "grpc":
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="image", datatype="UINT8", shape=images.shape
        )
        message = pb.ModelInferRequest(
            model_name=model, inputs=[tensor], raw_input_contents=[images.tobytes()]
        )
        return "application/grpc", message.SerializeToString()
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """The check of an answer: `error` is its kind, from a closed set, or "" if it is well formed.

    `wrong_labels` differ from the local model's, `mistakes` from the true ones.
    """

    error: str = ""
    wrong_labels: int = 0
    mistakes: int = 0


def judge(content: bytes, request: PreparedRequest) -> Verdict:
    """Check the body of an answer with status 200."""
    try:
        predictions = orjson.loads(content)["predictions"]
        if len(predictions) != len(request.own_labels):
            return Verdict("bad answer: count of predictions")
        labels = [_label(prediction) for prediction in predictions]
    except _BadAnswer as exc:
        return Verdict(f"bad answer: {exc}")
    except (ValueError, KeyError, TypeError, IndexError):
        return Verdict("bad answer: not the documented JSON")
    return _compare(labels, request)


def judge_binary(content: bytes, request: PreparedRequest) -> Verdict:
    """Check the body of a binary answer with status 200: float32 (n, 10), little-endian."""
    if len(content) != len(request.own_labels) * 10 * 4:
        return Verdict("bad answer: count of bytes")
    probabilities = np.frombuffer(content, "<f4").reshape(-1, 10)
    return judge_tensors(probabilities.argmax(axis=1), probabilities, request)


def judge_message(content: bytes, request: PreparedRequest) -> tuple[Verdict, dict[str, float]]:
    """Check the answer of ModelInfer; milliseconds in the service by stage."""
    try:
        reply = pb.ModelInferResponse.FromString(content)
    except DecodeError:
        return Verdict("bad answer: not a message of ModelInfer"), {}
    known = reply.parameters
    server_ms = {name.removesuffix("_us"): known[name].int64_param / 1e3 for name in known}
    names = [output.name for output in reply.outputs]
    raw = dict(zip(names, reply.raw_output_contents, strict=False))
    try:
        labels = np.frombuffer(raw["label"], "<i8")
        probabilities = np.frombuffer(raw["probabilities"], "<f4").reshape(-1, 10)
    except (KeyError, ValueError):
        return Verdict("bad answer: not the documented tensors"), server_ms
    return judge_tensors(labels, probabilities, request), server_ms


def judge_tensors(
    labels: NDArray[np.int64], probabilities: NDArray[np.float32], request: PreparedRequest
) -> Verdict:
    """Check an answer that came as tensors: labels (n,), probabilities (n, 10)."""
    if not len(labels) == len(probabilities) == len(request.own_labels):
        return Verdict("bad answer: count of predictions")
    if not (abs(probabilities.sum(axis=1) - 1) <= _SUM_TOLERANCE).all():
        return Verdict("bad answer: sum of probabilities")
    if not np.array_equal(labels, probabilities.argmax(axis=1)):
        return Verdict("bad answer: label is not the most probable")
    return _compare(labels.tolist(), request)


def error_kind(status: int, content: bytes) -> str:
    """The kind of an answer with another status than 200: the status and the service's code."""
    try:
        return f"{status} {orjson.loads(content)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


class _BadAnswer(Exception):
    """The message says what is wrong with a prediction."""


def _label(prediction: dict[str, Any]) -> int:
    label, probabilities = prediction["label"], prediction["probabilities"]
    if len(probabilities) != 10:
        raise _BadAnswer("count of probabilities")
    if not abs(sum(probabilities) - 1) <= _SUM_TOLERANCE:
        raise _BadAnswer("sum of probabilities")
    largest = max(probabilities)
    if type(label) is not int or probabilities[label] != largest:
        raise _BadAnswer("label is not the most probable")
    if prediction["confidence"] != largest:
        raise _BadAnswer("confidence is not the label's probability")
    return label


def _compare(labels: Sequence[int], request: PreparedRequest) -> Verdict:
    return Verdict(
        wrong_labels=_differences(labels, request.own_labels),
        mistakes=_differences(labels, request.true_labels),
    )


def _differences(labels: Sequence[int], expected: Sequence[int]) -> int:
    return sum(label != right for label, right in zip(labels, expected, strict=True))
