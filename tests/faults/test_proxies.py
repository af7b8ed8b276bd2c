"""Requests that a proxy and the service might read differently, sent through the proxy."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time

import numpy as np
import pytest

from tests.faults.clients import RAW, Connection, ask, assert_same, request
from tests.service_process import PATIENCE_S
from tests.wire.test_rfc import ROWS

CONFIGURATION = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_max_body_size 64m;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream service {{ server 127.0.0.1:{upstream}; keepalive 2; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://service;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_request_buffering {buffering};
        }}
    }}
}}
"""


@pytest.fixture(params=["on", "off"], ids=["bodies buffered", "bodies streamed"])
def nginx(request, served, tmp_path):
    """The port of an nginx in front of `served`, with few connections that are kept to it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIGURATION.format(
        folder=tmp_path, upstream=served.port, port=port, buffering=request.param
    )
    (tmp_path / "nginx.conf").write_text(text)
    command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(ConnectionRefusedError), Connection(port):
                break
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end_s
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_no_request_is_answered_as_another_behind_nginx(nginx, served, digits, intact):
    smuggled = request(digits.rows([1])[0], b"Accept: " + RAW)
    mine, expected = digits.rows([2])
    message = request(mine, b"Accept: " + RAW)
    with intact(extra_descriptors=2):  # the two that nginx keeps
        for data, _ in ROWS.values():
            attack = data.replace(b" /fast ", b" /predict ")
            with Connection(nginx) as attacker:
                attacker.socket.settimeout(0.2)
                attacker.send(attack + smuggled)
                # Whoever comes next on a connection that nginx keeps to the service.
                for _ in range(3):
                    answer = ask(nginx, message)
                    assert answer.status == 200, attack[:200]
                    assert_same(np.frombuffer(answer.body, "<f4").reshape(-1, 10), expected)
                attacker.half_close()
                with contextlib.suppress(TimeoutError, ConnectionResetError):
                    while attacker.socket.recv(1 << 16):
                        pass
