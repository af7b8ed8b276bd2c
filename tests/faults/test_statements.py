"""What a running service counts and serves, found again by its clients, the clock and /proc."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import http.client
import json
import math
import os
import platform
import re
import ssl
import time
import tomllib
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded

from benchmarks.grpc_stub import Stub
from lenet.model import Model
from service.errors import ExitCode
from tests.faults import http2
from tests.faults.checks import outcomes, samples, serving, total
from tests.faults.clients import Connection, ask, infer_request, request
from tests.faults.digits import WEIGHTS
from tests.service_process import PATIENCE_S, PROJECT

PICTURE = (PROJECT / "docs/images/seven.png").read_bytes()
BODY_BYTES, HELD_BYTES = 200_000, 199_000
PARTIAL = request(b"", length=BODY_BYTES) + bytes(HELD_BYTES)
RESET = b"\0\0\0\x08"  # CANCEL


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
    service = start_committed(*limits).ready()
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
