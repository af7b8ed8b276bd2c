"""`service.asgi:app` by the servers that docs/how-to/in-your-application.md names."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from benchmarks.servers import free_port
from service.asgi import open_app
from service.settings import Settings
from tests.service_process import ENDS_WITH_TESTS, PATIENCE_S, PROJECT

PAGE = (PROJECT / "docs/how-to/in-your-application.md").read_text()
COMMANDS = {
    name: rest.split()
    for name, rest in re.findall(
        r"^(?:LENET_\S+ )*(\w+) (.*service\.asgi:app.*)$", PAGE, re.MULTILINE
    )
}
SETTINGS = {"models": "lenet", "device": "cpu", "cors_origins": "https://a.example"}
KEPT = (
    *("access-control-allow-origin", "allow", "content-length", "content-type"),
    *("retry-after", "vary", "x-model-version", "x-request-id"),
)
BYTES = {"Content-Type": "application/octet-stream", "X-Request-Id": "r1"}
ORIGIN = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
IMAGES = np.random.default_rng(1).integers(0, 256, (600, 28, 28), np.uint8).tobytes()
ASKED = [
    ("POST", "/predict", IMAGES[:784], BYTES),
    ("POST", "/predict", IMAGES, BYTES),  # in pieces, as is the answer
    ("POST", "/predict?model=none", IMAGES[:784], BYTES),
    ("POST", "/predict", IMAGES[:783], BYTES),
    ("POST", "/v2/models/lenet/infer", b"{}", {}),
    ("GET", "/nothing", b"", {}),
    ("GET", "/v2/models/lenet", b"", ORIGIN),
    ("OPTIONS", "/predict", b"", ORIGIN),
    ("HEAD", "/readyz", b"", {}),
]


def pieces(body):
    """A body of unknown length."""
    yield body[:500]
    yield body[500:]


def kept(response):
    """What every server answers alike."""
    headers = {name: text for name, text in response.headers.items() if name in KEPT}
    return response.status_code, headers, response.content


async def expected():
    """The answers to `ASKED` of the application in this process."""
    async with open_app(Settings(weights=PROJECT / "weights", **SETTINGS)) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return [
                kept(await client.request(method, path, content=body, headers=headers))
                for method, path, body, headers in ASKED
            ]


@pytest.fixture(params=COMMANDS)
def started(request, tmp_path):
    """The process of a server, its URL and the file with its log."""
    name = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    port = str(free_port())
    plain = {key: text for key, text in os.environ.items() if not key.startswith("LENET_")}
    paths = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    variables = {f"LENET_{key.upper()}": text for key, text in SETTINGS.items()}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                *(*ENDS_WITH_TESTS, sys.executable, "-m", name),
                *(word.replace("8000", port) for word in COMMANDS[name]),
            ],
            cwd=tmp_path,
            env={**plain, **variables, "LENET_WEIGHTS": f"{PROJECT}/weights", "PYTHONPATH": paths},
            stdout=log,
            stderr=log,
        )
    try:
        yield process, f"http://127.0.0.1:{port}", tmp_path / "log"
    finally:
        process.kill()
        process.wait()


def wait_until_ready(client, process, log):
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        assert process.poll() is None, log.read_text()
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    pytest.fail(log.read_text())


@pytest.mark.process
def test_the_documented_server_answers_as_the_application_does_and_stops(started):
    process, url, log = started
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        wait_until_ready(client, process, log)
        found = [
            kept(client.request(method, path, content=body, headers=headers))
            for method, path, body, headers in ASKED
        ]
        assert found == asyncio.run(expected())
        streamed = client.post("/predict", content=pieces(IMAGES[:784]), headers=BYTES)
        assert streamed.content == found[0][2]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM), log.read_text()
    assert "Traceback" not in log.read_text()
