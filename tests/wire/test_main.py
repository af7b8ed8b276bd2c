"""The examples of wire's README, and `python -m wire`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import grpc
import httpx
import pytest

from tests.service_process import PATIENCE_S, PROJECT
from tests.wire.doors import until
from wire.door import HttpService

APPLICATION, METHOD = re.findall(
    r"^```python\n(.*?)^```", (PROJECT / "wire" / "README.md").read_text(), re.DOTALL | re.MULTILINE
)
LIFESPAN = """
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{step}"
            print(step, flush=True)
            await send({"type": f"lifespan.{step}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"Hello\\n"})
"""
STATE = """
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

@asynccontextmanager
async def lifespan(_):
    print("startup", flush=True)
    yield {"text": "Hello\\n"}
    print("shutdown", flush=True)

async def answer(request):
    text, request.state.text = request.state.text, "of another request"
    return PlainTextResponse(text)

app = Starlette(routes=[Route("/", answer)], lifespan=lifespan)
"""
FAILS = """
async def app(scope, receive, send):
    await send({"type": "lifespan.startup.failed", "message": "planted"})
"""
ENDS_BADLY = LIFESPAN.replace(
    '{"type": f"lifespan.{step}.complete"}',
    '{"type": f"lifespan.{step}." + ("complete" if step == "startup" else "failed")}',
)
RAISES = STATE.replace("yield", "raise ValueError('planted')\n    yield")


def served(folder, text, *flags, app="module:app"):
    (folder / "module.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "wire", app, "--port", "0", *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "said", "code"),
    [
        (APPLICATION, "", 0),
        (LIFESPAN, "startup\nshutdown\n", 0),
        (STATE, "startup\nshutdown\n", 0),
        (ENDS_BADLY, "startup\nshutdown\n", 1),
    ],
    ids=["readme", "life", "state", "bad end"],
)
def test_an_application_is_served_until_a_signal(text, said, code, tmp_path):
    with served(tmp_path, text) as server:
        try:
            while not (found := re.match(r"ready: (http://.*)", line := server.stderr.readline())):
                assert line, "it ended"
            for _ in range(2):
                assert httpx.get(found[1], trust_env=False, timeout=PATIENCE_S).text == "Hello\n"
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == code
            assert server.stdout.read() == said
            assert ("the application did not stop" in server.stderr.read()) == code
        finally:
            server.kill()


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "app", "flags", "said"),
    [
        (FAILS, "module:app", (), "the application did not start: planted"),
        (RAISES, "module:app", (), "the application did not start: ValueError: planted"),
        (APPLICATION, "module:app", ("--host", "192.0.2.1"), "cannot listen on 192.0.2.1:0"),
        (APPLICATION, "module:app", ("--tls-key", "a"), "--tls-certificate and --tls-key: got one"),
        (
            APPLICATION,
            "nope:app",
            (),
            "app: got nope:app, cannot import it: No module named 'nope'",
        ),
        (APPLICATION, "module:nope", (), "app: got module:nope, expected module:name of an ASGI"),
        (APPLICATION, ":app", (), "app: got :app, expected module:name of an ASGI application"),
    ],
)
def test_a_command_that_cannot_serve_says_why_in_a_line_and_fails(text, app, flags, said, tmp_path):
    with served(tmp_path, text, *flags, app=app) as server:
        try:
            _, errors = server.communicate(timeout=PATIENCE_S)
        finally:
            server.kill()
    assert server.returncode in (1, 2)
    *usage, line = errors.splitlines()
    assert said in line
    assert not usage or server.returncode == 2


async def test_the_method_of_the_readme_answers():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names, services = {}, []
    method, command, _ = METHOD.partition("asyncio.run(main())\n")
    assert command
    exec(APPLICATION + method.replace("8000", str(port)), names)

    def service(*given, **more):
        services.append(HttpService(*given, **more))
        return services[0]

    names["HttpService"] = service
    serving = asyncio.create_task(names["main"]())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test.Echo/Call")
            found = await call(b"seven", wait_for_ready=True, timeout=PATIENCE_S)
        assert found == b"seven"
        await until(lambda: not services[0].connections)
    finally:
        serving.cancel()
        await asyncio.wait([serving])
