"""Ports: addresses resolved, bound and reserved, in one place for HTTP and gRPC."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator

from service.errors import CannotListen


def listen(host: str, port: int, *, shared: bool) -> tuple[socket.socket, ...]:
    """Bind a TCP socket for each address of `host`, all on one port; none takes connections yet.

    `shared` lets the other workers bind the same port. An address family that this machine lacks
    is left out if another is there.

    Raises:
        CannotListen: an address is taken or none is this machine's; the message names it.
    """
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, (address, *_) in dict.fromkeys(found):
            try:
                sockets.append(_bind(family, str(address), port, shared))
            except OSError as exc:
                failures.append(exc)
            else:
                port = sockets[-1].getsockname()[1]
        taken = [exc for exc in failures if exc.errno == errno.EADDRINUSE]
        if taken or not sockets:
            raise (taken or failures)[0]
    except OSError as exc:
        for listener in sockets:
            listener.close()
        raise cannot_listen(host, port, exc) from exc
    return tuple(sockets)


@contextlib.contextmanager
def reserve(host: str, port: int) -> Iterator[int]:
    """Keep a port for workers that share it, without taking connections; yields its number.

    Raises:
        CannotListen: another program has it, or another supervisor keeps it.
    """
    with contextlib.ExitStack() as stack:
        # Without SO_REUSEPORT first: with it, another lenet-serve's port would be shared unnoticed.
        probes = listen(host, port, shared=False)
        port = probes[0].getsockname()[1]
        for listener in probes:
            listener.close()
        for listener in listen(host, port, shared=True):
            stack.enter_context(listener)
        # The first bind fails only where somebody listens, and during a warm-up nobody does. A name
        # in Linux' abstract namespace has one owner, is as wide as the ports (one network
        # namespace) and goes with the process. Elsewhere two services that start at the same time
        # may share a port.
        name = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            if sys.platform == "linux":
                name.bind(f"\0lenet-serve {host}:{port}")
        except OSError as exc:
            raise cannot_listen(host, port, exc) from exc
        yield port


def cannot_listen(host: str, port: int, cause: OSError) -> CannotListen:
    """The error that says why `host` and `port` cannot be listened on."""
    return CannotListen(
        f"cannot listen on {at(host, port)}: {cause.strerror}; choose another address with "
        "--host, --port or --grpc-port"
    )


def at(host: str, port: int) -> str:
    """Host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(family: int, address: str, port: int, shared: bool) -> socket.socket:
    # TCP by name: asyncio sets TCP_NODELAY only where the protocol is not left to be guessed, and
    # without it an answer in two writes waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            # One accept queue a worker: the kernel spreads connections over them by hash.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address, port))
    except OSError:
        listener.close()
        raise
    return listener
