"""nginx and Envoy with the configurations of deploy/, on free ports and with certificates of a test."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import trustme

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30
NGINX = """
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
def nginx(folder, certificates, backends):
    """The port of nginx in front of two `backends`, pairs of an HTTP and a gRPC port."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
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
    (folder / "lenet-serve.conf").write_text(text)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with running(command, port, folder / "nginx.log"):
        yield port


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
