"""The supervisor: starts one or several workers, shares connections out, replaces who dies.

Each worker is a whole service with its own contexts. A worker that dies is replaced, up to a
budget; past it, or when a start fails for a reason that a second try would not change, all stop.
One that finds broken files, of weights or of the certificate, is started again until they are
whole, while others serve.
A worker whose heartbeat stops is killed and so replaced, one that does not stop in time is killed.
Only the supervisor acts on SIGTERM and SIGINT, however many processes get them: workers block them
and stop when a pipe that they share is closed, also by the kernel after the supervisor was killed.
SIGHUP is passed on; a worker that gets it twice finds nothing new the second time. Workers share
nothing but a folder, of their metrics and of the models that requests named.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from service import logs
from service.engine import repository
from service.engine.versions import WeightsFolder
from service.errors import STARTUP_ERRORS, ExitCode, exit_code
from service.observe import workers
from service.process import allocator, mps
from service.process.heartbeat import BEAT_S, Watch
from service.process.shared_folder import shared_folder
from service.process.signals import SIGNALS, Signals, end_with_parent
from service.settings import Settings
from wire.listener import reserve
from wire.sharing import Inbox, Sharing

_log = logging.getLogger(__name__)

RESTARTS = 2
RESTART_WINDOW_S = 60.0
"""More than `RESTARTS` deaths within the window end the service, for its own supervisor to see."""

RETRY_S = 5.0
"""Between starts of a worker that finds files which must not be served, while others serve."""

SAME_FAULT_S = 2.0
"""Under MPS a fault of one worker takes the device from all that share it, some later than others.
"""

STOP_LIMIT_S = 2.0
"""After the drain, when a worker that has not stopped is killed. It ends itself before that, unless
it cannot run."""

_FINAL = {
    ExitCode.SETTINGS,
    ExitCode.WEIGHTS,
    ExitCode.BACKEND,
    ExitCode.ADDRESS,
    ExitCode.DESCRIPTORS,
}


def supervise(settings: Settings, signals: Signals) -> ExitCode:
    """Run `settings.workers` workers until one of `signals` stops them or they die too often.

    Raises:
        SystemExit: 128 plus the number of a second signal.
    """
    try:
        with contextlib.ExitStack() as stack:
            received = stack.enter_context(_received(signals))
            # A setting that no worker could start with is reported once, before any is started.
            folder = WeightsFolder(settings.weights, settings.latest_versions)
            versions = folder.read_all(
                settings.models, settings.default_model, alias=settings.model_alias
            )
            # A worker that replaces another has the same models, and the same default.
            names = tuple(dict.fromkeys(version.name for version in versions))
            same = {"models": settings.models or names, "default_model": versions[0].name}
            settings = settings.model_copy(update=same)
            if settings.certificate is not None:
                settings.certificate.context()
            ports = [stack.enter_context(reserve(settings.host, settings.port))]
            if settings.grpc_port != "off" and not settings.one_port:
                ports.append(stack.enter_context(reserve(settings.host, settings.grpc_port)))
            shared = stack.enter_context(shared_folder(settings.workers))
            shared_gpu = False
            # Under MPS a fault reaches every process, also those on other GPUs.
            alone = len(shares(settings.devices, settings.workers)) >= settings.workers
            if settings.mps == "auto" and not alone and mps.wanted(settings.device):
                shared_gpu = stack.enter_context(mps.shared_gpu())
            code = _Supervisor(settings, received, ports, shared_gpu, shared).run()
    except STARTUP_ERRORS as exc:
        _log.error("%s", exc)
        return exit_code(exc)
    if code is ExitCode.STOPPED:
        _log.info("stopped")
    return code


@contextlib.contextmanager
def _received(signals: Signals) -> Iterator[socket.socket]:
    """A socket from which each signal is read as a byte, its number."""
    reader, writer = socket.socketpair()

    def send(number: int) -> None:
        with contextlib.suppress(OSError):  # full: signals enough are waiting; closed: the end
            writer.send(bytes([number]))

    with reader, writer:
        writer.setblocking(False)
        signals.deliver(send)
        yield reader


@dataclass(eq=False, slots=True)
class _Worker:
    """A process, and what is known of it; times are of the monotonic clock."""

    process: BaseProcess
    devices: tuple[int, ...]
    is_first: bool
    """Whether it replaces no other."""
    watch: Watch
    inbox: Inbox
    fault_s: float = math.inf
    """When another worker lost a GPU that this one uses, too."""
    kill_at_s: float = math.inf


class _Supervisor:
    def __init__(
        self,
        settings: Settings,
        signals: socket.socket,
        ports: Sequence[tuple[socket.socket, ...]],
        shared_gpu: bool,
        folder: Path | None,
    ) -> None:
        self._settings = settings
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        # uvicorn accepts by itself, from the listeners that it has in common with other workers.
        accepted = 1 if settings.http_server == "uvicorn" else 0
        self._sharing = Sharing(ports, self._selector, accepted)
        self._shared_gpu = shared_gpu
        self._folder = folder
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._deaths: deque[float] = deque(maxlen=RESTARTS + 1)
        self._second_number = 0  # of a signal
        self._signalled = self._stopping = False
        self._close_at_s = self._retry_at_s = math.inf
        self._shutdown_pipe, self._stop_writer = self._spawn.Pipe(duplex=False)

    def run(self) -> ExitCode:
        with self._selector, self._shutdown_pipe, self._stop_writer:
            return self._watch()

    def _watch(self) -> ExitCode:
        self._take_signals()
        if not self._stopping:
            self._add(first=True)
        outcome = ExitCode.STOPPED
        check_at_s = time.monotonic() + BEAT_S
        while self._workers:
            kill_at_s = min(worker.kill_at_s for worker in self._workers)
            wait_s = min(check_at_s, self._close_at_s, kill_at_s) - time.monotonic()
            events = self._selector.select(0 if self._sharing.stuck else max(0.0, wait_s))
            ready = {key.fileobj for key, _ in events}
            if self._signals in ready:
                self._take_signals()
            self._sharing.share(ready)
            for worker in [one for one in self._workers if one.process.sentinel in ready]:
                if worker.process.is_alive():
                    continue  # about to end
                self._forget(worker)
                if not self._stopping:
                    outcome = self._after_death(worker)
                worker.process.close()
            now_s = time.monotonic()
            if now_s >= check_at_s:
                check_at_s = now_s + BEAT_S  # not one after another after a suspend
                self._kill_stuck()
            if now_s >= self._retry_at_s and not self._stopping:
                self._add()
            if now_s >= self._close_at_s:
                self._close_at_s = math.inf
                self._sharing.close()
            for worker in self._workers:
                if now_s >= worker.kill_at_s:
                    worker.kill_at_s = math.inf
                    if self._stopping:
                        _log.error(
                            "worker %d did not stop within %g s after the drain: killed",
                            *(worker.process.pid, STOP_LIMIT_S),
                        )
                    worker.process.kill()
        if self._second_number:
            sys.exit(128 + self._second_number)
        return outcome

    def _take_signals(self) -> None:
        while wait([self._signals], 0):
            (number,) = self._signals.recv(1)
            if number == signal.SIGHUP:
                self._reload()
            elif self._signalled:
                if not self._second_number:
                    _log.warning("second signal: exiting immediately")
                self._second_number = number
                for worker in self._workers:
                    worker.process.kill()
            else:
                self._signalled = True
                self._stop()

    def _add(self, *, first: bool = False) -> None:
        """Start the workers that are missing, unless some that lost their GPU are yet to end."""
        if self._shared_gpu and any(one.fault_s < math.inf for one in self._workers):
            return  # until then MPS takes no new client
        self._retry_at_s = math.inf
        parts = shares(self._settings.devices, self._settings.workers)
        while len(self._workers) < self._settings.workers:
            used = [worker.devices for worker in self._workers]
            worker = self._start(min(parts, key=used.count), first)
            self._workers.append(worker)
            self._selector.register(worker.process.sentinel, selectors.EVENT_READ)

    def _start(self, devices: tuple[int, ...], first: bool) -> _Worker:
        beats, heartbeat = self._spawn.Pipe(duplex=False)
        settings = self._settings.model_copy(update={"devices": devices})
        with heartbeat:
            inbox = self._sharing.add()
            process = self._spawn.Process(
                target=_work,
                args=(settings, self._shutdown_pipe, heartbeat, inbox, self._folder),
                daemon=True,
            )
            # A worker inherits the signals that this thread blocks. Starting the resource tracker,
            # which happens where it is not alive, unblocks some.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            process.start()
        _log.info("worker %d started", process.pid)
        return _Worker(process, devices, first, Watch(beats, self._settings.hang_timeout_s), inbox)

    def _forget(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.process.sentinel)
        assert worker.process.pid is not None, "bug: the worker was not started"
        if self._folder is not None:
            workers.fold(self._folder, worker.process.pid)
            repository.forget(self._folder, worker.process.pid)
        worker.watch.close()
        self._sharing.remove(worker.inbox)

    def _kill_stuck(self) -> None:
        for worker in self._workers:
            if worker.watch.is_stuck() and worker.process.is_alive() and not self._stopping:
                _log.error(
                    "worker %d gave no sign of life in %d checks, %g s apart: it is stopped or its "
                    "event loop is stuck: killed",
                    *(worker.process.pid, worker.watch.allowed, BEAT_S),
                )
                worker.process.kill()

    def _after_death(self, worker: _Worker) -> ExitCode:
        """Replace `worker`, or stop all; returns the exit code in case it is the end."""
        pid, code, now_s = worker.process.pid, worker.process.exitcode or 0, time.monotonic()
        files = code in (ExitCode.WEIGHTS, ExitCode.SETTINGS)  # the certificate's are settings
        if files and not worker.is_first and self._workers:
            _log.error("worker %d: another try in %g s, others serve", pid, RETRY_S)
            self._retry_at_s = now_s + RETRY_S
            return ExitCode.STOPPED
        # A GPU that served a worker may fail its successor for a moment.
        if code in _FINAL and (code != ExitCode.BACKEND or worker.is_first):
            self._stop()
            return ExitCode(code)
        _log.error("worker %d ended with %d", pid, code)
        lost = code == ExitCode.DEVICE
        # Whether it ended by a fault that is counted already: without MPS each worker notices it.
        same_fault = worker.fault_s < math.inf and (
            self._shared_gpu or (lost and now_s - worker.fault_s < SAME_FAULT_S)
        )
        if not same_fault:
            self._deaths.append(now_s)
        if len(self._deaths) > RESTARTS and self._deaths[-1] - self._deaths[0] < RESTART_WINDOW_S:
            _log.error("more than %d deaths in %g s: giving up", RESTARTS, RESTART_WINDOW_S)
            self._stop()
            return ExitCode.WORKERS
        if lost and not same_fault:
            for other in self._workers:
                if not worker.devices or set(worker.devices) & set(other.devices):
                    other.fault_s = now_s
                    if self._shared_gpu:
                        # A worker with a batch notices that it lost the GPU, too, and answers its
                        # callers; an idle one does not, and is ended.
                        other.kill_at_s = min(other.kill_at_s, now_s + SAME_FAULT_S)
        self._add()
        return ExitCode.STOPPED

    def _reload(self) -> None:
        for worker in self._workers:
            pid = worker.process.pid
            assert pid is not None, "bug: the worker was not started"
            if worker.process.is_alive():  # otherwise its process id may be another's by now
                os.kill(pid, signal.SIGHUP)

    def _stop(self) -> None:
        self._stopping = True
        self._close_at_s = time.monotonic() + self._settings.grace_s
        for worker in self._workers:
            worker.kill_at_s = self._close_at_s + self._settings.drain_timeout_s + STOP_LIMIT_S
        self._stop_writer.close()


def shares(devices: tuple[int, ...], workers: int) -> list[tuple[int, ...]]:
    """The GPUs of each worker: as many as there are for each, one if there are fewer.

    So the loss of a GPU ends its workers alone. Without numbers each worker uses all GPUs.
    """
    if len(devices) < 2:
        return [devices]
    parts = min(len(devices), workers)
    return [devices[part::parts] for part in range(parts)]


def _work(
    settings: Settings,
    shutdown_pipe: Connection,
    heartbeat: Connection,
    inbox: Inbox,
    folder: Path | None,
) -> None:
    # Until `run` sees the end of its pipe, which is after seconds of imports on a busy machine.
    end_with_parent(True)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        sys.exit(ExitCode.WORKERS)  # it ended before
    allocator.set_up()
    signals = Signals([signal.SIGHUP])  # the supervisor alone acts on the others
    signals.start()
    with contextlib.suppress(OSError):  # the name in `top` and `ps -e`; Linux only
        Path("/proc/self/comm").write_text("lenet-worker")
    logs.configure(settings.log_level, settings.log_format)
    gc.disable()  # until it serves, as in `service.__main__`
    from service.server import Supervised, run  # here alone: it takes half a second to import

    end_with_parent(False)
    sys.exit(run(settings, signals, Supervised(shutdown_pipe, heartbeat, inbox, folder)))
