"""Load a running service with digits, check every answer, and report the latency.

Closed loop: each connection sends its next request after the answer to the previous one. Open loop:
requests are due at times that do not depend on the service, and latency counts from the due time.
So a service that stalls delays every request that was due meanwhile, and the percentiles show it
(no coordinated omission). Latencies are those of good answers: errors are fast, and would make a
failing service look fast. The client measures itself, and the report says if it is the limit.

Labels are compared with those that the same weight file predicts here, on ONNX Runtime. Exit code:
0 when all targets are reached and no label is wrong, 1 otherwise, 2 when nothing was sent, 130
after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import multiprocessing
import random
import re
import selectors
import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, get_args
from urllib.parse import quote, urlsplit

import grpc
import httptools
import numpy as np

from benchmarks import command, digits
from benchmarks.digits import PreparedRequest, Verdict
from benchmarks.servers import find_service
from benchmarks.timing import PERCENTILES, distribution

TIMEOUT_S = 35.0
"""Timeout for a hung service; the service itself gives up after 30 s."""
WRONG_LABEL = "wrong label"
"""Kind of error: a well-formed answer with another label than the local model predicts."""
COLUMNS = (*PERCENTILES, "max")
SERVER_STAGES = ("decode", "queue", "compute", "encode", "total")
ROW = ("due_in", "came_in", "latency_ms", "late_ms", "mistakes", *SERVER_STAGES)
"""A good answer: the stages in which its request was due and it came, by index; its latency; how
late its request was sent; labels that differ from the true ones; milliseconds in the service."""

Answer: TypeAlias = tuple[float, Verdict, dict[str, float]]
"""When an answer came, its check, and milliseconds by stage of the service."""
Times: TypeAlias = Iterator[tuple[int, float]]
"""The requests to send: the index of the stage, and when it is due."""
Part: TypeAlias = tuple[Any, Counter[tuple[int, str]], Any]
"""What a process measured: good answers (n, ROW), errors by stage and kind, `_usage_s` by stage."""


class Stage(NamedTuple):
    """A part of the load; `level`: requests per second, or connections of a closed loop."""

    level: float
    duration_s: float


@command.explained
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test; the exit code."""
    options = parse(arguments)
    if options.figure is not None:
        import matplotlib  # noqa: F401 - is missed before the test, not after it
    service, weights = find_service(options.url, options.model, options.weights)
    labelled = digits.read_digits(options.data, weights)
    requests = digits.prepare_requests(labelled, weights, options.format, options.images)
    parts, interrupted = send(options, requests)
    total, *stages = summarise(options, parts)
    checks = [*check(total, options), ("nothing interrupted the test", not interrupted)]
    passed = all(met for _, met in checks)
    title = (
        f"{options.grpc if options.format == 'grpc' else options.url}: {service['name']} version "
        f"{service['version']} on {service['device']}\n{options.mode} loop, connections: "
        f"{options.connections}, processes: {options.processes}, {options.images} x "
        f"{options.format} per request\n{len(labelled.images):,} digits: {labelled.source}"
    )
    print(f"{title}\n\n{table(total, stages)}")
    print("\n".join(f"{'met   ' if met else 'MISSED'}  {text}" for text, met in checks))
    if options.json is not None:
        document = {
            **command.provenance(["lenet-serve", "httptools", "grpcio", "numpy", "onnxruntime"]),
            "arguments": command.arguments_of(options),
            "service": service,
            "passed": passed,
            "checks": [{"text": text, "met": met} for text, met in checks],
            "results": total,
            "stages": stages,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.figure is not None:
        draw(stages, title, options.figure)
    return 130 if interrupted else 0 if passed else 1


class HttpConnection:
    """POST /predict over one kept HTTP/1.1 connection; nothing is retried.

    httpx takes 1,000 us of CPU time a request where this takes 45, and would be the limit
    (32 connections; two Xeon cores, 2026-11-26).
    """

    def __init__(self, options: Namespace) -> None:
        self._url = urlsplit(options.url)
        self._query = f"?model={quote(options.model)}" if options.model else ""
        self._fields, self._timeout_s = f"Host: {self._url.netloc}\r\n", TIMEOUT_S
        if options.timeout_ms:  # the service reports its own timeouts
            self._fields += f"X-Request-Timeout-Ms: {options.timeout_ms}\r\n"
            self._timeout_s = options.timeout_ms / 1e3 + 5
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: PreparedRequest) -> Answer:
        """Send a request and check its answer; connects first where that is needed."""
        head = (
            f"POST {self._url.path}/predict{self._query} HTTP/1.1\r\n{self._fields}Content-Type: "
            f"{request.content_type}\r\nContent-Length: {len(request.body)}\r\n\r\n"
        )
        body, fields, keeps = bytearray(), dict[bytes, bytes](), list[bool]()
        calls = SimpleNamespace(
            on_header=lambda name, value: fields.update({name.lower(): value}),
            on_body=body.extend,
            on_message_complete=lambda: keeps.append(parser.should_keep_alive()),
        )
        parser = httptools.HttpResponseParser(calls)
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._streams is None or self._streams[0].at_eof():
                    await self.close()
                    self._streams = await asyncio.open_connection(
                        self._url.hostname, self._url.port, ssl=self._url.scheme == "https" or None
                    )
                reader, writer = self._streams
                writer.write(head.encode() + request.body)
                while not keeps:
                    if not (data := await reader.read(1 << 16)):
                        raise EOFError
                    parser.feed_data(data)
        except (OSError, EOFError, httptools.HttpParserError) as exc:
            await self.close()
            return time.perf_counter(), Verdict(type(exc).__name__), {}
        received_s, status = time.perf_counter(), parser.get_status_code()
        if not keeps[0]:
            await self.close()
        if status != 200:
            return received_s, Verdict(digits.error_kind(status, bytes(body))), {}
        times = re.findall(rb"(\w+);dur=([\d.]+)", fields.get(b"server-timing", b""))
        server_ms = {name.decode(): float(ms) for name, ms in times}
        return received_s, digits.judge(bytes(body), request), server_ms

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class GrpcConnection:
    """ModelInfer over one connection, with raw tensors; nothing is retried."""

    def __init__(self, options: Namespace) -> None:
        own = (("grpc.use_local_subchannel_pool", 1),)  # else channels share a connection
        self._channel = grpc.aio.insecure_channel(options.grpc, options=own)
        self._infer = self._channel.unary_unary(digits.MODEL_INFER)
        self._timeout_s = options.timeout_ms / 1e3 if options.timeout_ms else TIMEOUT_S

    async def send(self, request: PreparedRequest) -> Answer:
        """Send a request and check its answer."""
        try:
            answer = await self._infer(request.body, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            code = dict(exc.trailing_metadata() or ()).get("lenet-error-code", "")
            return time.perf_counter(), Verdict(f"{exc.code().name} {code}".strip()), {}
        return time.perf_counter(), *digits.judge_message(answer, request)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def due_times(stages: Sequence[Stage], start_s: float, arrivals: str, seed: int) -> Times:
    """The requests of an open loop that starts at `start_s`."""
    generator = random.Random(seed)
    for index, (rate, duration_s) in enumerate(stages):
        if arrivals == "constant":
            count = math.ceil(rate * duration_s - 1e-6)
            yield from ((index, start_s + number / rate) for number in range(count))
        else:
            due_s = start_s + generator.expovariate(rate)
            while due_s < start_s + duration_s:
                yield index, due_s
                due_s += generator.expovariate(rate)
        start_s += duration_s


def closed_times(stages: Sequence[Stage], start_s: float, connection: int) -> Times:
    """The requests of one connection, from 0, of a closed loop: each is due when it is taken."""
    for index, (level, duration_s) in enumerate(stages):
        end_s = start_s + duration_s
        while connection < level and (now_s := time.perf_counter()) < end_s:
            yield index, max(now_s, start_s)
        start_s = end_s


async def _send_part(options: Namespace, requests: Sequence[PreparedRequest], process: int) -> Part:
    kind = GrpcConnection if options.format == "grpc" else HttpConnection
    numbers = range(process, options.connections, options.processes)
    connections = [kind(options) for _ in numbers]
    # Each process starts at another digit, so that no two send the same one at a time.
    first = process * len(requests) // options.processes
    endless = itertools.cycle([*requests[first:], *requests[:first]])
    rows, errors = array("d"), Counter[tuple[int, str]]()

    async def use(connection: Any, times: Times) -> None:
        for due_in, due_s in times:
            # A request that waited for a connection is taken after its due time.
            taken_s = max(due_s, time.perf_counter())
            if (left_s := taken_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            late_ms = 1e3 * (time.perf_counter() - taken_s)
            came_s, verdict, server_ms = await connection.send(next(endless))
            error = verdict.error or (WRONG_LABEL if verdict.wrong_labels else "")
            shared.counts[2 * process + bool(error)] += 1
            if error:
                errors[due_in, error] += 1
                continue
            latency_ms, came_in = 1e3 * (came_s - due_s), bisect_right(ends_s, came_s)
            rows.extend((due_in, came_in, latency_ms, late_ms, verdict.mistakes))
            rows.extend(server_ms.get(name, math.nan) for name in SERVER_STAGES)

    shared.ready.wait(60)
    start_s = time.perf_counter()
    ends_s = list(itertools.accumulate((s for _, s in options.stages), initial=start_s))[1:]
    # Every `processes`-th of the same times: together, the processes send each request once.
    every = due_times(options.stages, start_s, options.arrivals, options.seed)
    times = [itertools.islice(every, process, None, options.processes)] * len(numbers)
    if options.mode == "closed":
        times = [closed_times(options.stages, start_s, number) for number in numbers]
    sending = asyncio.gather(*map(use, connections, times))
    usage = [_usage_s(start_s)]
    for end_s in ends_s:
        # Another process ends the test, which no event of asyncio shows: noqa.
        while not shared.stop.value and (left_s := end_s - time.perf_counter()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, 0.1))
        usage.append(_usage_s(end_s))
    while not sending.done() and not shared.stop.value:
        await asyncio.wait([sending], timeout=0.1)
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
    for connection in connections:
        await connection.close()
    return np.array(rows).reshape(-1, len(ROW)), errors, np.diff(usage, axis=0)


def _usage_s(end_s: float) -> tuple[float, float, float]:
    """Time until `end_s`, CPU time of this process, time in which this thread needed a core."""
    waited_ns = "0"
    with suppress(OSError):  # outside Linux
        waited_ns = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]
    needed_s = time.thread_time() + int(waited_ns) / 1e9
    return min(time.perf_counter(), end_s), time.process_time(), needed_s


shared = SimpleNamespace(ready=None, stop=None, counts=None)
"""Memory of all processes: a barrier, whether to stop, and good answers and errors of each."""


def _share(*memory: Any) -> None:
    shared.ready, shared.stop, shared.counts = memory


def send_part(options: Namespace, requests: Sequence[PreparedRequest], process: int) -> Part:
    """Send the part of one process, once all are ready."""
    # epoll rounds waits up to a millisecond, and would delay each request of an open loop by half a
    # millisecond; select does not round.
    factory = partial(asyncio.SelectorEventLoop, selectors.SelectSelector())
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_send_part(options, requests, process))


def send(options: Namespace, requests: Sequence[PreparedRequest]) -> tuple[list[Part], bool]:
    """Send the load from processes that start together; True if SIGINT ended it early."""
    count, spawn = options.processes, multiprocessing.get_context("spawn")
    ready, stop = spawn.Barrier(count), spawn.RawValue("b")
    counts = spawn.RawArray("Q", 2 * count)
    # The processes inherit this: Ctrl-C reaches all of them, and only this one acts on it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ProcessPoolExecutor(count, spawn, _share, (ready, stop, counts)) as pool:
            parts = [pool.submit(send_part, options, requests, one) for one in range(count)]
            signal.signal(signal.SIGINT, lambda *_: setattr(stop, "value", 1))
            while wait(parts, timeout=0.5).not_done:
                if sys.stderr.isatty():
                    text = f"{sum(counts[::2]):,} good answers, {sum(counts[1::2]):,} errors"
                    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            print("\r\x1b[K" * sys.stderr.isatty(), end="", file=sys.stderr)
            return [part.result() for part in parts], bool(stop.value)
    finally:
        signal.signal(signal.SIGINT, before)


def summarise(options: Namespace, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The numbers of the whole test, then of each stage that was begun, as written to JSON.

    `requests_per_s`: good answers that came while the stage ran. `client_cores`: of all processes.
    `client_busy`: share of the time in which the busiest event loop had a core or waited for one.
    """
    rows = np.concatenate([part[0] for part in parts])
    errors = sum((part[1] for part in parts), Counter[tuple[int, str]]())
    usage_s = np.array([part[2] for part in parts])
    unit = "per second" if options.mode == "open" else "connections"

    def numbers(*chosen: int) -> dict[str, Any]:
        levels = [options.stages[index].level for index in chosen]
        elapsed_s, _, busy_s = usage_s[:, chosen].sum(axis=1).max(axis=0).tolist()
        due = dict(zip(ROW, rows[np.isin(rows[:, 0], chosen)].T, strict=True))
        answered, images = len(due["mistakes"]), len(due["mistakes"]) * options.images
        rate = float(np.isin(rows[:, 1], chosen).sum()) / elapsed_s
        failed = Counter[str]()
        for (index, error), count in errors.items():
            failed[error] += count * (index in chosen)
        server = {one: distribution(due[one][due[one] >= 0]) for one in SERVER_STAGES}
        late_ms = distribution(due["late_ms"])
        return {
            "load": f"{levels[0]:.6g} {unit}" if len(levels) == 1 else "all",
            "offered": float(np.mean(levels)),
            "elapsed_s": elapsed_s,
            "requests": answered + failed.total(),
            "requests_per_s": rate,
            "images_per_s": rate * options.images,
            "errors": dict((+failed).most_common()),
            "accuracy": float(images - due["mistakes"].sum()) / (images or 1),
            "latency_ms": distribution(due["latency_ms"]),
            "server_ms": {one: found for one, found in server.items() if found},
            "sent_late_ms": late_ms,
            "client_busy": busy_s / elapsed_s,
            "client_cores": float(usage_s[:, chosen, 1].sum()) / elapsed_s,
            "client_limited": busy_s > 0.9 * elapsed_s or late_ms.get("p99", 0) > 10,
        }

    begun = [n for n in range(1, len(options.stages)) if usage_s[0, n, 0] > 1e-3] or [1]
    return [numbers(*begun), *map(numbers, begun)]


def check(total: dict[str, Any], options: Namespace) -> list[tuple[str, bool]]:
    """The text of each target, and of the rule on wrong labels, and whether the load met it."""
    wrong = total["errors"].get(WRONG_LABEL, 0)
    count, failed = total["requests"], sum(total["errors"].values()) - wrong
    limit, percent = options.errors
    most = limit * count / 100 if percent else limit
    checks = [
        (f"answers with wrong labels: {wrong:,}, allowed none", not wrong),
        (f"errors: {failed:,} of {count:,}, allowed {limit:g}{percent}", failed <= most),
        (f"good answers: {count - failed - wrong:,}", bool(total["latency_ms"])),
    ]
    for name, found_ms in total["latency_ms"].items():
        if limit_ms := vars(options).get(name):
            text = f"{name}: {found_ms:,.2f} ms, allowed {limit_ms:,.2f} ms"
            checks.append((text, found_ms <= limit_ms))
    return checks


def table(total: dict[str, Any], stages: Sequence[dict[str, Any]]) -> str:
    """A line for each stage, the service's part, and what else a reader must know."""

    def row(name: str, *cells: str, found: dict[str, float], client: str = "") -> str:
        times = [f"{found[one]:,.2f}" if found else "-" for one in COLUMNS]
        return f"{name:<19}{''.join(f'{cell:>10}' for cell in (*cells, *times, client))}".rstrip()

    heads = "".join(f"{head:>10}" for head in ("requests/s", "errors", *COLUMNS, "client"))
    lines = [f"{'latency in ms':<19}{heads}"]
    for one in (*stages, total) if len(stages) > 1 else (total,):
        rate, errors = f"{one['requests_per_s']:,.1f}", f"{sum(one['errors'].values()):,}"
        busy = f"{one['client_busy']:.0%}{'*' * one['client_limited']}"
        lines.append(row(one["load"], rate, errors, found=one["latency_ms"], client=busy))
    lines += [row(f"  service: {one}", "", "", found=ms) for one, ms in total["server_ms"].items()]
    late_ms = total["sent_late_ms"].get("p99", 0.0)
    lines += [
        f"\n{total['requests']:,} requests in {total['elapsed_s']:.1f} s, "
        f"{total['images_per_s']:,.1f} images/s, accuracy {total['accuracy']:.3%}",
        *(f"error: {count:,} x {kind}" for kind, count in total["errors"].items()),
        f"The client used {total['client_cores']:.2f} cores; its busiest event loop ran or waited "
        f"for a core {total['client_busy']:.0%} of the time; p99 of its delays: {late_ms:.2f} ms",
    ]
    if any(one["client_limited"] for one in stages):
        lines.append("* The client is the limit: raise --processes if cores are free, or --images")
    return "\n".join(lines)


def draw(stages: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the latency of each stage over its load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", dpi=120)
    axes = figure.subplots()
    offered = [one["offered"] for one in stages]
    for name in COLUMNS:
        ms = [one["latency_ms"].get(name, math.nan) for one in stages]
        axes.plot(offered, ms, marker="o", markersize=4, label=name)
    ms = [one["latency_ms"].get("p50") if one["client_limited"] else math.nan for one in stages]
    axes.plot(offered, ms, "kx", label="p50, the client is the limit")
    axes.set(
        xlabel="requests/s or connections", ylabel="latency (ms)", yscale="log", xlim=(0, None)
    )
    axes.set_title(title, fontsize="small")
    axes.grid(color="#DDDDDD", linewidth=0.6, which="both")
    axes.legend(frameon=False)
    command.save_picture(figure, path)


def ramp(text: str) -> list[Stage]:
    """Stages from LOAD:SECONDS, or ten equal ones from FROM-TO:SECONDS."""
    levels, _, seconds = text.partition(":")
    start, dash, end = levels.partition("-")
    try:
        first, last = command.positive_float(start), command.positive_float(end if dash else start)
        duration_s, count = command.positive_float(seconds), 10 if dash else 1
    except ValueError as exc:
        raise ArgumentTypeError(f"{text!r}, expected 100:5 or 100-1000:20") from exc
    return [Stage(level, duration_s / count) for level in np.linspace(first, last, count).tolist()]


def parse(arguments: Sequence[str] | None) -> Namespace:
    """The command line, completed by what depends on other options."""
    parser = ArgumentParser("python -m benchmarks.load_test", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    add, default = parser.add_argument, "(default: %(default)s)"
    count, number = command.positive_int, command.positive_float
    add("--url", default="http://127.0.0.1:8000", type=command.url, help=f"service {default}")
    add("--grpc", metavar="HOST:PORT", help="for --format grpc (default: port 8001 of --url)")
    add("--format", default="json", choices=get_args(digits.Format), help=f"of requests {default}")
    add("--images", default=1, type=count, help=f"per request {default}")
    add("--model", help="to request instead of the service's default")
    add("--timeout-ms", type=count, help="deadline of a request, sent to the service")
    add("--data", type=Path, help="folder of MNIST, instead of the weight file's ten images")
    add("--weights", type=Path, help="the served file, if it is not in weights/")
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--figure", type=Path, metavar="FILE", help="draw latency over load, as PNG, SVG or PDF")
    add = parser.add_argument_group("load").add_argument
    text = "as described above (default: open with --rate or --stages, else closed)"
    add("--mode", choices=("closed", "open"), help=text)
    add("--connections", type=count, help="maximum number at a time (default: 32)")
    add("--rate", type=number, help="requests per second of an open loop (default: 500)")
    add("--arrivals", default="poisson", choices=("poisson", "constant"), help=default)
    add("--seed", default=1, type=int, help=f"of random times {default}")
    add("--duration", type=number, help="seconds (default: 30)")
    text = "loads in sequence, requests per second or connections; FROM-TO:SECONDS: ten equal steps"
    add("--stages", nargs="+", type=ramp, metavar="LOAD:SECONDS", help=text)
    text = f"seconds of load before the test, not reported {default}"
    add("--warm-up", default=2.0, type=command.non_negative_float, help=text)
    text = "that send (default: one for each core; one less for a service on this machine)"
    add("--processes", type=count, help=text)
    add = parser.add_argument_group("targets, for all stages together").add_argument
    for name in COLUMNS:
        add(f"--{name}", type=command.duration_ms, metavar="TIME", help="maximum, such as 5ms")
    text = "maximum, such as 10 or 0.1%% (default: 0); wrong labels always fail the test"
    add("--errors", default="0", type=command.count_or_percent, help=text)

    options = parser.parse_args(arguments)
    if options.stages and (options.rate or options.duration):
        parser.error("--stages: has rates and durations of its own: leave out --rate, --duration")
    options.mode = options.mode or ("open" if options.rate or options.stages else "closed")
    closed = options.mode == "closed"
    if closed and (options.rate or (options.stages and options.connections)):
        parser.error("--mode closed: leave out --rate, and --connections beside --stages")
    level = float(options.connections or 32) if closed else options.rate or 500.0
    chosen = options.stages or [[Stage(level, options.duration or 30.0)]]
    if options.figure is not None and not options.stages:
        parser.error("--figure: needs several loads: use --stages")
    options.stages = [stage for part in chosen for stage in part]
    if closed:
        options.connections = math.ceil(max(level for level, _ in options.stages))
    options.stages.insert(0, Stage(options.stages[0].level, options.warm_up))
    options.connections = options.connections or 32
    host = urlsplit(options.url).hostname or ""
    options.grpc = options.grpc or f"{host}:8001"
    processes = options.processes or command.spare_cores(host)
    options.processes = min(processes, options.connections)
    if options.connections > 900 * options.processes:  # `select` takes 1,024 file descriptors
        parser.error("--connections: at most 900 for each of --processes")
    return options


if __name__ == "__main__":
    sys.exit(main())
