"""Connections are shared out evenly: the supervisor accepts and hands each to a worker.

The worker with the fewest connections gets the next one. The supervisor counts those that it has
handed over, the worker those that have ended, in memory that both share. A connection waits in the
kernel's queue until it is accepted, and in a socket of the worker until the worker takes it. From
there it is taken back when the worker dies.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import select
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from ctypes import c_longlong
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue

from wire.listener import BACKLOG, allow_connections

AT_ONCE = 16
"""Connections that are taken in one turn of an event loop. Those that are open come in between."""

STUCK_S = 0.01
"""Waited when no worker's socket has room, or no descriptor is free."""

_CONTROL_BYTES = socket.CMSG_LEN(4)
"""Control bytes of a message with one descriptor."""


def take(source: socket.socket) -> list[socket.socket]:
    """Take connections that wait at a listener, or in the socket of an `Inbox`.

    Returns: at most `AT_ONCE`, fewer where descriptors are few.

    Raises:
        EOFError: the supervisor hands over no more.
        OSError: no descriptor is free.
    """
    receive = _receive if source.family == socket.AF_UNIX else _accept
    at_once = max(1, min(AT_ONCE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 64))
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    taken: list[socket.socket] = []
    try:
        # To accept where nothing waits costs as much as to accept a connection.
        while len(taken) < at_once and waiting.poll(0):
            taken.append(receive(source))
    except (BlockingIOError, ConnectionAbortedError):
        pass  # it was reset while it waited
    except (EOFError, OSError):
        if not taken:
            raise
    return taken


def take_all(source: socket.socket) -> list[socket.socket]:
    """Take all connections that wait, and close `source`."""
    taken: list[socket.socket] = []
    with source, contextlib.suppress(EOFError, OSError):
        while len(taken) < BACKLOG and (some := take(source)):
            taken += some
    return taken


def _accept(source: socket.socket) -> socket.socket:
    return source.accept()[0]


def _receive(source: socket.socket) -> socket.socket:
    # `socket.recv_fds`, which is made for any number, takes three times as long.
    data, controls, _, _ = source.recvmsg(1, _CONTROL_BYTES)
    if not data:
        raise EOFError
    ((_, _, descriptor),) = controls
    return socket.socket(fileno=int.from_bytes(descriptor, sys.byteorder))


@dataclass(frozen=True, slots=True, eq=False)
class Inbox:
    """The connections that a worker receives.

    Attributes:
        source: where they come from, by `take`.
        ports: the listeners of each port. The worker allows connections and then closes them.
    """

    source: socket.socket
    ports: tuple[tuple[socket.socket, ...], ...]
    _closed: c_longlong | None

    def begin(self) -> None:
        """Ask for connections."""
        self.source.send(b"r")

    def count_closed(self, number: int) -> None:
        """Report that `number` of those that were taken have ended."""
        if self._closed is not None:
            self._closed.value = number


class _Share:
    """The connections of one worker."""

    def __init__(self, ports: tuple[tuple[socket.socket, ...], ...]) -> None:
        self.channel, source = socket.socketpair()
        for end in (self.channel, source):
            end.setblocking(False)
        self._closed: c_longlong | None = None
        with contextlib.suppress(OSError):  # nothing can be written here: workers take turns
            self._closed = RawValue(c_longlong, 0)
        self.inbox = Inbox(source, ports, self._closed)
        self._handed_over = 0

    def open(self) -> int:
        return 0 if self._closed is None else self._handed_over - self._closed.value

    def hand_over(self, connection: socket.socket) -> bool:
        """Whether there was room."""
        try:
            socket.send_fds(self.channel, [b"c"], [connection.fileno()])
        except OSError:  # also: too many descriptors are on their way, of any process of the user
            return False
        self._handed_over += 1
        return True

    def close(self) -> list[socket.socket]:
        """Returns: connections that the worker has not taken."""
        self.channel.close()
        return take_all(self.inbox.source)


class Sharing:
    """Hands the connections of `ports` over to workers, each known by its inbox.

    From the first `accepted` of them workers accept by themselves. Connections are allowed as long
    as a worker is there that asked for them. `selector` says what to call `share` for.
    """

    def __init__(
        self,
        ports: Sequence[tuple[socket.socket, ...]],
        selector: selectors.BaseSelector,
        accepted: int = 0,
    ) -> None:
        self._ports = tuple(ports)
        self._theirs = tuple(itertools.chain(*self._ports[:accepted]))
        self._listeners = tuple(itertools.chain(*self._ports[accepted:]))
        self._selector = selector
        self._starting: dict[socket.socket, _Share] = {}
        self._serving: list[_Share] = []  # of equals, the one that got none for longest first
        self._accepted: list[socket.socket] = []  # not handed over yet
        self.stuck = False
        """No worker had room for a connection, or no descriptor was free: call `share` again."""

    def add(self) -> Inbox:
        """Returns: a new worker's. It gets connections once it asks for them."""
        share = _Share(self._ports)
        self._starting[share.channel] = share
        self._selector.register(share.channel, selectors.EVENT_READ)
        return share.inbox

    def remove(self, inbox: Inbox) -> None:
        """Let the other workers have what this one, which has died, has not taken."""
        for share in (*self._starting.values(), *self._serving):
            if share.inbox is inbox:
                break
        serving = share in self._serving
        if serving:
            self._serving.remove(share)
        else:
            del self._starting[share.channel]
            self._selector.unregister(share.channel)
        self._accepted += share.close()
        if serving and not self._serving:
            self._refuse()
        self._hand_over()

    def share(self, ready: Iterable[object]) -> None:
        """Hand over the connections that wait, to workers that have asked for any.

        Args:
            ready: what can be read, of all that the selector waits for.

        Raises:
            CannotListen: another program took a port while no worker served.
        """
        self.stuck = False
        for source in ready:
            if source in self._starting:
                self._begin(self._starting.pop(source))
            elif source in self._listeners and not self._accepted:
                try:
                    self._accepted += take(source)
                except OSError:
                    self.stuck = True
        self._hand_over()
        self.stuck = self.stuck or bool(self._accepted)
        if self.stuck:
            time.sleep(STUCK_S)

    def close(self) -> None:
        """Hand over what the kernel has queued, close the ports, and tell the workers."""
        for listener in self._listeners:
            if self._serving:
                self._selector.unregister(listener)
            self._accepted += take_all(listener)
        for listener in self._theirs:
            listener.close()
        self._listeners = self._theirs = ()
        self._hand_over()
        for share in (*self._starting.values(), *self._serving):
            share.channel.shutdown(socket.SHUT_WR)

    def _begin(self, share: _Share) -> None:
        self._selector.unregister(share.channel)
        allow_connections(self._listeners)  # the last of the other workers may have died
        if not self._serving:
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)
        self._serving.insert(0, share)

    def _hand_over(self) -> None:
        while self._accepted and self._to_fewest(self._accepted[0]):
            self._accepted.pop(0).close()

    def _to_fewest(self, connection: socket.socket) -> bool:
        for share in sorted(self._serving, key=_Share.open):
            if share.hand_over(connection):
                self._serving.remove(share)
                self._serving.append(share)
                return True
        return False

    def _refuse(self) -> None:
        """No worker serves: refuse connections, so that clients try another instance."""
        for listener in self._listeners:
            self._selector.unregister(listener)
        for listener in (*self._theirs, *self._listeners):
            with contextlib.suppress(OSError):  # not Linux: connections wait for a worker
                listener.shutdown(socket.SHUT_RD)
        for connection in self._accepted:
            connection.close()
        self._accepted.clear()
