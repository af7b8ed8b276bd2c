"""The gRPC server: opened after the models are ready, closed before they are.

It refuses compressed messages, because pixels are small and a bomb is not: grpcio 1.83 unpacks a
message whole before it looks at the limit, 1.85 up to the limit, 32 MB for 32 KB in each of as
many calls as a client opens. It refuses TLS and authentication too, which belong to what stands
in front.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from service.engine.models import Predictor, Repository, Stop
from service.errors import CannotListen
from service.rpc.servicer import HealthServicer, InferenceServicer, add_inference

_log = logging.getLogger(__name__)

_IDENTITY_ONLY = 1
"""Bit set of grpc_compression_algorithm: none but "identity"."""

MAX_CALLS = 1024
"""That run at once, each with a message in memory; one more is RESOURCE_EXHAUSTED."""


@asynccontextmanager
async def serve(
    predictor: Predictor,
    repository: Repository,
    *,
    host: str,
    port: int,
    shared: bool,
    max_body_bytes: int,
    max_images: int,
    stop_timeout_s: float,
) -> AsyncIterator[int]:
    """Serve on the running loop; yields the port, a free one if `port` is 0.

    With `shared` other processes of this user may open the same port and the kernel spreads
    connections over them (SO_REUSEPORT); whoever starts them must have made sure that the port
    was free before the first. When the repository's stop begins, at the latest on leaving, new
    calls are refused at once and running ones have what is left of it to finish, `stop_timeout_s`
    at most.

    Raises:
        CannotListen: the address cannot be listened on; the message says which, why and what to do.
    """
    server = grpc.aio.server(
        maximum_concurrent_rpcs=MAX_CALLS,
        options=(
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ),
    )
    add_inference(InferenceServicer(predictor, repository, max_images), server)
    server.add_generic_rpc_handlers((HealthServicer(predictor, repository).handlers(),))
    bound = _listen(server, host, port, shared)
    await server.start()
    _log.info("gRPC on %s port %d", host, bound)
    stopping = asyncio.create_task(_stop(server, repository.stop, stop_timeout_s))
    try:
        yield bound
    finally:
        repository.stop.begin()
        await stopping


async def _stop(server: grpc.aio.Server, stop: Stop, timeout_s: float) -> None:
    await stop.begun()
    await server.stop(min(timeout_s, stop.left_s()))


def _listen(server: grpc.aio.Server, host: str, port: int, shared: bool) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        _probe(host, port, shared)
        return server.add_insecure_port(address)
    except (OSError, RuntimeError) as exc:  # RuntimeError: grpcio's, if the port went just now
        number, reason = (exc.errno, exc.strerror) if isinstance(exc, OSError) else (0, str(exc))
        raise CannotListen(
            number or errno.EADDRINUSE,
            f"gRPC cannot listen on {address}: {reason}; stop what listens there or choose "
            "another with LENET_HOST or LENET_GRPC_PORT",
        ) from exc


def _probe(host: str, port: int, shared: bool) -> None:
    """Raise what the kernel says to this address: grpcio 1.85 prints it and keeps it to itself."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failures: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if shared:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                probe.bind(address)
        except OSError as exc:
            failures.append(exc)
    # A name may stand for an address family that this machine lacks; one is enough.
    taken = [exc for exc in failures if exc.errno == errno.EADDRINUSE]
    if taken or len(failures) == len(found):
        raise (taken or failures)[0]
