r"""`POST /predict` as plain calls: body in, batch, answer out, without a task or future.

A call goes through these states; in each of them the deadline or `cancel` may end it.

    reading --end()--> decoding --> waiting for its batch --> answered
       \ refused: too large, no room      \ (small JSON and pixels are decoded at once)
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import cast, get_args
from urllib.parse import parse_qsl

import orjson

from lenet import nvtx
from lenet.nvtx import span
from lenet.pixels import Images, Probabilities
from service.engine.batcher import Batcher
from service.engine.deadlines import Deadlines
from service.engine.models import Models
from service.engine.queue import Prediction, Request
from service.errors import (
    BodyTimeout,
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    UnsupportedMediaType,
    invalid,
    shown,
)
from service.http.answer import INTERNAL_ERROR, JSON, Answer, error_answer
from service.http.openapi import BINARY, MAX_TIMEOUT_MS, TIMEOUT_HEADER
from service.images import DecodingThreads, Invert, Limits, decoder
from service.images.threads import Job
from service.metrics import NO_MODEL, Metrics

_log = logging.getLogger(__name__)

_INVERT = get_args(Invert)
_PARAMETERS = ("model", "version", "invert")
_BINARY = BINARY.encode()

_INLINE_BYTES = 256 * 1024
"""Larger bodies are decoded on a thread: at about 10 us an image in JSON, this much blocks the
event loop for 2 ms."""

Reply = Callable[[Answer], None]
"""Called once with the answer, unless the call is cancelled."""


@dataclass(slots=True)
class Bodies:
    """The bytes of bodies that are being read or decoded; at most `max_total_bytes` together."""

    max_bytes: int
    max_total_bytes: int
    held_bytes: int = 0

    def too_large(self, found: str) -> TooLarge:
        """The error for a body of more than `max_bytes`."""
        return TooLarge(
            f"the body has {found}, expected at most {self.max_bytes} bytes; "
            "send fewer images at a time",
            field="body",
        )

    def hold(self, size: int) -> None:
        """Hold `size` more bytes.

        Raises:
            Overloaded: there is no room for them.
        """
        if self.held_bytes + size > self.max_total_bytes:
            raise Overloaded(
                "body: too many request bodies in flight "
                f"(limit {self.max_total_bytes} bytes); try again later",
                field="body",
                retry_after_s=1,
            )
        self.held_bytes += size

    def release(self, size: int) -> None:
        """Stop holding `size` bytes."""
        self.held_bytes -= size


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the query and the headers of a request ask for. Equal requests share one."""

    model: str
    version: str
    timeout_s: float
    decode: Callable[[bytes], Images]
    cheap: bool
    """Whether small bodies are decoded on the event loop."""
    binary: bool
    length: int | None


@dataclass(frozen=True, slots=True)
class PredictRoute:
    """`POST /predict`."""

    models: Models
    metrics: Metrics
    limits: Limits
    bodies: Bodies
    decoding: DecodingThreads
    deadlines: Deadlines
    timeout_s: float

    def read(self, query: bytes, headers: Mapping[str, str]) -> Wanted:
        """Read the query and the headers, whose names are in lower case.

        Raises:
            InvalidInput: a parameter or header is wrong.
            UnsupportedMediaType: the body is compressed, or of an unknown type.
            TooLarge: the body is announced to be.
        """
        parameters = _parameters(query)
        invert = parameters.get("invert", "auto")
        if invert not in _INVERT:
            raise InvalidInput(
                f"query parameter invert is {invert[:40]!r}, expected one of {', '.join(_INVERT)}",
                field="invert",
            )
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise UnsupportedMediaType(
                f"content-encoding: got {shown(encoding)}, expected none; "
                "send the body uncompressed",
                field="content-encoding",
            )
        length = int(headers["content-length"]) if "content-length" in headers else None
        if length is not None and length > self.bodies.max_bytes:
            raise self.bodies.too_large(f"{length} bytes")
        content_type = headers.get("content-type", "")
        return Wanted(
            parameters.get("model", ""),
            parameters.get("version", ""),
            min(_requested_timeout_s(headers) or self.timeout_s, self.timeout_s),
            decoder(content_type, invert=cast("Invert", invert), limits=self.limits),
            content_type.startswith(("application/json", BINARY)),
            accepts_binary(headers.get("accept", "")),
            length,
        )

    def refuse(self, error: ServiceError) -> Answer:
        """The answer to a request that `read` rejected."""
        self.metrics.request_done(NO_MODEL, "http", error.code)
        return error_answer(error)

    def open(self, wanted: Wanted, reply: Reply) -> PredictCall:
        """Begin a request whose body is still to come."""
        return PredictCall(self, wanted, reply)


class PredictCall:
    """One request, from its headers to its answer."""

    __slots__ = (
        "_batcher",
        "_body",
        "_deadline_s",
        "_decode_s",
        "_ended",
        "_held_bytes",
        "_job",
        "_model",
        "_range",
        "_reply",
        "_request",
        "_route",
        "_size",
        "_started_s",
        "_tick",
        "_wanted",
    )

    def __init__(self, route: PredictRoute, wanted: Wanted, reply: Reply) -> None:
        self._route, self._wanted, self._reply = route, wanted, reply
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + wanted.timeout_s
        self._decode_s = 0.0
        self._model = NO_MODEL
        self._range = nvtx.begin("request")
        self._size = self._held_bytes = self._tick = 0
        self._ended = False
        self._body: bytes | bytearray = b""
        self._job: Job | None = None
        self._batcher: Batcher | None = None
        self._request: Request | None = None

    def data(self, data: bytes) -> None:
        """The next piece of the body.

        Raises:
            TooLarge: it is longer than allowed.
            Overloaded: all bodies together are.
        """
        if self._ended:
            return
        self._size += len(data)
        if self._wanted.length is None and self._size > self._route.bodies.max_bytes:
            raise self._route.bodies.too_large("more")
        if (
            self._body
        ):  # in pieces: one buffer, as an object for each chunk takes more than its bytes
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += data
        else:
            self._body = data
        if self._tick:
            self._hold()

    def wait_for_body(self) -> None:
        """The body has not arrived whole: from here on its time and memory are limited.

        Raises:
            Overloaded: there is no room for it.
        """
        if not self._tick and not self._ended:
            self._watch()
            self._hold()

    def end(self) -> None:
        """The whole body has arrived: decode it and queue its images."""
        if self._ended:
            return
        wanted, route = self._wanted, self._route
        self._decode_s = time.monotonic()
        try:
            self._hold()
            body, self._body = cast("bytes", self._body), b""  # a bytearray serves as bytes
            if wanted.cheap and len(body) <= _INLINE_BYTES:
                try:
                    images = wanted.decode(body)
                finally:
                    self._release()
                self._decoded(images)
            else:
                if not self._tick:
                    self._watch()
                work = partial(wanted.decode, body)
                self._job = route.decoding.start(work, self._decoded, self._release)
        except ServiceError as exc:
            self.fail(exc)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()

    def fail(self, error: ServiceError) -> None:
        """Answer with `error`, if nothing is answered yet."""
        if not self._ended:
            self._end(error.code)
            self._reply(error_answer(error))

    def cancel(self) -> None:
        """The client is gone."""
        if not self._ended:
            self._end(Cancelled.code)

    def _decoded(self, images: Images | Exception) -> None:
        self._job = None
        try:
            if isinstance(images, Exception):
                raise images
            self._decode_s = time.monotonic() - self._decode_s
            wanted = self._wanted
            self._unwatch()
            self._batcher, self._request = self._route.models.enqueue(
                images, wanted.model, wanted.version, self._deadline_s, self._answered
            )
            self._model = self._request.version.name
        except ServiceError as exc:
            self.fail(exc)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()

    def _answered(self, outcome: Prediction | ServiceError) -> None:
        self._request = None
        if isinstance(outcome, ServiceError):
            self.fail(self._late() if isinstance(outcome, DeadlineExceeded) else outcome)
            return
        try:
            began_s = time.monotonic()
            binary = self._wanted.binary
            body = _as_bytes(outcome) if binary else _as_json(outcome)
            now_s = time.monotonic()
            decode_s, queue_s, compute_s = self._decode_s, outcome.queue_s, outcome.compute_s
            times_s = decode_s, queue_s, compute_s, now_s - began_s, now_s - self._started_s
            answer = Answer(
                200, _BINARY if binary else JSON, body, _timing(times_s, outcome.version)
            )
            self._route.metrics.predicted("http", self._model, times_s)
            nvtx.end(self._range)
            self._ended = True
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()
        else:
            self._reply(answer)

    def _watch(self) -> None:
        self._tick = self._route.deadlines.add(self._deadline_s, self, PredictCall._expire)

    def _unwatch(self) -> None:
        if self._tick:
            self._route.deadlines.remove(self._tick, self)
            self._tick = 0

    def _expire(self) -> None:
        self._tick = 0
        if self._job is not None:
            self.fail(self._late())
            return
        self.fail(
            BodyTimeout(
                f"body: got {self._size} bytes in {self._wanted.timeout_s:g} s, "
                "expected the whole body",
                field="body",
            )
        )

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within {self._wanted.timeout_s * 1e3:.0f} ms")

    def _crash(self) -> None:
        _log.exception("POST /predict failed")
        self._end("internal")
        self._reply(INTERNAL_ERROR)

    def _hold(self) -> None:
        """Hold what has arrived. A body that arrives whole is held from its end on."""
        self._route.bodies.hold(self._size - self._held_bytes)
        self._held_bytes = self._size

    def _release(self) -> None:
        self._route.bodies.release(self._held_bytes)
        self._held_bytes = 0

    def _end(self, outcome: str) -> None:
        """Take the call out of whatever it waits for, and count it."""
        self._ended = True
        self._unwatch()
        if self._job is not None:
            self._route.decoding.cancel(self._job)  # which releases the body when it has ended
            self._job = None
        elif self._request is not None:
            request, self._request = self._request, None
            cast("Batcher", self._batcher).cancel(request)
        elif self._held_bytes:
            self._release()
        self._body = b""
        self._route.metrics.request_done(self._model, "http", outcome)
        nvtx.end(self._range)


def accepts_binary(accept: str) -> bool:
    """Whether `accept` prefers `BINARY` to JSON (RFC 9110, 12.5.1); JSON where both are as good."""
    if BINARY not in (accept := accept.lower()):
        return False
    qualities = {"application/json": -1.0, BINARY: -1.0}
    ranges: dict[str, float] = {}
    for choice in accept.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        quality = 1.0
        for parameter in parameters:
            if found := re.fullmatch(r"q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)", parameter):
                quality = float(found[1])
        ranges[kind] = quality
    for kind in qualities:
        for matching in (kind, "application/*", "*/*"):
            if matching in ranges:
                qualities[kind] = ranges[matching]
                break
    return qualities[BINARY] > 0 and qualities[BINARY] > qualities["application/json"]


def _parameters(query: bytes) -> dict[str, str]:
    if not query:
        return {}
    found: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name not in _PARAMETERS or name in found:
            wrong = "given twice" if name in found else "unknown"
            raise InvalidInput(
                f"query parameter {name[:40]!r} is {wrong}, "
                f"expected at most one each of {', '.join(_PARAMETERS)}",
                field=name[:40],
            )
        found[name] = value
    return found


def _requested_timeout_s(headers: Mapping[str, str]) -> float | None:
    """The `X-Request-Timeout-Ms` of a request, in seconds; None if it has none."""
    text = headers.get(TIMEOUT_HEADER.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 7) or not (
        1 <= int(text) <= MAX_TIMEOUT_MS
    ):
        raise invalid(TIMEOUT_HEADER, shown(text), f"whole milliseconds from 1 to {MAX_TIMEOUT_MS}")
    return int(text) / 1e3


@span("encode")
def _as_json(prediction: Prediction) -> bytes:
    """See `PredictResponse`. The numbers of a batch are written once, for all its requests."""
    encoded = prediction.batch.encoded
    rows: list[bytes] | None = encoded.get("json")
    if rows is None:
        rows = encoded["json"] = _rows_as_json(prediction.batch.probabilities)
    start = prediction.row
    wanted = (
        rows[start] if prediction.rows == 1 else b",".join(rows[start : start + prediction.rows])
    )
    return b"%s%s]}" % (_json_head(prediction.model, prediction.version), wanted)


def _rows_as_json(probabilities: Probabilities) -> list[bytes]:
    """One JSON object for each row, by a few calls for all of them."""
    numpy = orjson.OPT_SERIALIZE_NUMPY
    labels = probabilities.argmax(axis=1).tolist()
    largest = orjson.dumps(probabilities.max(axis=1), option=numpy)[1:-1].split(b",")
    rows = orjson.dumps(probabilities, option=numpy)[2:-2].split(b"],[")
    return [
        b'{"label":%d,"confidence":%s,"probabilities":[%s]}' % parts
        for parts in zip(labels, largest, rows, strict=True)
    ]


@lru_cache(maxsize=64)
def _json_head(model: str, version: str) -> bytes:
    return orjson.dumps({"model": model, "version": version, "predictions": []})[:-2]


@span("encode")
def _as_bytes(prediction: Prediction) -> bytes:
    """float32, little-endian, ten an image."""
    encoded = prediction.batch.encoded
    content: bytes | None = encoded.get("bytes")
    if content is None:
        probabilities = prediction.batch.probabilities.astype("<f4", copy=False)
        content = encoded["bytes"] = probabilities.tobytes()
        encoded["row_bytes"] = probabilities.shape[1] * 4
    size = encoded["row_bytes"]
    return content[prediction.row * size : (prediction.row + prediction.rows) * size]


def _timing(times_s: tuple[float, ...], version: str) -> bytes:
    """Server-Timing (W3C), in milliseconds by stage, and X-Model-Version."""
    decode, queue, compute, encode, total = (1e3 * seconds for seconds in times_s)
    return (
        b"server-timing: decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, encode;dur=%.3f, "
        b"total;dur=%.3f\r\nx-model-version: %s\r\n"
    ) % (decode, queue, compute, encode, total, version.encode())
