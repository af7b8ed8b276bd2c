"""The HTTP port, bound before anything is warmed. It refuses to listen: that comes last."""

from __future__ import annotations

import socket

from service.errors import CannotListen


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A bound TCP socket; `shared` lets the other workers bind the same port.

    Raises:
        CannotListen: the address is taken or not this machine's; the message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP by name: asyncio sets TCP_NODELAY only where the protocol is not left to be guessed, and
    # without it an answer in two writes waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            # One accept queue a worker: the kernel spreads connections over them by hash.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise cannot_listen(host, port, exc) from exc
    return listener


def cannot_listen(host: str, port: int, cause: OSError) -> CannotListen:
    """The error that tells why `host` and `port` cannot be listened on."""
    return CannotListen(f"cannot listen on {host}:{port}: {cause.strerror}")
