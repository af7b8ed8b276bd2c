"""`python -m benchmarks.wire`: wire beside other ASGI servers, each with a constant application.

uvicorn, hypercorn and granian are measured where they are installed, over HTTP/1.1 and, but for
uvicorn, HTTP/2 in the clear. Each has one process. h2load loads one after the other in alternating
rounds, on the same cores: the ratios mean something, the absolute rates are low. Exit code: 0, 1
when an answer failed, 2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import commit, positive_int, provenance
from benchmarks.grpc import LoadFailed, find_h2load, parse_output
from benchmarks.servers import Server, ServerFailed, free_port, running

_APP = "benchmarks.wire:app"
_SERVERS = {
    "wire": (_APP, "--port={}"),
    "uvicorn": (_APP, "--port={}", "--no-access-log", "--lifespan=off", "--log-level=warning"),
    "hypercorn": (_APP, "--bind=127.0.0.1:{}", "--worker-class=uvloop"),
    "granian": (_APP, "--port={}", "--interface=asgi", "--loop=uvloop", "--no-ws"),
}
"""The arguments of each server's module, with a place for the port."""

_PROTOCOLS = {"HTTP/1.1": ("--h1",), "HTTP/2": ("-m", "8")}
"""The arguments of h2load; over HTTP/2 a connection has eight requests at a time."""

_WARM_UP_S = 1
_BODY = b"x" * 300
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"300")]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that reads a request and answers 300 bytes."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _BODY})


@dataclass(frozen=True, slots=True)
class Round:
    """One run of h2load; `cpu_us` is the server's CPU time per request, None without /proc."""

    server: str
    protocol: str
    rps: float
    cpu_us: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        rounds = list(_measure(find_h2load(), options))
    except LoadFailed as exc:
        print(f"wire: {exc}", file=sys.stderr)
        return 2
    except ServerFailed as exc:
        print(f"wire: {exc}", file=sys.stderr)
        return 1
    found = summarise(rounds)
    for name, numbers in found.items():
        rps, cpu = numbers["rps"], numbers.get("cpu_us", ("",) * 3)
        print(f"{name:<20}{rps[0]:>9,.0f} requests/s ({rps[1]:,.0f}..{rps[2]:,.0f}), CPU us {cpu}")
    if options.json is not None:
        document = {**provenance(tuple(_SERVERS)), "commit": commit(), "servers": found}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _measure(h2load: str, options: argparse.Namespace) -> Iterator[Round]:
    """The rounds, the servers in turns, after a warm-up round of each."""
    with contextlib.ExitStack() as stack:
        servers: list[tuple[Server, str]] = []
        for name, flags in _SERVERS.items():
            if importlib.util.find_spec(name) is None:
                print(f"{name} is not installed", file=sys.stderr)
                continue
            port = free_port()
            command = [name, *(flag.format(port) for flag in flags)]
            server = stack.enter_context(running(name, command, port, {}))
            servers += [(server, one) for one in _PROTOCOLS if (name, one) != ("uvicorn", "HTTP/2")]
        for turn in range(options.rounds + 1):
            for server, protocol in list(servers):
                before_s = server.cpu_s()
                duration_s = options.duration if turn else _WARM_UP_S
                try:
                    answers = _load(h2load, server.url, protocol, duration_s, options.connections)
                except LoadFailed as exc:
                    if turn:
                        raise
                    # h2load 1.52 takes hypercorn's answers over HTTP/1.1 for failures.
                    print(f"{server.name}, {protocol}: left out, {exc}", file=sys.stderr)
                    servers.remove((server, protocol))
                    continue
                after_s = server.cpu_s()
                known = before_s is not None and after_s is not None
                cpu_us = (after_s - before_s) / answers * 1e6 if known else None
                if turn:
                    yield Round(server.name, protocol, answers / duration_s, cpu_us)
            servers.reverse()  # a drift during a turn favours none


def _load(h2load: str, url: str, protocol: str, duration_s: int, connections: int) -> int:
    """Load for so long; how many requests succeeded. Raises: LoadFailed."""
    done = subprocess.run(
        [h2load, "-D", str(duration_s), "-c", str(connections), *_PROTOCOLS[protocol], url],
        capture_output=True,
        text=True,
        timeout=duration_s + 60,
        check=False,
    )
    return parse_output(done.stdout, done.stderr)


def summarise(rounds: Sequence[Round]) -> dict[str, dict[str, list[float]]]:
    """Server and protocol to [median, minimum, maximum] of each number that was measured."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in dict.fromkeys(f"{one.server} {one.protocol}" for one in rounds):
        some = [one for one in rounds if f"{one.server} {one.protocol}" == name]
        found[name] = {"rps": _spread([one.rps for one in some])}
        cpu_us = [one.cpu_us for one in some if one.cpu_us is not None]
        if len(cpu_us) == len(some):
            found[name]["cpu_us"] = _spread(cpu_us)
    return found


def _spread(values: Sequence[float]) -> list[float]:
    return [round(one, 1) for one in (statistics.median(values), min(values), max(values))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    add = parser.add_argument
    add("--connections", default=32, type=positive_int, help="of the client")
    add("--rounds", default=5, type=positive_int, help="per server and protocol")
    add("--duration", default=4, type=positive_int, help="seconds of a round")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
