"""One serving process: opens the service, listens, answers until a stop, closes all in reverse.

Start: weight files read, contexts warmed up and validated, gRPC and HTTP opened, ready.
Stop: not ready, grace, listeners closed, accepted requests finished, contexts closed. What is not
done in time is abandoned: see `stopping`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from lenet import distribution_commit, distribution_version
from service.api.app import create_app
from service.api.explain import ExplainRoute
from service.api.grpc_methods import methods
from service.api.openapi import InfoResponse, LoadedModel
from service.api.routes import image_routes
from service.api.servicer import InferenceServicer
from service.budget import Budget
from service.decode.pool import Decoders
from service.engine.deadlines import Deadlines
from service.engine.devices import Placement, place
from service.engine.explainer import Explainer
from service.engine.faults import Faults
from service.engine.models import EngineConfig, Models, ServedModel
from service.engine.repository import Repository, unloaded
from service.engine.versions import WeightsFolder
from service.errors import (
    STARTUP_ERRORS,
    CannotListen,
    ExitCode,
    InvalidCertificate,
    Unavailable,
    exit_code,
)
from service.forms.body import Limits
from service.observe.access_log import AccessLog, access_log
from service.observe.metrics import NO_MODEL, Metrics
from service.observe.traces import Traces
from service.process import allocator, descriptors
from service.process.heartbeat import Heartbeat
from service.process.keys import Keys
from service.process.listener import allow_connections, at, listen
from service.process.sharing import Inbox
from service.process.signals import Signals
from service.process.stopping import Stop
from service.process.tls import ServedCertificate
from service.request import Requests
from service.settings import Settings
from service.transport.answer import STATUS
from service.transport.door import HttpService
from service.transport.gate import Gate
from service.transport.grpc_status import STATUS_NAMES
from service.transport.head import FastRoutes
from service.transport.http2_head import Methods
from service.transport.server import HttpServer

_log = logging.getLogger(__name__)

_DECODER_BYTES = 256 << 20
"""60 MiB for the process itself, 155 for the largest WebP, 130 for a PNG of 16 megapixels with
transparency. With 384 JSON of 30 MB killed the process instead of being refused."""

LAST_ANSWERS_S = 0.5
"""Seconds from the loss of the device to the stop: callers get answers, probes see it."""


@dataclass(frozen=True, slots=True)
class Service:
    """An open service: `app`, `fast_routes` and the `methods` of gRPC are to be served."""

    models: Models
    repository: Repository
    app: FastAPI
    fast_routes: FastRoutes
    methods: Methods
    budget: Budget
    gate: Gate
    metrics: Metrics
    access: AccessLog | None
    faults: Faults | None
    """Set by `--fault-injection`."""


@asynccontextmanager
async def open_service(
    settings: Settings,
    *,
    grpc_port: int,
    shared: bool = False,
    folder: Path | None = None,
) -> AsyncIterator[Service]:
    """Open everything but the listeners, and close it on leaving.

    `shared`: this is a worker of a supervisor; others may share `folder`, if there is one.

    Raises:
        InvalidWeightFile, GoldenMismatch: the weights must not be served.
        BackendUnavailable, DeviceError: the device cannot be used.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics(CollectorRegistry())
        stack.enter_context(metrics.flushed_regularly())

        began = time.perf_counter()
        weights = WeightsFolder(settings.weights, settings.latest_versions)
        versions = weights.read_all(
            settings.models, settings.default_model, unloaded(folder), settings.model_alias
        )
        read = time.perf_counter()
        names = ", ".join(f"{version.name}/{version.version}" for version in versions)
        what = names or "nothing, as all models are unloaded,"
        _log.info("read %s from %s: warming up", what, settings.weights)

        deadlines = Deadlines()
        stack.callback(deadlines.close)
        placement = place(settings)
        placed = time.perf_counter()
        faults = Faults() if settings.fault_injection else None
        config = _engine_config(settings, placement, faults)
        models = await stack.enter_async_context(
            Models(
                weights,
                versions,
                settings.default_model or versions[0].name,
                config,
                metrics,
                deadlines,
                settings.model_alias,
            )
        )
        opening_s, warm_up_s = models.start_s()
        phases = {
            "weights": read - began,
            "device": placed - read + opening_s,
            "warm_up": warm_up_s,
            "contexts": time.perf_counter() - placed,
        }
        for phase, seconds in phases.items():
            metrics.started(phase, seconds)
        took = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        _log.info("start phases, in seconds: %s", took)

        repository = Repository(models, folder, alone=not shared)
        await repository.apply_changes()
        decoders = stack.enter_context(
            Decoders(metrics, _decoder_count(settings), _decoder_memory_bytes(settings))
        )
        budget = Budget(settings.max_in_flight_bytes)
        metrics.watch_in_flight(lambda: budget.held_bytes)
        timeout_s = settings.request_timeout_ms / 1e3
        probes = settings.access_log_probes == "on"
        access = stack.enter_context(access_log(settings.access_log, probes))
        keys = Keys(
            (key.get_secret_value() for key in settings.api_keys),
            (key.get_secret_value() for key in settings.admin_keys),
        )
        build = distribution_version(), distribution_commit()  # read from files
        requests = Requests(
            models,
            metrics,
            Limits(settings.max_images),
            settings.max_body_bytes,
            budget,
            decoders,
            deadlines,
            timeout_s,
            traces=stack.enter_context(_traces(settings, build[0])),
        )
        routes = image_routes(requests)
        if settings.explain == "on":
            explainer = stack.enter_context(Explainer(deadlines))
            routes[b"POST", b"/explain"] = ExplainRoute.beside(requests, explainer)
        servicer = InferenceServicer(models, repository, metrics, settings.max_images)
        app = create_app(
            models=models,
            repository=repository,
            metrics=metrics,
            keys=keys,
            info=partial(_info, settings, grpc_port, placement, models, build),
            explain=settings.explain == "on",
            max_images=settings.max_images,
        )
        gate = Gate(
            keys,
            settings.cors_origins,
            lambda error: metrics.request_done(NO_MODEL, "http", error.code),
        )
        models.ready = True
        try:
            yield Service(
                models=models,
                repository=repository,
                app=app,
                fast_routes=routes,
                methods=methods(replace(requests, protocol="grpc"), servicer, models, keys),
                budget=budget,
                gate=gate,
                metrics=metrics,
                access=access,
                faults=faults,
            )
        finally:
            models.ready = False


@contextmanager
def _traces(settings: Settings, version: str) -> Iterator[Traces | None]:
    """What chooses the requests to be traced, and sends their spans; None if that is off."""
    url = settings.traces_endpoint
    if not url:
        yield None
        return
    from service.observe import otlp  # needs an extra

    traces = Traces(settings.traces_one_in, (settings.traces_slower_ms or math.inf) / 1e3)
    scheme = "http" if settings.certificate is None else "https"
    encoder = otlp.Encoder({"http": STATUS | {"": 200}, "grpc": STATUS_NAMES}, scheme)
    with otlp.sent(traces, encoder, url, version):
        yield traces


def _decoder_count(settings: Settings) -> int:
    """The setting; by default one for each core of this worker, two to eight."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    return settings.decoders or min(8, max(2, cores // settings.workers))


def _decoder_memory_bytes(settings: Settings) -> int:
    """The most memory of a decoder: for itself and the largest picture, and a body and its copy."""
    return _DECODER_BYTES + 2 * settings.max_body_bytes


def _engine_config(settings: Settings, placement: Placement, faults: Faults | None) -> EngineConfig:
    return EngineConfig(
        placement=placement,
        max_queue_rows=settings.max_queue_rows,
        max_wait_s=settings.max_wait_us / 1e6,
        hang_timeout_s=settings.hang_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        faults=faults,
    )


def _info(
    settings: Settings,
    grpc_port: int,
    placement: Placement,
    models: Models,
    build: tuple[str, str],
) -> InfoResponse:
    version, commit = build
    return InfoResponse(
        name="lenet-serve",
        version=version,
        commit=commit,
        python=platform.python_version(),
        grpc_port=grpc_port,
        default_model=models.default,
        models=[_loaded(model, placement) for model in models.served],
        limits={
            "max_batch_rows": placement.max_batch_rows,
            "max_queue_rows": settings.max_queue_rows,
            "max_images": settings.max_images,
            "max_picture_pixels": Limits(settings.max_images).max_picture_pixels,
            "max_body_bytes": settings.max_body_bytes,
            "request_timeout_ms": settings.request_timeout_ms,
        },
        explain=settings.explain == "on",
    )


def _loaded(model: ServedModel, placement: Placement) -> LoadedModel:
    version = model.version
    training = version.weights.training
    return LoadedModel(
        name=version.name,
        version=version.version,
        device=placement.name,
        precision=placement.precision,
        strategies=model.pool.workers[0].context.strategies,
        sha256=version.sha256,
        parameters=sum(math.prod(shape) for shape in version.weights.model.parameters().values()),
        accuracy=training.accuracy,
        epochs=training.epochs,
        seed=training.seed,
        dataset_sha256=training.dataset_sha256,
        labels=list(training.labels),
        loaded_at=datetime.fromtimestamp(version.read_at, UTC),
    )


def run(
    settings: Settings,
    signals: Signals,
    shutdown_pipe: Connection | None = None,
    heartbeat: Connection | None = None,
    inbox: Inbox | None = None,
    folder: Path | None = None,
) -> ExitCode:
    """Serve until a stop; a start that fails is one line in the log and an exit code.

    SIGTERM and SIGINT of `signals` stop it, or the end of `shutdown_pipe`. SIGHUP reloads the
    weights folder. `heartbeat` and `inbox` are of a worker with a supervisor, `folder` the one that
    its workers share, if there is one.
    """
    stop = Stop(settings.grace_s + settings.drain_timeout_s)
    signals.deliver(stop.take_signal)
    if shutdown_pipe is not None:
        threading.Thread(
            target=stop.wait_for_end, args=(shutdown_pipe,), name="shutdown", daemon=True
        ).start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, stop, heartbeat=heartbeat, inbox=inbox, folder=folder))
    except STARTUP_ERRORS as exc:
        _log.error("%s", exc)
        code = exit_code(exc)
        if code is ExitCode.DEVICE:
            _end_at_once()
        return code
    _log.info("stopped")
    return ExitCode.STOPPED


async def _serve(
    settings: Settings,
    requests: Stop,
    *,
    heartbeat: Connection | None = None,
    inbox: Inbox | None = None,
    folder: Path | None = None,
) -> None:
    shared = inbox is not None
    main = asyncio.current_task()
    assert main is not None, "bug: outside a task"
    stop = asyncio.Event()
    service: Service | None = None
    reload_requested = False
    files = settings.certificate
    certificate = None if files is None else ServedCertificate(files)

    def begin_stop() -> None:
        if service is None and not stop.is_set():
            main.cancel()
        stop.set()

    def on_hangup() -> None:
        nonlocal reload_requested
        if service is None:  # the warm-up may have read older files
            reload_requested = True
            return
        service.models.request_reload()
        service.repository.request_changes()
        if certificate is not None:
            _renew(certificate)
            service.metrics.certificate_read(certificate.ends_s)

    loop = asyncio.get_running_loop()
    requests.attach(begin_stop, on_hangup)
    heart = None if heartbeat is None else Heartbeat(heartbeat)
    if heart is not None:
        heart.start()
    try:
        with contextlib.ExitStack() as stack:
            # Both ports before the work of the start, so that a taken one is reported at once.
            ports = _bind(settings) if inbox is None else inbox.ports
            for listener in itertools.chain(*ports):
                stack.enter_context(listener)
            grpc_port = ports[-1][0].getsockname()[1]
            async with open_service(
                settings, grpc_port=grpc_port, shared=shared, folder=folder
            ) as service:
                if certificate is not None:
                    service.metrics.certificate_read(certificate.ends_s)
                if reload_requested:
                    on_hangup()
                ending = asyncio.create_task(_end_when_lost(service.models))
                if service.faults is not None:
                    loop.add_signal_handler(signal.SIGUSR2, service.faults.inject, "poison")
                    loop.add_signal_handler(signal.SIGUSR1, service.faults.inject, "hang")
                # SIGHUP to a supervisor reaches all workers, to a worker only that one.
                pid = os.getppid() if shared else os.getpid()
                if heart is not None:
                    heart.serve()
                await _answer(service, ports, inbox, stop, settings, certificate, pid)
            if service.models.lost.is_set():  # in the last of the stop
                await ending
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


def _bind(settings: Settings) -> tuple[tuple[socket.socket, ...], ...]:
    """The listeners of each port."""
    http = listen(settings.host, settings.port)
    if settings.one_port:
        return (http,)
    try:
        return http, listen(settings.host, settings.grpc_port)
    except CannotListen:
        for listener in http:
            listener.close()
        raise


def _renew(certificate: ServedCertificate) -> None:
    try:
        certificate.renew()
    except InvalidCertificate as exc:
        _log.error("certificate: not read again, still presenting the earlier one: %s", exc)
    else:
        _log.info("certificate: read again")


async def _answer(
    service: Service,
    ports: Sequence[Sequence[socket.socket]],
    inbox: Inbox | None,
    stop: asyncio.Event,
    settings: Settings,
    certificate: ServedCertificate | None,
    pid: int,
) -> None:
    """Serve until `stop`, then stop the connections and the queues within the drain timeout.

    `ports`: the listeners for HTTP and, unless they are the same, for gRPC. All speak both.
    """
    _freeze_objects()
    door = HttpService(
        service.fast_routes,
        service.budget,
        gate=service.gate,
        access=service.access,
        certificate=certificate,
        max_connections=descriptors.connections(),
        methods=service.methods,
    )
    server = HttpServer(
        service.app,
        door,
        settings.drain_timeout_s,
        service.metrics.connection_refused,
        *(() if inbox is None else (inbox.count_closed,)),
    )
    listeners = list(itertools.chain(*ports))
    allow_connections(listeners)  # before "ready" is logged, at which clients connect
    (host, port), (_, grpc_port) = (ports[index][0].getsockname()[:2] for index in (0, -1))
    grpc_at = at(host, grpc_port)
    sources = listeners
    if inbox is not None:
        for listener in listeners:  # or clients would wait for a supervisor that was killed
            listener.close()
        sources = [inbox.source]
        inbox.begin()
    scheme = "http" if certificate is None else "https"
    _log.info("ready: HTTP on %s://%s, gRPC on %s, pid %d", scheme, at(host, port), grpc_at, pid)
    serving = asyncio.create_task(server.serve(sources))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    _log.info("stopping: not ready, %g s of grace", settings.grace_s)
    service.models.ready = False
    await asyncio.wait((serving,), timeout=settings.grace_s)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + settings.drain_timeout_s
    door.stop()
    server.should_exit = True
    await serving
    door.give_up(
        Unavailable(
            "the service stopped before the answer; send this to another instance", retry_after_s=1
        )
    )
    await service.models.drain(max(0.0, deadline_s - loop.time()))


def _freeze_objects() -> None:
    """End the start: what is left of it is kept from the collector, what it freed is returned."""
    gc.collect()
    gc.freeze()  # a collection in the middle of traffic need not look at it
    gc.enable()  # turned off before the imports
    allocator.return_memory()  # 12 MiB with five models


async def _end_when_lost(models: Models) -> None:
    """End the process soon after its device is lost; every request has its error by then."""
    await models.lost.wait()
    models.ready = False
    await asyncio.sleep(LAST_ANSWERS_S)
    _end_at_once()


def _end_at_once() -> NoReturn:
    # Nothing is closed: what the libraries of a lost device do then, at exit included, may hang.
    os._exit(ExitCode.DEVICE)
