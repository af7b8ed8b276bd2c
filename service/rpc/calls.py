"""The open calls of a gRPC server: admission, the arrival of messages, statuses, the stop.

grpc.aio receives the message of a unary call before it calls the handler, so that nobody can refuse
it. Here every method is registered as one with a stream of requests, and its handler reads the only
message itself. On the wire there is no difference.

gRPC announces no message's size. Until its handler reads, a call holds at most the first 64 KiB of
its message; then all of it. So `_AT_ONCE` calls read at a time, and more when a tick of 20 ms shows
that the memory of the process hardly grew. A message that is not there after some ticks is slow.
Slow messages may go on while there is room for them: a few because they may be the largest, more as
long as the process has not grown by what the budget has left. Growth by what the budget holds, such
as bodies over HTTP, keeps no message from beginning.

Messages of other methods than ModelInfer are small, and wait for no others. One that is slow while
the process has grown is ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import grpc

from service import allocator
from service.access_log import AccessLog
from service.budget import Budget
from service.errors import (
    BodyTimeout,
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    InferenceFailed,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnsupportedMediaType,
    stopping,
)
from service.ids import Ids
from service.keys import Keys

_log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

Access: TypeAlias = Literal["public", "user", "admin"]
"""Who may make a call: anybody, whoever has a key where there are keys, or an administrator."""

MAX_CALLS = 1024
"""Open calls; one more is refused, unless it can take the place of one with a slow message."""

SPARE_CALLS = 64
"""Open calls besides, for methods other than ModelInfer: probes are answered under overload."""

Stream: TypeAlias = Literal["inference", "reflection", "health"]

MAX_STREAMS = 64
"""Calls that last, of each kind; they are among the others."""

_INFERENCE_STREAMS = 8
"""Streams for inference that are always possible, at most `MAX_STREAMS`. Each may bring the largest
message at any time, which is counted when it has arrived, so that more are only possible if the
budget has room for one of each."""

_IDLE_STREAM_S = 10.0
"""A stream for inference that has nothing to compute makes room for another if its client has sent
no whole message and read none for so long: gRPC shows no progress within one."""

MESSAGE_S = 10.0
"""A message that takes longer ends its call, however much time the call has."""

COUNTED_BYTES = 4096
"""Larger messages are held in the budget. Of smaller ones `MAX_CALLS` have 4 MiB."""

_COUNTED_ANSWER_BYTES = 64 * 1024
"""Larger answers are counted in the budget until they are sent: 1,365 images as bytes."""

_AT_ONCE = 8
"""Messages that begin to be received in a tick. One that is there already, or follows within the
tick, makes room for the next."""

_GROWN_BYTES = 8 * 1024 * 1024
"""If the process has grown by more, messages that take long keep others from beginning."""

_HELD_UP_TICKS = 25
"""The longest that growth keeps messages from beginning: half a second. Then it counts no more."""

_CALL_BYTES = 32 * 1024
"""Of an open call without its message, with a margin: 1,080 silent ones took 22 MB."""

_CANCEL_S = 1e-3
"""In which grpc cancels the task of a call whose client left, after the end of its messages."""

_TICK_S = 0.02
_SLOW_TICKS = 3
"""Ticks rather than a time: while the event loop is blocked, nothing can be said of messages."""

_TRIMMED_BYTES = 1024 * 1024
_TRIM_TICKS = (25, 100)
"""After more bytes than these in large messages, memory is returned once none came for half a
second: of one message of 12.8 MB glibc keeps up to 50 MB, in the heaps of several threads. And
again after 2 s, because gRPC's threads free what the clients of ended calls still sent."""

_STATM = Path("/proc/self/statm")

_CODES: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    TooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthorized: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    UnsupportedMediaType: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    BodyTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    InferenceFailed: grpc.StatusCode.INTERNAL,
}
_MAX_DETAILS_CHARACTERS = 500
"""Clients drop trailing metadata over 8 KiB, and each character may take 12 bytes of it."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends without an answer."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...]


LEFT = Status(grpc.StatusCode.CANCELLED, "", ())
"""Of a call that its client ended, for the log."""


def status_of(error: BaseException) -> Status:
    """The status for `error`, which is logged and hidden if it is unexpected.

    Trailing metadata: `lenet-error-code`, `lenet-error-field` if a field is wrong, and
    `grpc-retry-pushback-ms` (gRFC A6, used by clients with a retry policy) if a retry may succeed.

    The frames of `error` are dropped. They refer to the message, and may refer to the error itself:
    such a cycle keeps a message of 32 MB in memory until a full collection.
    """
    if not isinstance(error, ServiceError):
        _log.error("a gRPC call failed", exc_info=error)
        found = ServiceError("internal error; see the server log")
    else:
        found = error
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    metadata = [("lenet-error-code", found.code)]
    if found.field:
        field = found.field.encode("ascii", "backslashreplace").decode()  # it may quote the client
        metadata.append(("lenet-error-field", field))
    if found.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(1000 * found.retry_after_s)))
    details = found.message
    if len(details) > _MAX_DETAILS_CHARACTERS:
        details = f"{details[: _MAX_DETAILS_CHARACTERS - 3]}..."
    code = _CODES.get(type(found), grpc.StatusCode.INTERNAL)
    return Status(code, details, tuple(metadata))


async def abort(context: Context, status: Status) -> bytes:
    """End the call with `status`. The handler has to return what this returns.

    grpc then ends the handler's task with the exception that it keeps for this call. To be called
    outside of `except`, and without a local variable that refers to the message.
    """
    try:
        await context.abort(status.code, status.details, status.metadata)
    except grpc.aio.AbortError as exc:
        exc.__traceback__ = None  # its frames refer to the call, which refers to it
    except (grpc.aio.InternalError, grpc.aio.UsageError):
        pass  # the client has left, or the server ended the call at the same time
    return b""


class OpenCall:
    """One call, from its admission until its answer is ready."""

    # Initial values, all immutable; setting each of them in every instance would take time.
    held_bytes = 0
    beginning = False
    """Whether it is one of `_AT_ONCE`."""
    moved_s = 0.0
    """Of a stream for inference: when its client last sent or read, in `time.monotonic()`."""
    waits = False
    """Whether its next message may come at any time."""
    computing = False
    """Whether the next answer of a stream for inference is not there yet."""
    small = False
    """Whether its message is small, as those of all methods but ModelInfer."""
    stream: Stream | None = None
    """The kind of a call that lasts until someone ends it, at the latest a stop."""
    ended: ServiceError | None = None
    """Why the server ended it early, if it did."""

    def __init__(
        self, context: Context, task: asyncio.Task[Any], began_s: float, timeout_s: float
    ) -> None:
        self.context, self.task = context, task
        self._began_s, self._timeout_s = began_s, timeout_s

    def begin_again(self) -> None:
        """The time for its next message, of a stream, begins."""
        self._began_s = time.monotonic()

    @property
    def due_s(self) -> float:
        """When its message has to be there, in `time.monotonic()`."""
        return self._began_s + min(self._timeout_s, MESSAGE_S)


class Calls:
    """The open calls of one server. Belongs to the running event loop."""

    def __init__(
        self,
        budget: Budget,
        max_message_bytes: int,
        keys: Keys | None = None,
        access: AccessLog | None = None,
    ) -> None:
        self.access = access
        self._budget = budget
        self._keys = Keys() if keys is None else keys
        self.max_message_bytes = max_message_bytes
        """Of a request for inference."""
        self._loop = asyncio.get_running_loop()
        self._open: set[OpenCall] = set()
        self._receiving: dict[OpenCall, int] = {}
        """Calls whose message is awaited, oldest first, with the tick at which that began."""
        self._beginning = 0
        self._lines: dict[str, dict[OpenCall, asyncio.Future[None]]] = {}
        """Calls that are not read yet, by connection. Connections take turns."""
        self._ticks = 0
        self._ticking = False
        self._resident_bytes = resident_bytes()
        """Of the process when no message was slow: the baseline of its growth."""
        self._baseline_held_bytes = budget.held_bytes
        self._accepted_bytes = 0
        """Growth since the baseline that keeps no message from beginning any more."""
        self._held_up_ticks = 0
        self._held_bytes = 0
        self._quiet_ticks = 0
        self._large_bytes = 0
        """Of messages that arrived or were given up since memory was returned."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._admitted = 0
        self._goaway: asyncio.Event | None = None
        """None until the stop begins; set once GOAWAY has been sent to every client."""

    def open(
        self,
        context: Context,
        began_s: float,
        timeout_s: float,
        *,
        spare: int = 0,
        access: Access = "user",
    ) -> OpenCall:
        """Admit the call of `context`, to be closed by `close`.

        It began at `began_s` of `time.monotonic()` and has `timeout_s` from then on.

        Raises:
            Unauthorized, Forbidden: no right key came with it.
            Overloaded: `MAX_CALLS` and `spare` are open.
        """
        self._check_key(context, access)
        self._admitted += 1
        if len(self._open) >= MAX_CALLS + spare and not self._end_oldest_slow():
            raise Overloaded(f"{len(self._open)} calls are open; try again later", retry_after_s=1)
        task = asyncio.current_task()
        assert task is not None, "bug: outside a task"
        call = OpenCall(context, task, began_s, timeout_s)
        self._open.add(call)
        return call

    def _check_key(self, context: Context, access: Access) -> None:
        if (self._keys and access == "user") or access == "admin":
            metadata = context.invocation_metadata() or ()
            given = next((value for name, value in metadata if name == "authorization"), None)
            text = given if given is None or isinstance(given, str) else ""  # bytes: not this one
            if (error := self._keys.check(text, admin=access == "admin")) is not None:
                raise error

    def open_stream(self, context: Context, kind: Stream) -> OpenCall:
        """As `open`, for a call that lasts.

        Each of its messages has `MESSAGE_S`, but those for inference may come at any time.

        Raises:
            Overloaded: as many of its kind are open as may be.
        """
        access: Access = "public" if kind == "health" else "user"
        self._check_key(context, access)  # before others make room
        most = MAX_STREAMS
        if kind == "inference":
            large = self._budget.limit_bytes(self.max_message_bytes)
            most = min(most, max(_INFERENCE_STREAMS, large // self.max_message_bytes))
        streams = sum(call.stream == kind for call in self._open)
        if streams >= most and not (kind == "inference" and self._end_longest_idle()):
            raise Overloaded(f"{streams} streams are open; try again later", retry_after_s=1)
        now_s = time.monotonic()
        call = self.open(context, now_s, math.inf, spare=SPARE_CALLS, access=access)
        call.stream, call.moved_s = kind, now_s
        return call

    def close(self, call: OpenCall) -> None:
        """The call has its answer, or has failed."""
        self._open.discard(call)
        if call.held_bytes:
            self.release(call)

    async def receive_next(self, call: OpenCall) -> bytes | None:
        """The next message of a stream, as `receive`; None if the client sends no more."""
        call.begin_again()
        if call.stream != "inference":
            return await self._receive(call, small=True)
        if self._goaway is not None and self._goaway.is_set():
            raise stopping()
        call.waits = True
        try:
            message = await self._read(call)  # until a stop, or a stream that needs the place
        finally:
            call.waits, call.moved_s = False, time.monotonic()
        if message is None and self.access is not None:
            # A stream that was cancelled ends here, too, and was logged as OK in one of ten cases.
            await asyncio.sleep(_CANCEL_S)
        return message

    async def receive(self, call: OpenCall, *, small: bool = False) -> bytes:
        """The message of `call`. `release` it once it is decoded. A `small` one waits in no line.

        Raises:
            Overloaded: there is no room for it.
            BodyTimeout: it did not arrive in time.
            Unavailable: the server stops.
            InvalidInput: the client sent none.
        """
        message = await self._receive(call, small)
        if message is None:
            # A call that was cancelled, or whose message is too large, ends here, too: grpc cancels
            # this task in one of the next turns.
            await asyncio.sleep(_TICK_S)
            raise InvalidInput("message: got none, expected a request", field="message")
        return message

    async def _receive(self, call: OpenCall, small: bool) -> bytes | None:
        if self._goaway is not None:
            await self._goaway.wait()
            raise stopping()
        try:
            if small:
                call.small = True
            elif self._beginning < _AT_ONCE:
                self._beginning += 1
                call.beginning = True
            else:
                await self._wait_in_line(call)
            self._receiving[call] = self._ticks
            if not self._ticking:
                self._start_ticking()
            return await self._read(call)
        finally:
            self._receiving.pop(call, None)
            if call.beginning:
                call.beginning = False
                self._beginning -= 1
                if self._lines:
                    self._begin_next()

    async def _read(self, call: OpenCall) -> bytes | None:
        """The next message, held in the budget; None if there is none."""
        try:
            message = await call.context.read()
        except grpc.aio.AbortError as exc:
            exc.__traceback__ = None  # its frames refer to the call, which refers to it
            message = None
        if call.ended is not None:
            raise call.ended
        if not isinstance(message, bytes):
            return None
        size = len(message)
        if size > COUNTED_BYTES:
            self._large_bytes += size
            if not self._ticking:  # of a stream: memory is returned later
                self._start_ticking()
            self._budget.hold(size, size)
            call.held_bytes = size
            self._held_bytes += size
        return message

    def release(self, call: OpenCall) -> None:
        """The message of `call` is decoded."""
        self._budget.release(call.held_bytes)
        self._held_bytes -= call.held_bytes
        call.held_bytes = 0

    def may_return(self, answer: bytes) -> bool:
        """Whether a handler may return `answer` without `answered`: the frequent case."""
        return len(answer) <= _COUNTED_ANSWER_BYTES and self._goaway is None

    async def answered(self, context: Context, answer: bytes | Status) -> bytes:
        """What the handler of a call has to return for `answer`."""
        if self._goaway is not None:
            await self._goaway.wait()
        if isinstance(answer, Status):
            return await abort(context, answer)
        size = len(answer)
        if size > _COUNTED_ANSWER_BYTES:
            self._budget.add(size)
            task = asyncio.current_task()
            assert task is not None, "bug: outside a task"
            task.add_done_callback(lambda _: self._budget.release(size))  # it is sent
        return answer

    def log(self, context: Context, method: str, answer: bytes | Status, began_s: float) -> None:
        """Add an answer to the access log, if there is one; and a failure of ours with its ids."""
        failed = isinstance(answer, Status) and answer.code is grpc.StatusCode.INTERNAL
        if self.access is None and not failed:
            return
        metadata = context.invocation_metadata() or ()
        ids = Ids.read({name: text for name, text in metadata if isinstance(text, str)})
        status, size = ("OK", len(answer)) if isinstance(answer, bytes) else (answer.code.name, 0)
        if failed and ids:
            _log.error("%s was answered with %s: %s", method, status, ids)
        if self.access is not None:
            seconds = time.monotonic() - began_s
            self.access.add("grpc", context.peer(), method, status, size, seconds, ids)

    async def settle(self, timeout_s: float) -> None:
        """Answer no call from now on, and wait until no more arrive, at most `timeout_s`.

        grpc cancels calls that arrive between the beginning of its shutdown and the moment at which
        the client reads of it. A client that waits for answers sends none meanwhile.
        """
        self._goaway = asyncio.Event()
        until_s = self._loop.time() + timeout_s
        unchanged, admitted = 0, self._admitted
        while unchanged < _SLOW_TICKS and self._loop.time() < until_s:
            await asyncio.sleep(min(_TICK_S, timeout_s / 4))
            unchanged = unchanged + 1 if self._admitted == admitted else 0
            admitted = self._admitted

    def go_on(self) -> None:
        """Answer the calls that are open: GOAWAY has been sent, and clients open no more.

        Slow messages are awaited no longer, and calls that came since `settle` are unavailable.
        """
        assert self._goaway is not None, "bug: not settled"
        self._goaway.set()
        self._tick_now()

    def end_all(self) -> None:
        """End the calls that are still open as unavailable."""
        for call in tuple(self._open):
            self._end(call, stopping())

    def _end(self, call: OpenCall, error: ServiceError) -> None:
        """End a call from outside of its task."""
        if call.ended is not None:
            return
        call.ended = error
        self._open.discard(call)
        if call in self._receiving or (call.waits and self._goaway is None):
            # Not by cancelling the task: grpc would never free a message that arrives just then.
            self._receiving.pop(call, None)
            task = self._loop.create_task(abort(call.context, status_of(error)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            call.task.cancel()

    async def _wait_in_line(self, call: OpenCall) -> None:
        connection = call.context.peer()
        line = self._lines.setdefault(connection, {})
        line[call] = turn = self._loop.create_future()
        if not self._ticking:
            self._start_ticking()
        try:
            await turn
        finally:
            if line.pop(call, None) is not None and not line:
                self._lines.pop(connection, None)

    def _begin_next(self) -> None:
        while self._lines and self._beginning < _AT_ONCE:
            connection, line = next(iter(self._lines.items()))
            del self._lines[connection]
            call, turn = next(iter(line.items()))
            del line[call]
            if line:
                self._lines[connection] = line  # as the last
            if not turn.done():
                self._beginning += 1
                call.beginning = True
                turn.set_result(None)

    def _let_others_begin(self) -> None:
        """Messages that take longer than a tick do not keep others from beginning."""
        for call, began in self._receiving.items():
            if began < self._ticks and call.beginning:
                call.beginning = False
                self._beginning -= 1
        self._begin_next()

    def _slow(self) -> list[OpenCall]:
        """Calls with a slow message, oldest first."""
        last = self._ticks - _SLOW_TICKS
        return [
            call for call, _ in itertools.takewhile(lambda i: i[1] <= last, self._receiving.items())
        ]

    def _end_oldest_slow(self) -> bool:
        """Make room for a call; whether that was possible."""
        oldest = next(iter(self._receiving.items()), None)
        if oldest is None or oldest[1] > self._ticks - _SLOW_TICKS:
            return False
        self._end(oldest[0], _slow_overloaded())
        return True

    def _end_longest_idle(self) -> bool:
        """Make room for a stream; whether that was possible."""
        streams = [call for call in self._open if call.stream == "inference" and not call.computing]
        longest = min(streams, key=lambda call: call.moved_s, default=None)
        if longest is None or time.monotonic() - longest.moved_s < _IDLE_STREAM_S:
            return False
        self._end(longest, Overloaded("another stream needs the place of this, which is idle"))
        return True

    def _start_ticking(self) -> None:
        self._ticking = True
        self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        self._tick_now()
        self._ticking = bool(self._receiving or self._lines) or self._large_bytes > 0
        if self._ticking:
            self._loop.call_later(_TICK_S, self._tick)

    def _tick_now(self) -> None:
        if self._goaway is not None and self._goaway.is_set():
            waiting = [call for line in self._lines.values() for call in line]
            # The others have a request of which they learn that it is the last.
            streams = [
                call
                for call in self._open
                if call.stream is not None and (call.waits or call.stream != "inference")
            ]
            for call in (*self._slow(), *waiting, *streams):
                self._end(call, stopping())
            return
        resident = resident_bytes()
        grown = resident - self._resident_bytes - _CALL_BYTES * len(self._open)
        began = next(iter(self._receiving.values()), self._ticks)
        quick = began >= self._ticks - 1
        if resident < self._resident_bytes or (quick and not self._lines and not self._large_bytes):
            self._resident_bytes, self._baseline_held_bytes = resident, self._budget.held_bytes
            grown = self._accepted_bytes = 0
        if self._large_bytes and not self._receiving and not self._held_bytes:
            self._quiet_ticks += 1
            if self._quiet_ticks in _TRIM_TICKS:
                self._return_memory()
        else:
            self._quiet_ticks = 0
        if not quick:
            self._end_slow(grown)
        if self._lines:
            self._let_some_begin(grown)

    def _uncounted(self, grown: int) -> int:
        """The part of a growth that is not in the budget, perhaps of messages that arrive."""
        return grown - max(0, self._budget.held_bytes - self._baseline_held_bytes)

    def _let_some_begin(self, grown: int) -> None:
        """Let others begin unless messages that take long made the process grow."""
        uncounted = self._uncounted(grown)
        if uncounted - self._accepted_bytes < _GROWN_BYTES:
            self._held_up_ticks = 0
            self._let_others_begin()
            return
        self._held_up_ticks += 1
        if self._held_up_ticks >= _HELD_UP_TICKS and grown < self._room_bytes():
            self._held_up_ticks, self._accepted_bytes = 0, uncounted

    def _room_bytes(self) -> int:
        """How far the process may grow from the baseline, which holds a part of the budget."""
        limit = self._budget.limit_bytes(self.max_message_bytes)
        return limit - self._baseline_held_bytes

    def _end_slow(self, grown: int) -> None:
        """End slow calls that are late, or that the process has no room for."""
        now_s = time.monotonic()
        for call in self._slow():
            if call.due_s <= now_s:
                self._end(call, BodyTimeout("message: it did not arrive in time", field="message"))
            elif call.small and self._uncounted(grown) >= _GROWN_BYTES:
                self._end(call, _slow_overloaded())
        limit = self._budget.limit_bytes(self.max_message_bytes)
        slow = self._slow()
        excess = len(slow) - max(1, limit // self.max_message_bytes)
        # The growth holds what the budget got since the baseline: bodies over HTTP, too.
        if excess > 0 and grown > self._room_bytes():
            # The newest half: what the others hold is not known before the next tick.
            for call in slow[-((excess + 1) // 2) :]:
                self._end(call, _slow_overloaded())
            self._large_bytes += self.max_message_bytes

    def _return_memory(self) -> None:
        """Return memory that large messages took, once a burst of them is over."""
        if self._large_bytes > _TRIMMED_BYTES:
            self._loop.run_in_executor(None, allocator.return_memory)
        if self._quiet_ticks >= _TRIM_TICKS[-1]:
            self._large_bytes = self._quiet_ticks = 0


def resident_bytes() -> int:
    """The resident memory of this process; where it cannot be read, the most that it ever was."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:  # macOS, whose unit is a byte
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _slow_overloaded() -> Overloaded:
    return Overloaded(
        "message: it arrives slowly, while others need the room; try again later",
        field="message",
        retry_after_s=1,
    )
