r"""`POST /predict` as plain calls: body in, batch, answer out, without a task or future.

`ImageRoute` and `ImageCall` are what all routes share that take images. What differs is how a
request is read, and what its answer and its errors look like; see also `http.infer`.

A call goes through these states; in each of them the deadline or `cancel` may end it.

    reading --end()--> decoding --> waiting for its batch --> answered
       \ refused: too large, no room      \ (small JSON and pixels are decoded at once)
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, cast, get_args
from urllib.parse import parse_qsl

import numpy as np
import orjson

from lenet import nvtx
from lenet.nvtx import span
from lenet.pixels import Images, Probabilities
from service.budget import SMALL_BYTES, Budget
from service.decode.pool import Body, BodySource, Decoded, Decoders, Job, Source
from service.engine.batcher import Batcher
from service.engine.deadlines import Deadlines
from service.engine.explainer import Explainer
from service.engine.models import Models
from service.engine.queue import BatchAnswer, Request
from service.errors import (
    BodyTimeout,
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    ServiceError,
    TooLarge,
    UnsupportedMediaType,
    invalid,
    shown,
)
from service.forms.body import Digits, Doubt, Invert, Limits, decoder, media_type
from service.observe.metrics import NO_MODEL, Metrics, ModelKey, Transport
from service.transport.answer import JSON, Answer, error_answer

_log = logging.getLogger(__name__)

_INVERT = get_args(Invert)
_DIGITS = get_args(Digits)
BINARY = "application/octet-stream"
_BINARY = BINARY.encode()

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
MAX_TIMEOUT_MS = 3_600_000

WARNINGS: Mapping[Doubt, str] = {
    "several_shapes": "the picture shows several separate shapes, which were read as one digit; "
    "with ?digits=several each is read on its own",
    "not_a_digit": "the shape is unlike any digit, so label and confidence mean nothing; "
    "expected one digit on plain paper",
}

IN_PLACE = sys.maxsize
"""Of pixels: there is nothing to decode."""

_INLINE = {BINARY: IN_PLACE, "application/json": 192 * 1024, "application/x-npy": 1024 * 1024}
"""The largest bodies that are decoded on the event loop. Larger ones block it for more than the 2
to 3 ms that JSON of 192 KiB, 64 images and more, takes, and the transposition of an npy array in
Fortran's order (one Xeon core, 2026-11-22)."""

_DROPPED_BYTES = 64 * 1024
"""Bodies of unknown models up to this size are received and dropped, so that the connection can be
kept. A larger one is refused at the headers."""

ENCODED_ROWS = 256
"""Rows of a JSON answer that are written in one turn of the event loop, which takes 0.3 ms."""

Reply = Callable[[Answer], None]
"""Called once with the answer, unless the call is cancelled."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the first line and the headers of a request ask for. Equal requests share one."""

    model: str
    version: str
    timeout_s: float
    length: int | None
    source: Source
    """For a decoder."""
    inline_bytes: int
    """Bodies of up to so many bytes may be decoded on the event loop."""


@dataclass(frozen=True, slots=True)
class PredictWanted(Wanted):
    """Of `POST /predict`."""

    decode: Callable[[bytes], Images]
    binary: bool
    """Whether the answer is raw bytes."""


@dataclass(frozen=True, slots=True)
class ImageRoute:
    """What routes share that take images."""

    models: Models
    metrics: Metrics
    limits: Limits
    max_body_bytes: int
    budget: Budget
    decoders: Decoders
    deadlines: Deadlines
    timeout_s: float

    protocol: ClassVar[Transport] = "http"
    """In metrics."""

    def length_of(self, headers: Mapping[str, str]) -> int | None:
        """The announced length of the body, None if none is.

        Raises:
            UnsupportedMediaType: the body is compressed.
            TooLarge: it is announced to be.
        """
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise UnsupportedMediaType(
                f"content-encoding: got {shown(encoding)}, expected none; "
                "send the body uncompressed",
                field="content-encoding",
            )
        length = int(headers["content-length"]) if "content-length" in headers else None
        if length is not None and length > self.max_body_bytes:
            raise self.too_large(f"{length} bytes")
        return length

    def timeout_s_of(self, headers: Mapping[str, str]) -> float:
        """How long a request may take. Raises: InvalidInput."""
        return min(_requested_timeout_s(headers) or self.timeout_s, self.timeout_s)

    def too_large(self, found: str) -> TooLarge:
        """The error for a body of more than `max_body_bytes`."""
        return TooLarge(
            f"the body has {found}, expected at most {self.max_body_bytes} bytes; "
            "send fewer images at a time",
            field="body",
        )

    def refuse(self, error: ServiceError) -> Answer:
        """The answer to a request that `read` rejected."""
        self.metrics.request_done(NO_MODEL, self.protocol, error.code)
        return self.error(error)

    def count(self, model: ModelKey, times_s: tuple[float, ...]) -> None:
        """Count an answer: seconds of decode, queue, compute and encode, and in all."""
        self.metrics.predicted(self.protocol, model, times_s)

    def error(self, error: ServiceError) -> Answer:
        """The answer that reports `error`."""
        return error_answer(error)


class PredictRoute(ImageRoute):
    """`POST /predict`."""

    __slots__ = ()

    parameters: ClassVar[tuple[str, ...]] = ("model", "version", "invert", "digits")
    """Of the query."""

    def read(
        self, query: bytes, headers: Mapping[str, str], path: Mapping[str, str] | None = None
    ) -> PredictWanted:
        """Read the query and the headers, whose names are in lower case.

        Raises:
            InvalidInput: a parameter or header is wrong.
            UnsupportedMediaType: the body is compressed, or of an unknown type.
            TooLarge: the body is announced to be.
        """
        return self.wanted(_parameters(query, self.parameters), headers)

    def wanted(self, parameters: Mapping[str, str], headers: Mapping[str, str]) -> PredictWanted:
        """As `read`, from the parameters of the query."""
        invert = _choice(parameters, "invert", _INVERT)
        digits = _choice(parameters, "digits", _DIGITS)
        length = self.length_of(headers)
        content_type = headers.get("content-type", "")
        source = BodySource(
            content_type, cast("Invert", invert), cast("Digits", digits), self.limits
        )
        return PredictWanted(
            parameters.get("model", ""),
            parameters.get("version", ""),
            self.timeout_s_of(headers),
            length,
            source,
            _INLINE.get(media_type(content_type), 0),
            decoder(content_type, invert=source.invert, digits=source.digits, limits=self.limits),
            prefers(BINARY, headers.get("accept", "")),
        )

    def open(self, wanted: PredictWanted, reply: Reply) -> PredictCall:
        """Begin a request whose body is still to come."""
        return PredictCall(self, wanted, reply)


class ImageCall:
    """One request, from its headers to its answer."""

    # Initial values, all immutable; setting each of them in every instance would take time.
    _model = NO_MODEL
    _decoding_began_s = _decode_s = 0.0
    moved_bytes = 0
    """Of the body, received."""
    _held_bytes = 0
    _watched = _transferring = False
    done = False
    part = "body"
    """What is received, in messages."""
    copied = True
    """Whether the content of a small body matters, and not where it is."""
    timed = True
    """Whether the answer has header lines about its times."""
    names_model = True
    """Whether the path or the query names the model, and not the message."""
    _model_is_unknown = False
    _body: bytes | bytearray | memoryview = b""
    _job: Job | None = None
    _batcher: Batcher | Explainer | None = None
    """Where `_request` waits, or is computed."""
    _request: Request | None = None
    _encoding: _Encoding | None = None

    def __init__(self, route: ImageRoute, wanted: Wanted, reply: Reply) -> None:
        self._route, self._wanted, self._reply = route, wanted, reply
        self._length = wanted.length
        self._started_s = time.monotonic()
        self.deadline_s = self._started_s + wanted.timeout_s
        self._range = nvtx.begin("request")
        if self.names_model:
            if (served := route.models.find(wanted.model, wanted.version)) is None:
                self._model_is_unknown = True
            else:
                self._model = served.version.key  # whose failures are counted from here on

    def data(self, data: bytes) -> None:
        """The next piece of the body.

        Raises:
            TooLarge: it is longer than allowed.
            Overloaded: all bodies together are.
        """
        self.moved_bytes += len(data)
        if self._length is None and self.moved_bytes > self._route.max_body_bytes:
            raise self._route.too_large("more")
        if self.done:
            return
        body = self._body
        if type(body) is memoryview:
            body[self.moved_bytes - len(data) : self.moved_bytes] = data
        elif not body:
            self._body = data
        elif self.moved_bytes > SMALL_BYTES and (room := self.room()) is not None:
            # Once for all, where a body that grows would be copied or mapped anew again and again.
            room[: len(body)] = body
            room[len(body) : self.moved_bytes] = data
        else:
            if type(body) is bytes:
                self._body = body = bytearray(body)
            body += data
        if self._watched:
            self._hold_arrived()

    def room(self) -> memoryview | None:
        """Memory for a body of announced length. It is taken as it is written to."""
        length = self._length
        if self.done or length is None:
            return None
        in_place = self._wanted.inline_bytes == IN_PLACE
        room = self._route.models.room(length) if in_place else None
        self._body = room = room or np.empty(length, np.uint8).data
        return room

    def arrived(self, size: int) -> None:
        """As `data`, of what was written there."""
        if not self.done:
            self.moved_bytes += size
            if self._watched:
                self._hold_arrived()

    def wait_for_body(self) -> None:
        """The body has not arrived whole: from here on its time and memory are limited.

        Raises:
            UnknownModel: nothing would be done with a body that is large, or may become so.
            Overloaded: there is no room for it.
        """
        if not self._watched and not self.done:
            if self._model_is_unknown and (self._length is None or self._length > _DROPPED_BYTES):
                self._check_model()
            self._watch()
            self._hold_arrived()

    def end(self, body: Body | None = None) -> None:
        """The body is complete: decode it and queue its images.

        `body` is all of it, if `data` was not called.
        """
        if self.done:
            return
        wanted = self._wanted
        self._decoding_began_s = time.monotonic()
        try:
            if body is None:
                body, self._body = self._body, b""
                if self._transferring:
                    self._end_transfer()
            else:
                self.moved_bytes = len(body)
            if self._model_is_unknown:
                # Before its body: of two mistakes the unknown model is the one to know first.
                self._check_model()
            if (
                self.copied
                and type(body) is memoryview
                and IN_PLACE > wanted.inline_bytes >= len(body)
            ):
                body = bytes(body)
            if self.moved_bytes <= wanted.inline_bytes and self.is_quick(body):
                if self._held_bytes:
                    self._release()
                self.decode(body)
            else:
                self._hold()
                self._watch()
                decoders = self._route.decoders
                self._job = decoders.start(wanted.source, body, self._came, self._release)
        except ServiceError as exc:
            self.fail(exc)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()

    def fail(self, error: ServiceError) -> None:
        """Answer with `error`, if nothing is answered yet."""
        if not self.done:
            self._end(error.code)
            self._reply(self._route.error(error))

    def cancel(self) -> None:
        """The client is gone."""
        if not self.done:
            self._end(Cancelled.code)

    def _check_model(self) -> None:
        """Raises: UnknownModel, unless the model was loaded meanwhile."""
        served = self._route.models.get(self._wanted.model, self._wanted.version)
        self._model, self._model_is_unknown = served.version.key, False

    # What differs between routes.

    def is_quick(self, body: Body) -> bool:
        """Whether a body of up to `inline_bytes` may be decoded on the event loop."""
        return True

    def decode(self, body: Body) -> None:
        """Decode `body` on the event loop, and call `decoded`. Raises: ServiceError."""
        raise NotImplementedError

    def queue(self, images: Images) -> Request:
        """Have `images` computed, and `_answered` called. Raises: ServiceError."""
        wanted = self._wanted
        batcher = self._route.models.get(wanted.model, wanted.version).batcher
        self._batcher, self._model = batcher, batcher.version.key
        return batcher.enqueue(images, self.deadline_s, self._answered)

    def take(self, outcome: Decoded) -> None:
        """Call `decoded` with what a decoding process sent."""
        self.decoded(outcome.images)

    def content(self, request: Request) -> tuple[bytes, bytes, bytes]:
        """Media type, body and header lines of an answer."""
        raise NotImplementedError

    def steps(self, request: Request) -> Iterator[bytes] | None:
        """The pieces of a large answer in JSON; None if it is made at once."""
        raise NotImplementedError

    def _came(self, outcome: Decoded | ServiceError) -> None:
        self._job = None
        if isinstance(outcome, ServiceError):
            self.fail(outcome)
        else:
            self.take(outcome)

    def decoded(self, images: Images) -> None:
        """Queue the images of the request."""
        try:
            if self._watched:
                self._unwatch()
            self._request = request = self.queue(images)
            self._decode_s = request.arrived_s - self._decoding_began_s
        except ServiceError as exc:
            self.fail(exc)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()

    def _answered(self, request: Request, error: ServiceError | None) -> None:
        self._request = None
        if error is not None:
            self.fail(self._late() if isinstance(error, DeadlineExceeded) else error)
            return
        encoding = self._encoding
        rest: Sequence[bytes] = ()
        try:
            if encoding is not None:
                began_s = encoding.began_s
                (body, *rest), kind, lines = encoding.pieces, JSON, b""
                self._encoding = None
            else:
                began_s = time.monotonic()
                if request.rows > ENCODED_ROWS and (steps := self.steps(request)) is not None:
                    self._encoding = _Encoding(request, began_s, steps)
                    self._watch()
                    self._encode()
                    return
                kind, body, lines = self.content(request)
            now_s, cut_s = time.monotonic(), request.first_cut_s
            times_s = (
                self._decode_s,
                cut_s - request.arrived_s,
                request.answered_s - cut_s,
                now_s - began_s,
                now_s - self._started_s,
            )
            if self.timed:
                lines += _timing(request.version.version, request.batch_rows, *times_s)
            answer = Answer(200, kind, body, lines, rest)
            self._route.count(self._model, times_s)
            if self._range is not None:
                nvtx.end(self._range)
            self.done = True
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()
        else:
            self._reply(answer)

    def _encode(self) -> None:
        """Encode the next rows of a large answer, and go on in the next turn of the event loop."""
        encoding = self._encoding
        if encoding is None:  # ended meanwhile
            return
        try:
            with span("encode"):
                piece = next(encoding.steps, None)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()
            return
        if piece is not None:
            encoding.pieces.append(piece)
            asyncio.get_running_loop().call_soon(self._encode)
        else:
            self._unwatch()
            self._answered(encoding.request, None)

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._route.deadlines.add(self, ImageCall._expire)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._route.deadlines.remove(self)

    def _expire(self) -> None:
        self._watched = False
        if self._job is not None or self._encoding is not None:
            self.fail(self._late())
            return
        self.fail(
            BodyTimeout(
                f"{self.part}: got {self.moved_bytes} bytes in {self._wanted.timeout_s:g} s, "
                f"expected the whole {self.part}",
                field=self.part,
            )
        )

    def _late(self) -> DeadlineExceeded:
        limit_s = self.deadline_s - self._started_s
        return DeadlineExceeded(f"no answer within {round(limit_s * 1e3, 3):g} ms")

    def _crash(self) -> None:
        _log.exception("a request failed")
        if self.done:
            return
        self._end(ServiceError.code)
        self._reply(self._route.error(ServiceError("internal error; see the server log")))

    def evict(self) -> None:
        """The body arrives slowly, and others need the memory."""
        self.fail(
            BodyTimeout(
                f"{self.part}: got {self.moved_bytes} bytes, and little in the last second, while "
                "other requests need the memory; send it faster",
                field=self.part,
            )
        )

    def _hold(self) -> int:
        """Hold what has arrived. A body that arrives whole is held from its end on.

        Returns: how many bytes the body has, as far as is known.
        """
        whole = self._length or self.moved_bytes
        more = self.moved_bytes - self._held_bytes
        self._route.budget.hold(more, whole)
        if self.done:  # evicted, to make room for itself
            self._route.budget.release(more)
        else:
            self._held_bytes += more
        return whole

    def _hold_arrived(self) -> None:
        if self._hold() > SMALL_BYTES and not (self._transferring or self.done):
            self._transferring = True
            self._route.budget.watch(self)

    def _release(self) -> None:
        self._route.budget.release(self._held_bytes)
        self._held_bytes = 0

    def _end_transfer(self) -> None:
        self._transferring = False
        self._route.budget.unwatch(self)

    def _end(self, outcome: str) -> None:
        """Take the call out of whatever it waits for, and count it."""
        self.done = True
        self._unwatch()
        if self._transferring:
            self._end_transfer()
        if self._job is not None:
            self._route.decoders.cancel(self._job)  # which releases the body when it has ended
            self._job = None
        elif self._request is not None:
            request, self._request = self._request, None
            cast("Batcher | Explainer", self._batcher).cancel(request)
        elif self._held_bytes:
            self._release()
        self._body = b""
        self._encoding = None
        try:
            self._route.metrics.request_done(self._model, self._route.protocol, outcome)
        except Exception:  # noqa: BLE001 - the transport's edge: the client is answered all the same
            _log.exception("an answer was not counted")
        nvtx.end(self._range)


class PredictCall(ImageCall):
    """A request of `POST /predict`."""

    _wanted: PredictWanted
    _warnings: Sequence[Mapping[str, Any]] = ()
    """Of an answer in JSON, about the images of pictures."""

    def decode(self, body: Body) -> None:
        """As the content type says."""
        self.decoded(self._wanted.decode(cast("bytes", body)))

    def take(self, outcome: Decoded) -> None:
        """As in `ImageCall`, and keep the warnings."""
        if outcome.doubts:
            self._warnings = [
                {"image": index, "code": doubt, "message": WARNINGS[doubt]}
                for index, doubt in outcome.doubts
            ]
        super().take(outcome)

    def content(self, request: Request) -> tuple[bytes, bytes, bytes]:
        """JSON or bytes, as the client prefers."""
        if self._wanted.binary:
            return _BINARY, _as_bytes(request), b""
        body = _as_json(request)
        if self._warnings:
            body = body[:-1] + _json_end(self._warnings)
        return JSON, body, b""

    def steps(self, request: Request) -> Iterator[bytes] | None:
        """The pieces of an answer in JSON."""
        if self._wanted.binary:
            return None
        return _json_steps(request, b"]}]" + _json_end(self._warnings))


@dataclass(slots=True)
class _Encoding:
    """A large answer in JSON that is being made, a step in each turn of the event loop."""

    request: Request
    began_s: float
    steps: Iterator[bytes]
    pieces: list[bytes] = field(default_factory=list)


def prefers(kind: str, accept: str) -> bool:
    """Whether `accept` prefers `kind` to JSON (RFC 9110, 12.5.1); JSON where both are as good."""
    if kind not in (accept := accept.lower()):
        return False
    qualities = {"application/json": -1.0, kind: -1.0}
    ranges: dict[str, float] = {}
    for choice in accept.split(","):
        found_kind, *parameters = (part.strip() for part in choice.split(";"))
        quality = 1.0
        for parameter in parameters:
            if found := re.fullmatch(r"q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)", parameter):
                quality = float(found[1])
        ranges[found_kind] = quality
    for wanted in qualities:
        for matching in (wanted, wanted.partition("/")[0] + "/*", "*/*"):
            if matching in ranges:
                qualities[wanted] = ranges[matching]
                break
    return qualities[kind] > 0 and qualities[kind] > qualities["application/json"]


def _parameters(query: bytes, expected: Sequence[str]) -> dict[str, str]:
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


def _choice(parameters: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """The value of a query parameter, the first choice if there is none. Raises: InvalidInput."""
    found = parameters.get(name, choices[0])
    if found not in choices:
        raise InvalidInput(
            f"query parameter {name} is {found[:40]!r}, expected one of {', '.join(choices)}",
            field=name,
        )
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
def _as_json(request: Request) -> bytes:
    """See `PredictResponse`. The numbers of a batch are written once, for all its requests."""
    batch, start = cast("BatchAnswer", request.batch), request.row
    pieces: list[bytes] | None = batch.encoded.get("json")
    if pieces is None:
        names = request.version.weights.training.labels
        pieces = batch.encoded["json"] = _json_pieces(batch.probabilities, names)
    own = pieces[_A_ROW * start : _A_ROW * (start + request.rows)]
    # No row comes before: its end makes way for the head.
    own[0] = _json_head(request.version.name, request.version.version) + own[0][len(b"]},") :]
    own.append(b"]}]}")
    return b"".join(own)


def _json_steps(request: Request, end: bytes) -> Iterator[bytes]:
    """As `_as_json`, in pieces of `ENCODED_ROWS` rows; `end` follows the last number."""
    batch, version = cast("BatchAnswer", request.batch), request.version
    names = version.weights.training.labels
    for first in range(0, request.rows, ENCODED_ROWS):
        last = min(first + ENCODED_ROWS, request.rows)
        rows = batch.probabilities[request.row + first : request.row + last]
        pieces = _json_pieces(rows, names)
        if not first:
            pieces[0] = _json_head(version.name, version.version) + pieces[0][len(b"]},") :]
        if last == request.rows:
            pieces.append(end)
        yield b"".join(pieces)


def _json_end(warnings: Sequence[Mapping[str, Any]]) -> bytes:
    """The end of an answer, behind its predictions."""
    return b',"warnings":%s}' % orjson.dumps(warnings) if warnings else b"}"


_A_ROW = 4
"""Pieces of one row."""


def _json_pieces(probabilities: Probabilities, names: tuple[str, ...]) -> list[bytes]:
    """`_A_ROW` pieces of JSON for each row, by a few calls for all of them.

    The first piece of a row begins with the end of the row before.
    """
    count = len(probabilities)
    numpy = orjson.OPT_SERIALIZE_NUMPY
    labels = probabilities.argmax(axis=1)
    largest = probabilities[np.arange(count), labels]
    beginnings = _json_beginnings(names)
    pieces = [b',"probabilities":['] * (_A_ROW * count)
    pieces[0::_A_ROW] = [beginnings[label] for label in labels.tolist()]
    pieces[1::_A_ROW] = orjson.dumps(largest, option=numpy)[1:-1].split(b",")
    pieces[3::_A_ROW] = orjson.dumps(probabilities, option=numpy)[2:-2].split(b"],[")
    return pieces


@lru_cache(maxsize=64)
def _json_beginnings(names: tuple[str, ...]) -> list[bytes]:
    """The first piece of a row, by its label."""
    return [
        b']},{"label":%d,%s"confidence":'
        % (label, b"" if name == str(label) else b'"name":%s,' % orjson.dumps(name))
        for label, name in enumerate(names)
    ]


@lru_cache(maxsize=64)
def _json_head(model: str, version: str) -> bytes:
    return orjson.dumps({"model": model, "version": version, "predictions": []})[:-2]


@span("encode")
def _as_bytes(request: Request) -> bytes:
    """float32, little-endian, one for each class."""
    batch, start = cast("BatchAnswer", request.batch), request.row
    content: bytes | None = batch.encoded.get("bytes")
    if content is None:
        content = batch.encoded["bytes"] = batch.probabilities.astype("<f4", copy=False).tobytes()
    size = len(content) // len(batch.probabilities)
    return content[start * size : (start + request.rows) * size]


def _timing(
    version: str,
    batch_rows: int,
    decode: float,
    queue: float,
    compute: float,
    encode: float,
    total: float,
) -> bytes:
    """Server-Timing (W3C), milliseconds by stage and the rows of the batch, and X-Model-Version.

    Times are in seconds.
    """
    return (
        b"server-timing: decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, encode;dur=%.3f, "
        b'total;dur=%.3f, batch;desc="%d"\r\nx-model-version: %s\r\n'
    ) % (
        1e3 * decode,
        1e3 * queue,
        1e3 * compute,
        1e3 * encode,
        1e3 * total,
        batch_rows,
        version.encode(),
    )
