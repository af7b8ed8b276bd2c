"""One serving process: its event loop, its listeners, its signals.

Start and stop in the order that loses no request: warm, listen, ready; not ready, grace, listeners
closed, requests answered, contexts closed. A process whose device is lost ends without any of that.
It refuses to start others: that is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NoReturn

import uvicorn
import uvloop
from fastapi import FastAPI

from service.app import create_app
from service.errors import FORESEEN, ExitCode, exit_code
from service.http.protocol import HttpProtocol
from service.listener import cannot_listen, listen
from service.repository import Stop
from service.settings import Settings

_log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""New connections in one turn of the event loop. libuv accepts one a turn from each descriptor that
it watches: under load the last of 512 waited 3 s, with so many duplicates of one 0.2 s."""

LAST_ANSWERS_S = 0.5
"""From the loss of the device to the end: callers get their answers, and probes see it."""


class _Loop(uvloop.Loop):
    """uvloop with a clock like asyncio's own: uvloop's has whole milliseconds."""

    def time(self) -> float:
        return time.monotonic()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the contexts.

    At its end requests have what is left of the service's stop.
    """

    def __init__(self, config: uvicorn.Config, stop: Stop) -> None:
        super().__init__(config)
        self._stop = stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop.begin()  # from here on gRPC refuses new calls, too
        # Never 0: Python 3.11's wait_for then gives up, and uvicorn logs it, before it looks.
        # An int only for uvicorn's command line.
        left_s = max(1e-3, self._stop.left_s())
        self.config.timeout_graceful_shutdown = left_s  # type: ignore[assignment]
        await super().shutdown(sockets)


def run(settings: Settings, told: Connection | None = None) -> ExitCode:
    """Serve until told to stop; a start that fails is one line in the log and an exit code.

    SIGTERM and SIGINT tell it, or with `told` the end of that pipe and nothing else. On SIGHUP
    it reads its weights folder again.
    """
    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(_serve(settings, told))
    except FORESEEN as exc:
        _log.error("%s", exc)
        code = exit_code(exc)
        if code is ExitCode.DEVICE:
            _end_at_once()
        return code
    _log.info("stopped")
    return ExitCode.STOPPED


async def _serve(settings: Settings, told: Connection | None = None) -> None:
    """Serve until told to stop; a second signal waits for nobody."""
    main = asyncio.current_task()
    assert main is not None, "bug: outside a task"
    stop = asyncio.Event()
    warm = reload_asked = False
    shared = told is not None
    app = create_app(settings, shared=shared)

    def begin_stop() -> None:
        if not warm and not stop.is_set():
            main.cancel()
        stop.set()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            # No step of the stop could be trusted to end: a context may hang in its library.
            _log.warning("a second signal: waiting for nobody")
            os._exit(128 + number)
        begin_stop()

    def on_hangup() -> None:
        nonlocal reload_asked
        if warm:
            app.state.reloader.ask()
        else:  # what is being warmed may have been read before
            reload_asked = True

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # a supervisor had it wait
    if told is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
    else:
        pipe = told.fileno()

        def on_told() -> None:
            loop.remove_reader(pipe)  # it stays readable
            begin_stop()

        loop.add_reader(pipe, on_told)
    try:
        # Both before the work of the start, so that a taken port is told at once.
        listen(settings.host, settings.grpc_port, shared=shared).close()  # gRPC binds its own
        with listen(settings.host, settings.port, shared=shared) as listener:
            async with app.router.lifespan_context(app):
                warm = True
                if reload_asked:
                    app.state.reloader.ask()
                ending = asyncio.create_task(_end_when_lost(app))
                if settings.fault_injection:
                    faults = app.state.faults
                    loop.add_signal_handler(signal.SIGUSR2, faults.inject, "poison")
                    loop.add_signal_handler(signal.SIGUSR1, faults.inject, "hang")
                await _answer(app, listener, stop, settings)
            if app.state.lost.is_set():  # in the last of the stop
                await ending
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


async def _end_when_lost(app: FastAPI) -> None:
    """End the process soon after its device is lost; every request has its error by then."""
    await app.state.lost.wait()
    app.state.predictor.ready = False
    await asyncio.sleep(LAST_ANSWERS_S)
    _end_at_once()


def _end_at_once() -> NoReturn:
    # Nothing is closed: what the libraries of a lost device do then, at exit included, may hang.
    os._exit(ExitCode.DEVICE)


async def _answer(
    app: FastAPI, listener: socket.socket, stop: asyncio.Event, settings: Settings
) -> None:
    # What the start left behind lives as long as the process: a collection in the middle of
    # traffic need not look at it.
    gc.collect()
    gc.freeze()
    server = _server(app, app.state.stop)
    listeners = [listener, *(listener.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(server.config.backlog)  # so that whoever reads "ready" can connect
    except OSError as exc:  # another bound the port, too, and was faster
        raise cannot_listen(host, port, exc) from exc
    at = f"[{host}]" if ":" in host else host
    _log.info("ready: HTTP on http://%s:%d, gRPC on %s:%d", at, port, at, app.state.grpc_port)
    serving = asyncio.create_task(server.serve(listeners))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    _log.info("stopping: not ready, %g s of grace", settings.grace_s)
    app.state.predictor.ready = False
    await asyncio.wait((serving,), timeout=settings.grace_s)
    server.should_exit = True
    stopping.cancel()
    await serving


def _server(app: FastAPI, stop: Stop) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
        ),
        stop,
    )
