"""What a running service counts and serves, found again by its clients, the clock and /proc."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import http.client
import io
import json
import math
import os
import platform
import re
import ssl
import struct
import time
import tomllib
import zlib
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded
from PIL import Image

from benchmarks.grpc_stub import Stub
from lenet.model import Model
from service.errors import ExitCode
from service.forms import open_inference_pb2 as pb
from tests.documented import documented
from tests.faults import http2
from tests.faults.checks import decoding, outcomes, samples, serving, total
from tests.faults.clients import RAW, Connection, ask, infer_request, request
from tests.faults.digits import WEIGHTS
from tests.service_process import PATIENCE_S, PROJECT, committed

PICTURE = (PROJECT / "docs/images/seven.png").read_bytes()
BODY_BYTES, HELD_BYTES = 200_000, 199_000
PARTIAL = request(b"", length=BODY_BYTES) + bytes(HELD_BYTES)
RESET = b"\0\0\0\x08"  # CANCEL
PATIENT = ("--request-timeout-ms", "3600000")
"""On a busy machine no deadline passes but those that are asked for."""


def partial_stream(path, size, *fields):
    """The frames of a request over HTTP/2, on stream 1, whose body of zeros is not complete."""
    if path.startswith(b"/inference"):
        extra = b"".join(http2.literal(*field) for field in fields)
        block, body = http2.call_headers(path, extra), http2.message(bytes(size))
    else:
        kind = (b"content-type", b"application/octet-stream")
        block, body = http2.request_headers(b"POST", path, kind, *fields), bytes(size)
    data = http2.frame(http2.DATA, 0, 1, body[: size // 2])
    return http2.OPENING + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, block) + data


class Clients:
    """Requests over every protocol, each noted as its client saw it: `seen["http ok"] == 3`."""

    def __init__(self, service):
        self.seen, self.lost = collections.Counter(), 0
        self._service = service

    def http1(self, data):
        answer = ask(self._service.port, data)
        self._note(answer.status, answer.body)
        return answer

    def http2(self, body, path="/predict", kind="application/octet-stream"):
        """The headers of the answer."""
        h2 = H2Connection()
        h2.initiate_connection()
        names = {":method": "POST", ":scheme": "http", ":authority": "a", ":path": path}
        names |= {"content-type": kind, "content-length": str(len(body))}
        h2.send_headers(1, list(names.items()))
        headers, content, sent, ended = {}, b"", 0, False
        with Connection(self._service.port) as connection:
            while not ended:
                if size := min(len(body) - sent, h2.local_flow_control_window(1), 16_384):
                    sent += size
                    h2.send_data(1, body[sent - size : sent], end_stream=sent == len(body))
                connection.send(h2.data_to_send())
                if size and sent < len(body):
                    continue
                for event in h2.receive_data(connection.socket.recv(1 << 16)):
                    if isinstance(event, ResponseReceived):
                        headers = {name.decode(): text.decode() for name, text in event.headers}
                    elif isinstance(event, DataReceived):
                        content += event.data
                    ended |= isinstance(event, StreamEnded)
        self._note(int(headers[":status"]), content)
        return headers

    def _note(self, status, body):
        code = "ok" if status == 200 else re.search(rb'"code":"(\w+)"', body)[1].decode()
        self.seen[f"http {code}"] += 1

    def unary(self, asked):
        with self._stub() as stub:
            try:
                stub.ModelInfer(asked)
                code = "ok"
            except grpc.RpcError as error:
                code = dict(error.trailing_metadata())["lenet-error-code"]
        self.seen[f"grpc {code}"] += 1

    def stream(self, **wanted):
        """One stream with a request for each outcome: `ok=[request, ...]`."""
        codes = [code for code, asked in wanted.items() for _ in asked]
        with self._stub() as stub:
            sent = iter([one for asked in wanted.values() for one in asked])
            answers = list(stub.ModelStreamInfer(sent))
        assert [not one.error_message for one in answers] == [code == "ok" for code in codes]
        self.seen.update(f"grpc {code}" for code in codes)

    @contextlib.contextmanager
    def _stub(self):
        address = f"127.0.0.1:{self._service.grpc_port}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as channel:
            yield Stub(channel)

    def leave(self, data, outcome=None, last=b""):
        """Send `data`, wait until it has arrived, and reset the connection behind `last`."""
        await_(lambda: self.held_bytes() == 0)
        with Connection(self._service.port) as connection:
            connection.send(data)
            await_(self.held_bytes)
            connection.send(last)
            connection.reset()
        if outcome is None:
            self.lost += 1
        else:
            self.seen[outcome] += 1

    def held_bytes(self):
        return total(samples(self._service), "lenet_in_flight_bytes")


def await_(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.states(
    "metrics",
    "`lenet_requests_total`: each request, once, by protocol and outcome",
    found="good, bad, refused, late and cancelled requests over HTTP/1.1, HTTP/2, gRPC and its "
    "streams, and requests whose clients were gone before the answer: as many as were sent, each "
    "with the outcome that its client saw",
)
@pytest.mark.states(
    "metrics",
    "`lenet_in_flight_bytes`, `lenet_queue_rows`, `lenet_contexts_busy`: 0 at rest",
    found="the bytes that clients sent of bodies which are not complete; nothing after them",
)
@pytest.mark.states(
    "metrics",
    "`lenet_explanation_duration_seconds`: explanations, which are in no other count",
    found="explanations that were answered",
)
def test_every_request_is_counted_as_its_client_saw_it(start_committed, digits):
    limits = ("--max-body-bytes", "300000", "--max-in-flight-bytes", "600000")
    service = start_committed(*limits, *PATIENT).ready()
    clients, before = Clients(service), samples(service)
    image, infer = digits.images[:1], infer_request(digits.images[:3])
    unknown = infer_request(image, model="nobody")
    wrong = infer_request(image, shape=(2, 28, 28))
    for _ in range(3):
        clients.http1(request(digits.images[:2].tobytes()))
        clients.http2(digits.images[:2].tobytes())
        clients.unary(infer)
    for body, path, kind in (
        (bytes(783), "/predict", "application/octet-stream"),
        (b"{", "/predict", "application/json"),
        (image.tobytes(), "/predict?model=nobody", "application/octet-stream"),
        (image.tobytes(), "/predict", "text/plain"),
        (bytes(300_001), "/predict", "application/octet-stream"),
    ):
        clients.http1(request(body, path=path.encode(), kind=kind.encode()))
        clients.http2(body, path, kind)
    clients.unary(unknown)
    clients.unary(wrong)
    clients.unary(infer_request(np.zeros((400, 28, 28), np.uint8)))
    clients.stream(ok=[infer] * 3, invalid_input=[wrong] * 2, unknown_model=[unknown])
    # The decoding process that a picture needs has not started.
    clients.http1(request(PICTURE, b"X-Request-Timeout-Ms: 1", kind=b"image/png"))
    clients.http1(request(b"", b"X-Request-Timeout-Ms: 1", length=784))
    methods = [b"/inference.GRPCInferenceService/" + name for name in
               (b"ModelInfer", b"ModelStreamInfer")]  # fmt: skip
    clients.leave(request(b"", length=9000) + bytes(8000), "http cancelled")
    cancel = http2.frame(http2.RST_STREAM, 0, 1, RESET)
    for path in (b"/predict", *methods):
        protocol = "http" if path == b"/predict" else "grpc"
        clients.leave(partial_stream(path, 9000), f"{protocol} cancelled")
        clients.leave(partial_stream(path, 9000), f"{protocol} cancelled", cancel)
    await_(lambda: clients.held_bytes() == 0)
    with contextlib.ExitStack() as stack:
        for count in (1, 2, 3):
            stack.enter_context(Connection(service.port)).send(PARTIAL)
            await_(
                lambda count=count: (
                    total(samples(service), "lenet_in_flight_bytes") == count * HELD_BYTES
                )
            )
        clients.http1(PARTIAL)
        clients.http2(bytes(BODY_BYTES))
        large = infer_request(np.zeros((300, 28, 28), np.uint8))
        clients.unary(large)
        clients.stream(overloaded=[large])
    clients.seen["http cancelled"] += 3
    explained = request(image.tobytes(), path=b"/explain")
    assert [ask(service.port, explained).status for _ in range(2)] == [200, 200]
    body = bytes(784 * 12)
    clients.leave(request(b"", length=len(body)) + body[1:], last=b"\0")
    rest = http2.frame(http2.DATA, http2.END_STREAM, 1, body[: len(body) // 2])
    clients.leave(partial_stream(b"/predict", len(body)), last=rest)
    sent = clients.seen.total() + clients.lost

    def counted():
        found = outcomes(samples(service))
        return {key: found[key] for key in found if found[key]}

    await_(lambda: sum(counted().values()) == sent)
    gone = collections.Counter(counted()) - clients.seen
    assert not clients.seen - collections.Counter(counted())
    assert gone.total() == clients.lost
    assert set(gone) <= {"http ok", "http cancelled"}
    after = samples(service)
    assert total(after, "lenet_explanation_duration_seconds_count") == 2
    for name in ("in_flight_bytes", "queue_rows", "contexts_busy"):
        assert total(after, f"lenet_{name}") == total(before, f"lenet_{name}") == 0


def timing(text):
    """Seconds by stage, and the rows of the batch, of a Server-Timing header."""
    *stages, batch = text.split(", ")
    found = (re.fullmatch(r"(\w+);dur=([\d.]+)", stage).groups() for stage in stages)
    return {name: float(ms) / 1e3 for name, ms in found}, int(re.search(r'"(\d+)"', batch)[1])


@pytest.mark.states(
    "Server-Timing",
    "`decode`, `queue`, `compute`, `encode`, `total`: they fit into each other",
    found="the clock of the client around each request; their sum, at most `total`",
)
@pytest.mark.states(
    "Server-Timing",
    "`batch`: the images of the batch that completed the request",
    found="the images of requests that were sent one by one",
)
@pytest.mark.states(
    "metrics",
    "`lenet_stage_duration_seconds`, `lenet_stage_seconds_total`, `lenet_request_duration_seconds`",
    found="the sums of Server-Timing of the answers, to their rounding",
)
@pytest.mark.states(
    "metrics",
    "`lenet_images_total`, `lenet_batches_total`, `lenet_batch_rows`, `lenet_sized_batches_total`, "
    "`lenet_graph_replays_total`, `lenet_padding_rows_total`, `lenet_device_duration_seconds`",
    found="images and requests that were sent one by one; on the CPU nothing is padded or "
    "captured, and there is no clock of the device",
)
@pytest.mark.states(
    "metrics",
    "`lenet_batch_duration_seconds`, `lenet_sized_batch_seconds_total`",
    found="`compute` of Server-Timing, as each request was alone in its batches",
)
@pytest.mark.states(
    "metrics",
    "`lenet_last_prediction_timestamp_seconds`",
    found="the clock before and after the requests",
)
@pytest.mark.states(
    "/v2/models/stats",
    "every field: counts, durations, batches, last_inference",
    found="the requests that were sent, and their Server-Timing",
)
def test_the_sums_of_the_service_are_those_of_its_answers(served, digits):
    def statistics():
        answer = ask(served.port, request(method=b"GET", path=b"/v2/models/lenet/stats"))
        (found,) = json.loads(answer.body)["model_stats"]
        return found

    clients, before, stats_before = Clients(served), samples(served), statistics()
    counts, sums, began_s = (1, 1, 2, 3, 5, 8, 13, 64, 100), collections.Counter(), time.time()
    for number, count in enumerate(counts):
        body, sent_s = digits.images[:count].tobytes(), time.monotonic()
        if number % 2:
            header = clients.http1(request(body)).headers["server-timing"]
        else:
            header = clients.http2(body)["server-timing"]
        took_s = time.monotonic() - sent_s
        stages_s, rows = timing(header)
        assert rows == (count if count <= 64 else count - 64)
        total_s = stages_s["total"]
        assert 0 < sum(stages_s.values()) - total_s <= total_s + 3e-6
        assert total_s <= took_s
        sums.update(stages_s)
    clients.http1(request(bytes(783)))
    after, ended_s = samples(served), time.time()  # counted as they are read

    def moved(name, **labels):
        name = f"lenet_{name}"
        return total(after, name, **labels) - total(before, name, **labels)

    about = partial(pytest.approx, abs=len(counts) * 0.6e-6)  # rounded to 0.001 ms
    batches = [1, 1, 2, 3, 5, 8, 13, 64, 64, 36]
    sizes = collections.Counter(1 << (rows - 1).bit_length() for rows in batches)
    assert moved("images_total") == moved("batch_rows_sum") == sum(counts)
    assert moved("batches_total") == moved("batch_rows_count") == len(batches)
    assert moved("batches_total", reason="idle") + moved("batches_total", reason="full") == 10
    assert moved("graph_replays_total", result="miss") == len(batches)
    assert moved("graph_replays_total", result="hit") == moved("padding_rows_total") == 0
    assert moved("device_duration_seconds_count") == 0
    assert moved("batch_duration_seconds_count") == len(batches)
    computed_s = moved("batch_duration_seconds_sum")
    assert 0 < computed_s <= sums["compute"] + 1e-5
    assert moved("sized_batch_seconds_total") == about(computed_s)
    for rows, count in sizes.items():
        assert moved("sized_batches_total", rows=str(rows)) == count
    for stage in ("decode", "queue", "compute", "encode"):
        assert moved("stage_duration_seconds_sum", stage=stage) == about(sums[stage])
        assert moved("stage_duration_seconds_count", stage=stage) == len(counts)
    for stage, seconds in sums.items():
        assert moved("stage_seconds_total", stage=stage) == about(seconds)
    assert moved("request_duration_seconds_count", protocol="http") == len(counts)
    assert moved("request_duration_seconds_sum", protocol="http") == about(sums["total"])
    assert moved("request_duration_seconds_count", protocol="grpc") == 0
    (last_s,) = {value for (name, _), value in after.items() if "last_prediction" in name}
    assert began_s <= last_s <= ended_s
    stats = statistics()
    assert set(stats) == {
        *("name", "version", "last_inference", "inference_count", "execution_count"),
        *("inference_stats", "batch_stats"),
    }
    assert len(stats["inference_stats"]) == 8
    assert (stats["name"], stats["version"]) == ("lenet", "2")
    assert round(1e3 * began_s) <= stats["last_inference"] <= round(1e3 * ended_s)
    assert stats["inference_count"] - stats_before["inference_count"] == sum(counts)
    assert stats["execution_count"] - stats_before["execution_count"] == len(batches)
    for name, stage in {
        "success": "total",
        "queue": "queue",
        "compute_input": "decode",
        "compute_infer": "compute",
        "compute_output": "encode",
    }.items():
        one, other = stats["inference_stats"][name], stats_before["inference_stats"][name]
        assert one["count"] - other["count"] == len(counts)
        assert (one["ns"] - other["ns"]) / 1e9 == about(sums[stage])
    failed = [one["inference_stats"]["fail"]["count"] for one in (stats_before, stats)]
    assert failed[1] - failed[0] == 1
    for name in ("cache_hit", "cache_miss"):
        assert stats["inference_stats"][name] == {"count": 0, "ns": 0}
    sized, sized_before = (
        {one["batch_size"]: one["compute_infer"] for one in found["batch_stats"]}
        for found in (stats, stats_before)
    )
    none = {"count": 0, "ns": 0}
    for rows, count in sizes.items():
        assert sized[rows]["count"] - sized_before.get(rows, none)["count"] == count
    ns = [sum(one["ns"] for one in found.values()) for found in (sized_before, sized)]
    assert (ns[1] - ns[0]) / 1e9 == about(computed_s)


def proc(pid, file):
    return Path(f"/proc/{pid}/{file}").read_text()


def cpu_s(pids):
    ticks = [sum(map(int, proc(pid, "stat").rpartition(")")[2].split()[11:13])) for pid in pids]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


@pytest.mark.states(
    "/info",
    "every field of a model; name, version, Python, port, limits",
    found="the header of the weight file as JSON, the digest of its bytes, the numbers in its "
    "tensors, the clock; pyproject.toml; the defaults in docs/reference/settings.md",
)
@pytest.mark.states(
    "metrics",
    "`lenet_build_info`, `lenet_model_info`",
    found="pyproject.toml; the digest of the file's bytes",
)
@pytest.mark.states(
    "metrics",
    "`lenet_workers`, `lenet_contexts`, `lenet_queue_limit_rows`, `lenet_device_bytes`, "
    "`lenet_workspace_bytes`",
    found="the processes in /proc; one context a worker on the CPU, the documented default of "
    "`--max-queue-rows` for each; no memory of a device there",
)
@pytest.mark.states(
    "metrics",
    "`process_resident_memory_bytes`, `process_open_fds`, `process_cpu_seconds_total`",
    found="/proc of the workers, before and after",
)
@pytest.mark.states(
    "metrics",
    "`lenet_start_phase_seconds`",
    found="the clock from the command to its ready line: longer than the phases together",
)
def test_what_is_loaded_is_what_the_files_and_the_system_say(start_committed):
    began_s, began = time.monotonic(), datetime.now(UTC)
    service = start_committed("--workers", "2").ready(workers=2)
    took_s, pids = time.monotonic() - began_s, serving(service)

    def value(name, **labels):
        return total(samples(service), name, **labels)

    cpu_before_s = cpu_s(pids)
    await_(lambda: value("process_cpu_seconds_total") >= cpu_before_s)
    content = (WEIGHTS / "lenet/2.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    training = json.loads(header.pop("__metadata__")["training"])
    digest = hashlib.sha256(content).hexdigest()
    defaults = (PROJECT / "docs/reference/settings.md").read_text()
    info = json.loads(ask(service.port, request(method=b"GET", path=b"/info")).body)
    (model,) = info.pop("models")
    limits = info.pop("limits")
    assert info == {
        "name": "lenet-serve",
        "version": version,
        "commit": "",
        "default_model": "lenet",
        "python": platform.python_version(),
        "grpc_port": service.grpc_port,
        "explain": True,
    }
    assert began <= datetime.fromisoformat(model.pop("loaded_at")) <= datetime.now(UTC)
    strategies = model.pop("strategies")
    assert set(strategies.values()) == {"onnxruntime"}
    assert max(map(int, strategies)) == limits.pop("max_batch_rows") == 64
    tensors = [one["shape"] for name, one in header.items() if not name.startswith("golden.")]
    assert model == {
        "name": "lenet",
        "version": "2",
        "device": "cpu",
        "precision": "fp32",
        "sha256": digest,
        "parameters": sum(map(math.prod, tensors)),
        **{name: training[name] for name in ("accuracy", "epochs", "seed")},
        **{name: training[name] for name in ("dataset_sha256", "labels")},
    }
    assert limits.pop("max_picture_pixels") == 1 << 24
    for name, limit in limits.items():
        (row,) = re.findall(rf"^\| `--{name.replace('_', '-')}`.*", defaults, re.MULTILINE)
        assert f"| `{limit}` |" in row

    found = samples(service)
    assert value("lenet_build_info", version=version) == 1
    assert value("lenet_model_info", sha256=digest) == value("lenet_model_info") == 1
    assert value("lenet_workers") == value("lenet_contexts") == len(pids) == 2
    assert value("lenet_queue_limit_rows") == 2 * 32768
    assert value("lenet_device_bytes") == value("lenet_workspace_bytes") == 0
    descriptors = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
    # Connections that ask, and the folders of /proc while they are read, are open for a moment.
    assert value("process_open_fds") == pytest.approx(descriptors, rel=0.1)
    page = os.sysconf("SC_PAGE_SIZE")
    resident = page * sum(int(proc(pid, "statm").split()[1]) for pid in pids)
    assert value("process_resident_memory_bytes") == pytest.approx(resident, rel=0.1)
    assert value("process_cpu_seconds_total") <= cpu_s(pids) + 0.02  # two ticks of the clock
    phases = {dict(labels)["phase"]: one for (name, labels), one in found.items()
              if name == "lenet_start_phase_seconds"}  # fmt: skip
    assert set(phases) == {"weights", "device", "warm_up", "contexts"}
    assert 0 < phases["weights"] + phases["contexts"] < took_s
    assert 0 < phases["warm_up"] <= phases["contexts"]


@pytest.mark.states(
    "metrics",
    "`lenet_golden_error`, `lenet_golden_tolerance`: a file beyond it is not served",
    found="files whose golden logits were moved by a known share of the largest",
)
def test_the_golden_error_is_how_far_the_logits_of_a_file_were_moved(
    start, folder, random_weights, tiny
):
    weights = random_weights(Model("lenet", tiny.blocks))

    def write(share):
        logits = weights.golden.logits.copy()
        logits[3, 4] += share * np.abs(logits).max()
        golden = dataclasses.replace(weights.golden, logits=logits)
        dataclasses.replace(weights, golden=golden).write(folder / "lenet/1.safetensors")

    write(5e-5)
    service = start().ready()
    assert total(samples(service), "lenet_golden_error") == pytest.approx(5e-5, abs=2e-6)
    tolerance = total(samples(service), "lenet_golden_tolerance")
    write(tolerance * 1.1)
    assert start().wait() == ExitCode.WEIGHTS
    write(tolerance * 0.9)
    start().ready()


@pytest.mark.states(
    "metrics",
    "`lenet_certificate_end_timestamp_seconds`",
    found="the date that the certificate was made with",
)
def test_the_end_of_the_certificate_is_the_date_it_was_made_with(start, tmp_path):
    end = datetime(2047, 8, 9, 1, 2, 3, tzinfo=UTC)
    leaf = trustme.CA().issue_cert("localhost", not_after=end)
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "server.key")
    files = (f"--tls-{name}={tmp_path}/server.{kind}"
             for name, kind in (("certificate", "pem"), ("key", "key")))  # fmt: skip
    service = start(*files).ready()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("localhost", service.port, context=context)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    (ends_s,) = re.findall(r"^lenet_certificate_end_timestamp_seconds (\S+)$", text, re.MULTILINE)
    assert float(ends_s) == end.timestamp()


KEY = "a-key-of-an-administrator"
INFER, SEVERAL = b"/v2/models/lenet/infer", b"/predict?digits=several"
ROWS = json.dumps({"instances": [[[0] * 28] * 28]}).encode()
PIXELS_JSON = json.dumps({"images": [[0] * 784]}).encode()


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """A service with the committed `lenet` and its default limits."""
    folder = tmp_path_factory.mktemp("limited")
    with committed(folder, "--models", "lenet", "--admin-keys", KEY, *PATIENT) as service:
        yield service


def drawn(width, height, digits=1, kind="PNG", **options):
    """A picture of strokes of 8 x 24 pixels, 16 in a row."""
    page, file = Image.new("L", (int(width), int(height)), 255), io.BytesIO()
    for number in range(digits):
        x, y = 16 + 48 * (number % 16), 16 + 64 * (number // 16)
        page.paste(0, (x, y, x + 8, y + 24))
    page.save(file, kind, **options)
    return file.getvalue()


def posted(body, path=b"/predict", kind=b"image/png", size=0):
    """A request; its body is filled up with spaces to `size` bytes."""
    key = b"Authorization: Bearer " + KEY.encode()
    return request(body.ljust(size), key, path=path, kind=kind)


def json_of(path, size, content=ROWS):
    return posted(content, path, b"application/json", size)


def infer_json(images=1, **more):
    tensor = {"name": "image", "datatype": "UINT8", "shape": [images, 784]}
    tensor["data"] = [0] * (784 * images)
    return json.dumps({"inputs": [tensor], **more}).encode()


def classified(count):
    """A request for `count` classifications, 8 of each image."""
    output = {"name": "probabilities", "parameters": {"classification": 8}}
    return json_of(INFER, 0, infer_json(-(-count // 8), outputs=[output]))


def png_of(chunks):
    """A PNG with so many: behind its header, of 33 bytes, are empty ones. Three are its own."""
    content = drawn(64, 64)
    empty = bytes(4) + b"teXt" + zlib.crc32(b"teXt").to_bytes(4, "big")
    return posted(content[:33] + empty * (chunks - 3) + content[33:])


def gif_of(blocks):
    """A GIF with a comment of so many blocks. Those of its pixels are fewer than 1 %."""
    content = drawn(28, 28, kind="GIF")
    at = content.index(b",")
    comment = b"!\xfe" + b"\1x" * (blocks - 50) + b"\0"
    return posted(content[:at] + comment + content[at:], kind=b"image/gif")


def bmp_of(size):
    """A BMP with so many bytes of run lengths, a pixel each: lines of 127, and a last one."""
    stroke = b"\1\xff" * 60 + b"\1\0" * 7 + b"\1\xff" * 60 + b"\0\0"
    count, rest = divmod(size - 2, len(stroke))
    runs = stroke * count + b"\1\xff" * (rest // 2) + b"\0\1"
    assert len(runs) == size - size % 2
    colours = b"".join(bytes((grey, grey, grey, 0)) for grey in range(256))
    info = struct.pack("<IiiHHIIiiII", 40, 127, count + 1, 1, 8, 1, len(runs), 0, 0, 256, 0)
    start = 14 + len(info) + len(colours)
    head = struct.pack("<2sIHHI", b"BM", start + len(runs), 0, 0, start)
    return posted(head + info + colours + runs, kind=b"image/bmp")


def jpeg_of(scans):
    """A progressive JPEG whose last scan is there again and again."""
    content = drawn(64, 64, kind="JPEG", progressive=True)
    own, at = content.count(b"\xff\xda"), content.rindex(b"\xff\xda")
    return posted(content[:-2] + content[at:-2] * (scans - own) + content[-2:], kind=b"image/jpeg")


def webp(width, height):
    return posted(drawn(width, height, kind="WEBP", quality=1, method=0), kind=b"image/webp")


REPOSITORY = (
    "bytes of a request to the repository; characters of an `id`; classifications in a request"
)
FILES = "run lengths in a BMP; blocks in a GIF; chunks in a PNG or WebP; scans in a JPEG"
PIXELS = "pixels of all pictures in a request; of a WebP, whose decoder takes twice the memory"


@pytest.mark.states(
    "limits",
    "bytes of a request to the repository; characters of an `id`; classifications",
    found="as many, and one or an image more",
)
@pytest.mark.states(
    "limits",
    "bytes of JSON below `/v1` and `/v2`",
    found="bodies filled up with spaces to as many bytes, and one more",
)
@pytest.mark.states(
    "limits",
    "run lengths in a BMP; blocks in a GIF; chunks in a PNG or WebP; scans in a JPEG",
    found="files with as many, and a little more",
)
@pytest.mark.states(
    "limits", "digits in a picture with `digits=several`", found="as many strokes, and one more"
)
@pytest.mark.states(
    "limits",
    "images in a request for an explanation; operations of a network",
    found="as many images, and one more",
)
@pytest.mark.states(
    "limits",
    "pixels of all pictures in a request; of a WebP",
    found="pictures of as many pixels, and of a line more",
)
@pytest.mark.parametrize(
    ("row", "number", "request_of", "more", "refused"),
    [
        (PIXELS, 0, lambda n: posted(drawn(4096, n / 4096)), 4096, 413),
        (PIXELS, 1, lambda n: webp(4096, n / 4096), 4096, 413),
        (
            "images in a request for an",
            0,
            lambda n: posted(bytes(784 * n), b"/explain", RAW),
            1,
            413,
        ),
        ("digits in a picture", 0, lambda n: posted(drawn(800, 360, n), SEVERAL), 1, 413),
        (FILES, 0, bmp_of, 2, 400),
        (FILES, 1, gif_of, 100, 400),
        (FILES, 2, png_of, 1, 400),
        (FILES, 3, jpeg_of, 1, 400),
        ("bytes of JSON below", 0, lambda n: json_of(INFER, n, infer_json()), 1, 413),
        ("bytes of JSON below", 0, lambda n: json_of(b"/v1/models/lenet:predict", n), 1, 413),
        (REPOSITORY, 0, lambda n: json_of(b"/v2/repository/index", n, b"{}"), 1, 413),
        (REPOSITORY, 1, lambda n: json_of(INFER, 0, infer_json(id="a" * n)), 1, 400),
        (REPOSITORY, 2, classified, 8, 413),
    ],
)
def test_a_body_at_its_limit_is_answered_and_one_beyond_it_refused(
    limited, row, number, request_of, more, refused
):
    most = int(documented(row)[number])
    statuses = [ask(limited.port, request_of(count)).status for count in (most, most + more)]
    assert statuses == [200, refused]


@pytest.mark.states(
    "limits",
    "fields of a gRPC message; its bytes besides pixels; numbers in `uint_contents`",
    found="messages with as many fields, bytes and numbers, and more",
)
def test_a_message_of_grpc_at_its_limit_is_answered_and_one_beyond_it_refused(limited):
    fields, other_bytes, numbers = map(int, documented("fields of a gRPC message"))

    def typed(count):
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="image", datatype="UINT8", shape=[1, 784]
        )
        tensor.contents.uint_contents.extend([0] * count)
        return pb.ModelInferRequest(inputs=[tensor]).SerializeToString()

    image = typed(784)

    def refusal(content):
        with grpc.insecure_channel(f"127.0.0.1:{limited.grpc_port}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            future = call.future(content)
            assert future.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
            return future.details()

    # Six are its own: the input, its name, type, shape and contents, and the numbers of these.
    unknown = b"\xa0\x06\x01"
    assert refusal(image + unknown * (fields - 6)) == ""
    assert f"more than {fields} fields" in refusal(image + unknown * (fields - 5))
    for share, message in ((0.99, None), (1.01, f"more than {other_bytes} bytes besides the pix")):
        more = pb.ModelInferRequest()
        more.parameters["x"].string_param = "a" * int(share * other_bytes)
        found = refusal(image + more.SerializeToString())
        assert found.startswith(f"message: got {message}") if message else not found
    for count, wrong in ((numbers, "shape"), (numbers + 1, f"more than {numbers} numbers")):
        assert wrong in refusal(typed(count))


@pytest.mark.states(
    "limits", "memory of such a process", found="the limits in /proc of a decoding process"
)
def test_the_memory_of_a_decoding_process_is_limited(limited):
    assert ask(limited.port, posted(PICTURE)).status == 200
    own, twice = documented("memory of such a process")[0], 2 * (32 << 20)
    assert re.search(rf"Max data size +{own + twice} ", proc(decoding(limited)[0], "limits"))


@pytest.mark.states(
    "limits", "warnings in an answer", found="a form with a picture more, each with two digits"
)
def test_further_warnings_are_left_out(limited):
    (most,) = map(int, documented("warnings in an answer"))
    two = drawn(120, 60, 2)
    parts = b"".join(
        b"--x\r\nContent-Disposition: form-data; name=images; filename=a.png\r\n"
        b"Content-Type: image/png\r\n\r\n%s\r\n" % two
        for _ in range(most + 1)
    )
    answer = ask(
        limited.port, posted(parts + b"--x--\r\n", kind=b"multipart/form-data; boundary=x")
    )
    found = json.loads(answer.body)
    assert (len(found["predictions"]), len(found["warnings"])) == (most + 1, most)


@pytest.mark.states(
    "limits",
    "header fields of a request; bytes of its target; parameters of its query",
    found="an `Accept` that asks for bytes with as many commas, and one more",
)
def test_an_accept_of_too_many_parts_is_ignored(limited):
    most = int(documented("header fields of a request; bytes of its target")[3])
    kinds = [
        ask(limited.port, request(bytes(784), b"Accept: " + RAW + b"," * count)).headers[
            "content-type"
        ]
        for count in (most, most + 1)
    ]
    assert kinds == [RAW.decode(), "application/json"]


@pytest.mark.states(
    "limits",
    "processes in each worker that decode pictures and large bodies",
    found="the processes in /proc, after twenty pictures at once, with three that are set",
)
def test_as_many_processes_decode_as_are_set(start_committed):
    service = start_committed("--decoders", "3").ready()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Connection(service.port)) for _ in range(20)]
        for client in clients:
            client.send(posted(PICTURE))
        assert {client.answer().status for client in clients} == {200}
    assert len(decoding(service)) == 3


@pytest.mark.parametrize(
    ("number", "path", "content"),
    [
        (0, b"/predict", PIXELS_JSON),
        (1, INFER, infer_json()),
        (1, b"/v1/models/lenet:predict", ROWS),
    ],
)
@pytest.mark.states(
    "times and counts in operations.md",
    "JSON over 192 KiB (128 KiB below /v1 and /v2) is decoded by processes",
    found="the processes in /proc after bodies of as many bytes, and of one more",
)
def test_json_is_decoded_by_a_process_from_its_size_on(start_committed, number, path, content):
    text = (PROJECT / "docs/operations.md").read_text()
    sizes = re.search(r"JSON over (\d+) KiB \((\d+) KiB below `/v1` and `/v2`\)", text).groups()
    most = int(sizes[number]) << 10
    service = start_committed(*PATIENT).ready()
    for size, processes in ((most, 0), (most + 1, 1)):
        assert ask(service.port, json_of(path, size, content)).status == 200
        assert len(decoding(service)) == processes
