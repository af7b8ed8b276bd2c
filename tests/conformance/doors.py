"""The ways into the service: a server, a transport to it, and the form of what that carries.

A promise is asked for by an `Ask` and looks at an `Outcome`. What a form cannot say is None there.
To add a door, add a line to `DOORS`: a server (a function of `servers`), a transport (a subclass of
`Transport`) and a form (of `Form`).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import unquote

import grpc
import numpy as np
import pytest

from service.api import health_pb2
from service.forms import open_inference_pb2 as pb
from tests.conformance.servers import none, own, uvicorn
from tests.conformance.transports import Asgi, Http1, Http2, Message, Reply, Transport

STATUS = {
    "ok": (200, "OK"),
    "invalid_input": (400, "INVALID_ARGUMENT"),
    "unauthorized": (401, "UNAUTHENTICATED"),
    "unknown_model": (404, "NOT_FOUND"),
    "body_timeout": (408, "DEADLINE_EXCEEDED"),
    "too_large": (413, "INVALID_ARGUMENT"),
    "overloaded": (429, "RESOURCE_EXHAUSTED"),
    "internal": (500, "INTERNAL"),
    "inference_failed": (500, "INTERNAL"),
    "unavailable": (503, "UNAVAILABLE"),
    "deadline_exceeded": (504, "DEADLINE_EXCEEDED"),
}
"""Status by code, of HTTP and of gRPC."""


@dataclass(frozen=True)
class Ask:
    """A request for predictions.

    Attributes:
        images: uint8 (n, 28, 28).
        cut: how many bytes of the pixels are left out.
        garbage: send what the form does not understand.
        headers: sent as they are, in lower case.
    """

    images: np.ndarray = default(default_factory=lambda: np.zeros((1, 28, 28), np.uint8))
    model: str = ""
    version: str = ""
    timeout_ms: int | None = None
    cut: int = 0
    garbage: bool = False
    headers: Mapping[str, str] = default(default_factory=dict)

    @property
    def pixels(self):
        content = self.images.tobytes()
        return content[: len(content) - self.cut]


@dataclass(frozen=True)
class Outcome:
    """What the client of a request reads. None: the form does not say it.

    Attributes:
        status: of HTTP a number, of gRPC a name.
        probabilities: float (n, 10), of an answer.
        labels: n numbers, of an answer.
    """

    status: int | str | None = None
    code: str | None = None
    message: str = ""
    field: str | None = None
    retry_after_s: int | None = None
    model: str | None = None
    version: str | None = None
    probabilities: np.ndarray | None = None
    labels: list[int] | None = None
    headers: Mapping[str, str] = default(default_factory=dict)


class Form(Protocol):
    """What requests and answers look like.

    Attributes:
        protocol: its label in metrics.
        says: the attributes that an `Outcome` of an error has.
        fields: how errors name the content, the pixels in it, and their count.
    """

    protocol: ClassVar[str]
    says: ClassVar[frozenset[str]]
    fields: ClassVar[Mapping[str, str]]

    def message(self, ask: Ask) -> Message: ...

    def outcome(self, reply: Reply) -> Outcome: ...

    def returned_id(self, request_id: str) -> str | None:
        """What the header `x-request-id` of an answer has to be."""

    def probe(self) -> Message:
        """A question for readiness."""

    def is_ready(self, reply: Reply) -> bool: ...


def retry_after_s(reply):
    found = reply.headers.get("retry-after")
    return found and int(found)


class Http:
    """What all forms over HTTP have in common."""

    protocol = "http"

    def returned_id(self, request_id):
        return request_id


class Predict(Http):
    """`POST /predict` of pixels."""

    says = frozenset(("status", "code", "field", "retry_after_s"))
    fields = MappingProxyType({"content": "body", "pixels": "body", "count": "body"})

    def message(self, ask):
        options = {"model": ask.model, "version": ask.version}
        query = "&".join(f"{name}={text}" for name, text in options.items() if text)
        kind = "application/json" if ask.garbage else "application/octet-stream"
        headers = {"Content-Type": kind, **timeout_header(ask), **ask.headers}
        return Message("POST", f"/predict?{query}", headers, garbage(ask) or ask.pixels)

    def outcome(self, reply):
        document = json.loads(reply.body)
        if reply.status != 200:
            error = document["error"]
            found = {**error, "retry_after_s": retry_after_s(reply)}
            return Outcome(reply.status, **found, headers=reply.headers)
        rows = document["predictions"]
        return Outcome(
            200,
            "ok",
            model=document["model"],
            version=document["version"],
            probabilities=np.array([row["probabilities"] for row in rows]),
            labels=[row["label"] for row in rows],
            headers=reply.headers,
        )

    def probe(self):
        return Message("GET", "/readyz", {}, b"")

    def is_ready(self, reply):
        ready = json.loads(reply.body)["ready"]
        assert reply.status == (200 if ready else 503)
        return ready


class Infer(Http):
    """`POST /v2/models/MODEL/infer` of a binary tensor."""

    says = frozenset(("status", "retry_after_s"))
    fields = MappingProxyType({})

    def message(self, ask):
        size = {"binary_data_size": len(ask.pixels)}
        tensor = {"name": "image", "datatype": "UINT8", "shape": [*ask.images.shape]}
        document = {"inputs": [{**tensor, "parameters": size}]}
        if ask.timeout_ms is not None:
            document["parameters"] = {"timeout": 1000 * ask.timeout_ms}
        head = garbage(ask) or json.dumps(document).encode()
        length = {"Inference-Header-Content-Length": str(len(head))}
        path = f"/v2/{model_path(ask)}/infer"
        return Message("POST", path, {**length, **ask.headers}, head + ask.pixels)

    def outcome(self, reply):
        document = json.loads(reply.body)
        if reply.status != 200:
            return plain_error(reply, document)
        probabilities, label = document["outputs"]
        return Outcome(
            200,
            model=document["model_name"],
            version=document["model_version"],
            probabilities=np.reshape(probabilities["data"], probabilities["shape"]),
            labels=label["data"],
            headers=reply.headers,
        )

    def probe(self):
        return Message("GET", "/v2/health/ready", {}, b"")

    is_ready = Predict.is_ready


class Tensorflow(Http):
    """`POST /v1/models/MODEL:predict` of base64."""

    says = frozenset(("status", "retry_after_s"))
    fields = MappingProxyType({})

    def message(self, ask):
        size = 784
        images = [ask.pixels[at : at + size] for at in range(0, len(ask.pixels), size)]
        rows = [{"b64": base64.b64encode(image).decode()} for image in images]
        body = garbage(ask) or json.dumps({"instances": rows}).encode()
        headers = {**timeout_header(ask), **ask.headers}
        return Message("POST", f"/v1/{model_path(ask)}:predict", headers, body)

    def outcome(self, reply):
        document = json.loads(reply.body)
        if reply.status != 200:
            return plain_error(reply, document)
        rows = document["predictions"]
        return Outcome(
            200,
            version=reply.headers["x-model-version"],
            probabilities=np.array([row["probabilities"] for row in rows]),
            labels=[row["label"] for row in rows],
            headers=reply.headers,
        )

    def probe(self):
        return Message("GET", "/v1/models/tiny", {}, b"")

    def is_ready(self, reply):
        return json.loads(reply.body)["ready"]


def model_path(ask):
    version = f"/versions/{ask.version}" if ask.version else ""
    return f"models/{ask.model or 'tiny'}{version}"


def timeout_header(ask):
    return {} if ask.timeout_ms is None else {"X-Request-Timeout-Ms": str(ask.timeout_ms)}


def garbage(ask):
    return b'{"' if ask.garbage else b""


def plain_error(reply, document):
    message, retry_s = document["error"], retry_after_s(reply)
    return Outcome(reply.status, message=message, retry_after_s=retry_s, headers=reply.headers)


class ModelInfer:
    """The call `ModelInfer`."""

    protocol = "grpc"
    says = frozenset(("status", "code", "field", "retry_after_s"))
    fields = MappingProxyType(
        {"content": "message", "pixels": "raw_input_contents[0]", "count": "inputs[0].shape"}
    )
    method = "ModelInfer"

    def message(self, ask):
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="image", datatype="UINT8", shape=ask.images.shape
        )
        request = pb.ModelInferRequest(
            model_name=ask.model,
            model_version=ask.version,
            inputs=[tensor],
            raw_input_contents=[ask.pixels],
        )
        if ask.timeout_ms is not None:
            request.parameters["timeout"].int64_param = 1000 * ask.timeout_ms
        content = b"\xff\xff" if ask.garbage else request.SerializeToString()
        return call(f"/inference.GRPCInferenceService/{self.method}", content, ask.headers)

    def outcome(self, reply):
        """The status of the call, or its answer."""
        (status, *_) = [
            one.name for one in grpc.StatusCode if one.value[0] == int(reply.headers["grpc-status"])
        ]
        if status != "OK":
            retry_ms = reply.headers.get("grpc-retry-pushback-ms")
            return Outcome(
                status,
                reply.headers["lenet-error-code"],
                unquote(reply.headers["grpc-message"]),
                reply.headers.get("lenet-error-field", ""),
                retry_ms and int(retry_ms) // 1000,
                headers=reply.headers,
            )
        return self.answer(reply)

    def returned_id(self, request_id):
        return None

    def answer(self, reply):
        return inferred(pb.ModelInferResponse.FromString(content_of(reply)), reply)

    def probe(self):
        return call("/inference.GRPCInferenceService/ServerReady", b"")

    def is_ready(self, reply):
        return pb.ServerReadyResponse.FromString(content_of(reply)).ready


class Stream(ModelInfer):
    """A call `ModelStreamInfer` with one request. An error there says no more than a sentence."""

    says = frozenset()
    method = "ModelStreamInfer"

    def message(self, ask):
        return super().message(ask)._replace(is_answered=is_framed)

    def outcome(self, reply):
        return self.answer(reply) if is_framed(reply.body) else super().outcome(reply)

    def answer(self, reply):
        found = pb.ModelStreamInferResponse.FromString(content_of(reply))
        if found.error_message:
            return Outcome(message=found.error_message)
        return inferred(found.infer_response, reply)

    def probe(self):
        return call("/grpc.health.v1.Health/Check", b"")

    def is_ready(self, reply):
        found = health_pb2.HealthCheckResponse.FromString(content_of(reply))
        return found.status == health_pb2.HealthCheckResponse.SERVING


def call(path, content, headers=MappingProxyType({})):
    kind = {"content-type": "application/grpc", "te": "trailers"}
    return Message("POST", path, {**kind, **headers}, framed(content), has_length=False)


def framed(content):
    return b"\0" + len(content).to_bytes(4, "big") + content


def is_framed(body):
    return len(body) > 5 and body == framed(body[5:])


def content_of(reply):
    assert reply.status == 200
    content = reply.body[5:]
    assert reply.body == framed(content), "not exactly one message"
    return content


def inferred(response, reply):
    probabilities, labels = response.raw_output_contents
    rows = np.frombuffer(probabilities, "<f4").reshape(response.outputs[0].shape)
    return Outcome(
        "OK",
        "ok",
        model=response.model_name,
        version=response.model_version,
        probabilities=rows,
        labels=np.frombuffer(labels, "<i8").tolist(),
        headers=reply.headers,
    )


class Door(NamedTuple):
    """A way in.

    Attributes:
        server: opens it, see `servers`.
        can: what not every server does: "stop" (leave a port, answer what was accepted), "give up"
            (say so to whom it has no more time for), "log" (have an access log).
    """

    name: str
    server: Callable[..., Any]
    transport: type[Transport]
    form: Form
    can: frozenset[str] = frozenset(("stop", "give up", "log"))

    def status(self, code):
        """The status of an error."""
        return STATUS[code][self.form.protocol == "grpc"]

    def assert_refused(self, outcome, code, words, *, field="", retry_after_s=None):
        """`outcome` is the error `code`, and says what the form of this door can say of it."""
        field = self.form.fields.get(field, field)
        expected = Outcome(self.status(code), code, field=field, retry_after_s=retry_after_s)
        for name in self.form.says:
            assert getattr(outcome, name) == getattr(expected, name), (name, outcome)
        assert words in outcome.message
        assert not re.search(r"Traceback|\.py\b|0x[0-9a-f]{6}", outcome.message)


DOORS = (
    Door("HTTP/1.1", own, Http1, Predict()),
    Door("HTTP/2", own, Http2, Predict()),
    Door("HTTP/1.1 infer", own, Http1, Infer()),
    Door("HTTP/1.1 TensorFlow", own, Http1, Tensorflow()),
    Door("gRPC", own, Http2, ModelInfer()),
    Door("stream", own, Http2, Stream()),
    Door("uvicorn", uvicorn, Http1, Predict()),
    Door("ASGI", none, Asgi, Predict(), frozenset(("log",))),
)


def doors_that(can, form=object):
    """A mark for promises that not every server gives, or of requests in one class of forms."""
    doors = [door for door in DOORS if can in door.can and isinstance(door.form, form)]
    return pytest.mark.parametrize("door", doors, indirect=True, ids=[door.name for door in doors])
