"""The gRPC server: opened when the models are ready, closed before they are.

Compressed messages are rejected, because a small one may decompress to a large one: grpcio 1.83
decompresses a message whole before it checks the limit, 1.85 up to the limit, 32 MB for 32 KB in
each of as many calls as a client opens. TLS and authentication belong to a proxy in front.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from service.engine.models import Models
from service.images.decoders import Decoders
from service.listener import at, cannot_listen, probe
from service.metrics import Metrics
from service.rpc.servicer import HealthServicer, InferenceServicer, add_servicers

_IDENTITY_ONLY = 1
"""Bit set of grpc_compression_algorithm: "identity" alone."""

MAX_CALLS = 1024
"""Concurrent calls, each with a message in memory; one more is RESOURCE_EXHAUSTED."""


class GrpcServer:
    """A server that listens on `port`."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    async def stop(self, timeout_s: float) -> None:
        """Reject new calls at once, let running ones finish for `timeout_s`, cancel the rest."""
        await self._server.stop(timeout_s)


@asynccontextmanager
async def serve(
    models: Models,
    metrics: Metrics,
    decoders: Decoders,
    *,
    host: str,
    port: int,
    shared: bool,
    max_body_bytes: int,
    max_images: int,
    timeout_s: float,
    stop_timeout_s: float,
) -> AsyncIterator[GrpcServer]:
    """Serve on the running loop, on a free port if `port` is 0; stops on leaving.

    With `shared`, other processes of this user may open the same port (SO_REUSEPORT) and the
    kernel distributes connections; the caller makes sure that the port was free before the first.
    `timeout_s` is the longest that a call may take, `stop_timeout_s` what running calls get on
    leaving.

    Raises:
        CannotListen: the address cannot be listened on; the message names it.
    """
    # grpcio 1.85 prints why it cannot bind an address, and does not return the reason.
    addresses = probe(host, port, shared=shared)
    server = grpc.aio.server(
        maximum_concurrent_rpcs=MAX_CALLS,
        options=(
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ),
    )
    inference = InferenceServicer(
        models, metrics, decoders, max_images=max_images, timeout_s=timeout_s
    )
    add_servicers(server, inference, HealthServicer(models))
    for address in addresses:
        try:
            port = server.add_insecure_port(at(address, port))
        except RuntimeError as exc:  # in use since the probe
            raise cannot_listen(address, port, OSError(errno.EADDRINUSE, str(exc))) from exc
    await server.start()
    grpc_server = GrpcServer(server, port)
    try:
        yield grpc_server
    finally:
        await grpc_server.stop(stop_timeout_s)
