"""`python -m wire module:app` serves an ASGI application over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from wire.budget import Budget
from wire.door import HttpService
from wire.errors import CannotListen, InvalidCertificate
from wire.exchange import Application
from wire.listener import allow_connections, at, listen
from wire.server import HttpServer
from wire.tls import CertificateFiles, ServedCertificate

_log = logging.getLogger("wire")


@asynccontextmanager
async def lifespan(app: Application) -> AsyncIterator[dict[str, Any]]:
    """Start `app` by ASGI's lifespan protocol, and stop it. Without the protocol nothing is done.

    The block gets the state that the application leaves for its requests.

    Raises:
        RuntimeError: its start or its stop failed.
    """
    state: dict[str, Any] = {}
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    scope = {
        "type": "lifespan",
        "asgi": {"version": "3.0", "spec_version": "2.0"},
        "state": state,
    }
    task = asyncio.ensure_future(app(scope, received.get, sent.put))

    async def step(name: str) -> dict[str, Any]:
        received.put_nowait({"type": f"lifespan.{name}"})
        answer = asyncio.ensure_future(sent.get())
        await asyncio.wait((answer, task), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        return {"type": ""}

    started: dict[str, Any] = {"type": ""}
    try:
        started = await step("startup")
        if started["type"] == "lifespan.startup.failed":
            raise RuntimeError(f"the application did not start: {_cause(started)}")
        yield state
    finally:
        ended: dict[str, Any] = {"type": ""}
        if started["type"] == "lifespan.startup.complete":
            ended = await step("shutdown")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if ended["type"] == "lifespan.shutdown.failed":
        raise RuntimeError(f"the application did not stop: {_cause(ended)}")


def _cause(failed: Mapping[str, Any]) -> str:
    """Why a step failed, as the application says. Starlette sends a traceback."""
    message = str(failed.get("message", "")).strip()
    return message.splitlines()[-1] if "Traceback (most recent call last)" in message else message


async def serve(app: Application, options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT. Raises: CannotListen, InvalidCertificate."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    certificate = None
    if options.tls_certificate:
        files = CertificateFiles(options.tls_certificate, options.tls_key)
        certificate = ServedCertificate(files)
    budget = Budget(options.max_in_flight_bytes)
    listeners = listen(options.host, options.port)
    async with lifespan(app) as state:
        service = HttpService({}, budget, app=app, state=state, certificate=certificate)
        server = HttpServer(service, 30.0)
        serving = asyncio.create_task(server.serve(listeners))
        allow_connections(listeners)
        scheme = "http" if certificate is None else "https"
        _log.info("ready: %s://%s", scheme, at(*listeners[0].getsockname()[:2]))
        await stop.wait()
        server.stop()
        await serving


def _application(name: str) -> Application:
    """Import the application. Raises: ImportError: `name` names none."""
    module, _, attribute = name.partition(":")
    app: Application | None = None
    try:
        if module and not module.startswith("."):
            app = getattr(importlib.import_module(module), attribute or "app", None)
    except ImportError as exc:
        raise ImportError(f"app: got {name}, cannot import it: {exc}") from exc
    if not callable(app):
        expected = "module:name of an ASGI application"
        raise ImportError(f"app: got {name}, expected {expected}")
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m wire", description=__doc__)
    parser.add_argument("app", help="module:name of the application")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tls-certificate", type=Path, help="PEM file")
    parser.add_argument("--tls-key", type=Path, help="PEM file")
    parser.add_argument(
        "--max-in-flight-bytes",
        type=int,
        default=1 << 30,
        help="of bodies and answers that are held at a time",
    )
    options = parser.parse_args(arguments)
    if (options.tls_certificate is None) != (options.tls_key is None):
        parser.error("--tls-certificate and --tls-key: got one of the two, expected both")
    sys.path.insert(0, "")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        uvloop.run(serve(_application(options.app), options))
    except (ImportError, CannotListen, InvalidCertificate, RuntimeError) as exc:
        _log.error("%s", exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
