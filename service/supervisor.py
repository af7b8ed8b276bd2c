"""Serving processes on the same ports, one or several, and one that watches over them.

Each worker is a whole service with contexts of its own. A worker that dies is started again, up to
a budget; past it, or when a start fails for a reason that a second try would not change, all stop.
A signal is the supervisor's alone, however many processes it reaches: workers are deaf to SIGTERM
and SIGINT and stop when a pipe that they share is closed, be it by a supervisor that was killed.
SIGHUP it passes on; a worker that hears it twice finds nothing new the second time. It refuses to
talk to them otherwise: what they share is the ports and the folder of their metrics.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from prometheus_client.multiprocess import mark_process_dead

from service import logs
from service.engine.versions import read_models
from service.errors import FORESEEN, ExitCode, exit_code
from service.listener import cannot_listen, listen
from service.mps import shared_gpu
from service.settings import Settings

_log = logging.getLogger(__name__)

RESTARTS = 2
RESTART_WINDOW_S = 60.0
"""More than `RESTARTS` deaths within the window end the service: its supervisor must know."""

SAME_FAULT_S = 2.0
"""Under MPS a fault of one worker takes the device from all that share it, each in its own time."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FINAL = {ExitCode.SETTINGS, ExitCode.WEIGHTS, ExitCode.BACKEND, ExitCode.ADDRESS}


def supervise(settings: Settings) -> ExitCode:
    """Run `settings.workers` workers until told to stop or until they die too often.

    Raises:
        SystemExit: 128 plus the number of a second signal.
    """
    try:
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(_signals())
            folder = tempfile.mkdtemp(prefix="lenet-serve-metrics-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            # Read by prometheus_client when a worker imports it.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
            read_models(settings.weights, settings.models, settings.default_model)
            ports = {
                name: stack.enter_context(_reserve(settings.host, port))
                for name, port in (("port", settings.port), ("grpc_port", settings.grpc_port))
            }
            mps = stack.enter_context(shared_gpu(settings))
            return _Supervisor(settings.model_copy(update=ports), signals, mps).run()
    except FORESEEN as exc:
        _log.error("%s", exc)
        return exit_code(exc)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket with a byte to read, the signal's number, for each of `_SIGNALS`.

    The handler does nothing else: it may run between any two steps of the supervisor.
    """
    told, tell = socket.socketpair()

    def on_signal(number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it was told often enough
            tell.send(bytes([number]))

    with told, tell:
        tell.setblocking(False)
        before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
        try:
            yield told
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _reserve(host: str, port: int) -> Iterator[int]:
    """Keep the port for the workers, by a socket that takes no connection; yields its number.

    Raises:
        CannotListen: another program has it, or another supervisor keeps it.
    """
    # Without SO_REUSEPORT first: with it, another lenet-serve's port would be shared unnoticed.
    with listen(host, port, shared=False) as probe:
        port = probe.getsockname()[1]
    # The probe fails only where somebody listens, and during the warm-up nobody does. A name in
    # Linux' abstract namespace has one owner, is as wide as the ports (one network namespace) and
    # goes with the process. Elsewhere two services started within one warm-up are not told apart.
    with listen(host, port, shared=True), socket.socket(socket.AF_UNIX) as name:
        try:
            if sys.platform == "linux":
                name.bind(f"\0lenet-serve {host}:{port}")
        except OSError as exc:
            raise cannot_listen(host, port, exc) from exc
        yield port


class _Supervisor:
    def __init__(self, settings: Settings, signals: socket.socket, mps: bool) -> None:
        self._settings = settings
        self._signals = signals
        self._mps = mps
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[BaseProcess] = []
        self._first: list[BaseProcess] = []  # those that replace no other
        self._deaths: deque[float] = deque(maxlen=RESTARTS + 1)
        self._fault_s = -math.inf  # when a worker ended that had lost its device
        self._beside: list[BaseProcess] = []  # those that lived then
        self._ended: list[BaseProcess] = []  # of those, the ones that were not left to live
        self._stopping = False
        self._told, self._tell = self._spawn.Pipe(duplex=False)

    def run(self) -> ExitCode:
        with self._told, self._tell:
            return self._watch()

    def _watch(self) -> ExitCode:
        # Made with the first worker otherwise, and it unblocks the signals that `_start` blocks.
        # SIGHUP, which it would die of, stays blocked in it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._workers = [self._start() for _ in range(self._settings.workers)]
        self._first = list(self._workers)
        outcome = ExitCode.STOPPED
        first = second = 0  # signals
        while self._workers:
            events = wait([self._signals, *(worker.sentinel for worker in self._workers)])
            if self._signals in events:
                (number,) = self._signals.recv(1)
                if number == signal.SIGHUP:
                    self._reload()
                elif first:
                    second = number
                    self._kill()
                else:
                    first = number
                    self._stop()
            for worker in [worker for worker in self._workers if not worker.is_alive()]:
                self._workers.remove(worker)
                mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
                if not self._stopping:
                    outcome = self._after_death(worker)
        if second:
            sys.exit(128 + second)
        return outcome

    def _start(self) -> BaseProcess:
        worker = self._spawn.Process(target=_work, args=(self._settings, self._told), daemon=True)
        # What is blocked here stays so in the child, for life, but for SIGHUP, which waits there
        # until it is listened to. Ctrl-C in a terminal reaches every process, and so does the
        # SIGTERM of systemd or `timeout`.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _log.info("worker %d started", worker.pid)
        return worker

    def _after_death(self, worker: BaseProcess) -> ExitCode:
        """Replace `worker`, or stop all; the code to end with if that was the end."""
        code = worker.exitcode or 0
        # A GPU that served the worker before may fail its successor for a moment.
        if code in _FINAL and (code != ExitCode.BACKEND or worker in self._first):
            self._stop()
            return ExitCode(code)
        _log.error("worker %d ended with %d", worker.pid, code)
        now_s = time.monotonic()
        if not self._same_fault(worker, now_s):
            self._deaths.append(now_s)
        if len(self._deaths) > RESTARTS and self._deaths[-1] - self._deaths[0] < RESTART_WINDOW_S:
            _log.error("more than %d deaths in %g s: giving up", RESTARTS, RESTART_WINDOW_S)
            self._stop()
            return ExitCode.WORKERS
        if self._mps and code == ExitCode.DEVICE and worker not in self._ended:
            self._end_neighbours()
        self._workers.append(self._start())
        return ExitCode.STOPPED

    def _same_fault(self, worker: BaseProcess, now_s: float) -> bool:
        """Whether `worker` lost its device to the fault that took it from another before."""
        if worker in self._ended:
            return True
        if worker.exitcode != ExitCode.DEVICE:
            return False
        if worker in self._beside and now_s - self._fault_s < SAME_FAULT_S:
            return True
        self._fault_s, self._beside = now_s, list(self._workers)
        return False

    def _end_neighbours(self) -> None:
        """End those from whom the fault took the GPU, too: before, MPS takes no new client.

        One with a batch finds out by itself, and its callers are told; one that idles does not.
        """
        self._ended = list(self._workers)
        deadline_s = time.monotonic() + SAME_FAULT_S
        for worker in self._ended:
            worker.join(max(0.0, deadline_s - time.monotonic()))
            worker.kill()
            worker.join()

    def _reload(self) -> None:
        for worker in self._workers:  # one that died keeps its process id until it is removed
            assert worker.pid is not None, "bug: the worker was not started"
            os.kill(worker.pid, signal.SIGHUP)

    def _stop(self) -> None:
        self._stopping = True
        self._tell.close()

    def _kill(self) -> None:
        _log.warning("a second signal: waiting for nobody")
        for worker in self._workers:
            worker.kill()


def _work(settings: Settings, told: Connection) -> None:
    logs.configure(settings.log_level)
    from service.server import run  # here alone: all that serves is half a second of imports

    sys.exit(run(settings, told))
