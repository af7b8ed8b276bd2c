"""The gRPC server: opened when the models are ready, closed before they are.

Compressed messages are accepted. One of 32 KB may be 32 MB: grpcio 1.85 decompresses it when it is
read, up to the limit of a message. As calls are read a few at a time (`rpc.calls`), 600 such calls
at once took 57 MB.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from service.access_log import AccessLog
from service.budget import Budget
from service.engine.models import Models
from service.images.decoders import Decoders
from service.keys import Keys
from service.listener import at, cannot_listen, probe
from service.metrics import Metrics
from service.rpc.calls import MAX_CALLS, Calls
from service.rpc.servicer import HealthServicer, InferenceServicer, add_servicers
from service.tls import CertificateFiles

_MAX_PENDING = 16 * MAX_CALLS
"""Calls that wait for their handler to begin. Beyond, gRPC cancels calls, which nobody counts; its
default is 1,000, a fifth of a second of them."""

_SETTLE_S = 0.5
"""The longest that calls which are under way to the server are waited for; 0.06 s if none are."""

_GOAWAY_S = 0.02
"""From the beginning of the shutdown until answers go out. The GOAWAY frames are written before."""

_LAST_STATUSES_S = 0.5
"""From the end of the drain timeout until connections are closed: for the statuses of the rest."""

_log = logging.getLogger(__name__)


class GrpcServer:
    """A server that listens on `port`."""

    def __init__(
        self, server: grpc.aio.Server, calls: Calls, port: int, credentials: _Credentials | None
    ) -> None:
        self._server, self._calls = server, calls
        self._credentials = credentials
        self._stopping = False
        self.port = port

    def renew_certificate(self) -> None:
        """Present what the certificate's files hold now to clients that connect from now on.

        Raises:
            InvalidCertificate: they cannot be read; the earlier ones stay.
        """
        if self._credentials is not None:
            self._credentials.renew()

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
        await self._calls.settle(min(_SETTLE_S, timeout_s / 4))
        rest_s = max(0.0, end_s - loop.time())
        stopping = asyncio.create_task(self._server.stop(rest_s + _LAST_STATUSES_S))
        await asyncio.sleep(min(_GOAWAY_S, rest_s / 4))
        self._calls.go_on()
        await asyncio.wait((stopping,), timeout=max(0.0, end_s - loop.time()))
        self._calls.end_all()
        await asyncio.wait((stopping,), timeout=2 * _LAST_STATUSES_S)
        if not stopping.done():  # some connection is not closed: the end of the process closes it
            _log.warning("gRPC did not stop within %.1f s", loop.time() - end_s + timeout_s)
            stopping.cancel()


class _Credentials:
    """A server's certificate, which may be renewed; gRPC asks for it in every handshake."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._latest = self._read()
        self.server = grpc.dynamic_ssl_server_credentials(
            self._latest, lambda: self._latest, files.client_ca is not None
        )

    def renew(self) -> None:
        self._latest = self._read()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        key, certificate, authority = self._files.contents()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


@asynccontextmanager
async def serve(
    models: Models,
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
    certificate: CertificateFiles | None = None,
) -> AsyncIterator[GrpcServer]:
    """Serve on the running loop, on a free port if `port` is 0; stops on leaving.

    With `shared`, other processes of this user may open the same port (SO_REUSEPORT) and the
    kernel distributes connections; the caller makes sure that the port was free before the first.
    Calls need one of `keys`, if there are any, and clients TLS, if there is a `certificate`.
    `timeout_s` is the longest that a call may take, `stop_timeout_s` what running calls get on
    leaving.

    Raises:
        CannotListen: the address cannot be listened on; the message names it.
        InvalidCertificate: its files cannot be read.
    """
    # grpcio 1.85 prints why it cannot bind an address, and does not return the reason.
    addresses = probe(host, port, shared=shared)
    server = grpc.aio.server(
        # Of calls whose status is not sent yet, too, because their clients do not read.
        maximum_concurrent_rpcs=_MAX_PENDING,
        options=(
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_receive_message_length", max_body_bytes),
            # Otherwise each stream may send 4 MiB before its handler reads, instead of 64 KiB.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.server.max_pending_requests", _MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
            ("grpc.max_allowed_incoming_connections", max_connections),
            # Connections of clients that are gone without a word end after 80 s.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ),
    )
    calls = Calls(budget, max_body_bytes, keys, access)
    credentials = None if certificate is None else _Credentials(certificate)
    inference = InferenceServicer(
        models, metrics, decoders, calls, max_images=max_images, timeout_s=timeout_s
    )
    add_servicers(server, inference, HealthServicer(models), calls)
    for address in addresses:
        try:
            if credentials is None:
                port = server.add_insecure_port(at(address, port))
            else:
                port = server.add_secure_port(at(address, port), credentials.server)
        except RuntimeError as exc:  # in use since the probe
            raise cannot_listen(address, port, OSError(errno.EADDRINUSE, str(exc))) from exc
    grpc_server = GrpcServer(server, calls, port, credentials)
    starting = asyncio.create_task(server.start())
    try:
        await asyncio.shield(starting)  # grpc's own tasks fail when their start is cancelled
        yield grpc_server
    finally:
        await starting
        await grpc_server.stop(stop_timeout_s)
