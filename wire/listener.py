"""Ports: addresses resolved, bound and reserved, in one place for HTTP and gRPC."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator, Sequence

from wire.errors import CannotListen

BACKLOG = 2048
"""Connections that wait to be accepted, at each address."""


def listen(host: str, port: int) -> tuple[socket.socket, ...]:
    """Bind a TCP socket for each address of `host`, all on one port; none takes connections yet.

    `host` may be several names or addresses between commas; localhost is 127.0.0.1 and ::1, also
    where a file knows one of them alone. An address family that this machine lacks is left out if
    the name has another.

    Raises:
        CannotListen: an address is taken or none of a name is this machine's; the message names it.
    """
    sockets: dict[tuple[int, str], socket.socket] = {}
    for name in host.split(","):
        failures: list[OSError] = []
        is_bound = False
        try:
            for family, address in _addresses(name, port):
                try:
                    if (family, address) not in sockets:
                        sockets[family, address] = _bind(family, address, port)
                except OSError as exc:
                    failures.append(exc)
                else:
                    is_bound, port = True, sockets[family, address].getsockname()[1]
            taken = [exc for exc in failures if exc.errno == errno.EADDRINUSE]
            if taken or not is_bound:
                raise (taken or failures)[0]
        except OSError as exc:
            for listener in sockets.values():
                listener.close()
            raise cannot_listen(name, port, exc) from exc
    return tuple(sockets.values())


def allow_connections(listeners: Sequence[socket.socket]) -> None:
    """Let clients connect to bound sockets; repeating it changes nothing.

    Raises:
        CannotListen: another process bound the port, too, and was faster.
    """
    for listener in listeners:
        try:
            listener.listen(BACKLOG)
        except OSError as exc:
            host, port = listener.getsockname()[:2]
            raise cannot_listen(host, port, exc) from exc


@contextlib.contextmanager
def reserve(host: str, port: int) -> Iterator[tuple[socket.socket, ...]]:
    """Bind a port as `listen` does, and keep other supervisors from doing so.

    Raises:
        CannotListen: another program has it, or another supervisor keeps it.
    """
    with contextlib.ExitStack() as stack:
        for probe in listen(host, port):
            port = probe.getsockname()[1]
            probe.close()
        # By number: to a listener that was bound to any port, the kernel gives another when it
        # listens again.
        listeners = tuple(stack.enter_context(one) for one in listen(host, port))
        # To bind a port fails only where somebody listens, and during a warm-up nobody does. A name
        # in Linux' abstract namespace has one owner, is as wide as the ports (one network
        # namespace) and goes with the process. Elsewhere, of two services that start at the same
        # time, one ends when it begins to listen.
        for name in host.split(","):
            kept = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                if sys.platform == "linux":
                    kept.bind(f"\0wire {name}:{port}")
            except OSError as exc:
                raise cannot_listen(name, port, exc) from exc
        yield listeners


def cannot_listen(host: str, port: int, cause: OSError) -> CannotListen:
    """The error that says why `host` and `port` cannot be listened on."""
    return CannotListen(
        f"cannot listen on {at(host, port)}: {cause.strerror}; choose another host or port"
    )


def at(host: str, port: int) -> str:
    """Host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _addresses(name: str, port: int) -> list[tuple[int, str]]:
    """Family and address of each address that `name` has. Raises: OSError."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = [(int(family), str(address)) for family, *_, (address, *_) in found]
    if name == "localhost":  # RFC 6761, 6.3
        addresses += [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    return list(dict.fromkeys(addresses))


def _bind(family: int, address: str, port: int) -> socket.socket:
    # TCP by name: asyncio sets TCP_NODELAY only where the protocol is not left to be guessed, and
    # without it an answer in two writes waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((address, port))
    except OSError:
        listener.close()
        raise
    return listener
