"""What a running service counts and serves, found again by its clients, the clock and /proc."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import json
import math
import platform
import re
import time
import tomllib
from datetime import UTC, datetime
from functools import partial

import grpc
import httpx
import numpy as np
import pytest

from benchmarks.grpc_stub import Stub
from tests.documented import documented
from tests.faults import checks, http2
from tests.faults.checks import outcomes, samples, serving, total, until
from tests.faults.clients import RAW, WEIGHTS, ask, infer_request, opened, request, reset_at_close
from tests.service_process import PATIENCE_S, PROJECT
from tests.wire import test_http2 as h2

BYTES, JSON = RAW.decode(), "application/json"
PICTURE = (PROJECT / "docs/images/seven.png").read_bytes()
BODY_BYTES, HELD_BYTES = 200_000, 199_000
PARTIAL = request(b"", length=BODY_BYTES) + bytes(HELD_BYTES)
METHODS = (http2.INFER, http2.INFER.replace(b"ModelInfer", b"ModelStreamInfer"))
PATIENT = ("--request-timeout-ms", "3600000")
"""On a busy machine no deadline passes but those that are asked for."""


def partial_stream(path, size, *fields):
    """The frames of a request over HTTP/2, on stream 1, whose body of zeros is not complete."""
    block, body = http2.call_headers(path), http2.message(bytes(size))
    if path == b"/predict":
        fields = ((b"content-type", RAW), *fields)
        block, body = h2.block(*fields, method=b"POST", path=path), bytes(size)
    return http2.OPENING + h2.headers(block, h2.WHOLE) + h2.data(1, body[: size // 2])


class Clients:
    """Requests over every protocol, each noted as its client saw it: `seen["http ok"] == 3`."""

    def __init__(self, service):
        self.seen, self._service = collections.Counter(), service
        self._stub = Stub(grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}"))

    def post(self, over_http2, body, path="/predict", kind=BYTES):
        """A request over HTTP/1.1 or HTTP/2; the headers of its answer."""
        options = {"http1": not over_http2, "verify": False, "timeout": PATIENCE_S}
        with httpx.Client(http2=over_http2, **options) as client:
            url = f"http://127.0.0.1:{self._service.port}{path}"
            answer = client.post(url, content=body, headers={"content-type": kind})
        self._note(answer.status_code, answer.content)
        return answer.headers

    def send(self, data):
        """The bytes of a request over HTTP/1.1."""
        answer = ask(self._service.port, data)
        self._note(answer.status, answer.body)

    def _note(self, status, body):
        self.seen["http ok" if status == 200 else f"http {json.loads(body)['error']['code']}"] += 1

    def refused(self, body_bytes):
        """A request over HTTP/2 that is answered before its body has arrived."""
        length, received = (b"content-length", b"%d" % body_bytes), b""
        with opened(self._service.port, partial_stream(b"/predict", 9000, length)) as connection:
            while not (code := re.search(rb'"code":"(\w+)"', received)):
                received += connection.recv(1 << 16) or pytest.fail("no answer")
        self.seen[f"http {code[1].decode()}"] += 1

    def unary(self, asked):
        try:
            self._stub.ModelInfer(asked)
            code = "ok"
        except grpc.RpcError as error:
            code = dict(error.trailing_metadata())["lenet-error-code"]
        self.seen[f"grpc {code}"] += 1

    def stream(self, **wanted):
        """One stream with a request for each outcome: `ok=[request, ...]`."""
        codes = [code for code, asked in wanted.items() for _ in asked]
        answers = list(self._stub.ModelStreamInfer(itertools.chain(*wanted.values())))
        assert [not one.error_message for one in answers] == [code == "ok" for code in codes]
        self.seen.update(f"grpc {code}" for code in codes)

    def leave(self, data, outcome, last=b""):
        """Send `data`, wait until it has arrived, and reset the connection behind `last`."""
        until(lambda: self.held_bytes() == 0)
        with opened(self._service.port, data) as connection:
            until(self.held_bytes)
            connection.sendall(last)
            reset_at_close(connection)
        self.seen[outcome] += 1

    def held_bytes(self):
        return total(samples(self._service), "lenet_in_flight_bytes")


@pytest.mark.states(
    "metrics",
    {
        "`lenet_requests_total`: each request, once, by protocol and outcome": (
            "good, bad, refused, late and cancelled requests over HTTP/1.1, HTTP/2, gRPC and its "
            "streams, and requests whose clients were gone before the answer: as many as were "
            "sent, each with the outcome that its client saw"
        ),
        "`lenet_in_flight_bytes`, `lenet_queue_rows`, `lenet_contexts_busy`: 0 at rest": (
            "the bytes that clients sent of bodies which are not complete; nothing after them"
        ),
        "`lenet_explanation_duration_seconds`: explanations, which are in no other count": (
            "explanations that were answered"
        ),
    },
)
def test_every_request_is_counted_as_its_client_saw_it(start_committed, digits):
    limits = ("--max-body-bytes", "300000", "--max-in-flight-bytes", "600000")
    service = start_committed(*limits, *PATIENT).ready()
    clients, before = Clients(service), samples(service)
    image, infer = digits.images[:1], infer_request(digits.images[:3])
    unknown = infer_request(image, model="nobody")
    wrong = infer_request(image, shape=(2, 28, 28))
    requests = [*[(digits.images[:2].tobytes(),)] * 3, (bytes(783),), (b"{", "/predict", JSON)]
    requests += [(bytes(784), "/predict?model=nobody"), (bytes(784), "/predict", "text/plain")]
    for over_http2, one in itertools.product((False, True), requests):
        clients.post(over_http2, *one)
    clients.post(False, bytes(300_001))
    clients.refused(300_001)
    large = infer_request(np.zeros((400, 28, 28), np.uint8))
    for asked in (infer, infer, infer, unknown, wrong, large):
        clients.unary(asked)
    clients.stream(ok=[infer] * 3, invalid_input=[wrong] * 2, unknown_model=[unknown])
    # The decoding process that a picture needs has not started.
    clients.send(request(PICTURE, b"X-Request-Timeout-Ms: 1", kind=b"image/png"))
    clients.send(request(b"", b"X-Request-Timeout-Ms: 1", length=784))
    clients.leave(request(b"", length=9000) + bytes(8000), "http cancelled")
    cancel = h2.reset()
    for path, last in itertools.product((b"/predict", *METHODS), (b"", cancel)):
        protocol = "http" if path == b"/predict" else "grpc"
        clients.leave(partial_stream(path, 9000), f"{protocol} cancelled", last)
    until(lambda: clients.held_bytes() == 0)
    with contextlib.ExitStack() as stack:
        for count in (1, 2, 3):
            stack.enter_context(opened(service.port, PARTIAL))
            until(lambda count=count: clients.held_bytes() == count * HELD_BYTES)
        clients.send(PARTIAL)
        clients.refused(BODY_BYTES)
        large = infer_request(np.zeros((300, 28, 28), np.uint8))
        clients.unary(large)
        clients.stream(overloaded=[large])
    clients.seen["http cancelled"] += 3
    explained = request(image.tobytes(), path=b"/explain")
    assert [ask(service.port, explained).status for _ in range(2)] == [200, 200]
    body = bytes(784 * 12)
    clients.leave(request(b"", length=len(body)) + body[1:], "lost", b"\0")
    rest = h2.data(1, body[: len(body) // 2], h2.END)
    clients.leave(partial_stream(b"/predict", len(body)), "lost", rest)

    def counted():
        return +collections.Counter(outcomes(samples(service)))

    until(lambda: counted().total() == clients.seen.total())
    lost, gone = clients.seen.pop("lost"), counted() - clients.seen
    assert not clients.seen - counted()
    assert gone.total() == lost
    assert set(gone) <= {"http ok", "http cancelled"}
    after = samples(service)
    assert total(after, "lenet_explanation_duration_seconds_count") == 2
    for name in ("in_flight_bytes", "queue_rows", "contexts_busy"):
        assert total(after, f"lenet_{name}") == total(before, f"lenet_{name}") == 0


SPANS = {"success": "total", "queue": "queue", "compute_input": "decode"}
SPANS |= {"compute_infer": "compute", "compute_output": "encode"}


@pytest.mark.states(
    "Server-Timing",
    {
        "`decode`, `queue`, `compute`, `encode`, `total`: they fit into each other": (
            "the clock of the client around each request; their sum, at most `total`"
        ),
        "`batch`: the images of the batch that completed the request": "the images of requests "
        "that were sent one by one",
    },
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
    "`lenet_stage_duration_seconds`, `lenet_stage_seconds_total`, `lenet_request_duration_seconds`",
    found="the sums of Server-Timing of the answers, to their rounding",
)
@pytest.mark.states(
    "metrics",
    {
        "`lenet_batch_duration_seconds`, `lenet_sized_batch_seconds_total`": (
            "`compute` of Server-Timing, as each request was alone in its batches"
        ),
        "`lenet_last_prediction_timestamp_seconds`": "the clock before and after the requests",
    },
)
@pytest.mark.states(
    "/v2/models/stats",
    "every field: counts, durations, batches, last_inference",
    found="the requests that were sent, and their Server-Timing",
)
def test_the_sums_of_the_service_are_those_of_its_answers(served, digits):
    def statistics():
        """The numbers of the one model, by name: "success count", "64 ns"."""
        answer = ask(served.port, request(method=b"GET", path=b"/v2/models/lenet/stats"))
        (found,) = json.loads(answer.body)["model_stats"]
        assert (found.pop("name"), found.pop("version")) == ("lenet", "2")
        spans = found.pop("inference_stats")
        assert set(spans) == {*SPANS, "fail", "cache_hit", "cache_miss"}
        assert spans["cache_hit"] == spans["cache_miss"] == {"count": 0, "ns": 0}
        for one in found.pop("batch_stats"):
            spans[str(one["batch_size"])] = one["compute_infer"]
        assert set(found) == {"last_inference", "inference_count", "execution_count"}
        spans = {f"{name} {key}": span[key] for name, span in spans.items() for key in span}
        return collections.Counter(found | spans)

    clients, before, stats = Clients(served), samples(served), statistics()
    counts, sums, began_s = (1, 1, 2, 3, 5, 8, 13, 64, 100), collections.Counter(), time.time()
    for number, count in enumerate(counts):
        sent_s = time.monotonic()
        headers = clients.post(number % 2 == 1, digits.images[:count].tobytes())
        took_s = time.monotonic() - sent_s
        *stages, batch = headers["server-timing"].split(", ")
        assert batch == f'batch;desc="{count if count <= 64 else count - 64}"'
        spans = (re.fullmatch(r"(\w+);dur=([\d.]+)", stage).groups() for stage in stages)
        stages_s = {name: float(ms) / 1e3 for name, ms in spans}
        total_s = stages_s["total"]
        assert 0 < sum(stages_s.values()) - total_s <= total_s + 3e-6
        assert total_s <= took_s
        sums.update(stages_s)
    clients.post(False, bytes(783))
    after, ended_s = samples(served), time.time()  # counted as they are read

    def moved(name, **labels):
        name = f"lenet_{name}"
        return total(after, name, **labels) - total(before, name, **labels)

    about = partial(pytest.approx, abs=len(counts) * 0.6e-6)  # rounded to 0.001 ms
    batches = [1, 1, 2, 3, 5, 8, 13, 64, 64, 36]
    sizes = collections.Counter(str(1 << (rows - 1).bit_length()) for rows in batches)
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
    assert {rows: moved("sized_batches_total", rows=rows) for rows in sizes} == sizes
    for stage, seconds in sums.items():
        assert moved("stage_seconds_total", stage=stage) == about(seconds)
        if stage != "total":
            assert moved("stage_duration_seconds_sum", stage=stage) == about(seconds)
            assert moved("stage_duration_seconds_count", stage=stage) == len(counts)
    assert moved("request_duration_seconds_count", protocol="http") == len(counts)
    assert moved("request_duration_seconds_sum", protocol="http") == about(sums["total"])
    assert moved("request_duration_seconds_count", protocol="grpc") == 0
    (last_s,) = {value for (name, _), value in after.items() if "last_prediction" in name}
    assert began_s <= last_s <= ended_s
    found = statistics()
    assert round(1e3 * began_s) <= found["last_inference"] <= round(1e3 * ended_s)
    found.subtract(stats)
    assert {name: count for name, count in found.items() if count and "count" in name} == {
        "inference_count": sum(counts),
        "execution_count": len(batches),
        "fail count": 1,
        **{f"{name} count": len(counts) for name in SPANS},
        **{f"{rows} count": count for rows, count in sizes.items()},
    }
    for name, stage in SPANS.items():
        assert found[f"{name} ns"] / 1e9 == about(sums[stage])
    assert sum(found[f"{rows} ns"] for rows in sizes) / 1e9 == about(computed_s)


@pytest.mark.states(
    "/info",
    "every field of a model; name, version, Python, port, limits",
    found="the header of the weight file as JSON, the digest of its bytes, the numbers in its "
    "tensors, the clock; pyproject.toml; the defaults in docs/reference/settings.md",
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
    {
        "`lenet_build_info`, `lenet_model_info`": "pyproject.toml; the digest of the file's bytes",
        "`process_resident_memory_bytes`, `process_open_fds`, `process_cpu_seconds_total`": (
            "/proc of the workers, before and after"
        ),
        "`lenet_start_phase_seconds`": "the clock from the command to its ready line: longer than "
        "the phases together",
    },
)
def test_what_is_loaded_is_what_the_files_and_the_system_say(start_committed):
    began_s, began = time.monotonic(), datetime.now(UTC)
    service = start_committed("--workers", "2").ready(workers=2)
    took_s, pids = time.monotonic() - began_s, serving(service)

    def value(name, **labels):
        return total(samples(service), name, **labels)

    cpu_before_s = checks.cpu_s(*pids)
    until(lambda: value("process_cpu_seconds_total") >= cpu_before_s)
    content = (WEIGHTS / "lenet/2.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    training = json.loads(header.pop("__metadata__")["training"])
    digest = hashlib.sha256(content).hexdigest()
    defaults = (PROJECT / "docs/reference/settings.md").read_text()
    info = json.loads(ask(service.port, request(method=b"GET", path=b"/info")).body)
    (model,), limits = info.pop("models"), info.pop("limits")
    expected = {"name": "lenet-serve", "version": version, "commit": "", "explain": True}
    expected |= {"default_model": "lenet", "python": platform.python_version()}
    assert info == expected | {"grpc_port": service.grpc_port}
    assert began <= datetime.fromisoformat(model.pop("loaded_at")) <= datetime.now(UTC)
    strategies = model.pop("strategies")
    layers = model.pop("layers")
    assert layers.keys() == strategies.keys()
    assert set(strategies.values()) == {"onnxruntime"}
    assert all(set(who.values()) == {"onnxruntime"} for who in layers.values())
    assert max(map(int, strategies)) == limits.pop("max_batch_rows") == 64
    tensors = [one["shape"] for name, one in header.items() if not name.startswith("golden.")]
    expected = {"name": "lenet", "version": "2", "device": "cpu", "precision": "fp32"}
    expected |= {"sha256": digest, "parameters": sum(map(math.prod, tensors))}
    expected |= {"version_labels": []}
    names = ("accuracy", "epochs", "seed", "dataset_sha256", "labels")
    assert model == expected | {name: training[name] for name in names}
    assert limits.pop("max_picture_pixels") == 1 << 26
    for name, limit in limits.items():
        (row,) = re.findall(rf"^\| `--{name.replace('_', '-')}`.*", defaults, re.MULTILINE)
        assert f"| `{limit}` |" in row
    assert value("lenet_build_info", version=version) == 1
    assert value("lenet_model_info", sha256=digest) == value("lenet_model_info") == 1
    assert value("lenet_workers") == value("lenet_contexts") == len(pids) == 2
    assert value("lenet_queue_limit_rows") == 2 * 32768
    assert value("lenet_device_bytes") == value("lenet_workspace_bytes") == 0
    # Connections that ask, and the folders of /proc while they are read, are open for a moment.
    assert value("process_open_fds") == pytest.approx(checks.descriptors(*pids), rel=0.1)
    resident = pytest.approx(checks.resident_bytes(*pids), rel=0.1)
    assert value("process_resident_memory_bytes") == resident
    assert (
        value("process_cpu_seconds_total") <= checks.cpu_s(*pids) + 0.02
    )  # two ticks of the clock
    phases = {dict(labels)["phase"]: one for (name, labels), one in samples(service).items()
              if name == "lenet_start_phase_seconds"}  # fmt: skip
    assert set(phases) == {"weights", "device", "warm_up", "contexts"}
    assert 0 < phases["weights"] + phases["contexts"] < took_s
    assert 0 < phases["warm_up"] <= phases["contexts"]


INFER, PREDICT = b"/v2/models/lenet/infer", b"/v1/models/lenet:predict"
ROWS = json.dumps({"instances": [[[0] * 28] * 28]}).encode()
PIXELS = json.dumps({"images": [[0] * 784]}).encode()
TENSOR = {"name": "image", "datatype": "UINT8", "shape": [1, 784], "data": [0] * 784}
IMAGE = json.dumps({"inputs": [TENSOR]}).encode()
JSON_BYTES = "bytes of JSON below `/v1` and `/v2`"
REPOSITORY = "bytes of a request to the repository; characters of an `id`; classifications"


def json_of(path, content, size=0):
    """A request of at least `size` bytes."""
    return request(content.ljust(size), path=path, kind=b"application/json")


@pytest.mark.states("limits", REPOSITORY, found="an `id` of as many, and one more")
@pytest.mark.states(
    "limits", JSON_BYTES, found="bodies filled up with spaces to as many bytes, and one more"
)
@pytest.mark.parametrize(
    ("row", "number", "make", "refused"),
    [
        (JSON_BYTES, 0, lambda n: json_of(INFER, IMAGE, n), 413),
        (JSON_BYTES, 0, lambda n: json_of(PREDICT, ROWS, n), 413),
        (REPOSITORY, 1, lambda n: json_of(INFER, IMAGE[:-1] + b',"id":"%b"}' % (b"a" * n)), 400),
    ],
)
def test_json_at_its_limit_is_answered_and_no_more(served, row, number, make, refused):
    most = int(documented(row)[number])
    statuses = [ask(served.port, make(count)).status for count in (most, most + 1)]
    assert statuses == [200, refused]


def sized(number, path, content):
    """JSON of the size up to which the event loop decodes it, and of a byte more."""
    text = (PROJECT / "docs/operations.md").read_text()
    most = re.search(r"JSON over (\d+) KiB \((\d+) KiB below `/v1` and `/v2`\)", text)[number]
    most = int(most) << 10
    return [(1, json_of(path, content, size), size - most) for size in (most, most + 1)]


@pytest.mark.states(
    "limits",
    "processes in each worker that decode pictures and large bodies",
    found="the processes in /proc, after twenty pictures at once, with three that are set",
)
@pytest.mark.states(
    "times and counts in operations.md",
    "JSON over 192 KiB (128 KiB below /v1 and /v2) is decoded by processes",
    found="the processes in /proc after bodies of as many bytes, and of one more",
)
@pytest.mark.parametrize(
    "steps",
    [
        [(20, request(PICTURE, kind=b"image/png"), 3)],
        sized(1, b"/predict", PIXELS),
        sized(2, INFER, IMAGE),
        sized(2, PREDICT, ROWS),
    ],
)
def test_so_many_processes_decode(start_committed, steps):
    service = start_committed("--decoders", "3", *PATIENT).ready()
    for count, sent, processes in steps:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(opened(service.port, sent)) for _ in range(count)]
            assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}
        assert len(checks.decoding(service)) == processes
