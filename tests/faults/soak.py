"""A real service under good, bad, slow and leaving clients, with reloads and killed workers.

`make soak` runs it for ten minutes. Each answer is compared with what the version that it names
answers to the same images; each error with what the client did. At the end it prints how memory,
descriptors and threads grew, and exits with 1 if anything was not as it has to be.
`--overload SECONDS` offers three times what the service can do instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from PIL import Image

from benchmarks.grpc_stub import Stub
from tests.faults.checks import (
    NO_TRACE,
    decoding,
    outcomes,
    samples,
    serving,
    total,
)
from tests.faults.clients import RAW, ROUNDING, AsyncConnection, infer_request, request
from tests.faults.digits import WEIGHTS, Digits, weight_file
from tests.faults.overload import overload
from tests.service_process import PATIENCE_S, Service

JSON, NPY, PNG = b"application/json", b"application/x-npy", b"image/png"
BINARY = b"Accept: " + RAW
KILL_EVERY_S = 45.0
"""A third death within a minute ends the service."""

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


class Violation(Exception):
    """The service did what it must not do."""


class Answered(AsyncConnection):
    """A connection on which every request is answered, unless its worker is killed."""

    async def answer(self):
        answer = await super().answer()
        if answer is None:
            raise ConnectionResetError("the connection ended without an answer")
        return answer


@dataclass
class Report:
    """Counts of requests and outcomes, and the errors found."""

    counts: Counter = field(default_factory=Counter)
    images: int = 0
    slowest_s: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    excused: int = 0

    def done(self, kind: str, took_s: float, images: int = 0) -> None:
        self.counts[kind] += 1
        self.images += images
        self.slowest_s[kind] = max(took_s, self.slowest_s.get(kind, 0.0))

    def wrong(self, what: str) -> None:
        if len(self.violations) < 100:
            self.violations.append(f"{time.strftime('%H:%M:%S')} {what}")


class Soak:
    """Clients of one service, and what they know about it."""

    def __init__(self, service, folder, digits, options):
        self.service, self.folder, self.digits = service, folder, digits
        self.options = options
        self.tolerance = options.tolerance
        self.random = random.Random(options.seed)
        self.generator = np.random.default_rng(options.seed)
        self.expected = {
            "1": digits.computed_by(weight_file(1)),
            "2": digits.probabilities,
        }
        self.pictures: dict[str, dict[bytes, list]] = {"1": {}, "2": {}}
        self.bodies = self._picture_bodies()
        self.report = Report()
        self.over = asyncio.Event()
        self.killed_s = -1e9
        self.readings: dict[str, list[tuple[float, dict[str, float]]]] = {}
        """Readings of each worker and of shared metrics: (seconds since the first, values)."""
        self.kills = self.reloads = 0

    # Sending and checking

    def _picture_bodies(self):
        """[(content type, body)] of PNG files and multipart bodies."""
        files = []
        for image in self.digits.golden.images:
            content = io.BytesIO()
            Image.fromarray(image).resize((100, 100)).save(content, "png")
            files.append(content.getvalue())
        boundary = b"soak"
        parts = b"".join(
            b'--soak\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\n'
            b"Content-Type: image/png\r\n\r\n" + file + b"\r\n"
            for file in files
        )
        multipart = b"multipart/form-data; boundary=" + boundary
        return [*((PNG, file) for file in files), (multipart, parts + b"--soak--\r\n")]

    async def learn_pictures(self):
        """Record each version's answers to pictures on an idle service; golden labels hold."""
        for version in ("1", "2"):
            await self.reload(to=version)
            connection = await self.connect()
            for number, (kind, body) in enumerate(self.bodies):
                answer = await connection.ask(request(body, BINARY, kind=kind))
                if answer.status != 200 or answer.headers["x-model-version"] != version:
                    raise Violation(f"a picture of the start was answered {answer}")
                self.pictures[version][body] = answer.body
                labels = np.frombuffer(answer.body, "<f4").reshape(-1, 10).argmax(axis=1)
                golden = self.digits.golden.labels
                if list(labels) != list(
                    golden if number == len(golden) else golden[number : number + 1]
                ):
                    raise Violation(f"version {version} reads picture {number} as {labels}")
            await connection.close()

    async def connect(self):
        return await Answered.open(self.service.port)

    def choose(self, most=64):
        """Some rows and their images."""
        size = min(most, self.random.choice((1, 1, 1, 1, 2, 5, 16, 64, 65, 300)))
        chosen = self.generator.integers(0, len(self.digits.images), size)
        return chosen, self.digits.images[chosen]

    def judge(self, kind, chosen, answer, began_s):
        """Whether `answer` is what the version that it names says to the rows `chosen`."""
        if answer.status != 200:
            raise Violation(f"{kind}: {len(chosen)} images were answered {answer}")
        if answer.headers["content-type"].startswith("application/json"):
            content = json.loads(answer.body)
            version = content["version"]
            predictions = content["predictions"]
            found = np.array([one["probabilities"] for one in predictions], np.float32)
            labels = [one["label"] for one in predictions]
            if labels != found.argmax(axis=1).tolist():
                raise Violation(f"{kind}: labels {labels} are not those of the probabilities")
        else:
            version = answer.headers["x-model-version"]
            found = np.frombuffer(answer.body, "<f4").reshape(-1, 10)
        self.compare(kind, chosen, version, found, began_s)

    def compare(self, kind, chosen, version, found, began_s):
        expected = self.expected[version][chosen]
        if found.shape != expected.shape or np.abs(found - expected).max() > self.tolerance:
            raise Violation(f"{kind}: an answer of version {version} is not that of its images")
        self.report.done(kind, time.monotonic() - began_s, len(chosen))

    @property
    def excused(self):
        """Whether a worker was killed a moment ago: its connections are broken."""
        return time.monotonic() - self.killed_s < EXCUSED_S

    async def forever(self, client, pause_s):
        """Run `client` again and again, at random distances of `pause_s` on average."""
        while not self.over.is_set():
            began_s = time.monotonic()
            try:
                await client()
            except Violation as exc:
                self.report.wrong(str(exc))
            except (OSError, EOFError, TimeoutError, struct.error) as exc:
                self._lost(client, began_s, f"{type(exc).__name__}: {exc}")
            except grpc.RpcError as exc:
                unavailable = exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                self._lost(client, began_s, f"{exc.code()}: {exc.details()}", unavailable)
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is reported
                self.report.wrong(f"{client.__name__}: {exc!r}")
            await asyncio.sleep(self.random.expovariate(1 / pause_s))

    def _lost(self, client, began_s, what, excusable=True):
        if excusable and (self.excused or self.killed_s > began_s):
            self.report.excused += 1
        else:
            self.report.wrong(f"{client.__name__}: {what}")

    # Good clients

    async def kept(self):
        """Many requests on one connection."""
        connection = await self.connect()
        for _ in range(self.random.randrange(1, 60)):
            await self._good("kept", connection)
            await asyncio.sleep(0.002)
        await connection.close()

    async def fresh(self):
        connection = await self.connect()
        await self._good("fresh", connection)
        await connection.close()

    async def _good(self, how, connection):
        chosen, images = self.choose(300)
        form = self.random.choice((RAW, JSON, NPY))
        if form == RAW:
            body = images.tobytes()
        elif form == NPY:
            content = io.BytesIO()
            np.save(content, images)
            body = content.getvalue()
        else:
            body = json.dumps({"images": images.reshape(-1, 784).tolist()}).encode()
        accept = (BINARY,) if self.random.random() < 0.5 else ()
        began_s = time.monotonic()
        answer = await connection.ask(request(body, *accept, kind=form))
        kind = f"{how} {form.decode().rpartition('/')[2]}"
        self.judge(kind, chosen, answer, began_s)

    async def picture(self):
        kind, body = self.random.choice(self.bodies)
        connection = await self.connect()
        began_s = time.monotonic()
        answer = await connection.ask(request(body, BINARY, kind=kind))
        if answer.status != 200:
            raise Violation(f"a picture was answered {answer}")
        expected = np.frombuffer(self.pictures[answer.headers["x-model-version"]][body], "<f4")
        if np.abs(np.frombuffer(answer.body, "<f4") - expected).max() > self.tolerance:
            raise Violation("the answer to a picture is not that of its file")
        self.report.done(kind.decode().partition(";")[0], time.monotonic() - began_s, 1)
        await connection.close()

    async def pipelined(self):
        connection = await self.connect()
        rows = [self.choose(5) for _ in range(20)]
        began_s = time.monotonic()
        connection.writer.write(b"".join(request(images.tobytes(), BINARY) for _, images in rows))
        for chosen, _ in rows:
            self.judge("pipelined", chosen, await connection.answer(), began_s)
        await connection.close()

    async def grpc_call(self):
        chosen, images = self.choose(100)
        began_s = time.monotonic()
        answer = await self.stub.ModelInfer(infer_request(images), timeout=PATIENCE_S)
        found = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(-1, 10)
        self.compare("gRPC", chosen, answer.model_version, found, began_s)

    async def probes(self):
        connection = await self.connect()
        for path in (b"/healthz", b"/readyz", b"/metrics", b"/info"):
            began_s = time.monotonic()
            answer = await connection.ask(request(method=b"GET", path=path))
            if answer.status != 200:
                raise Violation(f"{path.decode()} was answered {answer}")
            self.report.done(path.decode(), time.monotonic() - began_s)
        await connection.close()

    # Bad, slow and leaving clients

    BAD = (
        (400, request(b'{"images": [NaN]}', kind=JSON)),
        (400, request(b'{"images":' + b"[" * 50_000, kind=JSON)),
        (400, request(b'{"images":[' + b"0," * 100_000 + b"0]}", kind=JSON)),
        (400, request(b'{"images":"' + b"a" * 200_000 + b'"}', kind=JSON)),
        (400, request(bytes(785))),
        (400, request(b"\x93NUMPY\x01\x00" + bytes(300), kind=NPY)),
        (400, request(b"\x89PNG\r\n\x1a\n" + bytes(300), kind=PNG)),
        (400, request(bytes(784), b"X-Request-Timeout-Ms: soon")),
        (400, request(bytes(784), path=b"/predict?network=lenet")),
        (400, b"GET /healthz HTTP/1.1\r\n\r\n"),
        (400, b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
        (
            400,
            request(None, b"Content-Type: " + RAW, b"Transfer-Encoding: chunked") + b"zz\r\n",
        ),
        (404, request(bytes(784), path=b"/predict?model=vgg")),
        (404, request(None, method=b"GET", path=b"/admin")),
        (405, request(None, method=b"DELETE", path=b"/healthz")),
        (413, request(b"", length=1 << 40)),
        (415, request(bytes(784), kind=b"text/html")),
        (415, request(bytes(784), b"Content-Encoding: gzip")),
        (431, b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000),
        (501, request(None, b"Transfer-Encoding: gzip", b"Content-Type: " + RAW)),
    )

    async def bad(self):
        status, message = self.random.choice(self.BAD)
        connection = await self.connect()
        began_s = time.monotonic()
        answer = await connection.ask(message)
        if answer.status != status:
            raise Violation(f"{message[:100]!r} was answered {answer}, expected {status}")
        self.report.done(f"bad {status}", time.monotonic() - began_s)
        await connection.close()

    async def bad_grpc(self):
        images = np.zeros((1, 28, 28), np.uint8)
        cases = (
            ({"shape": (-1, 28, 28)}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"shape": (2**62 + 1, 28, 28)}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"raw": [b""]}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"datatype": "FP64"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"model": "vgg"}, grpc.StatusCode.NOT_FOUND),
        )
        changes, expected = self.random.choice(cases)
        began_s = time.monotonic()
        try:
            await self.stub.ModelInfer(infer_request(images, **changes), timeout=PATIENCE_S)
        except grpc.RpcError as exc:
            if exc.code() != expected:
                raise
            self.report.done("bad gRPC", time.monotonic() - began_s)
        else:
            raise Violation(f"gRPC: {changes} was answered, expected {expected}")

    async def garbage(self):
        connection = await self.connect()
        message = bytearray(self.random.choice(self.BAD)[1][:2000])
        for _ in range(self.random.randrange(1, 30)):
            message[self.random.randrange(len(message))] = self.random.randrange(256)
        began_s = time.monotonic()
        connection.writer.write(bytes(message))
        connection.writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            content = await connection.reader.read()
        for status in re.findall(rb"^HTTP/1\.1 (\d{3}) ", content, re.MULTILINE):
            if status[:1] == b"5" and status not in (b"501", b"505"):
                raise Violation(f"{bytes(message)!r} was answered {content[:500]!r}")
        self.report.done("garbage", time.monotonic() - began_s)
        await connection.close()

    async def slow_sender(self):
        """Sends for two seconds, or stops for ever."""
        chosen, images = self.choose(64)
        stops = self.random.random() < 0.4
        deadline = (b"X-Request-Timeout-Ms: 3000",) if stops else ()
        message = request(images.tobytes(), BINARY, *deadline)
        connection = await self.connect()
        pieces = 20
        step = len(message) // pieces + 1
        began_s = time.monotonic()
        for number in range(pieces - 1 if stops else pieces):
            connection.writer.write(message[number * step : (number + 1) * step])
            await asyncio.sleep(0.1)
        answer = await connection.answer()
        if not stops:
            self.judge("slow sender", chosen, answer, began_s)
        elif answer.status != 408:
            raise Violation(f"a body that does not come was answered {answer}")
        else:
            self.report.done("stalled sender", time.monotonic() - began_s)
        await connection.close()

    async def slow_reader(self):
        """Takes three seconds for the answer to 2,000 images."""
        chosen = self.generator.integers(0, len(self.digits.images), 2000)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.service.port, limit=2048)
        connection = AsyncConnection(reader, writer)
        began_s = time.monotonic()
        writer.write(request(self.digits.images[chosen].tobytes(), BINARY, b"Connection: close"))
        content = b""
        async with asyncio.timeout(2 * PATIENCE_S):
            while piece := await reader.read(8192):
                content += piece
                await asyncio.sleep(0.3)
        head, _, body = content.partition(b"\r\n\r\n")
        if f"content-length: {len(body)}\r\n".encode() not in head.lower() + b"\r\n":
            raise ConnectionResetError(f"the answer ended after {len(content)} bytes")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise Violation(f"a slow reader was answered {head!r}")
        version = re.search(rb"x-model-version: (\d)", head)[1].decode()
        found = np.frombuffer(body, "<f4").reshape(-1, 10)
        self.compare("slow reader", chosen, version, found, began_s)
        await connection.close()

    async def leaving(self):
        """Resets its connection, or cancels its call, while it is worked on."""
        _, images = self.choose(300)
        wait_s = self.random.expovariate(1 / 0.005)
        began_s = time.monotonic()
        if self.random.random() < 0.3:
            call = self.stub.ModelInfer(infer_request(images), timeout=PATIENCE_S)
            await asyncio.sleep(wait_s)
            call.cancel()
        else:
            connection = await self.connect()
            message = request(images.tobytes())
            connection.writer.write(message[: self.random.randrange(1, len(message) + 1)])
            await asyncio.sleep(wait_s)
            connection.reset()
        self.report.done("leaving", time.monotonic() - began_s)

    async def hurried(self):
        """Has a deadline of 1 ms."""
        chosen, images = self.choose(64)
        began_s = time.monotonic()
        if self.random.random() < 0.3:
            try:
                answer = await self.stub.ModelInfer(infer_request(images), timeout=0.001)
            except grpc.RpcError as exc:
                if exc.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                self.report.done("1 ms, late", time.monotonic() - began_s)
                return
            found = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(-1, 10)
            self.compare("1 ms, answered", chosen, answer.model_version, found, began_s)
            return
        connection = await self.connect()
        message = request(images.tobytes(), BINARY, b"X-Request-Timeout-Ms: 1")
        answer = await connection.ask(message)
        if answer.status in (408, 504):
            self.report.done("1 ms, late", time.monotonic() - began_s)
        else:
            self.judge("1 ms, answered", chosen, answer, began_s)
        await connection.close()

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

    async def reloading(self):
        to = "1" if (self.folder / "lenet" / "2.safetensors").exists() else "2"
        if self.excused:
            return  # a worker that starts reads the newest version without a reload
        await self.reload(to)

    async def kill(self):
        """Kill a worker, and wait for its successor."""
        victim = self.random.choice(serving(self.service))
        ready = self.service.log.count("ready: HTTP on")
        self.killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
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
                else:
                    await self.reloading()
            except AssertionError as exc:
                self.report.wrong(f"a reload or a kill: {exc}")

    async def watch(self):
        began_s = {}
        while not self.over.is_set():
            with contextlib.suppress(OSError, KeyError):  # a worker that was just killed
                decoders = decoding(self.service)
                found = {f"worker {pid}": _of_worker(pid) for pid in serving(self.service)}
                found["shared"] = {
                    "decoders": float(len(decoders)),
                    "decoders_mib": sum(map(_resident_mib, decoders)),
                }
                if (device := device_mib()) is not None:
                    found["shared"]["device_mib"] = device
                now_s = time.monotonic()
                for owner, reading in found.items() if not self.excused else ():
                    age_s = now_s - began_s.setdefault(owner, now_s)
                    self.readings.setdefault(owner, []).append((age_s, reading))
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def run(self):
        target = f"127.0.0.1:{self.service.grpc_port}"
        clients = (
            (self.kept, 0.05, 4),
            (self.fresh, 0.05, 2),
            (self.picture, 0.3, 1),
            (self.pipelined, 0.3, 1),
            (self.grpc_call, 0.03, 4),
            (self.probes, 0.5, 1),
            (self.bad, 0.05, 2),
            (self.bad_grpc, 0.1, 1),
            (self.garbage, 0.05, 2),
            (self.slow_sender, 0.5, 6),
            (self.slow_reader, 1.0, 2),
            (self.leaving, 0.05, 3),
            (self.hurried, 0.1, 2),
        )
        async with grpc.aio.insecure_channel(target) as channel:
            self.stub = Stub(channel)
            await self.learn_pictures()
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for client, pause_s, count in clients:
                    for _ in range(count):
                        group.create_task(self.forever(client, pause_s))
                group.create_task(self.disturb())
                group.create_task(self.watch())
                await self._wait(began_s)
                self.over.set()

    async def _wait(self, began_s):
        end_s = began_s + self.options.duration
        while (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, 30.0))
            done = sum(self.report.counts.values())
            wrong = len(self.report.violations)
            print(
                f"{time.monotonic() - began_s:6.0f} s: {done} exchanges, {self.report.images} "
                f"images, {self.reloads} reloads, {self.kills} kills, {wrong} wrong",
                flush=True,
            )
            if self.service.process.poll() is not None:
                self.report.wrong(f"the service ended with {self.service.process.returncode}")
                return

    # The end

    def check_end(self):
        """Check the counters, the log and the stop."""
        report, service = self.report, self.service
        time.sleep(2.5)  # the counters of other workers are a second old
        found = samples(service)
        for name in ("lenet_queue_rows", "lenet_contexts_busy"):
            if value := total(found, name):
                report.wrong(f"{name} is {value:g} at the end")
        for outcome, count in outcomes(found).items():
            if outcome.split()[1] in ("internal", "inference_failed") and count:
                report.wrong(f"{count} requests ended as {outcome}")
        service.signal()
        code, took_s = service.wait(), service.stopped_after_s()
        if code != 0 or took_s > 13:
            report.wrong(f"the stop ended with {code} after {took_s:.1f} s")
        for line in service.lines:
            if NO_TRACE.search(line) or not any(re.search(one, line) for one in EXPECTED_LOG):
                report.wrong(f"in the log: {line}")

    def print_table(self):
        report = self.report
        print(f"\n{'exchange':24} {'number':>9} {'slowest, s':>11}")
        for kind, count in sorted(report.counts.items()):
            print(f"{kind:24} {count:9} {report.slowest_s[kind]:11.2f}")
        print(f"broken by a killed worker: {report.excused}")
        warm_s = min(600.0, max(20.0, self.options.duration / 5))
        print(f"\n{'':26} {'last':>9} {'an hour':>10} {'margin':>9} {'growth':>9}")
        for owner, readings in self.readings.items():
            warm = [(at, reading) for at, reading in readings if at >= warm_s]
            for name in warm[0][1] if len(warm) > 3 else ():
                at = np.array([at for at, _ in warm]) / 3600
                values = np.array([reading[name] for _, reading in warm])
                slope, margin = slope_and_margin(at, values)
                growth = slope * (at[-1] - at[0])
                numbers = f"{values[-1]:9.1f} {slope:+10.2f} {margin:9.2f} {growth:+9.2f}"
                line = f"{owner:13} {name:12} {numbers}"
                print(line)
                if (slope - margin) * (at[-1] - at[0]) > GROWTH[name]:
                    report.wrong(f"it grows: {line}")
        print(f"\n{len(report.violations)} wrong")
        for text in report.violations:
            print(f"  {text[:400]}")


def slope_and_margin(at, values):
    """Slope of the linear regression, units of `values` a unit of `at`, and 2 standard errors."""
    centred = at - at.mean()
    spread = float((centred**2).sum())
    slope = float((centred * values).sum()) / spread
    rest = values - values.mean() - slope * centred
    error = np.sqrt(float((rest**2).sum()) / max(1, len(at) - 2) / spread)
    return slope, 2 * float(error)


def _of_worker(pid):
    return {
        "rss_mib": _resident_mib(pid),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),  # noqa: PTH208
        "threads": float(len(os.listdir(f"/proc/{pid}/task"))),  # noqa: PTH208
    }


def _resident_mib(pid):
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    if found is None:  # it was killed, and its parent does not know yet
        raise ProcessLookupError(pid)
    return int(found[1]) / 1024


def device_mib():
    """Memory of all GPUs that is used; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(sum(map(float, done.stdout.split()))) if done.returncode == 0 else None


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
        default=ROUNDING,
        help="largest difference of a probability; on a GPU in fp16 give 0.005",
    )
    parser.add_argument(
        "--overload",
        type=seconds,
        metavar="SECONDS",
        help="instead: three times capacity for so long, for each size, closed and open loop",
    )
    parser.add_argument(
        "service", nargs="*", help="arguments of the service, behind --, as -- --device cuda"
    )
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.overload is not None:
            return overload(folder, options.overload, options.seed, options.service)
        weights = folder / "weights"
        (weights / "lenet").mkdir(parents=True)
        for version in (1, 2):
            file = f"lenet/{version}.safetensors"
            shutil.copy(WEIGHTS / file, weights / file)
        arguments = ["--port", "0", "--grpc-port", "0", "--workers", str(options.workers)]
        service = Service([*arguments, *options.service], folder)
        try:
            service.ready(options.workers)
            soak = Soak(service, weights, Digits(300, options.seed), options)
            asyncio.run(soak.run())
            soak.check_end()
        finally:
            service.end()
        soak.print_table()
    return 1 if soak.report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
