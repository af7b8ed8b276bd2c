"""`POST /explain`: what each layer of a model computes of one image.

Requests are those of `POST /predict`, with a few parameters more.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Self

import orjson

from lenet.explanation import Change, Layer
from lenet.nvtx import span
from lenet.pixels import Images
from service.api.openapi import MAX_EXPLAINED_IMAGES, MAX_NOISE
from service.api.routes import (
    PARAMETERS,
    Headers,
    ImageRequest,
    ImageRoute,
    Reply,
    parameters_of,
    read_predict,
)
from service.engine.explainer import Explainer, Explanation
from service.errors import InvalidInput, ServiceError, invalid, shown
from service.forms.form import JSON, Content
from service.forms.prediction import warnings
from service.observe.traces import Traces
from service.request import Request, Requests, TimesS, Wanted
from service.transport.answer import Answer

_PARAMETERS = (*PARAMETERS, "index", "biases", "noisy", "noise")
_INDEX = re.compile(r"[0-9]{1,5}")
_NOISE = re.compile(r"[0-9]{1,2}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class ExplainWanted(Wanted):
    """The options of an explanation, read from the request's head."""

    index: int = field(kw_only=True)
    """Index of the explained image."""
    change: Change = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class ExplainRoute:
    """`POST /explain`, answered like `POST /predict`, by which its requests are read."""

    predict: ImageRoute
    explainer: Explainer

    @classmethod
    def beside(cls, requests: Requests, explainer: Explainer) -> Self:
        """A route for fewer images than `requests` allow."""
        most = min(MAX_EXPLAINED_IMAGES, requests.limits.max_images)
        fewer = replace(requests, limits=replace(requests.limits, max_images=most))
        read = partial(read_predict, names=_PARAMETERS)
        return cls(ImageRoute(fewer, "/explain", read), explainer)

    def read(
        self, query: bytes, headers: Headers, path: Mapping[str, str] | None = None
    ) -> ExplainWanted:
        """Read the options from the query and headers. Raises: see `ImageRoute.read`."""
        wanted = self.predict.read(query, headers)
        parameters = parameters_of(query, _PARAMETERS)
        index, change = _index(parameters), _change(parameters)
        shared = {one.name: getattr(wanted, one.name) for one in fields(wanted)}
        return ExplainWanted(**shared, index=index, change=change)

    def refuse(self, error: ServiceError) -> Answer:
        """The answer to a request that `read` rejected."""
        return self.predict.refuse(error)

    def open(self, wanted: ExplainWanted, reply: Reply) -> Request:
        """Begin a request whose body is still to come."""
        return _ExplainRequest(self.predict, wanted, reply, self.explainer)


class _ExplainRequest(ImageRequest):
    """One request for an explanation: an `Explainer` takes the place of the batcher."""

    def __init__(
        self, route: ImageRoute, wanted: ExplainWanted, reply: Reply, explainer: Explainer
    ) -> None:
        super().__init__(route, wanted, reply)
        self._explained, self._explainer = wanted, explainer
        self._explanation: Explanation | None = None

    def compute(self, images: Images) -> None:
        """Have one of `images` explained. Raises: ServiceError."""
        wanted, version = self._explained, self._find().version
        if wanted.index >= len(images):
            expected = f"0 to {len(images) - 1}, as the request has {len(images)} images"
            raise invalid("index", str(wanted.index), expected)
        self._explanation = explanation = self._explainer.enqueue(
            version, images, wanted.index, wanted.change, self.deadline_s, self._explained_to
        )
        self.version, self.arrived_s = version, explanation.arrived_s
        self.rows = self.batch_rows = 1

    def withdraw(self) -> None:
        """Nobody waits for the layers any more."""
        if self._explanation is not None:
            self._explainer.cancel(self._explanation)

    def _explained_to(self, error: ServiceError | None) -> None:
        explanation = self._explanation
        assert explanation is not None, "bug: nothing was asked for"
        self.first_cut_s, self.answered_s = explanation.begun_s, explanation.answered_s
        self.answered(error)

    @span("encode")
    def write(self) -> Content:
        """JSON, see `ExplainResponse`."""
        explained = self._explanation
        assert explained is not None, "bug: nothing was asked for"
        version = explained.version
        document: dict[str, Any] = {
            "model": version.name,
            "version": version.version,
            "images": [base64.b64encode(image.tobytes()).decode() for image in explained.images],
            "index": explained.index,
            "prediction": _prediction(explained.layers[-1], version.labels),
        }
        if self.asked.doubts:
            document["warnings"] = warnings(self.asked.doubts)
        document["layers"] = [_layer(layer) for layer in explained.layers]
        return Content(JSON, orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))

    def batch_span(self, traces: Traces) -> None:
        """There is no batch."""

    def count(self, times_s: TimesS) -> None:
        """Count an answer, apart from predictions."""
        self._requests.metrics.explained(times_s[-1])


def _index(parameters: Mapping[str, str]) -> int:
    text = parameters.get("index", "0")
    if not _INDEX.fullmatch(text):
        raise invalid("index", shown(text), "the number of an image, 0 is the first")
    return int(text)


def _change(parameters: Mapping[str, str]) -> Change:
    """Read the changes to the model from the query. Raises: InvalidInput."""
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
    """A prediction in the form of `POST /predict`."""
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
