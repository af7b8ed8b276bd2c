"""Processes that decode pictures and large bodies, so that clients' work can be ended.

A thread cannot be ended, holds the interpreter lock, and shares its memory with the service. A
process is asked to end its work, which it looks for between two pictures or slices, and is killed
if it does not within `_CANCEL_S`, and has worked for `_LEAST_RUN_S`. One that dies fails only its
own request.

    start() --> waiting, small or large --> one decoder --> on_done
                   |           ^               |    |
                cancel():      +--- larger than its bytes said
                dropped                     cancel(): asked to end, then killed

Nothing runs until the first picture or large body comes; a decoder that is idle for `_IDLE_S` ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import orjson

from lenet.pixels import HEIGHT, PIXELS, WIDTH
from service.decode.decoding_process import CANCEL, HEAD, READY
from service.errors import (
    InferenceFailed,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
    UnsupportedMediaType,
    stopping,
)
from service.forms.form import Body, Decoded, Form, asked_from
from service.observe.metrics import DecoderEnd, Metrics

_log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 20
"""Maximum bytes of small work, which a decoding process may still find to be large."""

MAX_WAITING, MAX_LARGE_WAITING = 1024, 64
"""Small and large requests that wait for a decoder; further ones are rejected as `Overloaded`."""

MAX_HEADER_BYTES = 1 << 20
"""Limit of a reply's header: an id or an unknown name in a gRPC message may be 64 KiB, six times
that in JSON."""

_CANCEL_S = 0.03
"""Time for a decoder to stop after a cancel: it finishes a small picture or a slice first."""

_LEAST_RUN_S = 0.5
"""Time that work has before its process is killed. The next start takes 0.2 s of CPU time, up to
0.6 s where other programs want the cores: ending less work than that costs more than it saves."""

_START_S = 30.0
"""Time to start, after which a process is killed."""

_RESTART_S = 0.05
"""Pause after a process has died while it started, before the next starts."""

_IDLE_S = 60.0
_REAP_S = 0.02
_CLOSE_S = 0.2
_LOG_S = 10.0
"""At most one line about decoders that failed in so much time: clients may provoke them."""

_ARGUMENTS = ("-P", "-m", "service.decode.decoding_process")
_ERRORS = {error.code: error for error in (InvalidInput, TooLarge, UnsupportedMediaType)}

OnDone: TypeAlias = Callable[[Decoded | ServiceError], None]


class Job:
    """One piece of work: waiting for a decoder, running, or ended."""

    __slots__ = ("body", "decoder", "ended", "form", "is_large", "on_done")

    def __init__(self, form: Form, body: Body, on_done: OnDone, ended: Callable[[], None]) -> None:
        self.form, self.body, self.ended = form, body, ended
        self.is_large = len(body) > SMALL_BYTES
        self.on_done: OnDone | None = on_done
        self.decoder: _Decoder | None = None


class Decoders:
    """A bounded number of decoding processes, shared by all transports of one event loop.

    Small work (a picture up to about a megapixel) never waits for a process that has large work:
    that may use all of them but one. A context manager; on leaving what runs is killed.
    """

    def __init__(self, metrics: Metrics, count: int, memory_bytes: int) -> None:
        """`count` processes at most, two at least, each with so many bytes of memory."""
        assert count >= 2, "bug: large work would take the only decoder"
        self._metrics, self._count, self._memory_bytes = metrics, count, memory_bytes
        self._loop = asyncio.get_running_loop()
        self._small, self._large = dict[Job, None](), dict[Job, None]()
        self._large_running = 0
        self._decoders: set[_Decoder] = set()
        self._idle: list[_Decoder] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._log_from_s = 0.0
        self._unlogged = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._closed = True
        self._fail_waiting(stopping())
        # Twice: on a busy machine a killed process may not end in time.
        for _ in range(2):
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_CLOSE_S)

    def start(
        self,
        form: Form,
        body: Body,
        on_done: OnDone,
        ended: Callable[[], None] = lambda: None,
    ) -> Job:
        """Decode `body`, then call `on_done` with the images and options, or the error.

        `ended` is called once, before that, when the work has ended or been dropped: `body` is kept
        until then. Both are called on the event loop, and never by `start`.

        Raises: Overloaded (too much work waits), Unavailable (closed).
        """
        if self._closed:
            raise stopping()
        job = Job(form, body, on_done, ended)
        self._wait(job)
        self._dispatch()
        return job

    def cancel(self, job: Job) -> None:
        """Do not call `on_done`, and end the work."""
        job.on_done = None
        waiting = self._waiting(job)
        if job in waiting:
            del waiting[job]
            job.ended()
        elif job.decoder is not None:
            job.decoder.cancel()

    def _waiting(self, job: Job) -> dict[Job, None]:
        return self._large if job.is_large else self._small

    def _wait(self, job: Job) -> None:
        """Raises: Overloaded."""
        most = MAX_LARGE_WAITING if job.is_large else MAX_WAITING
        if len(self._waiting(job)) >= most:
            kind = "large requests" if job.is_large else "requests"
            message = f"{most} {kind} wait to be decoded; try again later"
            raise Overloaded(message, retry_after_s=1)
        self._waiting(job)[job] = None

    def _large_may_run(self) -> int:
        return min(len(self._large), self._count - 1 - self._large_running)

    def _dispatch(self) -> None:
        """Wake and start as many decoders as have work."""
        work = len(self._small) + self._large_may_run()
        for decoder in self._idle[-work:] if work else ():
            decoder.wake()
        free = len(self._idle) + sum(not one.is_ready for one in self._decoders)
        try:
            while free < work and len(self._decoders) < self._count:
                decoder = _Decoder(self._memory_bytes)
                self._decoders.add(decoder)
                free += 1
                task = self._loop.create_task(self._run(decoder))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except OSError as exc:
            self._report("no decoding process can be started: %s", exc)
            if not self._decoders:
                message = f"no decoding process can be started ({exc}); try again later"
                self._loop.call_soon(self._fail_waiting, Unavailable(message, retry_after_s=1))

    async def _run(self, decoder: _Decoder) -> None:
        """Give `decoder` work until it is idle for long, or is lost."""
        reason: DecoderEnd = "died"
        job: Job | None = None
        try:
            async with asyncio.timeout(_START_S):
                await decoder.start()
            while (job := await self._next(decoder)) is not None:
                outcome = await decoder.decode(job)
                done, job = job, None
                self._done(done, outcome)
            reason = "idle"
        except (OSError, EOFError):
            if decoder.is_killed:
                reason = "cancelled"
            else:
                its = "" if job is None else ", and its request"
                self._report("a decoding process died%s", its)
        except (ValueError, KeyError, TypeError) as exc:
            # The decoded content may have compromised the process.
            self._report("a decoding process sent an invalid reply: %s", exc)
        finally:
            self._decoders.discard(decoder)
            if not self._closed:
                self._metrics.decoder_ended(reason)
            if job is not None:
                failed = InferenceFailed("the process that decoded this body died")
                self._done(job, stopping() if self._closed else failed)
            if decoder.is_ready:
                self._dispatch()
            elif not self._decoders:  # nor would the next one start
                self._fail_waiting(InferenceFailed("a decoding process died while it started"))
            else:
                self._loop.call_later(_RESTART_S, self._dispatch)
            await decoder.end()

    async def _next(self, decoder: _Decoder) -> Job | None:
        """The next job for `decoder`, each class in turn; None if there is none for `_IDLE_S`."""
        while not (self._small or self._large_may_run() > 0):
            self._idle.append(decoder)
            try:
                async with asyncio.timeout(_IDLE_S):
                    await decoder.woken()
            except TimeoutError:
                return None
            finally:
                self._idle.remove(decoder)
        if not decoder.is_alive():
            raise EOFError
        is_large = self._large_may_run() > 0 and not (self._small and self._large_running)
        waiting = self._large if is_large else self._small
        job = next(iter(waiting))
        del waiting[job]
        self._large_running += is_large
        job.decoder = decoder
        return job

    def _done(self, job: Job, outcome: Decoded | ServiceError | None) -> None:
        """`job` has ended, or without an outcome has turned out to be large."""
        self._large_running -= job.is_large
        if outcome is None and job.on_done is not None:
            job.is_large, job.decoder = True, None
            try:
                self._wait(job)
            except Overloaded as exc:
                outcome = exc
            else:
                # Once the decoder that found it has taken its next work.
                self._loop.call_soon(self._dispatch)
                return
        self._finish(job, outcome)

    def _fail_waiting(self, error: ServiceError) -> None:
        for waiting in (self._small, self._large):
            while waiting:
                self._finish(waiting.popitem()[0], error)

    def _finish(self, job: Job, outcome: Decoded | ServiceError | None) -> None:
        job.decoder = None
        job.ended()
        on_done, job.on_done = job.on_done, None
        if on_done is not None and outcome is not None:
            on_done(outcome)

    def _report(self, message: str, *arguments: object) -> None:
        """Log it, unless something else was logged just before."""
        now_s = self._loop.time()
        if now_s < self._log_from_s:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        _log.error(message + more, *arguments)
        self._log_from_s, self._unlogged = now_s + _LOG_S, 0


class _Decoder:
    """One process, and the socket on which it gets its work."""

    def __init__(self, memory_bytes: int) -> None:
        """Start it. Raises: OSError."""
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()
        self._killer: asyncio.TimerHandle | None = None
        self._is_sent = False
        self._began_s = 0.0
        self.is_ready = False
        """Whether the process has started."""
        self.is_killed = False
        """Whether `cancel` has killed it."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start(theirs, memory_bytes)
            except OSError:
                self._socket.close()
                raise
        self._socket.setblocking(False)

    async def start(self) -> None:
        """Wait for the process to start. Raises: EOFError, OSError, ValueError."""
        if await self._receive(HEAD.size) != READY:
            raise ValueError("a reply before it was ready")
        self.is_ready = True

    def wake(self) -> None:
        """End `woken`."""
        if not self._woken.done():
            self._woken.set_result(None)

    async def woken(self) -> None:
        """Wait for `wake`."""
        self._woken = self._loop.create_future()
        await self._woken

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    async def decode(self, job: Job) -> Decoded | ServiceError | None:
        """The outcome; None if small work is large. Raises: likewise, KeyError, TypeError."""
        self._began_s, self._is_sent = self._loop.time(), False
        header = _header(job.form, job.is_large)
        start = HEAD.pack(len(header), len(job.body)) + header
        if job.is_large:
            await self._loop.sock_sendall(self._socket, start)
            await self._loop.sock_sendall(self._socket, job.body)
        else:
            await self._loop.sock_sendall(self._socket, start + job.body)
        self._is_sent = True
        if self._killer is not None:
            self._ask_to_end()
        header_bytes, pixel_bytes = HEAD.unpack(await self._receive(HEAD.size))
        rows, rest = divmod(pixel_bytes, PIXELS)
        if rest or rows > job.form.max_images or not 0 < header_bytes <= MAX_HEADER_BYTES:
            raise ValueError(f"{header_bytes} and {pixel_bytes} bytes")
        reply = orjson.loads(await self._receive(header_bytes))
        images = np.empty((rows, HEIGHT, WIDTH), np.uint8)
        if rows:
            await self._fill(memoryview(images.reshape(-1)))  # type: ignore[arg-type]
        if self._killer is not None:
            self._killer.cancel()
            self._killer = None
        if not isinstance(reply, dict):
            raise ValueError("no JSON object")
        if reply.get("large") is True and not job.is_large:
            return None
        if "error" in reply:
            error = _error(*(str(reply["error"][key]) for key in ("code", "message", "field")))
            error.asked = asked_from(reply["asked"], 0) if reply.get("asked") else None
            return error
        if not rows:
            raise ValueError("neither images nor an error")
        return Decoded(images, asked_from(reply["asked"], rows))

    def cancel(self) -> None:
        """Ask the process to end its work, and kill it if it has not within `_CANCEL_S`."""
        if self._killer is not None:
            return
        kill_s = max(self._loop.time() + _CANCEL_S, self._began_s + _LEAST_RUN_S)
        self._killer = self._loop.call_at(kill_s, self._kill)
        if self._is_sent:
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        with suppress(OSError):  # its end is noticed by reading
            self._socket.send(CANCEL)

    def _kill(self) -> None:
        self.is_killed = True
        self._process.kill()

    async def end(self) -> None:
        """Kill the process, and take its exit code."""
        if self._killer is not None:
            self._killer.cancel()
        self._process.kill()
        self._socket.close()
        try:
            while self.is_alive():  # noqa: ASYNC110 - it sets no event
                await asyncio.sleep(_REAP_S)
        finally:
            if self._process.returncode is None:  # nobody waits for it any longer
                self._process.returncode = -signal.SIGKILL

    async def _receive(self, size: int) -> bytearray:
        found = bytearray(size)
        await self._fill(memoryview(found))
        return found

    async def _fill(self, rest: memoryview) -> None:
        while rest:
            count = await self._loop.sock_recv_into(self._socket, rest)
            if not count:
                raise EOFError
            rest = rest[count:]


@lru_cache(maxsize=64)
def _header(form: Form, is_large: bool) -> bytes:
    return pickle.dumps((form, is_large))


def _error(code: str, message: str, field: str) -> ServiceError:
    if code in _ERRORS:
        return _ERRORS[code](message, field=field)
    if code != "cancelled":
        _log.error("a body could not be decoded: %s", message)
    return ServiceError("internal error; see the server log")


def _start(theirs: socket.socket, memory_bytes: int) -> subprocess.Popen[bytes]:
    """A new process. Raises: OSError."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    numbers = (theirs.fileno(), os.getpid(), memory_bytes)
    environment = {  # without the keys: it reads what anyone has sent
        name: text for name, text in os.environ.items() if not name.startswith("LENET_")
    }
    return subprocess.Popen(  # noqa: S603 - this program, with numbers as arguments
        [sys.executable, *_ARGUMENTS, *map(str, numbers)],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Not a session of its own, in which Linux' autogroups would ignore its priority.
        process_group=0,
        # Each OpenBLAS thread would reserve memory, and matrices here are small.
        env={**environment, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
    )
