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
        self._workers: list[BaseProcess] = []
        self._watches: dict[BaseProcess, Watch] = {}
        self._inboxes: dict[BaseProcess, Inbox] = {}
        self._devices: dict[BaseProcess, tuple[int, ...]] = {}
        self._first: list[BaseProcess] = []  # those that replace no other
        self._deaths: deque[float] = deque(maxlen=RESTARTS + 1)
        self._fault_s = -math.inf  # when a worker last ended because its device was lost
        self._beside: list[BaseProcess] = []  # the workers that lived then
        self._ended: list[BaseProcess] = []  # those of them that this process ended
        self._stop_number = self._second_number = 0  # of signals
        self._stopping = False
        self._close_at_s = self._kill_at_s = self._retry_at_s = self._end_at_s = math.inf
        self._shutdown_pipe, self._stop_writer = self._spawn.Pipe(duplex=False)

    def run(self) -> ExitCode:
        with self._selector, self._shutdown_pipe, self._stop_writer:
            return self._watch()

    def _watch(self) -> ExitCode:
        self._take_signals()
        if not self._stopping:
            self._add(self._settings.workers)
        self._first = list(self._workers)
        outcome = ExitCode.STOPPED
        check_at_s = time.monotonic() + BEAT_S
        while self._workers:
            next_s = min(check_at_s, self._close_at_s, self._kill_at_s, self._end_at_s)
            wait_s = next_s - time.monotonic()
            events = self._selector.select(0 if self._sharing.stuck else max(0.0, wait_s))
            ready = {key.fileobj for key, _ in events}
            if self._signals in ready:
                self._take_signals()
            self._sharing.share(ready)
            for worker in [one for one in self._workers if one.sentinel in ready]:
                if worker.is_alive():
                    continue  # about to end
                self._forget(worker)
                if not self._stopping:
                    outcome = self._after_death(worker)
                worker.close()
                del self._devices[worker]
            now_s = time.monotonic()
            if now_s >= check_at_s:
                check_at_s = now_s + BEAT_S  # not one after another after a suspend
                self._kill_stuck()
            if now_s >= self._retry_at_s and not self._stopping and not self._left():
                self._retry_at_s = math.inf
                self._add(self._settings.workers - len(self._workers))
            if now_s >= self._end_at_s:
                self._end_at_s = math.inf
                for neighbour in self._left():
                    neighbour.kill()
            if now_s >= self._close_at_s:
                self._close_at_s = math.inf
                self._sharing.close()
            if now_s >= self._kill_at_s:
                self._kill_at_s = math.inf
                self._kill_late()
        if self._second_number:
            sys.exit(128 + self._second_number)
        return outcome

    def _take_signals(self) -> None:
        while wait([self._signals], 0):
            (number,) = self._signals.recv(1)
            if number == signal.SIGHUP:
                self._reload()
            elif self._stop_number:
                if not self._second_number:
                    _log.warning("second signal: exiting immediately")
                self._second_number = number
                self._kill_all()
            else:
                self._stop_number = number
                self._stop()

    def _add(self, number: int) -> None:
        for _ in range(number):
            used = [self._devices[one] for one in self._workers]
            devices = min(shares(self._settings.devices, self._settings.workers), key=used.count)
            worker = self._start(devices)
            self._workers.append(worker)
            self._devices[worker] = devices
            self._selector.register(worker.sentinel, selectors.EVENT_READ)

    def _start(self, devices: tuple[int, ...]) -> BaseProcess:
        beats, heartbeat = self._spawn.Pipe(duplex=False)
        settings = self._settings.model_copy(update={"devices": devices})
        with heartbeat:
            inbox = self._sharing.add()
            worker = self._spawn.Process(
                target=_work,
                args=(settings, self._shutdown_pipe, heartbeat, inbox, self._folder),
                daemon=True,
            )
            # A worker inherits the signals that this thread blocks. Starting the resource tracker,
            # which happens where it is not alive, unblocks some.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            worker.start()
        assert worker.pid is not None, "bug: the worker was not started"
        self._watches[worker] = Watch(beats, self._settings.hang_timeout_s)
        self._inboxes[worker] = inbox
        _log.info("worker %d started", worker.pid)
        return worker

    def _forget(self, worker: BaseProcess) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.sentinel)
        assert worker.pid is not None, "bug: the worker was not started"
        if self._folder is not None:
            workers.fold(self._folder, worker.pid)
            repository.forget(self._folder, worker.pid)
        if (watch := self._watches.pop(worker, None)) is not None:
            watch.close()
            self._sharing.remove(self._inboxes.pop(worker))

    def _kill_stuck(self) -> None:
        for worker, watch in self._watches.items():
            if watch.is_stuck() and worker.is_alive() and not self._stopping:
                _log.error(
                    "worker %d gave no sign of life in %d checks, %g s apart: it is stopped or its "
                    "event loop is stuck: killed",
                    *(worker.pid, watch.allowed, BEAT_S),
                )
                worker.kill()

    def _after_death(self, worker: BaseProcess) -> ExitCode:
        """Replace `worker`, or stop all; returns the exit code in case it is the end."""
        code = worker.exitcode or 0
        files = code in (ExitCode.WEIGHTS, ExitCode.SETTINGS)  # the certificate's are settings
        if files and worker not in self._first and self._workers:
            _log.error("worker %d: another try in %g s, others serve", worker.pid, RETRY_S)
            self._retry_at_s = time.monotonic() + RETRY_S
            return ExitCode.STOPPED
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
            # They lost the GPU to the same fault. A worker with a batch notices that and answers
            # its callers; an idle one does not, and is ended.
            # Those that lost another GPU just before are still to be ended, and no later.
            left, end_at_s = self._left(), now_s + SAME_FAULT_S
            self._end_at_s = min(self._end_at_s, end_at_s) if left else end_at_s
            self._ended = left + [one for one in self._neighbours(worker) if one not in left]
        if not self._left():  # until then MPS takes no new client
            self._add(self._settings.workers - len(self._workers))
        return ExitCode.STOPPED

    def _left(self) -> list[BaseProcess]:
        """The workers that this process is about to end, and that still run."""
        return [one for one in self._ended if one in self._workers]

    def _same_fault(self, worker: BaseProcess, now_s: float) -> bool:
        """Whether `worker` lost its device to a fault that is counted already."""
        if worker in self._ended:
            return True
        if worker.exitcode != ExitCode.DEVICE:
            return False
        if worker in self._beside and now_s - self._fault_s < SAME_FAULT_S:
            return True
        self._fault_s, self._beside = now_s, self._neighbours(worker)
        return False

    def _neighbours(self, worker: BaseProcess) -> list[BaseProcess]:
        """The other workers that use a GPU of `worker`, which has ended."""
        own = set(self._devices[worker])
        return [one for one in self._workers if own.intersection(self._devices[one]) or not own]

    def _reload(self) -> None:
        for worker in self._workers:
            assert worker.pid is not None, "bug: the worker was not started"
            if worker.is_alive():  # otherwise its process id may be another's by now
                os.kill(worker.pid, signal.SIGHUP)

    def _stop(self) -> None:
        self._stopping = True
        self._close_at_s = time.monotonic() + self._settings.grace_s
        self._kill_at_s = self._close_at_s + self._settings.drain_timeout_s + STOP_LIMIT_S
        self._stop_writer.close()

    def _kill_late(self) -> None:
        for worker in self._workers:
            _log.error(
                "worker %d did not stop within %g s after the drain: killed",
                *(worker.pid, STOP_LIMIT_S),
            )
        self._kill_all()

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()


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
    from service.server import run  # here alone: it takes half a second to import

    end_with_parent(False)
    sys.exit(run(settings, signals, shutdown_pipe, heartbeat, inbox, folder))
