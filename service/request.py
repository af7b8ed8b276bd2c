r"""The life of a prediction, whatever it came by: HTTP or gRPC, alone or in a stream.

Deadline, memory, model, metrics, cancellation and errors are decided here, once for all. A request
goes through these states, by plain calls without a task or a future; in each of them the deadline
or `cancel` may end it.

    arriving --complete()--> decoding --> queued --> computed --> written
       \ refused: too large, no room   \ (what takes few milliseconds is decoded at once)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lenet import nvtx
from lenet.nvtx import span
from lenet.pixels import Images
from service.decode.pool import Decoders, Job
from service.engine.batcher import Batcher
from service.engine.deadlines import Deadlines
from service.engine.models import Models
from service.engine.queue import Work
from service.errors import (
    BodyTimeout,
    Cancelled,
    DeadlineExceeded,
    ServiceError,
    TooLarge,
    UnknownModel,
    invalid,
)
from service.forms.form import NOTHING, Asked, Body, Content, Decoded, Form
from service.forms.reader import Limits
from service.observe.metrics import NO_MODEL, Metrics, ModelKey, Transport
from service.observe.traces import Ended, Operation, Parent, Traces, batch_attributes
from wire.budget import SMALL_BYTES, Budget
from wire.errors import INTERNAL, Refusal

_log = logging.getLogger(__name__)

_GROWN_BYTES = 1024 * 1024
"""A larger body of unknown length gets memory for the longest, which is taken as it is written to.
"""

_DROPPED_BYTES = 64 * 1024
"""Bodies of unknown models up to this size are received and dropped, so that the connection can be
kept. A larger one is refused at the headers."""


TimesS: TypeAlias = tuple[float, float, float, float, float]
"""Seconds of decoding, in the queue, computing and encoding, and in all."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Shared by all requests of a protocol."""

    models: Models
    metrics: Metrics
    limits: Limits
    max_body_bytes: int
    budget: Budget
    decoders: Decoders
    watched: dict[Request, None]
    """Requests that wait for their clients, a decoder or a turn, until the deadline."""
    deadlines: Deadlines[Request]
    """Fails the requests in `watched` whose deadline has passed."""
    timeout_s: float
    """The longest that a request may take."""
    count: Callable[[Transport, ModelKey, TimesS], None]
    """Counts an answer."""
    protocol: Transport = "http"
    """The label in metrics."""
    traces: Traces | None = None

    def too_large(self, part: str, found: str) -> TooLarge:
        """The error for a body of more than `max_body_bytes`."""
        return TooLarge(
            f"{part}: got {found}, expected at most {self.max_body_bytes} bytes; "
            "send fewer images at a time",
            field=part,
        )

    def refused(self, error: Refusal) -> None:
        """Count a request that its head has ended."""
        self.metrics.request_done(NO_MODEL, self.protocol, error.code)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options read from the head of a request. Equal heads share one."""

    form: Form
    timeout_s: float
    operation: Operation
    """What is asked for, in traces."""
    parent: Parent | None = None
    """The caller's span."""
    length: int | None = None
    """Bytes of the body, if that is known."""
    model: str = ""
    version: str = ""
    asks_first: bool = False
    """Whether the client waits for `100 Continue` before it sends the body."""
    refused: Callable[[Refusal], Any] = str
    """An error in the form of the path, over HTTP."""


class Request(Work):
    """One prediction, from the head of its request to its answer.

    A subclass says how it is answered: by `reply` or `reply_error`, one of which is called once,
    unless the request is cancelled. `to` is what they answer.
    """

    __slots__ = (
        *("_body", "_decode_s", "_decoding_began_s", "_form", "_held_bytes", "_job", "_length"),
        *("_model", "_range", "_requests", "_served", "_started_s"),
        *("_to", "_transferring", "_wanted", "asked", "done", "moved_bytes"),
    )

    is_prediction = True
    """Whether its time is one of a prediction, in metrics."""

    def __init__(self, requests: Requests, wanted: Wanted, to: Any) -> None:
        self._requests, self._wanted, self._to = requests, wanted, to
        self._form = wanted.form
        self._length = wanted.length
        self._started_s = started_s = time.monotonic()
        self.deadline_s = started_s + wanted.timeout_s
        self._range: Any = nvtx.begin("request") if nvtx.active else None
        self.done = self.waits = False
        self.asked = NOTHING
        """Options in the body, once it is decoded."""
        self.moved_bytes = self._held_bytes = 0
        """`moved_bytes`: received bytes of the body."""
        self._transferring = False
        self._body: Body = b""
        self._job: Job | None = None
        self._decoding_began_s = 0.0
        self._model = NO_MODEL
        self._served: Batcher | None = None

    def reply(self, content: Content, rest: list[bytes], times_s: TimesS) -> None:
        """Answer with `content`; if `rest` is not empty, its pieces are the body."""
        raise NotImplementedError

    def reply_error(self, error: Refusal) -> None:
        """Answer with `error`."""
        raise NotImplementedError

    def announce(self, size: int | None) -> None:
        """The body has `size` bytes, or so many as come."""
        self._length = size
        if size is not None and size > self._requests.max_body_bytes:
            self.fail(self._requests.too_large(self._form.part, f"{size} bytes"))

    def data(self, data: bytes) -> None:
        """The next piece of the body.

        Raises:
            TooLarge: it is longer than allowed.
            InvalidInput: it is longer than announced.
            Overloaded: all bodies together are.
        """
        self.moved_bytes += len(data)
        most = self._requests.max_body_bytes if self._length is None else self._length
        if self.moved_bytes > most:
            part = self._form.part
            if self._length is None:
                raise self._requests.too_large(part, "more")
            raise invalid(part, "more", f"{most} bytes, the announced length")
        if self.done:
            return
        body = self._body
        if type(body) is memoryview:
            body[self.moved_bytes - len(data) : self.moved_bytes] = data
        elif not body:
            self._body = data
        elif self.moved_bytes > (_GROWN_BYTES if self._length is None else SMALL_BYTES):
            # Allocated once; a growing bytearray would be copied repeatedly.
            self._body = room = self.room() or np.empty(most, np.uint8).data
            room[: len(body)] = body
            room[len(body) : self.moved_bytes] = data
        else:
            if type(body) is bytes:
                self._body = body = bytearray(body)
            body += data
        if self in self._requests.watched:
            self._hold_arrived()

    def room(self) -> memoryview | None:
        """Memory for a body of announced length. It is taken as it is written to."""
        length = self._length
        if self.done or length is None:
            return None
        room = self._requests.models.room(length) if self._form.in_place else None
        self._body = room = room or np.empty(length, np.uint8).data
        return room

    def arrived(self, size: int) -> None:
        """`size` bytes were written to the memory of `room`."""
        if not self.done:
            self.moved_bytes += size
            if self in self._requests.watched:
                self._hold_arrived()

    def wait_for_body(self) -> None:
        """The body has not arrived whole: from here on its time and memory are limited.

        Raises:
            UnknownModel: nothing would be done with a body that is large, or may become so.
            Overloaded: there is no room for it.
        """
        if not self.done and self not in self._requests.watched:
            if not self._form.names_model:
                try:
                    self._find()
                except UnknownModel:
                    is_small = self._length is not None and self._length <= _DROPPED_BYTES
                    if self._wanted.asks_first or not is_small:
                        raise
            self._watch()
            self._hold_arrived()

    def complete(self, body: Body | None = None) -> None:
        """The body is complete: decode it and queue its images.

        `body` is all of it, if `data` was not called.
        """
        if self.done:
            return
        self._decoding_began_s = time.monotonic()
        if self._transferring:
            self._end_transfer()
        try:
            if body is None:
                body, self._body = self._body, b""
                if type(body) is memoryview:
                    body = body[: self.moved_bytes]
            else:
                self.moved_bytes = len(body)
            if self._served is None and not self._form.names_model:
                # Before its body: of two mistakes the unknown model is the one to know first.
                self._find()
            decoded = self._form.decode_now(body)
            if decoded is not None:
                if self._held_bytes:
                    self._release()
                self._decoded(decoded)
            else:
                self._hold()
                if self.done:  # evicted, to make room for itself
                    return
                self._watch()
                decoders = self._requests.decoders
                self._job = decoders.start(self._form, body, self._on_decoded, self._release)
        except Refusal as exc:
            self._refuse(exc)
        except Exception:  # noqa: BLE001 - the edge of a request: its client gets it
            self._crash()

    def fail(self, error: Refusal) -> None:
        """Answer with `error`, if nothing is answered yet."""
        if not self.done:
            self._close(error.code)
            self.reply_error(error)

    def cancel(self) -> None:
        """The client is gone."""
        if not self.done:
            self._close(Cancelled.code)

    def _find(self) -> Batcher:
        """The model that the body names, or else the head. Raises: UnknownModel."""
        asked, wanted = self.asked, self._wanted
        model, version = asked.model or wanted.model, asked.version or wanted.version
        self._served = served = self._requests.models.get(model, version)
        self._model = served.version.key  # whose failures are counted from here on
        return served

    def compute(self, images: Images) -> None:
        """Queue `images`, which has `answered` called. Raises: ServiceError."""
        batcher = self._served
        if batcher is None or self.asked is not NOTHING or batcher.closed:
            batcher = self._find()
        batcher.enqueue(self, images)
        self._model = self.version.key

    def withdraw(self) -> None:
        """Nobody waits for the answer any more: take the images out of the queue."""
        if self.waits:
            assert self._served is not None, "bug: queued nowhere"
            self._served.cancel(self)

    # From the decoded body to the answer.

    def _on_decoded(self, outcome: Decoded | ServiceError) -> None:
        """Go on with what a decoding process sent."""
        self._job = None
        if isinstance(outcome, ServiceError):
            self._refuse(outcome)
            return
        try:
            self._decoded(outcome)
        except ServiceError as exc:
            self.fail(exc)
        except Exception:  # noqa: BLE001 - the edge of a request: its client gets it
            self._crash()

    def _refuse(self, error: Refusal) -> None:
        """End a request whose body cannot be decoded."""
        asked: Asked | None = error.asked if isinstance(error, ServiceError) else None
        if asked is not None and not self.done:
            self.asked = asked
            try:
                self._find()
            except UnknownModel as exc:  # of two mistakes the one to know first
                error = exc
        self.fail(error)

    def _decoded(self, decoded: Decoded) -> None:
        """Queue the images. Raises: ServiceError."""
        self._requests.watched.pop(self, None)
        self.asked = asked = decoded.asked
        if asked.timeout_us:
            self.deadline_s = min(self.deadline_s, self._started_s + asked.timeout_us / 1e6)
        self.compute(decoded.images)
        self._decode_s = self.arrived_s - self._decoding_began_s

    def answered(self, error: ServiceError | None) -> None:
        """The images were computed, or failed with `error`."""
        if error is not None:
            self.fail(self._late() if isinstance(error, DeadlineExceeded) else error)
            return
        began_s = time.monotonic()
        try:
            content = self._form.write(self.asked, self)
            if content.steps is None:
                self._end_written(content, began_s, [])
            else:
                self._watch()
                self._write_on(content, content.steps, began_s, [])
        except Exception:  # noqa: BLE001 - the edge of a request: its client gets it
            self._crash()

    def _write_on(
        self, content: Content, steps: Iterator[bytes], began_s: float, pieces: list[bytes]
    ) -> None:
        """Make the next piece of a large answer, and go on in the next turn of the event loop."""
        if self.done:  # ended meanwhile
            return
        try:
            with span("encode"):
                piece = next(steps, None)
            if piece is None:
                self._requests.watched.pop(self, None)
                self._end_written(content, began_s, pieces)
            else:
                pieces.append(piece)
                loop = asyncio.get_running_loop()
                loop.call_soon(self._write_on, content, steps, began_s, pieces)
        except Exception:  # noqa: BLE001 - the edge of a request: its client gets it
            self._crash()

    def _end_written(self, content: Content, began_s: float, rest: list[bytes]) -> None:
        requests, now_s, queue_s = self._requests, time.monotonic(), self.queue_s
        times_s = (
            self._decode_s,
            queue_s,
            self.compute_s,
            now_s - began_s,
            now_s - self._started_s,
        )
        self.done = True
        try:
            self.reply(content, rest, times_s)
        except Exception:
            self.done = False  # `_crash` ends it
            raise
        requests.count(requests.protocol, self._model, times_s)
        if nvtx.active:
            nvtx.end(self._range)
        if requests.traces is not None:
            cut_s = self.arrived_s + queue_s
            steps_s = (
                *(self._decoding_began_s, self.arrived_s),
                *(cut_s, cut_s + self.compute_s, began_s),
            )
            self._trace(requests.traces, "", now_s, steps_s)

    # Deadline, memory, and other ends.

    def _watch(self) -> None:
        self._requests.watched[self] = None
        if self.deadline_s < self._requests.deadlines.look_s:
            self._requests.deadlines.note(self.deadline_s)

    def expire(self) -> None:
        """The deadline has passed."""
        if self._decoding_began_s:
            self.fail(self._late())
            return
        part = self._form.part
        self.fail(
            BodyTimeout(
                f"{part}: got {self.moved_bytes} bytes in {self._wanted.timeout_s:g} s, "
                f"expected the whole {part}",
                field=part,
            )
        )

    def _late(self) -> DeadlineExceeded:
        limit_s = self.deadline_s - self._started_s
        return DeadlineExceeded(f"no answer within {round(limit_s * 1e3, 3):g} ms")

    def _crash(self) -> None:
        _log.exception("a request failed")
        self.fail(Refusal(INTERNAL))

    def evict(self) -> None:
        """The body arrives slowly while memory is short: fail."""
        part = self._form.part
        self.fail(
            BodyTimeout(
                f"{part}: upload too slow while other requests need the memory, got "
                f"{self.moved_bytes} bytes so far; send it faster",
                field=part,
            )
        )

    def _hold(self) -> int:
        """Hold what has arrived. A body that arrives whole is held from its end on.

        Returns: how many bytes the body has, as far as is known.
        """
        whole = self._length or self.moved_bytes
        more = self.moved_bytes - self._held_bytes
        self._requests.budget.hold(more, whole)
        if self.done:  # evicted, to make room for itself
            self._requests.budget.release(more)
        else:
            self._held_bytes += more
        return whole

    def _hold_arrived(self) -> None:
        if self._hold() > SMALL_BYTES and not (self._transferring or self.done):
            self._transferring = True
            self._requests.budget.watch(self)

    def _release(self) -> None:
        self._requests.budget.release(self._held_bytes)
        self._held_bytes = 0

    def _end_transfer(self) -> None:
        self._transferring = False
        self._requests.budget.unwatch(self)

    def _close(self, outcome: str) -> None:
        """Take the call out of whatever it waits for, and count it."""
        self.done = True
        self._requests.watched.pop(self, None)
        if self._served is None and not self._form.names_model:  # not looked up yet
            served = self._requests.models.find(self._wanted.model, self._wanted.version)
            if served is not None:
                self._model = served.version.key
        if self._transferring:
            self._end_transfer()
        if self._job is not None:
            self._requests.decoders.cancel(self._job)  # which releases the body when it has ended
            self._job = None
        elif self._held_bytes:
            self._release()
        self.withdraw()
        self._body = b""
        try:
            self._requests.metrics.request_done(self._model, self._requests.protocol, outcome)
        except Exception:  # noqa: BLE001 - its client is answered all the same
            _log.exception("an answer was not counted")
        if self._requests.traces is not None:
            self._trace(self._requests.traces, outcome, time.monotonic())
        nvtx.end(self._range)

    def _trace(
        self, traces: Traces, code: str, now_s: float, steps_s: tuple[float, ...] = ()
    ) -> None:
        """Trace the request if it is sampled. `code`: of the error, "" for an answer."""
        wanted = self._wanted
        if not traces.wants(wanted.parent, code, now_s - self._started_s):
            return
        try:
            rows = self.rows if steps_s else 0
            batch = self.batch if steps_s else None
            of = self._requests.protocol, wanted.operation, wanted.parent, self._model, rows
            attributes = (
                ()
                if batch is None or batch.result is None
                else batch_attributes(self.batch_rows, batch.reason, batch.result)
            )
            is_prediction = self.is_prediction and not code
            times_s = self._started_s, now_s, steps_s
            traces.note(Ended(*of, code, *times_s, attributes, is_prediction))
        except Exception:  # noqa: BLE001 - its client is answered all the same
            _log.exception("a request was not traced")
