from __future__ import annotations

import contextlib
import socket

import pytest

from wire.errors import CannotListen
from wire.listener import allow_connections, listen, reserve


def bound(host="127.0.0.1", port=0):
    (listener,) = listen(host, port)
    return listener


def resolving_to(*addresses):
    def getaddrinfo(host, port, **_):
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in addresses
        ]

    return getaddrinfo


def test_a_port_is_taken_at_once_but_takes_no_connection():
    with bound() as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        listener.listen()
        socket.create_connection(address).close()


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CannotListen) as caught:
            listen("127.0.0.1", port)
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another host or port"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_named(host):
    with pytest.raises(CannotListen, match=f"cannot listen on {host}:8000: "):
        listen(host, 8000)


IPV4, IPV6 = (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")
ELSEWHERE = (socket.AF_INET6, "2001:db8::1")


def test_every_address_of_a_name_is_listened_on_at_one_port(monkeypatch):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    monkeypatch.setattr(socket, "getaddrinfo", resolving_to(IPV4, IPV6))
    first, second = listen("localhost", 0)
    with first, second:
        assert {first.family, second.family} == {socket.AF_INET, socket.AF_INET6}
        assert first.getsockname()[1] == second.getsockname()[1]
    with (  # while ::1 is free
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(CannotListen, match="in use"),
    ):
        listen("localhost", other.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "resolved", "found"),
    [
        ("localhost", (IPV4,), {"127.0.0.1", "::1"}),
        ("127.0.0.1,::1", None, {"127.0.0.1", "::1"}),
        ("127.0.0.1,127.0.0.2", None, {"127.0.0.1", "127.0.0.2"}),
        ("127.0.0.2,localhost,127.0.0.1", None, {"127.0.0.2", "127.0.0.1", "::1"}),
    ],
)
def test_several_addresses_are_listened_on_at_one_port(monkeypatch, host, resolved, found):
    if "::1" in found and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    if resolved:
        monkeypatch.setattr(socket, "getaddrinfo", resolving_to(*resolved))
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(one) for one in listen(host, 0)]
        allow_connections(listeners)
        names = [one.getsockname() for one in listeners]
        assert ({name[0] for name in names}, len(names)) == (found, len(found))
        assert len({name[1] for name in names}) == 1


def test_one_of_several_hosts_that_is_not_here_is_named():
    with pytest.raises(CannotListen, match=r"cannot listen on 192\.0\.2\.1:\d+: "):
        listen("127.0.0.1,192.0.2.1", 0)


def test_one_address_is_enough_when_a_name_has_another_that_is_not_here(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", resolving_to(IPV4, ELSEWHERE))
    with bound("name") as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(CannotListen, match="in use"):
            bound("name", port)


def test_the_port_of_another_service_is_not_shared_when_nobody_listens_there_yet():
    with reserve("127.0.0.1", 0) as (listener,):
        port = listener.getsockname()[1]
        refusal = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        with pytest.raises(CannotListen, match=refusal), reserve("127.0.0.1", port):
            raise AssertionError
        several = "127.0.0.2,127.0.0.1"
        with pytest.raises(CannotListen, match=refusal), reserve(several, port):
            raise AssertionError
    with reserve("127.0.0.1", port) as (again,):
        assert again.getsockname()[1] == port


def test_a_port_is_named_when_another_program_is_faster():
    with bound() as listener, bound(port=listener.getsockname()[1]) as other:
        other.listen()
        with pytest.raises(CannotListen, match="in use"):
            allow_connections([listener])
