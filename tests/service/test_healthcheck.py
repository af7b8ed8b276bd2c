from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from service import healthcheck
from service.settings import Settings


@pytest.fixture
def answering(monkeypatch):
    """`answering(host, status)`: a server there; its port."""

    def start(host, status=200):
        class Server(HTTPServer):
            address_family = socket.getaddrinfo(host, None)[0][0]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status if self.path == "/readyz" else 404)
                self.end_headers()

            def log_message(self, *_): ...

        try:
            server = stack.enter_context(Server((host, 0), Handler))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        monkeypatch.setenv("LENET_HOST", host)
        monkeypatch.setenv("LENET_PORT", str(server.server_port))
        return server.server_port

    with contextlib.ExitStack() as stack:
        yield start


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
    monkeypatch.delenv("LENET_PORT")
    for name in ("SAGEMAKER_BIND_TO_PORT", "AIP_HTTP_PORT", "LENET_PORT"):  # the last one wins
        monkeypatch.setenv(name, "tcp://10.96.0.7:80")
        assert healthcheck.obstacle().startswith(f"{name} is 'tcp://10.96.0.7:80', expected")


def test_without_variables_it_asks_where_a_service_without_settings_listens(monkeypatch):
    for name in ("HOST", "PORT", "TLS_CERTIFICATE", "TLS_CLIENT_CA"):
        monkeypatch.delenv(f"LENET_{name}", raising=False)
    asked = []
    monkeypatch.setattr(healthcheck, "_ask", lambda *address: asked.append(address))
    assert healthcheck.obstacle() is None
    assert asked == [tuple(Settings.model_fields[name].default for name in ("host", "port"))]


def test_an_argument_is_explained_and_starts_no_check(capsys):
    assert healthcheck.main(["--help"]) is None
    assert "LENET_HOST" in capsys.readouterr().out
    assert healthcheck.main(["--port=9000"]) == "got --port=9000, expected no argument but --help"
