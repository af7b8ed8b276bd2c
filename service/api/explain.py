"""`POST /explain`: what each layer of a model computes of one image.

Requests are those of `POST /predict`, with a few parameters more.
"""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from lenet.explanation import Change, Layer
from lenet.nvtx import span
from lenet.pixels import Images
from service.api.routes import ImageRequest, ImageRoute, Reply, parameters_of, read_predict
from service.api.schemas import MAX_EXPLAINED_IMAGES, MAX_NOISE, ExplainQuery
from service.engine.explainer import Explained, Explainer
from service.errors import invalid, shown
from service.forms.form import JSON, Content
from service.forms.prediction import one_prediction, warnings
from service.observe.traces import Attributes
from service.request import Requests, TimesS, Wanted

_INDEX = re.compile(r"[0-9]{1,5}")
_NOISE = re.compile(r"[0-9]{1,2}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?")


def explain_route(requests: Requests, explainer: Explainer) -> ImageRoute:
    """`POST /explain`, for fewer images than `requests` allow."""
    most = min(MAX_EXPLAINED_IMAGES, requests.limits.max_images)
    fewer = replace(requests, limits=replace(requests.limits, max_images=most))
    read = partial(read_predict, query_model=ExplainQuery)
    return ImageRoute(
        fewer, "/explain", read, request=partial(_ExplainRequest, explainer), options=_options
    )


def _options(query: bytes) -> tuple[int, Change]:
    """Which image is explained, and of which network. Raises: InvalidInput."""
    parameters = parameters_of(query, tuple(ExplainQuery.model_fields))
    index, noise = parameters.get("index", "0"), parameters.get("noise", "0")
    biases, noisy = parameters.get("biases", "on"), parameters.get("noisy", "")
    if not _INDEX.fullmatch(index):
        raise invalid("index", shown(index), "the number of an image, 0 is the first")
    if biases not in ("on", "off"):
        raise invalid("biases", shown(biases), "on or off")
    if not _NOISE.fullmatch(noise) or float(noise) > MAX_NOISE:
        expected = f"a number from 0 to {MAX_NOISE}, in standard deviations of the weights"
        raise invalid("noise", shown(noise), expected)
    if noisy and "noise" not in parameters:
        raise invalid("noise", "none", "it with noisy, as in noise=0.5")
    if float(noise) and not noisy:
        raise invalid("noisy", "none", "it with noise, as in noisy=conv1")
    return int(index), Change(biases == "on", noisy, float(noise))


class _ExplainRequest(ImageRequest, Explained):
    """A request for an explanation: an `Explainer` takes the place of the batcher, and its batch.

    The answer is JSON, see `ExplainResponse`, and counted apart from predictions.
    """

    def __init__(
        self, explainer: Explainer, route: ImageRoute, wanted: Wanted, reply: Reply
    ) -> None:
        super().__init__(route, wanted, reply)
        self._explainer, self.layers = explainer, []
        self.index, self.change = wanted.options

    def compute(self, images: Images) -> None:
        if self.index >= len(images):
            expected = f"0 to {len(images) - 1}, as the request has {len(images)} images"
            raise invalid("index", str(self.index), expected)
        self._explainer.enqueue(self, images, self._find().version)

    def withdraw(self) -> None:
        if self.waits:
            self._explainer.cancel(self)

    @span("encode")
    def write(self) -> Content:
        version, probabilities = self.version, self.layers[-1].probabilities
        assert probabilities is not None, "bug: not the last layer"
        document: dict[str, Any] = {
            "model": version.name,
            "version": version.version,
            "images": [base64.b64encode(image.tobytes()).decode() for image in self.images],
            "index": self.index,
            "prediction": orjson.Fragment(one_prediction(probabilities, version.labels)),
        }
        if self.asked.doubts:
            document["warnings"] = warnings(self.asked.doubts)
        document["layers"] = [_layer(layer) for layer in self.layers]
        return Content(JSON, orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))

    def batch_attributes(self) -> Attributes:
        return ()

    def count(self, times_s: TimesS) -> None:
        self._requests.metrics.explained(times_s[-1])


def _layer(layer: Layer) -> dict[str, Any]:
    document: dict[str, Any] = {"name": layer.name, "kind": layer.kind, "shape": layer.shape}
    if layer.logits is not None:
        return document | {"values": layer.logits}
    data = {} if layer.data is None else {"data": base64.b64encode(layer.data).decode()}
    return document | {"low": layer.low, "high": layer.high} | data
