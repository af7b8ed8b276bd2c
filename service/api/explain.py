"""`POST /explain`: what each layer of a model computes of one image.

A request is read and decoded as one of `POST /predict`. Then an `Explainer` takes the place of the
model's batcher.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, cast

import orjson

from lenet.explanation import Change, Layer
from lenet.nvtx import span
from lenet.pixels import Images
from service.api.openapi import MAX_EXPLAINED_IMAGES, MAX_NOISE
from service.engine.explainer import Explainer, ExplanationRequest
from service.engine.queue import Request
from service.errors import InvalidInput, invalid, shown
from service.observe.metrics import ModelKey
from service.request import PredictCall, PredictRoute, PredictWanted, Reply
from service.transport.answer import JSON

_INDEX = re.compile(r"[0-9]{1,5}")
_NOISE = re.compile(r"[0-9]{1,2}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class ExplainWanted(PredictWanted):
    """Of `POST /explain`."""

    index: int
    """Which image is explained."""
    change: Change


@dataclass(frozen=True, slots=True)
class ExplainRoute(PredictRoute):
    """`POST /explain`."""

    explainer: Explainer

    parameters: ClassVar[tuple[str, ...]] = (
        *PredictRoute.parameters,
        *("index", "biases", "noisy", "noise"),
    )

    @classmethod
    def beside(cls, predict: PredictRoute, explainer: Explainer) -> Self:
        """A route that shares what `predict` has, for fewer images."""
        shared = {one.name: getattr(predict, one.name) for one in fields(predict)}
        most = min(MAX_EXPLAINED_IMAGES, predict.limits.max_images)
        shared["limits"] = replace(predict.limits, max_images=most)
        return cls(**shared, explainer=explainer)

    def wanted(self, parameters: Mapping[str, str], headers: Mapping[str, str]) -> ExplainWanted:
        """As `read`, from the parameters of the query."""
        index, change = _index(parameters), _change(parameters)
        wanted = PredictRoute.wanted(self, parameters, headers)
        shared = {one.name: getattr(wanted, one.name) for one in fields(wanted)}
        return ExplainWanted(**shared, index=index, change=change)

    def open(self, wanted: PredictWanted, reply: Reply) -> ExplainCall:
        """Begin a request whose body is still to come."""
        return ExplainCall(self, wanted, reply)

    def count(self, model: ModelKey, times_s: tuple[float, ...]) -> None:
        """Count an answer, apart from predictions: seconds in all come last."""
        self.metrics.explained(times_s[-1])


class ExplainCall(PredictCall):
    """A request of `POST /explain`."""

    _route: ExplainRoute
    _wanted: ExplainWanted

    def queue(self, images: Images) -> Request:
        """Have one of `images` explained. Raises: ServiceError."""
        route, wanted = self._route, self._wanted
        version = route.models.get(wanted.model, wanted.version).version
        self._batcher, self._model = route.explainer, version.key
        if wanted.index >= len(images):
            expected = f"0 to {len(images) - 1}, as the request has {len(images)} images"
            raise invalid("index", str(wanted.index), expected)
        return route.explainer.enqueue(
            version, images, wanted.index, wanted.change, self.deadline_s, self._answered
        )

    @span("encode")
    def content(self, request: Request) -> tuple[bytes, bytes, bytes]:
        """Always JSON, see `ExplainResponse`."""
        explained = cast("ExplanationRequest", request)
        version = explained.version
        document: dict[str, Any] = {
            "model": version.name,
            "version": version.version,
            "images": [base64.b64encode(image.tobytes()).decode() for image in explained.images],
            "index": explained.index,
            "prediction": _prediction(explained.layers[-1], version.weights.training.labels),
        }
        if self._warnings:
            document["warnings"] = self._warnings
        document["layers"] = [_layer(layer) for layer in explained.layers]
        return JSON, orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), b""

    def steps(self, request: Request) -> None:
        """None: the answer is made at once."""


def _index(parameters: Mapping[str, str]) -> int:
    text = parameters.get("index", "0")
    if not _INDEX.fullmatch(text):
        raise invalid("index", shown(text), "the number of an image, 0 is the first")
    return int(text)


def _change(parameters: Mapping[str, str]) -> Change:
    """What the query changes of the model. Raises: InvalidInput."""
    biases = parameters.get("biases", "on")
    if biases not in ("on", "off"):
        raise invalid("biases", shown(biases), "on or off")
    noisy, text = parameters.get("noisy", ""), parameters.get("noise", "0")
    if not _NOISE.fullmatch(text) or float(text) > MAX_NOISE:
        expected = f"a number from 0 to {MAX_NOISE}, in standard deviations of the weights"
        raise invalid("noise", shown(text), expected)
    if noisy and "noise" not in parameters:
        raise InvalidInput(
            "noise: got none, expected it with noisy, as in noise=0.5", field="noise"
        )
    if float(text) and not noisy:
        raise InvalidInput(
            "noisy: got none, expected it with noise, as in noisy=conv1", field="noisy"
        )
    return Change(biases == "on", noisy, float(text))


def _prediction(logits: Layer, names: Sequence[str]) -> dict[str, Any]:
    """As one of `POST /predict`."""
    probabilities = logits.probabilities
    assert probabilities is not None, "bug: not the last layer"
    label = int(probabilities.argmax())
    name = {} if names[label] == str(label) else {"name": names[label]}
    return {
        "label": label,
        **name,
        "confidence": probabilities[label],
        "probabilities": probabilities,
    }


def _layer(layer: Layer) -> dict[str, Any]:
    document: dict[str, Any] = {"name": layer.name, "kind": layer.kind, "shape": layer.shape}
    if layer.logits is not None:
        document["values"] = layer.logits
        return document
    document |= {"low": layer.low, "high": layer.high}
    if layer.data is not None:
        document["data"] = base64.b64encode(layer.data).decode()
    return document
