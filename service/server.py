"""The composition root: settings in, an application out; everything is made and closed here.

Start: weight files are read and doubted, contexts warmed and proven, gRPC and HTTP opened, ready.
Stop is the exact reverse. It refuses to do any work of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from service import distribution_version
from service.engine.devices import Placement, place
from service.engine.faults import Faults
from service.engine.models import Batching, Predictor, Reloader, Repository, ServedModel, Stop
from service.engine.versions import read_models
from service.errors import FORESEEN, ExitCode, exit_code
from service.http.app import Application, install, operations_router, predict_route
from service.http.body import Bodies
from service.http.connection import HttpProtocol
from service.http.openapi import InfoResponse, LoadedModel
from service.images import Limits
from service.listener import cannot_listen, listen
from service.metrics import Metrics
from service.rpc import server as rpc
from service.settings import Settings

_log = logging.getLogger(__name__)


def create_app(settings: Settings, *, shared: bool = False) -> Application:
    """The service as an ASGI application; its lifespan opens and closes all it needs.

    With `shared` other processes may open the same gRPC port.

    While it runs, `app.state.predictor` answers, `app.state.reloader` can be asked to read the
    weights folder again, `app.state.grpc_port` is the bound port, `app.state.stop` tells how
    much time a stop has left, `app.state.lost` is set when the device is lost, and
    `app.state.faults` takes those of a test, if the settings allow it.
    """

    @asynccontextmanager
    async def lifespan(app: Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await _start(app, settings, stack, shared)
            try:
                yield
            finally:
                app.state.predictor.ready = False

    app = Application(
        title="lenet-serve",
        summary="Handwritten digits, recognised over HTTP and gRPC.",
        version=distribution_version(),
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would be made of the Host header
    )
    install(app)
    return app


async def _start(app: Application, settings: Settings, stack: AsyncExitStack, shared: bool) -> None:
    metrics = Metrics(CollectorRegistry())
    stack.enter_context(metrics.tallies.flushed_regularly())
    began = time.perf_counter()
    files = read_models(settings.weights, settings.models, settings.default_model)
    read = time.perf_counter()
    _log.info("read %s: warming up", ", ".join(str(file.path) for file in files))

    placement = place(settings)
    placed = time.perf_counter()
    app.state.faults = Faults() if settings.fault_injection else None
    batching = _batching(settings, placement, app.state.faults)
    repository = Repository(files, settings.default_model, batching, metrics)
    await stack.enter_async_context(repository)
    app.state.lost = repository.lost
    opening_s, warm_up_s = repository.start_s()
    phases = {
        "weights": read - began,
        "device": placed - read + opening_s,
        "warm_up": warm_up_s,
        "contexts": time.perf_counter() - placed,
    }
    for phase, seconds in phases.items():
        metrics.started(phase, seconds)
    _log.info(
        "the start took, in seconds: %s", ", ".join(f"{name} {s:.2f}" for name, s in phases.items())
    )
    app.state.reloader = await stack.enter_async_context(
        Reloader(settings.weights, repository, metrics)
    )

    timeout_s = settings.request_timeout_ms / 1e3
    predictor = Predictor(repository, metrics, timeout_s)
    app.state.predictor = predictor
    app.state.stop = repository.stop
    app.state.grpc_port = await stack.enter_async_context(
        rpc.serve(
            predictor,
            repository,
            host=settings.host,
            port=settings.grpc_port,
            max_body_bytes=settings.max_body_bytes,
            max_images=settings.max_images,
            stop_timeout_s=settings.drain_timeout_s,
            shared=shared,
        )
    )
    bodies = Bodies(settings.max_body_bytes, settings.max_bodies_bytes)
    route = predict_route(predictor, Limits(settings.max_images), bodies, timeout_s)
    app.router.routes.append(route)  # for the documentation, and below a root path
    app.predict_route = route
    info = partial(_info, settings, placement, repository.models)
    app.include_router(operations_router(predictor, metrics, info))
    predictor.ready = True


def _batching(settings: Settings, placement: Placement, faults: Faults | None) -> Batching:
    return Batching(
        placement=placement,
        max_queue_rows=settings.max_queue_rows,
        max_wait_s=settings.max_wait_us / 1e6,
        hang_timeout_s=settings.hang_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        faults=faults,
    )


def _info(
    settings: Settings, placement: Placement, models: tuple[ServedModel, ...]
) -> InfoResponse:
    return InfoResponse(
        name="lenet-serve",
        version=distribution_version(),
        default_model=settings.default_model,
        models=[_loaded(model, placement.name) for model in models],
        limits={
            "max_batch_rows": placement.max_batch_rows,
            "max_queue_rows": settings.max_queue_rows,
            "max_images": settings.max_images,
            "max_picture_pixels": Limits(settings.max_images).max_picture_pixels,
            "max_body_bytes": settings.max_body_bytes,
            "request_timeout_ms": settings.request_timeout_ms,
        },
    )


def _loaded(model: ServedModel, device: str) -> LoadedModel:
    weights = model.file.weights
    training = weights.training
    return LoadedModel(
        name=model.file.name,
        version=model.file.version,
        device=device,
        sha256=model.file.sha256,
        parameters=sum(math.prod(shape) for shape in weights.model.parameters().values()),
        accuracy=training.accuracy,
        epochs=training.epochs,
        seed=training.seed,
        dataset_sha256=training.dataset_sha256,
        labels=list(training.labels),
    )


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
