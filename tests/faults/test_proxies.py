"""Requests that a proxy and the service might read differently, sent through the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import shutil

import pytest

from tests.deploy.proxies import free_ports, nginx_with
from tests.faults.clients import ACCEPT, Connection, request
from tests.wire.test_http1 import ROWS

SITE = """
client_max_body_size 64m;
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
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.parametrize("buffering", ["on", "off"])
async def test_no_request_is_answered_as_another_behind_nginx(
    known, served, intact, tmp_path, buffering
):
    (port,) = free_ports(1)
    site = tmp_path / "site.conf"
    site.write_text(SITE.format(upstream=served.port, port=port, buffering=buffering))
    smuggled = request(known.choose(1)[1].tobytes(), ACCEPT)
    # Two connections to the service are kept.
    with intact(extra_descriptors=2), nginx_with(site, port, tmp_path):
        for data, _ in ROWS.values():
            async with await Connection.open(port) as attacker:
                await attacker.send(data.replace(b" /fast ", b" /predict ") + smuggled)
                # Whoever comes next on a connection that nginx keeps to the service.
                for _ in range(3):
                    rows, images = known.choose(1)
                    async with await Connection.open(port) as client:
                        answer = await client.ask(request(images.tobytes(), ACCEPT))
                        known.judge(rows, answer)
                attacker.writer.write_eof()
                with contextlib.suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(0.2):
                        await attacker.reader.read()
