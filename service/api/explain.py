"""`POST /explain`: what each layer of a model computes of one image, apart from the batches.

Requests are those of `POST /predict`, with a few parameters more. One explanation is computed at a
time, on a thread.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import orjson
from fastapi import Request, Response

from lenet.explanation import MAX_OPERATIONS, Change, Layer, explain, operations
from lenet.nvtx import span
from lenet.pixels import Images
from lenet.weightfile import WeightFile
from service.api.endpoints import Endpoint, answered
from service.api.routes import ImageRequest, ImageRoute, Reply, parameters_of, read_predict
from service.api.schemas import MAX_EXPLAINED_IMAGES, MAX_NOISE, ExplainQuery
from service.engine.queue import BatchAnswer
from service.errors import (
    InferenceFailed,
    InvalidInput,
    Overloaded,
    ServiceError,
    invalid,
    shown,
    stopping,
)
from service.forms.form import JSON, Content
from service.forms.prediction import one_prediction, warnings
from service.request import Requests, Wanted

_log = logging.getLogger(__name__)

MAX_WAITING = 32
"""Explanations that wait for the thread; further ones are rejected as `Overloaded`."""

_INDEX = re.compile(r"[0-9]{1,5}")
_NOISE = re.compile(r"[0-9]{1,2}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?")

_Computing: TypeAlias = asyncio.Future[tuple[float, list[Layer]]]
"""The time at which computing began, and the layers."""


def explain_route(requests: Requests) -> ImageRoute:
    """The head of `POST /explain`, for fewer images than `requests` allow."""
    most = min(MAX_EXPLAINED_IMAGES, requests.limits.max_images)
    fewer = replace(
        requests,
        limits=replace(requests.limits, max_images=most),
        count=lambda _protocol, _model, times_s: requests.metrics.explained(times_s[-1]),
    )
    read = partial(read_predict, query_model=ExplainQuery, is_explained=True)
    return ImageRoute(fewer, "/explain", read)


def explain_endpoint(requests: Requests, thread: ThreadPoolExecutor) -> Endpoint:
    """The endpoint of `POST /explain`, which computes on the only `thread`."""
    route, unfinished = explain_route(requests), set[_Computing]()

    async def explain(request: Request) -> Response:
        def begin(wanted: Wanted, reply: Reply) -> ImageRequest:
            index, change = options(request.scope["query_string"])
            return _Explanation(route.requests, wanted, reply, thread, unfinished, index, change)

        return await answered(request, route, begin)

    return explain


def options(query: bytes) -> tuple[int, Change]:
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


class _Explanation(ImageRequest):
    """A request for an explanation, whose answer is an `ExplainResponse`."""

    __slots__ = ("_change", "_computing", "_index", "_thread", "_unfinished")
    is_prediction = False

    def __init__(
        self,
        requests: Requests,
        wanted: Wanted,
        reply: Reply,
        thread: ThreadPoolExecutor,
        unfinished: set[_Computing],
        index: int,
        change: Change,
    ) -> None:
        super().__init__(requests, wanted, reply)
        self._thread, self._unfinished = thread, unfinished
        self._index, self._change = index, change
        self._computing: _Computing | None = None

    def compute(self, images: Images) -> None:
        index, served = self._index, self._find()
        if index >= len(images):
            expected = f"0 to {len(images) - 1}, as the request has {len(images)} images"
            raise invalid("index", str(index), expected)
        if served.closed:
            raise stopping()
        if len(self._unfinished) > MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} explanations wait, and no more may; try again later",
                retry_after_s=1,
            )
        self.begin(images, served.version, time.monotonic())
        self.rows = self.batch_rows = 1
        image, weights = images[index : index + 1], self.version.weights
        self._computing = computing = asyncio.get_running_loop().run_in_executor(
            self._thread, layers_of, weights, image, self._change, lambda: self.done
        )
        self._unfinished.add(computing)
        computing.add_done_callback(self._unfinished.discard)
        computing.add_done_callback(self._computed)
        self._watch()

    def withdraw(self) -> None:
        if self._computing is not None:
            self._computing.cancel()

    def _computed(self, computing: _Computing) -> None:
        if self.done:
            return
        computed_s = time.monotonic()
        try:
            began_s, layers = computing.result()
            self.queue_s, self.compute_s = began_s - self.arrived_s, computed_s - began_s
            self._requests.watched.pop(self, None)
            self._end_written(self._content(layers), computed_s, [])
        except ServiceError as exc:
            self.fail(exc)
        except Exception:  # noqa: BLE001 - the edge of a request: its client gets it
            _log.exception("an explanation failed")
            self.fail(InferenceFailed("the explanation failed; see the server log"))

    @span("encode")
    def _content(self, layers: list[Layer]) -> Content:
        version, probabilities = self.version, layers[-1].probabilities
        assert probabilities is not None, "bug: not the last layer"
        self.batch = BatchAnswer(probabilities)
        document: dict[str, Any] = {
            "model": version.name,
            "version": version.version,
            "images": [base64.b64encode(image.tobytes()).decode() for image in self.images],
            "index": self._index,
            "prediction": orjson.Fragment(one_prediction(probabilities, version.labels)),
        }
        if found := warnings(self.asked.doubts, version.labels):
            document["warnings"] = found
        if self.asked.candidates:
            document["candidates"] = self.asked.candidates
        document["layers"] = [_layer(layer) for layer in layers]
        return Content(JSON, orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))


@span("explain")
def layers_of(
    weights: WeightFile, image: Images, change: Change, has_left: Callable[[], bool]
) -> tuple[float, list[Layer]]:
    """Compute on the thread, up to the layer in which the client leaves.

    Raises: InvalidInput, InferenceFailed.
    """
    began_s, model, layers = time.monotonic(), weights.model, list[Layer]()
    if (found := operations(model)) > MAX_OPERATIONS:
        raise InvalidInput(
            f"model: {shown(model.name)} takes {found} operations an image, expected at most "
            f"{MAX_OPERATIONS} of a model that is explained; ask for its prediction",
            field="model",
        )
    names = [shape.name for shape in model.shapes()]
    if change.noisy and change.noisy not in names:
        raise invalid("noisy", shown(change.noisy), f"one of {', '.join(names)}")
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in explain(weights, image, change):
            if has_left():
                break
            if not math.isfinite(layer.high - layer.low):
                raise InferenceFailed(f"layer {layer.name} computes values that are not finite")
            layers.append(layer)
    return began_s, layers


def _layer(layer: Layer) -> dict[str, Any]:
    document: dict[str, Any] = {"name": layer.name, "kind": layer.kind, "shape": layer.shape}
    if layer.logits is not None:
        return document | {"values": layer.logits}
    data = {} if layer.data is None else {"data": base64.b64encode(layer.data).decode()}
    return document | {"low": layer.low, "high": layer.high} | data
