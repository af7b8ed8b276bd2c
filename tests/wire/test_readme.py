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
from wire.errors import Forbidden
from wire.unary import unary

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
FAILS = """
async def app(scope, receive, send):
    await send({"type": "lifespan.startup.failed", "message": "planted"})
"""


def served(folder, text, *flags):
    (folder / "module.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "wire", "module:app", "--port", "0", *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "said"), [(APPLICATION, ""), (LIFESPAN, "startup\nshutdown\n")], ids=["readme", "life"]
)
def test_an_application_is_served_until_a_signal(text, said, tmp_path):
    with served(tmp_path, text) as server:
        try:
            while not (found := re.match(r"ready: (http://.*)", line := server.stderr.readline())):
                assert line, "it ended"
            assert httpx.get(found[1], trust_env=False, timeout=PATIENCE_S).text == "Hello\n"
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 0
            assert server.stdout.read() == said
        finally:
            server.kill()


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (FAILS, (), "the application did not start: planted"),
        (APPLICATION, ("--host", "192.0.2.1"), "cannot listen on 192.0.2.1:0"),
        (APPLICATION, ("--tls-key", "a"), "--tls-certificate and --tls-key: got one of the two"),
    ],
    ids=["start", "address", "flags"],
)
def test_a_command_that_cannot_serve_says_why_and_fails(text, flags, said, tmp_path):
    with served(tmp_path, text, *flags) as server:
        try:
            _, errors = server.communicate(timeout=PATIENCE_S)
        finally:
            server.kill()
    assert server.returncode in (1, 2)
    assert said in errors
    assert "Traceback" not in errors


async def test_the_method_of_the_readme_answers():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names, services = {}, []
    exec(APPLICATION + METHOD.replace("8000", str(port)), names)

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


class Exchange:
    """How a call ended."""

    def __init__(self):
        self.ended = []

    def reply(self, message):
        self.ended.append(message)

    def refuse(self, error):
        self.ended.append((error.grpc_status.name, error.message))


def refused(message):
    raise Forbidden("not you")


@pytest.mark.parametrize(
    ("answer", "ended"),
    [
        (bytes.upper, b"ABCD"),
        (refused, ("PERMISSION_DENIED", "not you")),
        (lambda message: 1 / 0, ("INTERNAL", "internal error; see the server log")),
    ],
    ids=["answer", "refusal", "bug"],
)
def test_a_call_ends_as_its_function_does(answer, ended):
    exchange = Exchange()
    call = unary(answer, max_bytes=4).open(None, exchange)
    message = call.message(4)
    message.data(b"ab")
    message.data(b"cd")
    message.complete()
    assert exchange.ended == [ended]


@pytest.mark.parametrize("size", [5, None], ids=["announced", "not announced"])
def test_a_message_over_the_limit_is_refused(size):
    call = unary(bytes.upper, max_bytes=4).open(None, Exchange())
    with pytest.raises(Exception, match="message: got 5 bytes, expected at most 4"):
        call.message(size).data(b"abcde")
