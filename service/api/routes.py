"""The HTTP routes that take images: the form of each path, and its answers.

A new form gets a function here that reads its head, and a line in `paths`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, get_args
from urllib.parse import parse_qsl

from service.api.schemas import MAX_TIMEOUT_MS, TIMEOUT_HEADER, PredictQuery
from service.errors import InvalidInput, UnsupportedMediaType, invalid, shown
from service.forms.compressed import CompressedForm
from service.forms.form import Content, Form
from service.forms.invocation import InvocationForm
from service.forms.oip_json import LENGTH_HEADER, OipJsonForm
from service.forms.pixels import Scale, scale_of
from service.forms.prediction import ImageForm
from service.forms.reader import OCTETS, Limits
from service.forms.tensorflow import TensorflowForm
from service.observe.traces import http_operation, parent_of
from service.pictures.headers import Digits, Invert
from service.request import Request, Requests, TimesS, Wanted
from wire.answer import Answer, error_answer
from wire.errors import Refusal
from wire.ids import Ids
from wire.inflate import CODINGS

PREFIX = "/v2"
"""Paths of the Open Inference Protocol begin so."""

TENSORFLOW = "/v1"
"""Paths of TensorFlow Serving's API begin so."""

MODEL = "/models/{model}"
MODEL_VERSION = f"{MODEL}/versions/{{version}}"
MODEL_LABEL = f"{MODEL}/labels/{{version}}"

_TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"
"""Names a file of a multi-model endpoint of SageMaker."""

_BOOLEANS = {"True": "true", "1": "true", "False": "false", "0": "false"}
"""Other spellings of `invert`: `requests` writes Python's."""

_MAX_SEPARATORS = 100
"""Maximum number of commas and semicolons in `Accept` and `Accept-Encoding`; one with more is
ignored. 60 KB of them take 48 ms (2 cores, 2026-11-26)."""

Headers: TypeAlias = Mapping[str, str]
"""Header values by lower-case name."""

Reply: TypeAlias = Callable[[Answer], None]
"""Called once with the answer, unless the request is cancelled."""

ReadForm: TypeAlias = Callable[[bytes, Headers, Mapping[str, str], Limits], tuple[Form, str, str]]
"""Reads form, model and version from the query, the headers and the path."""


@dataclass(frozen=True, slots=True)
class ImageRoute:
    """A route that takes images; `error` gives its errors their form."""

    requests: Requests
    template: str
    """Its path, which may have placeholders."""
    read_form: ReadForm
    error: Callable[[Refusal], Answer] = error_answer

    def read(self, query: bytes, headers: Headers, path: Mapping[str, str] | None = None) -> Wanted:
        """Read the options of a request. `path`: the values of the path's placeholders.

        Raises:
            InvalidInput: a parameter or header is wrong.
            UnsupportedMediaType: the body's type or coding is unknown.
            TooLarge: Content-Length exceeds the limit.
        """
        path = path or {}
        form, model, version = self.read_form(query, headers, path, self.requests.limits)
        coding = headers.get("content-encoding", "identity")
        if coding.lower() not in CODINGS:
            expected = f"one of {', '.join(CODINGS)}"
            message = f"content-encoding: got {shown(coding)}, expected {expected}"
            raise UnsupportedMediaType(message, field="content-encoding")
        packs = takes_gzip(headers.get("accept-encoding", ""))
        if (coding := coding.lower()) != "identity" or packs:
            form = CompressedForm(form, coding, self.requests.max_body_bytes, packs)
        timeout_s = min(_timeout_s(headers), self.requests.timeout_s)
        asks_first = headers.get("expect", "").lower() == "100-continue"
        operation = http_operation("POST", self.template, self.template.format(**path))
        length, trace = self._length(headers), Ids.read(headers).trace
        parent = parent_of(trace, headers.get("tracestate", ""))
        asked = length, model, version, asks_first
        return Wanted(form, timeout_s, operation, parent, *asked, self.error)

    def refuse(self, error: Refusal) -> Answer:
        """The answer to a request that `read` rejected."""
        self.requests.refused(error)
        return self.error(error)

    def open(self, wanted: Wanted, reply: Reply) -> ImageRequest:
        """Begin a request whose body is still to come."""
        return ImageRequest(self.requests, wanted, reply)

    def _length(self, headers: Headers) -> int | None:
        if (text := headers.get("content-length")) is None:
            return None
        if not re.fullmatch("[0-9]{1,20}", text):
            raise invalid("content-length", shown(text), "the length of the body in bytes")
        if (length := int(text)) > self.requests.max_body_bytes:
            raise self.requests.too_large("body", f"{length} bytes")
        return length


class ImageRequest(Request):
    """A request for predictions over HTTP, which answers `to` the server, see `Reply`."""

    __slots__ = ()

    def reply(self, content: Content, rest: list[bytes], times_s: TimesS) -> None:
        """Answer with `content`, the model's version, and Server-Timing (W3C).

        That is milliseconds by stage, and the rows of the batch.
        """
        body = content.body
        if rest:
            body, *rest = rest
        decode, queue, compute, encode, total = times_s
        lines = (
            b"%bserver-timing: decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, "
            b'encode;dur=%.3f, total;dur=%.3f, batch;desc="%d"\r\nx-model-version: %b\r\n'
        ) % (
            content.lines,
            1e3 * decode,
            1e3 * queue,
            1e3 * compute,
            1e3 * encode,
            1e3 * total,
            self.batch_rows,
            self.version.version.encode(),
        )
        self._to(Answer(200, content.media_type, body, lines, rest))

    def reply_error(self, error: Refusal) -> None:
        """Answer with `error` in its route's form."""
        self._to(self._wanted.refused(error))


def read_predict(
    query: bytes,
    headers: Headers,
    path: Mapping[str, str],
    limits: Limits,
    query_model: type[PredictQuery] = PredictQuery,
    is_explained: bool = False,
) -> tuple[Form, str, str]:
    """The head of `POST /predict`; `query_model` has the parameters that the query may have.

    Raises: InvalidInput, UnsupportedMediaType.
    """
    parameters = parameters_of(query, tuple(query_model.model_fields))
    form = ImageForm.of(
        headers.get("content-type", ""),
        _choice(parameters, "invert", Invert),
        _choice(parameters, "digits", Digits),
        limits,
        binary=prefers(OCTETS, headers.get("accept", "")),
        scale=_choice(parameters, "scale", Scale),
        is_explained=is_explained,
    )
    return form, parameters.get("model", ""), parameters.get("version", "")


def read_infer(
    query: bytes, headers: Headers, path: Mapping[str, str], limits: Limits
) -> tuple[Form, str, str]:
    """The head of inference by the Open Inference Protocol. Raises: InvalidInput."""
    json_bytes = None
    if (text := headers.get(LENGTH_HEADER.lower())) is not None:
        if not re.fullmatch("[0-9]{1,19}", text):
            raise invalid(LENGTH_HEADER, shown(text), "the length of the JSON in bytes")
        json_bytes = int(text)
    form = OipJsonForm(json_bytes, limits, _scale(query))
    return form, path["model"], path.get("version", "")


def read_tensorflow(
    query: bytes, headers: Headers, path: Mapping[str, str], limits: Limits
) -> tuple[Form, str, str]:
    """The head of a prediction by TensorFlow Serving's API. Raises: InvalidInput."""
    return TensorflowForm(limits, _scale(query)), path["model"], path.get("version", "")


def _scale(query: bytes) -> Scale:
    """The scale that a query states, whose other parameters are ignored. Raises: InvalidInput."""
    found: Scale = "byte"
    for name, value in parse_qsl(query.decode("latin-1")) if query else ():
        if name == "scale":
            found = scale_of(value, "scale")
    return found


def read_invocation(
    query: bytes, headers: Headers, path: Mapping[str, str], limits: Limits
) -> tuple[Form, str, str]:
    """The head of `POST /invocations`. Raises: InvalidInput, UnsupportedMediaType."""
    if (target := headers.get(_TARGET_MODEL.lower())) is not None:
        expected = "none: a model is chosen by its name, as in ?model=mlp"
        raise invalid(_TARGET_MODEL, shown(target), expected)
    images, model, version = read_predict(query, headers, path, limits)
    assert isinstance(images, ImageForm), "bug: another form of /predict"
    instances = TensorflowForm(limits, _scale(query))
    return InvocationForm(images, instances), model, version


def _qualities(header: str) -> dict[str, float]:
    """The choices of `Accept` or `Accept-Encoding` with their quality, 0 to 1: RFC 9110, 12.4.2."""
    found: dict[str, float] = {}
    if header.count(",") + header.count(";") > _MAX_SEPARATORS:
        return found
    for item in header.lower().split(","):
        choice, *parameters = (part.strip() for part in item.split(";"))
        found[choice] = 1.0
        for parameter in parameters:
            if quality := re.fullmatch(r"q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)", parameter):
                found[choice] = float(quality[1])
    return found


def prefers(kind: str, accept: str, other: str = "application/json") -> bool:
    """Whether `accept` prefers `kind` to `other` (RFC 9110, 12.5.1), not where both are as good."""
    if kind not in accept.lower():
        return False
    ranges = _qualities(accept)

    def quality(wanted: str) -> float:
        matching = (wanted, wanted.partition("/")[0] + "/*", "*/*")
        return next((ranges[one] for one in matching if one in ranges), 0.0)

    return quality(kind) > quality(other)


@lru_cache(maxsize=64)
def takes_gzip(accept_encoding: str) -> bool:
    """Whether gzip may be sent, and is preferred to no coding: RFC 9110, 12.5.3."""
    codings = _qualities(accept_encoding)
    quality = codings.get("gzip", codings.get("*", 0.0))
    return quality > 0 and quality >= codings.get("identity", 0.0)


def parameters_of(query: bytes, expected: Sequence[str]) -> dict[str, str]:
    """The parameters of a query. Raises: InvalidInput, unless each is one of `expected`, once."""
    if not query:
        return {}
    found: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name not in expected or name in found:
            wrong = "given twice" if name in found else "unknown"
            raise InvalidInput(
                f"query parameter {name[:40]!r} is {wrong}, "
                f"expected at most one each of {', '.join(expected)}",
                field=name[:40],
            )
        found[name] = value
    return found


def _choice(parameters: Mapping[str, str], name: str, literal: Any) -> Any:
    """The value of a query parameter, by default the first of `literal`. Raises: InvalidInput."""
    choices = get_args(literal)
    found = parameters.get(name, choices[0])
    if literal is Invert:
        found = _BOOLEANS.get(found, found)
    if found not in choices:
        raise InvalidInput(
            f"query parameter {name} is {found[:40]!r}, expected one of {', '.join(choices)}",
            field=name,
        )
    return found


def _timeout_s(headers: Mapping[str, str]) -> float:
    """The `X-Request-Timeout-Ms` of a request, in seconds; infinite if it has none."""
    text = headers.get(TIMEOUT_HEADER.lower())
    if text is None:
        return math.inf
    if not re.fullmatch("[0-9]{1,7}", text) or not 1 <= int(text) <= MAX_TIMEOUT_MS:
        raise invalid(TIMEOUT_HEADER, shown(text), f"whole milliseconds from 1 to {MAX_TIMEOUT_MS}")
    return int(text) / 1e3
