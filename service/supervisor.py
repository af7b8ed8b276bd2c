"""The supervisor: starts one or several workers on the same ports and replaces those that die.

Each worker is a whole service with its own contexts. A worker that dies is replaced, up to a
budget; past it, or when a start fails for a reason that a second try would not change, all stop.
Only the supervisor acts on SIGTERM and SIGINT, however many processes get them: workers block them
and stop when a pipe that they share is closed, also by the kernel after the supervisor was killed.
SIGHUP is passed on; a worker that gets it twice finds nothing new the second time. Workers share
nothing else but the ports and the folder of their metrics.
"""

from __future__ import annotations

import contextlib
import gc
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
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from service import logs, mps
from service.engine.versions import WeightsFolder
from service.errors import STARTUP_ERRORS, ExitCode, exit_code
from service.listener import reserve
from service.settings import Settings

_log = logging.getLogger(__name__)

RESTARTS = 2
RESTART_WINDOW_S = 60.0
"""More than `RESTARTS` deaths within the window end the service, for its own supervisor to see."""

SAME_FAULT_S = 2.0
"""Under MPS a fault of one worker takes the device from all that share it, some later than others.
"""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FINAL = {ExitCode.SETTINGS, ExitCode.WEIGHTS, ExitCode.BACKEND, ExitCode.ADDRESS}


def supervise(settings: Settings) -> ExitCode:
    """Run `settings.workers` workers until a signal stops them or they die too often.

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
            # Broken weights or a taken port are reported once, before any worker is started.
            WeightsFolder(settings.weights).read_all(settings.models, settings.default_model)
            ports = {
                name: stack.enter_context(reserve(settings.host, port))
                for name, port in (("port", settings.port), ("grpc_port", settings.grpc_port))
            }
            shared_gpu = False
            if settings.mps == "auto" and mps.wanted(settings.device, settings.workers):
                shared_gpu = stack.enter_context(mps.shared_gpu())
            return _Supervisor(settings.model_copy(update=ports), signals, shared_gpu).run()
    except STARTUP_ERRORS as exc:
        _log.error("%s", exc)
        return exit_code(exc)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket from which each signal of `_SIGNALS` is read as a byte, its number.

    The handler does nothing else: it may run between any two steps of the supervisor.
    """
    reader, writer = socket.socketpair()

    def on_signal(number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):  # full: signals enough are waiting
            writer.send(bytes([number]))

    with reader, writer:
        writer.setblocking(False)
        before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
        try:
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Supervisor:
    def __init__(self, settings: Settings, signals: socket.socket, shared_gpu: bool) -> None:
        self._settings = settings
        self._signals = signals
        self._shared_gpu = shared_gpu
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[BaseProcess] = []
        self._first: list[BaseProcess] = []  # those that replace no other
        self._deaths: deque[float] = deque(maxlen=RESTARTS + 1)
        self._fault_s = -math.inf  # when a worker last ended because its device was lost
        self._beside: list[BaseProcess] = []  # the workers that lived then
        self._ended: list[BaseProcess] = []  # those of them that this process ended
        self._stopping = False
        self._shutdown_pipe, self._stop_writer = self._spawn.Pipe(duplex=False)

    def run(self) -> ExitCode:
        with self._shutdown_pipe, self._stop_writer:
            return self._watch()

    def _watch(self) -> ExitCode:
        # Otherwise it starts with the first worker, and unblocks the signals that `_start` blocks.
        # SIGHUP, which would end it, stays blocked in it.
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
        worker = self._spawn.Process(
            target=_work, args=(self._settings, self._shutdown_pipe), daemon=True
        )
        # Blocked here, they stay blocked in the worker; only SIGHUP is unblocked there, once it has
        # a handler. Ctrl-C in a terminal reaches every process, as does the SIGTERM of systemd or
        # `timeout`.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _log.info("worker %d started", worker.pid)
        return worker

    def _after_death(self, worker: BaseProcess) -> ExitCode:
        """Replace `worker`, or stop all; returns the exit code in case it is the end."""
        code = worker.exitcode or 0
        # A GPU that served a worker may fail its successor for a moment.
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
        if self._shared_gpu and code == ExitCode.DEVICE and worker not in self._ended:
            self._end_neighbours()
        self._workers.append(self._start())
        return ExitCode.STOPPED

    def _same_fault(self, worker: BaseProcess, now_s: float) -> bool:
        """Whether `worker` lost its device to a fault that is counted already."""
        if worker in self._ended:
            return True
        if worker.exitcode != ExitCode.DEVICE:
            return False
        if worker in self._beside and now_s - self._fault_s < SAME_FAULT_S:
            return True
        self._fault_s, self._beside = now_s, list(self._workers)
        return False

    def _end_neighbours(self) -> None:
        """End the workers that lost the GPU to the same fault; until then MPS takes no new client.

        A worker with a batch notices the fault and answers its callers; an idle one does not.
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
        self._stop_writer.close()

    def _kill(self) -> None:
        _log.warning("second signal: exiting immediately")
        for worker in self._workers:
            worker.kill()


def _work(settings: Settings, shutdown_pipe: Connection) -> None:
    with contextlib.suppress(OSError):  # the name in `top` and `ps -e`; Linux only
        Path("/proc/self/comm").write_text("lenet-worker")
    logs.configure(settings.log_level)
    gc.disable()  # until it serves, as in `service.__main__`
    from service.server import run  # here alone: it takes half a second to import

    sys.exit(run(settings, shutdown_pipe))
