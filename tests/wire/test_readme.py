"""The examples of wire's README, and `python -m wire`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import grpc
import httpx
import pytest

from tests.service_process import PATIENCE_S, PROJECT
from tests.wire.doors import until
from wire.budget import Budget
from wire.door import HttpService
from wire.errors import Forbidden, Overloaded
from wire.unary import unary

MIB = 1 << 20
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
    ("text", "flags", "said"),
    [
        (FAILS, (), "the application did not start: planted"),
        (RAISES, (), "the application did not start: ValueError: planted"),
        (APPLICATION, ("--host", "192.0.2.1"), "cannot listen on 192.0.2.1:0"),
        (APPLICATION, ("--tls-key", "a"), "--tls-certificate and --tls-key: got one of the two"),
    ],
    ids=["start", "traceback", "address", "flags"],
)
def test_a_command_that_cannot_serve_says_why_and_fails(text, flags, said, tmp_path):
    with served(tmp_path, text, *flags) as server:
        try:
            _, errors = server.communicate(timeout=PATIENCE_S)
        finally:
            server.kill()
    assert server.returncode in (1, 2)
    *usage, line = errors.splitlines()
    assert said in line
    assert not usage or server.returncode == 2


@pytest.mark.process
@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("nope:app", "app: got nope:app, cannot import it: No module named 'nope'"),
        ("module:nope", "app: got module:nope, expected module:name of an ASGI application"),
        (":app", "app: got :app, expected module:name of an ASGI application"),
    ],
)
def test_a_command_without_an_application_says_so_in_a_line(app, said, tmp_path):
    with served(tmp_path, APPLICATION, app=app) as server:
        try:
            _, errors = server.communicate(timeout=PATIENCE_S)
        finally:
            server.kill()
    assert (server.returncode, errors) == (1, f"{said}\n")


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


class Exchange:
    """How a call ended, and the budget of its connection."""

    def __init__(self, max_bytes=4 * MIB):
        self.ended, self.budget = [], Budget(max_bytes)
        self.writer = SimpleNamespace(peer=self)

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


@pytest.mark.parametrize(
    "end",
    [
        lambda call: call.complete(),
        lambda call: call.fail(Forbidden("not you")),
        lambda call: call.cancel(),
    ],
    ids=["complete", "fail", "cancel"],
)
def test_the_bytes_of_a_message_are_held_until_its_call_ends(end):
    exchange = Exchange()
    call = unary(bytes.upper).open(None, exchange)
    message = call.message(4)
    message.data(b"ab")
    message.data(b"cd")
    assert exchange.budget.held_bytes == 4
    end(call)
    assert exchange.budget.held_bytes == 0


def test_a_message_for_which_there_is_no_memory_is_refused():
    exchange = Exchange(max_bytes=3)
    exchange.budget.hold(1, 1)
    message = unary(bytes.upper).open(None, exchange).message(4)
    message.data(b"ab")
    with pytest.raises(Overloaded) as caught:
        message.data(b"cd")
    message.fail(caught.value)
    assert exchange.budget.held_bytes == 1


def test_a_large_slow_message_gives_way_when_others_need_its_memory(run_virtually):
    async def main(loop):
        exchange = Exchange()
        message = unary(len).open(None, exchange).message(3 * MIB)
        message.data(bytes(2 * MIB))
        await asyncio.sleep(1.5)
        exchange.budget.hold(2 * MIB, 2 * MIB)
        ((status, text),) = exchange.ended
        assert status == "DEADLINE_EXCEEDED"
        assert f"got {2 * MIB} bytes so far" in text
        assert exchange.budget.held_bytes == 2 * MIB
        await asyncio.sleep(2)
        assert not loop.pending_timers(), "nothing is looked at without transfers"

    run_virtually(main)


def test_a_slow_message_that_makes_room_for_itself_is_not_answered(run_virtually):
    async def main(_):
        exchange = Exchange()
        message = unary(len).open(None, exchange).message(4 * MIB)
        message.data(bytes(2 * MIB))
        await asyncio.sleep(1.5)
        message.data(bytes(2 * MIB))
        message.complete()
        assert [status for status, _ in exchange.ended] == ["DEADLINE_EXCEEDED"]
        assert exchange.budget.held_bytes == 0

    run_virtually(main)


@pytest.mark.parametrize("size", [5, None], ids=["announced", "not announced"])
def test_a_message_over_the_limit_is_refused(size):
    call = unary(bytes.upper, max_bytes=4).open(None, Exchange())
    with pytest.raises(Exception, match="message: got 5 bytes, expected at most 4"):
        call.message(size).data(b"abcde")
