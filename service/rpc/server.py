"""The gRPC server: opened when the models are ready, closed before they are.

A request whose path is not UTF-8 ends the loop in which grpcio 1.85 accepts calls: the port stays
open, and nothing is answered any more. Another server then takes the port, within 0.1 s, and calls
that had begun are finished.

Compressed messages are accepted. One of 32 KB may be 32 MB: grpcio 1.85 decompresses it when it is
read, up to the limit of a message. As calls are read a few at a time (`rpc.calls`), 600 such calls
at once took 57 MB.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import grpc

from service.access_log import AccessLog
from service.budget import Budget
from service.engine.models import Models
from service.engine.repository import Repository
from service.images.decoders import Decoders
from service.keys import Keys
from service.listener import at, cannot_listen, probe
from service.metrics import Metrics
from service.rpc.calls import MAX_CALLS, Calls
from service.rpc.methods import HealthServicer, add_methods
from service.rpc.servicer import InferenceServicer
from service.tls import ServedCertificate

_MAX_PENDING = 16 * MAX_CALLS
"""Calls that wait for their handler to begin. Beyond, gRPC cancels calls, which nobody counts; its
default is 1,000, a fifth of a second of them."""

MAX_STREAMS_OF_A_CONNECTION = 200
"""Calls that are open at a time on a connection; a client waits with further ones. gRPC keeps the
headers of each before the service sees it: with any number two connections took 2 GB in ten
seconds."""

_REFUSED_BYTES = 4 * 1024 * 1024
"""How far a message may be over the limit and be refused by its handler. One beyond is refused by
gRPC, which says RESOURCE_EXHAUSTED, counts nothing and ends a stream."""

_SETTLE_S = 0.5
"""The longest that calls which are under way to the server are waited for; 0.06 s if none are."""

_GOAWAY_S = 0.02
"""From the beginning of the shutdown until answers go out. The GOAWAY frames are written before."""

_LAST_STATUSES_S = 0.5
"""From the end of the drain timeout until connections are closed: for the statuses of the rest."""

_RESTART_S = 0.02
"""Before the first attempt to take the port of a server that has ended; later ones wait longer."""

_QUIET_ATTEMPTS = 10

_ACCEPTING = "_server_main_loop"
"""In the name of the task in which a grpcio server accepts calls."""

_log = logging.getLogger(__name__)


class GrpcServer:
    """A server that listens on `port` of `addresses`, a free one if it is 0, until `stop`.

    `make` makes one that does not listen yet, whose calls are `calls` and take at most `timeout_s`.
    """

    def __init__(
        self,
        make: Callable[[], grpc.aio.Server],
        addresses: Sequence[str],
        port: int,
        calls: Calls,
        certificate: ServedCertificate | None,
        timeout_s: float,
    ) -> None:
        self._make, self._calls, self._timeout_s = make, calls, timeout_s
        self._addresses, self.port = addresses, port
        self._certificate = certificate
        self._stopping = False
        self._restarting: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Accept calls.

        Raises:
            CannotListen: an address cannot be listened on; the message names it.
        """
        server = self._make()
        credentials = None if self._certificate is None else _credentials(self._certificate)
        for address in self._addresses:
            try:
                if credentials is None:
                    self.port = server.add_insecure_port(at(address, self.port))
                else:
                    self.port = server.add_secure_port(at(address, self.port), credentials)
            except RuntimeError as exc:  # in use since the probe
                await server.stop(None)
                raise cannot_listen(
                    address, self.port, OSError(errno.EADDRINUSE, str(exc))
                ) from exc
        others = asyncio.all_tasks()
        await server.start()
        self._server = server
        for task in asyncio.all_tasks() - others:
            if _ACCEPTING in repr(task):
                task.add_done_callback(partial(self._restart, server))

    async def renew(self) -> None:
        """Present the certificate as it is now to clients that connect afterwards.

        Another server takes the port, and the former finishes its calls. A connection that the
        former has not accepted when it closes its side of the port is lost.
        """
        if self._certificate is not None and not self._stopping:
            self._restarting = asyncio.create_task(self._replace(self._restarting))
            await asyncio.wait((self._restarting,))

    async def _replace(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        former = self._server
        try:
            await self.start()
        except Exception as exc:  # noqa: BLE001 - the former goes on
            _log.error("gRPC presents the earlier certificate: %r", exc)
        else:
            self._close(former)
            await asyncio.sleep(_GOAWAY_S)  # in which it closes its side of the port

    async def stop(self, timeout_s: float) -> None:
        """Reject new calls at once, let running ones finish for `timeout_s`, end the rest.

        Clients get answers or UNAVAILABLE. A call is CANCELLED only if it arrives after gRPC began
        to shut down and before its client learned of that. A client that waits for its answers
        before it calls again sends none then; see `Calls.settle`.
        """
        if self._stopping:
            return
        self._stopping = True
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        if self._restarting is not None:
            await asyncio.wait((self._restarting,))
        await self._calls.settle(min(_SETTLE_S, timeout_s / 4))
        rest_s = max(0.0, end_s - loop.time())
        stopping = asyncio.create_task(self._server.stop(rest_s + _LAST_STATUSES_S))
        await asyncio.sleep(min(_GOAWAY_S, rest_s / 4))
        self._calls.go_on()
        # With what is left of servers that ended before.
        ending = (stopping, *self._closing)
        await asyncio.wait(ending, timeout=max(0.0, end_s - loop.time()))
        self._calls.end_all()
        await asyncio.wait((stopping,), timeout=2 * _LAST_STATUSES_S)
        if not stopping.done():  # some connection is not closed: the end of the process closes it
            _log.warning("gRPC did not stop within %.1f s", loop.time() - end_s + timeout_s)
            stopping.cancel()

    def _restart(self, server: grpc.aio.Server, accepting: asyncio.Task[None]) -> None:
        """Have another server take the port, because one ended that was not told to."""
        if self._stopping or accepting.cancelled() or server is not self._server:
            return
        _log.error("gRPC stopped accepting calls, starting it anew: %r", accepting.exception())
        self._restarting = asyncio.create_task(self._take_over(self._server))

    async def _take_over(self, ended: grpc.aio.Server) -> None:
        self._close(ended)
        for attempt in itertools.count(1):
            await asyncio.sleep(min(_RESTART_S * attempt, 1.0))
            if self._stopping:
                return
            try:
                await self.start()
            except Exception as exc:  # noqa: BLE001 - without it nobody would try again
                if attempt == _QUIET_ATTEMPTS:  # usually the former is not closed yet
                    _log.error("gRPC cannot be started anew, trying on: %r", exc)
            else:
                return

    def _close(self, server: grpc.aio.Server) -> None:
        """Its calls go on, and end by their own deadlines."""
        closing = asyncio.create_task(server.stop(self._timeout_s))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _credentials(certificate: ServedCertificate) -> grpc.ServerCredentials:
    """Those of the certificate as it is now.

    Not `dynamic_ssl_server_credentials`: in grpcio 1.85 a fetcher that returns a configuration
    crashes the process after some hundred to some thousand handshakes.
    """
    key, chain, authority = certificate.contents
    return grpc.ssl_server_credentials([(key, chain)], authority, authority is not None)


@asynccontextmanager
async def serve(
    models: Models,
    repository: Repository,
    metrics: Metrics,
    decoders: Decoders,
    budget: Budget,
    *,
    host: str,
    port: int,
    shared: bool,
    max_body_bytes: int,
    max_images: int,
    max_connections: int,
    timeout_s: float,
    stop_timeout_s: float,
    keys: Keys | None = None,
    access: AccessLog | None = None,
    certificate: ServedCertificate | None = None,
) -> AsyncIterator[GrpcServer]:
    """Serve on the running loop, on a free port if `port` is 0; stops on leaving.

    With `shared`, other processes of this user may open the same port (SO_REUSEPORT) and the
    kernel distributes connections; the caller makes sure that the port was free before the first.
    Calls need one of `keys`, if there are any, and clients TLS, if there is a `certificate`.
    `timeout_s` is the longest that a call may take, `stop_timeout_s` what running calls get on
    leaving.

    Raises:
        CannotListen: the address cannot be listened on; the message names it.
    """
    # grpcio 1.85 prints why it cannot bind an address, and does not return the reason.
    addresses = probe(host, port, shared=shared)
    options = (
        # With a certificate also for the server that takes the port when it changes.
        ("grpc.so_reuseport", int(shared or certificate is not None)),
        ("grpc.max_concurrent_streams", MAX_STREAMS_OF_A_CONNECTION),
        # It would end calls that a client sent before it heard of fewer.
        ("grpc.http.overload_protection", 0),
        # A little more is received, so that it is refused as over HTTP, and a stream goes on.
        ("grpc.max_receive_message_length", max_body_bytes + _REFUSED_BYTES),
        # Otherwise each stream may send 4 MiB before its handler reads, instead of 64 KiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
        ("grpc.max_allowed_incoming_connections", max_connections),
        # Connections of clients that are gone without a word end after 80 s.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
    )
    calls = Calls(budget, max_body_bytes, keys, access)
    inference = InferenceServicer(
        models, repository, metrics, decoders, calls, max_images=max_images, timeout_s=timeout_s
    )
    health = HealthServicer(models, tells_names=not keys)

    def make() -> grpc.aio.Server:
        # The limit is of calls whose status is not sent yet, too: their clients do not read.
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_PENDING)
        add_methods(server, inference, health, calls)
        return server

    grpc_server = GrpcServer(make, addresses, port, calls, certificate, timeout_s)
    starting = asyncio.create_task(grpc_server.start())
    try:
        await asyncio.shield(starting)  # grpc's own tasks fail when their start is cancelled
        yield grpc_server
    finally:
        await starting
        await grpc_server.stop(stop_timeout_s)
