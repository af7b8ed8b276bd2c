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
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop
from starlette.types import ASGIApp

from service.assembly import Service, open_service
from service.engine.models import Models
from service.errors import STARTUP_ERRORS, ExitCode, exit_code
from service.observe.metrics import Metrics
from service.process import allocator, descriptors
from service.process.heartbeat import Heartbeat
from service.process.signals import Signals
from service.process.stopping import Stop
from service.settings import Settings
from wire.door import HttpService
from wire.errors import CannotListen, InvalidCertificate
from wire.listener import BACKLOG, allow_connections, at, listen
from wire.server import HttpServer
from wire.sharing import Inbox
from wire.tls import ServedCertificate
from wire.turns import Turns

if TYPE_CHECKING:
    import uvicorn

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""How long uvicorn keeps a connection without a request; our own server does as long."""

MAX_HEADER_BYTES = 64 * 1024
"""Maximum bytes of an incomplete header section on uvicorn; our own server has the same limit."""

LAST_ANSWERS_S = 0.5
"""Seconds from the loss of the device to the stop: callers get answers, probes see it."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """What a worker has of its supervisor: a pipe whose end stops it, and what it serves from.

    `folder` is the one that the workers share, if there is one.
    """

    shutdown_pipe: Connection
    heartbeat: Connection
    inbox: Inbox
    folder: Path | None


def run(settings: Settings, signals: Signals, supervised: Supervised | None = None) -> ExitCode:
    """Serve until a stop; a start that fails is one line in the log and an exit code.

    SIGTERM and SIGINT of `signals` stop it, or its supervisor. SIGHUP reloads the weights folder.
    """
    stop = Stop(settings.grace_s + settings.drain_timeout_s)
    signals.deliver(stop.take_signal)
    if supervised is not None:
        pipe = (supervised.shutdown_pipe,)
        threading.Thread(target=stop.wait_for_end, args=pipe, name="shutdown", daemon=True).start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, stop, supervised))
    except STARTUP_ERRORS as exc:
        _log.error("%s", exc)
        code = exit_code(exc)
        if code is ExitCode.DEVICE:
            _end_at_once()
        return code
    _log.info("stopped")
    return ExitCode.STOPPED


async def _serve(settings: Settings, requests: Stop, supervised: Supervised | None = None) -> None:
    main = asyncio.current_task()
    assert main is not None, "bug: outside a task"
    stop = asyncio.Event()
    service: Service | None = None
    files = settings.certificate
    certificate = None if files is None else ServedCertificate(files)

    def begin_stop() -> None:
        if service is None and not stop.is_set():
            main.cancel()
        stop.set()

    def reload() -> None:
        assert service is not None, "bug: a reload before the start"
        service.repository.request_reload()
        if certificate is not None:
            _renew(certificate, service.metrics)
            if settings.http_server == "uvicorn":
                _log.warning("certificate: uvicorn presents that of its start until a restart")

    requests.on_stop(begin_stop)
    heart = None if supervised is None else Heartbeat(supervised.heartbeat)
    if heart is not None:
        heart.start()
    try:
        with contextlib.ExitStack() as stack:
            # Both ports before the work of the start, so that a taken one is reported at once.
            ports = _bind(settings) if supervised is None else supervised.inbox.ports
            for listener in itertools.chain(*ports):
                stack.enter_context(listener)
            grpc_port = None
            if settings.grpc_port != "off":
                grpc_port = ports[-1][0].getsockname()[1]
            folder = None if supervised is None else supervised.folder
            async with open_service(
                settings, grpc_port=grpc_port, shared=supervised is not None, folder=folder
            ) as service:
                if certificate is not None:
                    _show(certificate, service.metrics, "read")
                requests.on_reload(reload)  # now, too: the warm-up may have read older files
                ending = asyncio.create_task(_end_when_lost(service.models, service.metrics))
                if service.faults is not None:
                    loop = asyncio.get_running_loop()
                    loop.add_signal_handler(signal.SIGUSR2, service.faults.inject, "poison")
                    loop.add_signal_handler(signal.SIGUSR1, service.faults.inject, "hang")
                if heart is not None:
                    heart.serve()
                inbox = None if supervised is None else supervised.inbox
                await _answer(service, ports, stop, settings, certificate, inbox, heart)
            if service.models.lost.is_set():  # in the last of the stop
                await ending
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


def _bind(settings: Settings) -> tuple[tuple[socket.socket, ...], ...]:
    """The listeners of each port."""
    http = listen(settings.host, settings.port)
    if settings.one_port or settings.grpc_port == "off":
        return (http,)
    try:
        return http, listen(settings.host, settings.grpc_port)
    except CannotListen:
        for listener in http:
            listener.close()
        raise


def _show(certificate: ServedCertificate, metrics: Metrics, how: str) -> None:
    metrics.certificate_read(certificate.ends_s)
    end = "unknown"
    if math.isfinite(certificate.ends_s):
        end = datetime.fromtimestamp(certificate.ends_s, UTC).isoformat(timespec="seconds")
    _log.info("certificate: %s, its end is %s", how, end)


def _renew(certificate: ServedCertificate, metrics: Metrics) -> None:
    try:
        certificate.renew()
    except InvalidCertificate as exc:
        _log.error("certificate: not read again, still presenting the earlier one: %s", exc)
    else:
        _show(certificate, metrics, "read again")


async def _answer(
    service: Service,
    ports: Sequence[Sequence[socket.socket]],
    stop: asyncio.Event,
    settings: Settings,
    certificate: ServedCertificate | None = None,
    inbox: Inbox | None = None,
    heart: Heartbeat | None = None,
) -> None:
    """Serve until `stop`, then stop the connections and the queues within the drain timeout.

    `ports`: the listeners for HTTP and, unless they are the same, for gRPC. On our own server all
    speak both.
    """
    _freeze_objects()
    by_uvicorn, has_grpc = settings.http_server == "uvicorn", settings.grpc_port != "off"
    door = HttpService(
        service.fast_routes,
        service.budget,
        gate=service.gate,
        access=service.access,
        certificate=certificate,
        max_connections=descriptors.connections(),
        max_connection_age_s=settings.max_connection_age_s or math.inf,
        methods=service.methods if has_grpc else {},
        turns=Turns() if heart is None else Turns(heart.turn),
        app=service.app,
        return_memory=allocator.return_memory,
    )
    server = HttpServer(
        door,
        settings.drain_timeout_s,
        service.metrics.connection_refused,
        *(() if inbox is None else (inbox.count_closed,)),
    )
    listeners = list(itertools.chain(*ports))
    allow_connections(listeners)  # before "ready" is logged, at which clients connect
    (host, port), (_, grpc_port) = (ports[index][0].getsockname()[:2] for index in (0, -1))
    grpc_at = f"gRPC on {at(host, grpc_port)}" if has_grpc else "no gRPC"
    theirs = list(ports[0]) if by_uvicorn else []
    ours = [one for one in listeners if one not in theirs]
    if inbox is not None:
        for listener in ours:  # or clients would wait for a supervisor that was killed
            listener.close()
        ours = [inbox.source]
        inbox.begin()
    scheme = "http" if certificate is None else "https"
    by = ", HTTP by uvicorn" if by_uvicorn else ""
    # SIGHUP to a supervisor reaches all workers, to a worker only that one.
    pid = os.getpid() if inbox is None else os.getppid()
    _log.info("ready: HTTP on %s://%s, %s, pid %d%s", scheme, at(host, port), grpc_at, pid, by)
    serving = [asyncio.create_task(server.serve(ours))]
    stop_all = [server.stop]
    if by_uvicorn:
        other, stop_other = _uvicorn(service.asgi, settings)
        serving.append(asyncio.create_task(other.serve(sockets=theirs)))
        stop_all.append(stop_other)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((*serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    _log.info("stopping: not ready, %g s of grace", settings.grace_s)
    service.models.ready = False
    await asyncio.wait(serving, timeout=settings.grace_s, return_when=asyncio.FIRST_COMPLETED)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + settings.drain_timeout_s
    for end in stop_all:
        end()
    await asyncio.gather(*serving)
    left_s = max(0.0, deadline_s - loop.time())
    await asyncio.gather(service.repository.close(left_s), service.models.drain(left_s))


def _uvicorn(app: ASGIApp, settings: Settings) -> tuple[uvicorn.Server, Callable[[], None]]:
    """Uvicorn for `app`, by its documented interface, and what stops it."""
    import uvicorn  # where it is not chosen, nothing of it is loaded

    certificate = settings.certificate
    tls: dict[str, Any] = {}
    if certificate is not None:
        tls = {"ssl_certfile": certificate.certificate, "ssl_keyfile": certificate.key}
        if certificate.client_ca is not None:
            authority = {"ssl_ca_certs": certificate.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
            tls |= authority
    config = uvicorn.Config(
        app,
        http="h11",  # httptools has no limit of headers
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # the service's own has its form
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        limit_concurrency=descriptors.connections(),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, math.ceil(settings.drain_timeout_s)),
        **tls,
    )
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    return server, stop


def _freeze_objects() -> None:
    """End the start: what is left of it is kept from the collector, what it freed is returned."""
    gc.collect()
    gc.freeze()  # a collection in the middle of traffic need not look at it
    gc.enable()  # turned off before the imports
    allocator.return_memory()  # 12 MiB with five models


async def _end_when_lost(models: Models, metrics: Metrics) -> None:
    """End the process soon after its device is lost; every request has its error by then."""
    await models.lost.wait()
    models.ready = False
    await asyncio.sleep(LAST_ANSWERS_S)
    try:
        metrics.flush()  # those errors are counted, for the other workers to show
    finally:
        _end_at_once()


def _end_at_once() -> NoReturn:
    # Nothing is closed: what the libraries of a lost device do then, at exit included, may hang.
    os._exit(ExitCode.DEVICE)
