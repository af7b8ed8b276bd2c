"""`python -m benchmarks.grpc`: ModelInfer of our service beside a constant answer of grpc.aio.

Each call has one raw image. The other server, `benchmarks.baselines.bare_grpc`, answers the same
messages on the same event loop without reading them. h2load loads one after the other in
alternating rounds, on the same cores: the ratios mean something, the absolute rates are low. Exit
code: 0, 1 when an answer failed, 2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.command import arguments_of, commit, latest_weights, positive_int, provenance
from benchmarks.digits import (
    MODEL_INFER,
    PreparedRequest,
    judge_message,
    prepare_requests,
    read_digits,
)
from benchmarks.servers import Server, ServerFailed, free_port, lenet_serve, running
from lenet.errors import LeNetError
from lenet.files import write_atomically
from lenet.weightfile import WeightFile

_WARM_UP_S = 1
_DISTRIBUTIONS = ("lenet-serve", "grpcio", "protobuf", "uvloop", "onnxruntime")


class LoadFailed(Exception):
    """h2load is missing, or calls failed; the message says which."""


@dataclass(frozen=True, slots=True)
class Round:
    """One run of h2load; `cpu_us` is the server's CPU time per call, None without /proc."""

    server: str
    rps: float
    cpu_us: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        h2load = find_h2load()
        path = options.weights or latest_weights()
        weights = WeightFile.read(path)
    except (LoadFailed, LeNetError, FileNotFoundError) as exc:
        print(f"grpc: {exc}", file=sys.stderr)
        return 2
    request = prepare_requests(read_digits(None, weights), weights, "grpc", 1)[0]
    try:
        rounds = list(_measure(h2load, path, weights.model.name, request, options))
    except (LoadFailed, ServerFailed) as exc:
        print(f"grpc: {exc}", file=sys.stderr)
        return 1
    found = summarise(rounds)
    print(table(found))
    if options.json is not None:
        document = {
            **provenance(_DISTRIBUTIONS),
            "commit": commit(),
            "arguments": arguments_of(options),
            **found,
        }
        write_atomically(options.json, (json.dumps(document, indent=1) + "\n").encode())
    return 0


def find_h2load() -> str:
    """The path of h2load.

    Raises:
        LoadFailed: it is not installed.
    """
    path = shutil.which("h2load")
    if path is None:
        raise LoadFailed(
            "h2load is not on the PATH; it generates the load. Install it (Debian and Ubuntu: "
            "apt-get install nghttp2-client; macOS: brew install nghttp2) and try again"
        )
    return path


def parse_output(output: str, errors: str = "") -> int:
    """How many calls succeeded, as h2load printed it.

    Raises:
        LoadFailed: none did, or some failed.
    """
    found = re.search(r"(\d+) succeeded, (\d+) failed", output)
    if found is None or not int(found[1]) or int(found[2]):
        raise LoadFailed(f"h2load: {found[0] if found else (errors or output).strip()[-500:]}")
    return int(found[1])


@contextlib.contextmanager
def _servers(
    weights: Path, model: str, options: argparse.Namespace
) -> Iterator[list[tuple[Server, str]]]:
    """Our service and the constant answer, each with its gRPC address."""
    flags = ["--device=cpu", *shlex.split(options.service_args)]
    port, grpc_port = free_port(), free_port()
    command = ["benchmarks.baselines.bare_grpc", f"--port={port}", f"--grpc-port={grpc_port}"]
    with (
        lenet_serve(weights, model, flags, name="ours") as ours,
        running("constant", command, port, {}) as constant,
    ):
        address = re.search(r"gRPC on (\S+),", ours.logged())
        assert address is not None, "bug: the ready line names no gRPC address"
        yield [(ours, address[1]), (constant, f"127.0.0.1:{grpc_port}")]


def _measure(
    h2load: str, weights: Path, model: str, request: PreparedRequest, options: argparse.Namespace
) -> Iterator[Round]:
    """The rounds, the servers in turns, after a warm-up round of each."""
    with tempfile.TemporaryDirectory() as folder, _servers(weights, model, options) as servers:
        body = Path(folder) / "body"
        body.write_bytes(asyncio.run(_checked_message(servers[0][1], request)))
        for turn in range(options.rounds + 1):
            for server, address in servers:
                before_s, answered = server.cpu_s(), _answered(server)
                duration_s = options.duration if turn else _WARM_UP_S
                calls = _load(h2load, f"http://{address}{MODEL_INFER}", body, duration_s, options)
                after_s = server.cpu_s()
                # h2load looks at HTTP's status alone, which is 200 also for a call that failed.
                if server.name == "ours" and _answered(server) - answered < calls:
                    raise LoadFailed(f"of {calls} calls some ended with an error")
                if turn:
                    known = before_s is not None and after_s is not None
                    cpu_us = (after_s - before_s) / calls * 1e6 if known else None
                    yield Round(server.name, calls / duration_s, cpu_us)
            servers.reverse()  # a drift during a turn favours none


async def _checked_message(address: str, request: PreparedRequest) -> bytes:
    """The message of a call, as it is written to a stream, once our service answered it right."""
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await channel.unary_unary(MODEL_INFER)(request.body, timeout=30)
    except grpc.aio.AioRpcError as exc:
        raise LoadFailed(f"our service answers {exc.code().name}: {exc.details()}") from exc
    verdict, _ = judge_message(answer, request)
    if verdict.error or verdict.wrong_labels:
        raise LoadFailed(f"our service answers wrongly: {verdict.error or 'the label'}")
    return b"\0" + len(request.body).to_bytes(4, "big") + request.body


def _answered(server: Server) -> int:
    """The calls that our service answered so far, 0 for another server."""
    text = server.get("/metrics")[1].decode()
    counts = re.findall(r'^lenet_requests_total\{.*"ok",protocol="grpc".*\} (\S+)$', text, re.M)
    return int(sum(map(float, counts)))


def _load(h2load: str, url: str, body: Path, duration_s: int, options: argparse.Namespace) -> int:
    """Call for so long; how many calls succeeded."""
    command = [h2load, "-D", str(duration_s), "-d", str(body), url]
    command += ["-c", str(options.connections), "-m", str(options.streams)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=duration_s + 60, check=False
    )
    return parse_output(done.stdout, done.stderr)


def summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    """Server to [median, minimum, maximum] of each number, and of the ratio of each turn's rates.

    `cpu_us` is missing where it was not measured.
    """
    servers: dict[str, dict[str, list[float]]] = {}
    for name in ("ours", "constant"):
        some = [one for one in rounds if one.server == name]
        found = servers[name] = {"rps": _spread([one.rps for one in some])}
        cpu_us = [one.cpu_us for one in some if one.cpu_us is not None]
        if len(cpu_us) == len(some):
            found["cpu_us"] = _spread(cpu_us)
    rates = [[one.rps for one in rounds if one.server == name] for name in ("ours", "constant")]
    ratios = [ours / constant for ours, constant in zip(*rates, strict=True)]
    return {"servers": servers, "ratio": _spread(ratios)}


def _spread(values: Sequence[float]) -> list[float]:
    return [round(one, 3) for one in (statistics.median(values), min(values), max(values))]


def table(found: dict[str, Any]) -> str:
    """A line per server, and one with the ratio."""
    lines = [f"{'':<10}{'calls/s':>8} {'(min..max)':<17}{'CPU us':>7} (min..max)"]
    for name, numbers in found["servers"].items():
        rate, low, high = numbers["rps"]
        line = f"{name:<10}{rate:>8,.0f} {f'({low:,.0f}..{high:,.0f})':<17}"
        if "cpu_us" in numbers:
            used, least, most = numbers["cpu_us"]
            line += f"{used:>7,.0f} ({least:,.0f}..{most:,.0f})"
        lines.append(line.rstrip())
    ratio, low, high = found["ratio"]
    lines.append(f"ours/constant: calls/s {ratio:.2f} ({low:.2f}..{high:.2f})")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grpc",
        description="Compare ModelInfer with a constant answer of grpc.aio on the CPU, by h2load.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--connections", default=4, type=positive_int, help="of the client")
    add("--streams", default=8, type=positive_int, help="concurrent calls of a connection")
    add("--rounds", default=5, type=positive_int, help="per server")
    add("--duration", default=4, type=positive_int, help="seconds of a round")
    add("--weights", type=Path, help="weight file, instead of the latest in weights/lenet")
    add("--service-args", default="", help="more arguments for our service, as one string")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
