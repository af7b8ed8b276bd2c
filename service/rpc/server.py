"""The gRPC server: opened after the models are ready, closed before they are.

It refuses compressed messages, because pixels are small and a bomb is not: grpcio 1.83 unpacks a
message whole before it looks at the limit, 1.85 up to the limit, 32 MB for 32 KB in each of as
many calls as a client opens. It refuses TLS and authentication too, which belong to what stands
in front.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from service.engine.models import Models
from service.listener import at, cannot_listen, probe
from service.metrics import Metrics
from service.rpc.servicer import HealthServicer, InferenceServicer, add_inference

_IDENTITY_ONLY = 1
"""Bit set of grpc_compression_algorithm: none but "identity"."""

MAX_CALLS = 1024
"""That run at once, each with a message in memory; one more is RESOURCE_EXHAUSTED."""


class GrpcServer:
    """A server that is listening on `port`."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    async def stop(self, timeout_s: float) -> None:
        """Refuse new calls at once, let running ones finish for `timeout_s`, cancel the rest."""
        await self._server.stop(timeout_s)


@asynccontextmanager
async def serve(
    models: Models,
    metrics: Metrics,
    *,
    host: str,
    port: int,
    shared: bool,
    max_body_bytes: int,
    max_images: int,
    stop_timeout_s: float,
) -> AsyncIterator[GrpcServer]:
    """Serve on the running loop, on a free port if `port` is 0; stops on leaving if nobody did.

    With `shared` other processes of this user may open the same port and the kernel spreads
    connections over them (SO_REUSEPORT); whoever starts them must have made sure that the port
    was free before the first.

    Raises:
        CannotListen: the address cannot be listened on; the message says which, why and what to do.
    """
    # grpcio 1.85 prints why it cannot bind an address, and does not say so to its caller.
    addresses = probe(host, port, shared=shared)
    server = grpc.aio.server(
        maximum_concurrent_rpcs=MAX_CALLS,
        options=(
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ),
    )
    add_inference(InferenceServicer(models, metrics, max_images), server)
    server.add_generic_rpc_handlers((HealthServicer(models).handlers(),))
    for address in addresses:
        try:
            port = server.add_insecure_port(at(address, port))
        except RuntimeError as exc:  # taken since the probe
            raise cannot_listen(address, port, OSError(errno.EADDRINUSE, str(exc))) from exc
    await server.start()
    grpc_server = GrpcServer(server, port)
    try:
        yield grpc_server
    finally:
        await grpc_server.stop(stop_timeout_s)
