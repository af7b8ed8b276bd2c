from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

from service import healthcheck
from service.errors import CannotListen
from service.settings import Settings
from wire.listener import allow_connections, listen


@pytest.fixture
def answering(monkeypatch):
    """`answering(host, status)`: a server there that answers one request; its port."""
    listeners, threads = [], []

    def answer(listener, status):
        try:
            connection, _ = listener.accept()
        except OSError:  # closed at the end of the test: nobody asked here
            return
        with connection:
            assert connection.recv(1000).startswith(b"GET /readyz ")
            connection.sendall(b"HTTP/1.1 %d x\r\nContent-Length: 0\r\n\r\n" % status)

    def start(host, status=200):
        try:
            listeners.extend(listen(host, 0))
        except CannotListen:
            pytest.skip(f"this machine has no {host}")
        allow_connections(listeners)
        for listener in listeners:
            listener.setblocking(True)
            threads.append(threading.Thread(target=answer, args=(listener, status)))
            threads[-1].start()
        port = listeners[0].getsockname()[1]
        monkeypatch.setenv("LENET_HOST", host)
        monkeypatch.setenv("LENET_PORT", str(port))
        return port

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


HOSTS = ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::", "localhost"]


@pytest.mark.parametrize("host", HOSTS)
def test_the_service_is_asked_at_the_address_where_it_listens(answering, host):
    answering(host)
    assert healthcheck.obstacle() is None


def test_a_message_names_what_was_asked_and_what_came_of_it(answering, monkeypatch):
    port = answering("127.0.0.2", 503)
    assert healthcheck.obstacle() == f"/readyz at 127.0.0.2:{port}: got 503, expected 200"
    monkeypatch.setenv("LENET_HOST", "127.0.0.3")
    refused = f"/readyz at 127.0.0.3:{port}: ConnectionRefusedError: "
    assert healthcheck.obstacle().startswith(refused)
    monkeypatch.setenv("LENET_PORT", "tcp://10.96.0.7:80")
    assert healthcheck.obstacle().startswith("LENET_PORT is 'tcp://10.96.0.7:80', expected")


def test_without_variables_it_asks_where_a_service_without_settings_listens(monkeypatch):
    for name in ("HOST", "PORT", "TLS_CERTIFICATE", "TLS_CLIENT_CA"):
        monkeypatch.delenv(f"LENET_{name}", raising=False)
    asked = []
    monkeypatch.setattr(healthcheck, "_ask", lambda *address: asked.append(address))
    assert healthcheck.obstacle() is None
    assert asked == [tuple(Settings.model_fields[name].default for name in ("host", "port"))]


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--port=9000", 1)])
def test_an_argument_is_explained_and_starts_no_check(argument, code):
    command = [sys.executable, "-m", "service.healthcheck", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("LENET_HOST" in done.stdout) == (code == 0)
    assert done.stderr == (
        "" if code == 0 else "got --port=9000, expected no argument but --help\n"
    )
