"""A real service under good, bad, slow and leaving clients, with reloads and killed workers.

`make soak` runs it for ten minutes. Each answer is compared with what the version that it names
answers to the same images; each error with what the client did. At the end it prints how memory,
descriptors and threads grew, and exits with 1 if anything was not as it has to be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import grpc
import numpy as np

from benchmarks.grpc_stub import Stub
from lenet.weightfile import WeightFile
from tests.faults import clients
from tests.faults.attacks import PNG, SHORT
from tests.faults.checks import (
    NO_TRACE,
    decoding,
    descriptors,
    outcomes,
    resident_bytes,
    samples,
    serving,
    total,
)
from tests.faults.clients import (
    ACCEPT,
    JSON,
    NPY,
    RAW,
    WEIGHTS,
    Digits,
    Known,
    infer_request,
    message,
    request,
)
from tests.pictures import FORM, encoded, form
from tests.service_process import PATIENCE_S, Service

KILL_EVERY_S = 45.0
"""A third death within a minute ends the service."""

_LEAST_WINDOW_S = 60.0
"""A slope is taken over so much time at least: in ten seconds one burst is all that it sees."""

EXCUSED_S = 5.0
"""After a kill: how long connections of the killed worker may be found broken."""

RELOAD_EVERY_S = 3.0
SAMPLE_EVERY_S = 2.0
GROWTH = {
    "rss_mib": 16.0,
    "descriptors": 8.0,
    "threads": 2.0,
    "decoders": 1.0,
    "decoders_mib": 32.0,
    "device_mib": 16.0,
}
"""How much each may grow from the end of the warm-up to the end, above the margin of the slope: of
each worker by itself, whose warm-up begins with its start, and of what all share.

RSS: what an allocator may keep of a rare burst. Descriptors and threads: connections that are open
at the moment of a sample. Decoders: what they decode at that moment."""

EXPECTED_LOG = (
    r"INFO service\.engine\.models: model lenet: version \d .* replaced version \d",
    r"INFO service\.engine\.repository: reload: 1 replaced, 0 unchanged, 0 refused",
    r"INFO service\.engine\.models: model lenet version \d .* loaded: ",
    r"INFO service\.engine\.devices: computing on ",
    r"INFO service\.assembly: (read .*: warming up|start phases, in seconds: )",
    r"INFO service\.server: ready: HTTP on ",
    r"INFO service\.server: stopping: not ready, 0 s of grace",
    r"INFO service\.supervisor: worker \d+ started",
    r"INFO service\.(server|supervisor): stopped",
    r"(ERROR|WARNING) service\.supervisor: worker \d+ .*-9",
)


class Soak:
    """Clients of one service, and what they found."""

    def __init__(self, service, folder, options):
        digits = Digits(300, options.seed)
        files = (WEIGHTS / "lenet" / f"{number}.safetensors" for number in (1, 2))
        versions = {file.stem: digits.computed_by(WeightFile.read(file)) for file in files}
        self.known = Known(service, digits, versions, options.seed)
        self.random = self.known.random
        self.service, self.folder, self.options = service, folder, options
        pngs = [
            encoded(np.kron(image, np.ones((4, 4), np.uint8))) for image in digits.golden.images
        ]
        self.bodies = [*((PNG, file) for file in pngs), (FORM.encode(), form(*pngs))]
        self.pictures = {}
        """Probabilities by version and number of a body."""
        self.done = {}
        """Exchanges by client: how many, and seconds of the slowest."""
        self.wrong = []
        self.excused_count = self.kills = self.reloads = 0
        self.over = asyncio.Event()
        self.killed_s = -1e9
        self.readings = defaultdict(list)
        """Readings of each worker and of what all share: (seconds since the first, values)."""

    async def learn_pictures(self):
        """Record each version's answers to pictures on an idle service; golden labels hold."""
        labels = self.known.digits.golden.labels
        for version in ("1", "2"):
            await self.reload(to=version)
            for number, (kind, body) in enumerate(self.bodies):
                async with await self.known.connect() as connection:
                    answer = await connection.ask(request(body, ACCEPT, kind=kind))
                assert answer.headers["x-model-version"] == version
                found = self.pictures[version, number] = answer.probabilities
                expected = labels if number == len(labels) else labels[number : number + 1]
                assert found.argmax(axis=1).tolist() == expected.tolist()

    @property
    def excused(self):
        """Whether a worker was killed a moment ago: its connections are broken."""
        return time.monotonic() - self.killed_s < EXCUSED_S

    async def forever(self, name, client, pause_s):
        """Run `client` again and again, at random distances of `pause_s` on average."""
        while not self.over.is_set():
            began_s = time.monotonic()
            try:
                await client()
                count, slowest_s = self.done.get(name, (0, 0.0))
                self.done[name] = count + 1, max(slowest_s, time.monotonic() - began_s)
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is reported
                broken = isinstance(exc, OSError | EOFError) or (
                    isinstance(exc, grpc.RpcError)
                    and exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                )
                if broken and (self.excused or self.killed_s > began_s):
                    self.excused_count += 1
                else:
                    self.report(f"{name}: {exc!r}")
            await asyncio.sleep(self.random.expovariate(1 / pause_s))

    def report(self, what):
        if len(self.wrong) < 100:
            self.wrong.append(f"{time.strftime('%H:%M:%S')} {what}")

    # Good clients

    async def good(self, most):
        """Up to `most` requests on one connection."""
        async with await self.known.connect() as connection:
            for _ in range(self.random.randint(1, most)):
                rows, images = self.known.choose(1, 1, 1, 1, 2, 5, 16, 64, 65, 300)
                accept = (ACCEPT,) * self.random.randrange(2)
                data = message(images, self.random.choice((RAW, JSON, NPY)), *accept)
                self.known.judge(rows, await connection.ask(data))
                await asyncio.sleep(0.002)

    async def picture(self):
        number = self.random.randrange(len(self.bodies))
        kind, body = self.bodies[number]
        async with await self.known.connect() as connection:
            answer = await connection.ask(request(body, ACCEPT, kind=kind))
        version = answer.headers.get("x-model-version"), number
        clients.assert_same(answer.probabilities, self.pictures[version])

    async def call(self):
        rows, images = self.known.choose(1, 1, 2, 16, 64, 100)
        asked = infer_request(images)
        self.known.judge(rows, await self.stub.ModelInfer(asked, timeout=PATIENCE_S))

    async def probes(self):
        async with await self.known.connect() as connection:
            for path in (b"/healthz", b"/readyz", b"/metrics", b"/info"):
                answer = await connection.ask(request(method=b"GET", path=path))
                assert answer.status == 200, (path, answer)

    # Faults of the service

    async def reload(self, to):
        """Let version `to` be served, 1 or 2."""
        second = self.folder / "lenet" / "2.safetensors"
        pattern = rf"model lenet: version {to} .* replaced version"
        count = len(re.findall(pattern, self.service.log))
        if (to == "2") == second.exists():
            return
        if to == "2":
            new = second.with_suffix(".new")
            shutil.copy(WEIGHTS / "lenet" / "2.safetensors", new)
            new.rename(second)
        else:
            second.unlink()
        self.service.signal(signal.SIGHUP)
        await asyncio.to_thread(self.service.wait_for, pattern, count + self.options.workers)
        self.reloads += 1

    async def kill(self):
        """Kill a worker, and wait for its successor."""
        ready = self.service.log.count("ready: HTTP on")
        self.killed_s = time.monotonic()
        os.kill(self.random.choice(serving(self.service)), signal.SIGKILL)
        self.kills += 1
        await asyncio.to_thread(self.service.wait_for, "ready: HTTP on", ready + 1)
        self.killed_s = time.monotonic()

    async def disturb(self):
        """Reloads, and with several workers kills; one after another."""
        next_kill_s = time.monotonic() + KILL_EVERY_S
        while not self.over.is_set():
            await asyncio.sleep(RELOAD_EVERY_S)
            try:
                if self.options.workers > 1 and time.monotonic() > next_kill_s:
                    next_kill_s = time.monotonic() + KILL_EVERY_S
                    await self.kill()
                elif not self.excused:  # a worker that starts reads the newest version
                    is_second = (self.folder / "lenet" / "2.safetensors").exists()
                    await self.reload(to="1" if is_second else "2")
            except AssertionError as exc:
                self.report(f"a reload or a kill: {exc}")

    async def watch(self):
        began_s = {}
        while not self.over.is_set():
            # Of a worker that was just killed there are no files, or they are empty.
            with contextlib.suppress(OSError, TypeError):
                found = {f"worker {pid}": _of_worker(pid) for pid in serving(self.service)}
                decoders = decoding(self.service)
                found["shared"] = {
                    "decoders": len(decoders),
                    "decoders_mib": resident_bytes(*decoders) / 2**20,
                    **_of_devices(),
                }
                now_s = time.monotonic()
                for owner, reading in found.items() if not self.excused else ():
                    age_s = now_s - began_s.setdefault(owner, now_s)
                    self.readings[owner].append((age_s, reading))
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def run(self):
        good = {
            "kept": (partial(self.good, 60), 0.05, 4),
            "fresh": (partial(self.good, 1), 0.05, 2),
            "picture": (self.picture, 0.3, 1),
            "gRPC": (self.call, 0.03, 4),
            "probes": (self.probes, 0.5, 1),
        }
        often = {"mangled requests": 0.3, "leaving": 0.02, "hurried": 0.05}
        bad = {
            name: (partial(do, self.known), often.get(name, 1.0), 1) for name, do in SHORT.items()
        }
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.service.grpc_port}") as channel:
            self.stub = Stub(channel)
            await self.learn_pictures()
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for name, (client, pause_s, count) in (good | bad).items():
                    for _ in range(count):
                        group.create_task(self.forever(name, client, pause_s))
                group.create_task(self.disturb())
                group.create_task(self.watch())
                await self._wait(began_s)
                self.over.set()

    async def _wait(self, began_s):
        while (left_s := began_s + self.options.duration - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, 30.0))
            done = sum(count for count, _ in self.done.values())
            print(
                f"{time.monotonic() - began_s:6.0f} s: {done} exchanges, {self.reloads} reloads, "
                f"{self.kills} kills, {len(self.wrong)} wrong",
                flush=True,
            )
            if self.service.process.poll() is not None:
                self.report(f"the service ended with {self.service.process.returncode}")
                return

    # The end

    def check_end(self):
        """Check the counters, the log and the stop."""
        service = self.service
        time.sleep(2.5)  # the counters of other workers are a second old
        found = samples(service)
        for name in ("lenet_queue_rows", "lenet_contexts_busy"):
            if value := total(found, name):
                self.report(f"{name} is {value:g} at the end")
        for outcome, count in outcomes(found).items():
            if outcome.split()[1] in ("internal", "inference_failed"):
                self.report(f"{count} requests ended as {outcome}")
        service.signal()
        code, took_s = service.wait(), service.stopped_after_s()
        if code != 0 or took_s > 13:
            self.report(f"the stop ended with {code} after {took_s:.1f} s")
        for line in service.lines:
            if NO_TRACE.search(line) or not any(re.search(one, line) for one in EXPECTED_LOG):
                self.report(f"in the log: {line}")

    def print_table(self):
        print(f"\n{'exchange':24} {'number':>9} {'slowest, s':>11}")
        for name, (count, slowest_s) in sorted(self.done.items()):
            print(f"{name:24} {count:9} {slowest_s:11.2f}")
        print(f"broken by a killed worker: {self.excused_count}")
        warm_s = min(600.0, max(20.0, self.options.duration / 5))
        print(f"\n{'':26} {'last':>9} {'an hour':>10} {'margin':>9} {'growth':>9}")
        for owner, readings in self.readings.items():
            warm = [(at, reading) for at, reading in readings if at >= warm_s]
            is_long = len(warm) > 3 and warm[-1][0] - warm[0][0] >= _LEAST_WINDOW_S
            for name in warm[0][1] if is_long else ():
                at = np.array([at for at, _ in warm]) / 3600
                values = np.array([reading[name] for _, reading in warm])
                slope, margin = slope_and_margin(at, values)
                length = at[-1] - at[0]
                numbers = f"{values[-1]:9.1f} {slope:+10.2f} {margin:9.2f} {slope * length:+9.2f}"
                line = f"{owner:13} {name:12} {numbers}"
                print(line)
                if (slope - margin) * length > GROWTH[name]:
                    self.report(f"it grows: {line}")
        print(f"\n{len(self.wrong)} wrong")
        for text in self.wrong:
            print(f"  {text[:400]}")


def slope_and_margin(at, values):
    """Slope of the linear regression, units of `values` a unit of `at`, and 2 standard errors."""
    (slope, _), covariance = np.polyfit(at, values, 1, cov=True)
    return float(slope), 2 * float(np.sqrt(covariance[0, 0]))


def _of_worker(pid):
    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    rss_mib = resident_bytes(pid) / 2**20
    return {"rss_mib": rss_mib, "descriptors": descriptors(pid), "threads": threads}


def _of_devices():
    """Memory of all GPUs that is used, where there are any."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    used = sum(map(float, done.stdout.split())) if done.returncode == 0 else None
    return {} if used is None else {"device_mib": used}


def seconds(text):
    """90s, 10m, 24h or a number of seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    try:
        return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time as 90s, 10m or 24h") from None


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--duration", type=seconds, default=600.0, help="as 90s, 10m or 24h")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=clients.ROUNDING,
        help="largest difference of a probability; on a GPU in fp16 give 0.005",
    )
    parser.add_argument(
        "service", nargs="*", help="arguments of the service, behind --, as -- --device cuda"
    )
    options = parser.parse_args()
    clients.ROUNDING = options.tolerance
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(WEIGHTS / "lenet", folder / "weights" / "lenet")
        arguments = ["--port", "0", "--grpc-port", "0", "--workers", str(options.workers)]
        service = Service([*arguments, *options.service], folder)
        try:
            service.ready(options.workers)
            soak = Soak(service, folder / "weights", options)
            asyncio.run(soak.run())
            soak.check_end()
        finally:
            service.end()
        soak.print_table()
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
