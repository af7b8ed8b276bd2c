"""Processes that decode pictures and large bodies, so that clients' work can be ended.

A thread cannot be ended, holds the interpreter lock, and shares its memory with the service. A
process is asked to end its work, which it looks for between two pictures or slices, and is killed
if it does not within `_CANCEL_S`, and has worked for `_LEAST_RUN_S`. One that dies fails only its
own request.

    start() --> waiting, cheap or costly --> one decoder --> on_done
                   |                            |
                cancel(): dropped            cancel(): dropped if it was not sent yet,
                                             else asked to end, then killed

Nothing runs until the first picture or large body comes; a decoder that is idle for `_IDLE_S` ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import orjson

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.decode.frames import CANCEL, HEAD, MAX_HEADER_BYTES, READY, form_header, frame
from service.errors import (
    Cancelled,
    InferenceFailed,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
    UnsupportedMediaType,
    stopping,
)
from service.forms.cost import CHEAP_S
from service.forms.form import Body, Decoded, Form, asked_from
from service.observe.metrics import Metrics

_log = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Requests of a class that wait for a decoder; further ones are rejected as `Overloaded`."""

MAX_WAITING_S = 10.0
"""Estimated work of a class that may wait, for each decoder."""

_CANCEL_S = 0.03
"""Time for a decoder to stop after a cancel: it finishes a small picture or a slice first."""

_LEAST_RUN_S = 0.5
"""Time that work has before its process is killed. The next start takes 0.2 s of CPU time, up to
0.6 s where other programs want the cores: ending less work than that costs more than it saves."""

_START_S = 30.0
"""Time to start, after which a cancel kills the process."""

_IDLE_S = 60.0
_REAP_S = 0.02
_CLOSE_S = 0.1
_LOG_S = 10.0
"""At most one line about decoders that failed in so much time: clients may provoke them."""

_SENT_BYTES = 256 * 1024
"""Sent to a decoder in one turn of the event loop: 0.1 ms."""

_ARGUMENTS = ("-P", "-m", "service.decode.decoding_process")
_ERRORS = {error.code: error for error in (InvalidInput, TooLarge, UnsupportedMediaType)}


OnDone: TypeAlias = Callable[[Decoded | ServiceError], None]


class Job:
    """One piece of work: waiting for a decoder, running, or ended."""

    __slots__ = ("cost_s", "costly", "decoder", "ended", "frame", "max_images", "on_done")

    def __init__(self, form: Form, body: Body, on_done: OnDone, ended: Callable[[], None]) -> None:
        self.cost_s = form.cost_s(body)
        self.costly = self.cost_s > CHEAP_S
        self.max_images = form.max_images
        self.frame: list[Body] = [frame(form_header(form), len(body))]
        if body:
            self.frame.append(body)
        self.on_done: OnDone | None = on_done
        self.ended = ended
        self.decoder: _Decoder | None = None


class Decoders:
    """A bounded number of decoding processes, shared by all transports of one event loop.

    Small work (a picture up to about a megapixel) never waits for a process that has long work:
    that may use all of them but one. A context manager; on leaving what runs is killed.
    """

    def __init__(self, metrics: Metrics, count: int, memory_bytes: int) -> None:
        """`count` processes at most, two at least, each with so many bytes of memory."""
        assert count >= 2, "bug: long work would take the only decoder"
        self._count = count
        self._metrics = metrics
        self._memory_bytes = memory_bytes
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[bool, OrderedDict[Job, None]] = {
            costly: OrderedDict() for costly in (False, True)
        }
        self._waiting_s = {False: 0.0, True: 0.0}
        self._running = {False: 0, True: 0}
        self._idle: list[_Decoder] = []
        self._busy: set[_Decoder] = set()
        self._ending: list[subprocess.Popen[bytes]] = []
        self._reaper: asyncio.TimerHandle | None = None
        self._watcher: asyncio.TimerHandle | None = None
        self._reaping = self._watching = False
        self._closed = False
        self._log_from_s = 0.0
        self._unlogged = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        error = stopping()
        for waiting in self._waiting.values():
            while waiting:
                self._finish(waiting.popitem()[0], error)
        for decoder in tuple(self._busy):
            job = decoder.take_job()
            decoder.end(kill=True)
            if job is not None:
                self._finish(job, error)
        for decoder in self._idle:
            decoder.end()
        for timer in (self._reaper, self._watcher):
            if timer is not None:
                timer.cancel()
        self._wait_for_all(_CLOSE_S)
        for process in self._ending:
            process.kill()
        self._wait_for_all(_CLOSE_S)
        for process in self._ending:
            # On a busy machine it may not have been its turn yet. Nobody waits for it any longer.
            process.returncode = -signal.SIGKILL
        self._ending.clear()

    def _wait_for_all(self, timeout_s: float) -> None:
        """Wait for processes to end; those still running after `timeout_s` stay in `_ending`."""
        until_s = time.monotonic() + timeout_s
        while self._ending and (self._ending[0].poll() is not None or time.monotonic() < until_s):
            if self._ending[0].poll() is not None:
                del self._ending[0]
            else:
                time.sleep(0.001)

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

        Raises:
            Overloaded: too much work waits.
            TooLarge: a picture has too many pixels.
            Unavailable: closed, or no process can be started.
        """
        if self._closed:
            raise stopping()
        job = Job(form, body, on_done, ended)
        waiting = self._waiting[job.costly]
        slots = self._count - job.costly
        work_s = self._waiting_s[job.costly] + job.cost_s
        if waiting and (len(waiting) >= MAX_WAITING or work_s > MAX_WAITING_S * slots):
            raise Overloaded(
                f"too many requests wait to be decoded, about {work_s / slots:.0f} s of work; "
                "try again later",
                retry_after_s=math.ceil(work_s / slots),
            )
        waiting[job] = None
        self._waiting_s[job.costly] = work_s
        try:
            self._dispatch()
        except OSError as exc:
            if job not in waiting:  # another was first
                return job
            self._drop(job)
            raise Unavailable(
                f"no decoding process can be started ({exc.strerror}); try again later",
                retry_after_s=1,
            ) from exc
        return job

    def cancel(self, job: Job) -> None:
        """Do not call `on_done`, and end the work."""
        job.on_done = None
        if job in self._waiting[job.costly]:
            self._drop(job)
            job.ended()
        elif job.decoder is not None:
            job.decoder.cancel()

    # Called by decoders.

    def done(self, decoder: _Decoder, job: Job, outcome: Decoded | ServiceError) -> None:
        """`decoder` is free again, or will be when its process has started."""
        self._busy.discard(decoder)
        self._idle.insert(len(self._idle) if decoder.ready else 0, decoder)  # the last is taken
        decoder.idle_since_s = self._loop.time()
        if not self._watching:
            self._watching = True
            self._watcher = self._loop.call_later(_IDLE_S / 4, self._end_idle)
        self._running[job.costly] -= 1
        self._finish(job, outcome)
        self._dispatch_later()

    def lost(self, decoder: _Decoder, job: Job | None, *, killed: bool) -> None:
        """`decoder` has ended, by `cancel` if it was `killed`, and `job` with it."""
        self._busy.discard(decoder)
        if decoder in self._idle:
            self._idle.remove(decoder)
        if not self._closed:
            self._metrics.decoder_ended("cancelled" if killed else "died")
            if not killed:
                self.log("a decoding process died%s", "" if job is None else ", and its request")
        if job is not None:
            self._running[job.costly] -= 1
            self._finish(job, InferenceFailed("the process that decoded this body died"))
        self._dispatch_later()

    def reap(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for `process`, which ends."""
        self._ending.append(process)
        if not (self._reaping or self._closed):
            self._reaping = True
            self._reaper = self._loop.call_later(_REAP_S, self._reap)

    def log(self, message: str, *arguments: object) -> None:
        """Log it, unless something else was logged just before."""
        now_s = self._loop.time()
        if now_s < self._log_from_s:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        _log.error(message + more, *arguments)
        self._log_from_s, self._unlogged = now_s + _LOG_S, 0

    def _dispatch_later(self) -> None:
        try:
            self._dispatch()
        except OSError as exc:
            # Those that wait are tried again when a request comes or a decoder is free. Without
            # any decoder there is nobody to wait for.
            if not self._busy:
                error = Unavailable("no decoding process can be started", retry_after_s=1)
                for waiting in self._waiting.values():
                    for job in tuple(waiting):
                        self._drop(job)
                        self._finish(job, error)
            self.log("no decoding process can be started: %s", exc)

    def _dispatch(self) -> None:
        """Start what can be started. Raises: OSError."""
        while not self._closed and (waiting := self._next()) is not None:
            decoder = self._idle.pop() if self._idle else None
            if decoder is None or not decoder.alive():
                if decoder is not None:
                    decoder.end()
                    self._metrics.decoder_ended("died")
                    continue
                decoder = _Decoder(self, self._memory_bytes)
            job = next(iter(waiting))
            self._drop(job)
            self._running[job.costly] += 1
            self._busy.add(decoder)
            decoder.begin(job)

    def _next(self) -> OrderedDict[Job, None] | None:
        """The class whose turn it is, if a decoder is free for it. Each has at least one."""
        if len(self._busy) >= self._count:
            return None
        cheap, costly = self._waiting[False], self._waiting[True]
        if costly and not self._running[True]:
            return costly
        if cheap:
            return cheap
        return costly if costly and self._running[True] < self._count - 1 else None

    def _drop(self, job: Job) -> None:
        waiting = self._waiting[job.costly]
        del waiting[job]
        self._waiting_s[job.costly] = self._waiting_s[job.costly] - job.cost_s if waiting else 0.0

    def _finish(self, job: Job, outcome: Decoded | ServiceError) -> None:
        job.frame.clear()
        job.decoder = None
        job.ended()
        on_done, job.on_done = job.on_done, None
        if on_done is not None:
            on_done(outcome)

    def _reap(self) -> None:
        """Take the exit codes of processes that have ended."""
        self._ending = [process for process in self._ending if process.poll() is None]
        self._reaping = bool(self._ending)
        if self._reaping:
            self._reaper = self._loop.call_later(_REAP_S, self._reap)

    def _end_idle(self) -> None:
        idle_from_s = self._loop.time() - _IDLE_S
        for decoder in [one for one in self._idle if one.idle_since_s <= idle_from_s]:
            self._idle.remove(decoder)
            decoder.end()
            self._metrics.decoder_ended("idle")
        self._watching = bool(self._idle)
        if self._watching:
            self._watcher = self._loop.call_later(_IDLE_S / 4, self._end_idle)


class _Decoder:
    """One process, and the socket on which it gets its work."""

    def __init__(self, pool: Decoders, memory_bytes: int) -> None:
        """Start it. Raises: OSError."""
        self._pool = pool
        self._job: Job | None = None
        self._sent = False
        """Whether the process has the job, or a part of it."""
        self._unsent: deque[memoryview] = deque()
        self._head = bytearray(HEAD.size)
        self._header: bytearray | None = None
        self._pixels: Images | None = None
        self._room = memoryview(self._head)
        """The unfilled rest of the buffer for the part being received."""
        self._loop = asyncio.get_running_loop()
        self._killer: asyncio.TimerHandle | None = None
        self._writing = False
        self.ready = False
        """Whether the process has started."""
        self._began_s = self._loop.time()
        """Time at which the process, then its job began."""
        self.idle_since_s = 0.0
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start(theirs, memory_bytes)
            except OSError:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def begin(self, job: Job) -> None:
        """Work on `job` in the next turn of the event loop, or when the process has started."""
        self._job, job.decoder, self._sent = job, self, False
        if self.ready:
            self._loop.call_soon(self._send_job)

    def _send_job(self) -> None:
        if self._job is None or self._sent:
            return  # it was cancelled in the same turn
        self._sent, self._began_s = True, self._loop.time()
        self._unsent.extend(map(memoryview, self._job.frame))
        self._send()

    def cancel(self) -> None:
        """End the work: now if the process does not have it, else within `_CANCEL_S` of asking.

        A process is not killed while its job, or itself, has just begun.
        """
        if self._killer is not None:
            return
        now_s = self._loop.time()
        if self._sent:
            self._unsent.append(memoryview(CANCEL))
            kill_s = max(now_s + _CANCEL_S, self._began_s + _LEAST_RUN_S)
            self._killer = self._loop.call_at(kill_s, self._kill)
            self._send()
        elif not self.ready and now_s > self._began_s + _START_S:
            self._kill()
        else:
            job = self.take_job()
            assert job is not None, "bug: no job to cancel"
            self._pool.done(self, job, Cancelled("cancelled"))

    def take_job(self) -> Job | None:
        """The job, which is no longer this decoder's."""
        job, self._job = self._job, None
        return job

    def end(self, *, kill: bool = False) -> None:
        """Close the socket, at which the process ends, and perhaps kill it."""
        if self._killer is not None:
            self._killer.cancel()
        self._unsent.clear()
        self._loop.remove_reader(self._socket.fileno())
        if self._writing:
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        if kill:
            self._process.kill()
        self._pool.reap(self._process)

    def _kill(self) -> None:
        self._lost(killed=True)

    def _lost(self, *, killed: bool = False) -> None:
        job = self.take_job()
        self.end(kill=True)
        self._pool.lost(self, job, killed=killed)

    def _send(self) -> None:
        left = _SENT_BYTES
        try:
            while self._unsent and left > 0:
                piece = self._unsent[0]
                sent = self._socket.send(piece[:left])
                left -= sent
                if sent < len(piece):
                    self._unsent[0] = piece[sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # its end is noticed by reading
        if not self._unsent and self._job is not None:
            self._job.frame.clear()  # the process has it
        if bool(self._unsent) is not self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._socket.fileno(), self._send)
            else:
                self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(self._room)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._lost()
            return
        self._room = self._room[count:]
        if self._room:
            return
        try:
            self._received()
        except (ValueError, KeyError, TypeError) as exc:
            # The decoded content may have compromised the process.
            self._pool.log("a decoding process sent an invalid reply: %s", exc)
            self._lost()

    def _expect_head(self) -> None:
        self._header = self._pixels = None
        self._room = memoryview(self._head)

    def _received(self) -> None:
        """The part that was expected is complete. Raises: ValueError, KeyError, TypeError."""
        job = self._job
        if not self.ready:
            if self._head != READY:
                raise ValueError("a reply before it was ready")
            self.ready = True
            self._expect_head()
            self._send_job()
            return
        if job is None:
            raise ValueError("a reply to nothing")
        if self._header is None:
            header_bytes, pixel_bytes = HEAD.unpack(self._head)
            rows, rest = divmod(pixel_bytes, PIXELS)
            if rest or rows > job.max_images or not 0 < header_bytes <= MAX_HEADER_BYTES:
                raise ValueError(f"{header_bytes} and {pixel_bytes} bytes")
            self._header = bytearray(header_bytes)
            self._pixels = np.empty((rows, HEIGHT, WIDTH), np.uint8)
            self._room = memoryview(self._header)
            return
        assert self._pixels is not None, "bug: a header without its pixels"
        if len(self._pixels) and self._room.obj is self._header:
            self._room = memoryview(self._pixels.reshape(-1))  # type: ignore[arg-type]
            return
        outcome = self._outcome(orjson.loads(self._header), self._pixels)
        self._expect_head()
        self._job = None
        if self._killer is not None:
            self._killer.cancel()
            self._killer = None
        self._pool.done(self, job, outcome)

    def _outcome(self, header: dict[str, Any], images: Images) -> Decoded | ServiceError:
        if "error" not in header:
            if not len(images):
                raise ValueError("neither images nor an error")
            return Decoded(images, asked_from(header["asked"], len(images)))
        error = self._error(header)
        if header.get("asked"):
            error.asked = asked_from(header["asked"], 0)
        return error

    def _error(self, header: dict[str, Any]) -> ServiceError:
        code, message, field = (str(header["error"][key]) for key in ("code", "message", "field"))
        if code in _ERRORS:
            return _ERRORS[code](message, field=field)
        if code != "cancelled":
            self._pool.log("a body could not be decoded: %s", message)
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
