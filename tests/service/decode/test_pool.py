from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from prometheus_client import CollectorRegistry

from service.decode import pool as decoders
from service.decode.decoding_process import HEAD, READY
from service.decode.pool import Decoders
from service.errors import (
    InferenceFailed,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
    UnsupportedMediaType,
)
from service.forms import open_inference_pb2 as pb
from service.forms.body import decode
from service.forms.form import NOTHING, Asked
from service.forms.oip_json import OipJsonForm
from service.forms.oip_proto import OipProtoForm
from service.forms.prediction import ImageForm
from service.forms.reader import Limits
from service.forms.tensors import (
    ALL_OUTPUTS,
)
from service.observe.metrics import Metrics
from tests.documented import documented
from tests.faults.checks import cpu_s
from tests.pictures import FORM, PNG, encoded, form, long_form, seven
from tests.service_process import PATIENCE_S
from tests.tasks import decode as decode_by

LIMITS = Limits(16_384)
LONG = long_form()
"""About 4 s of decoding."""
JSON = "application/json"
MEMORY_BYTES = 320 << 20


def body(content_type, invert="auto", limits=LIMITS):
    return ImageForm.of(content_type, invert, "one", limits)


class Pool(Decoders):
    """The real one; knows its processes by the system's list of children."""

    @property
    def pids(self):
        listed = read(f"/proc/self/task/{os.getpid()}/children").split()
        return {int(pid) for pid in listed if "decoding_process" in command_line(int(pid))}


def command_line(pid):
    try:
        return read(f"/proc/{pid}/cmdline")
    except OSError:
        return ""


def read(path):
    return Path(path).read_text()


@asynccontextmanager
async def open_pool(count=2, memory_bytes=MEMORY_BYTES):
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    async with Pool(metrics, count, memory_bytes) as pool:

        def ends(reason):
            metrics.flush()
            return registry.get_sample_value("lenet_decoder_ends_total", {"reason": reason})

        pool.ends = ends
        yield pool
    await until(lambda: not pool.pids)


@pytest.fixture
async def pool():
    async with open_pool() as pool:
        yield pool


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the end of a process sets no event
            await asyncio.sleep(0.001)


def kill(pid):
    """SIGKILL to a child, and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@contextmanager
def outcomes(pool):
    """`start(source, body)` starts a job and returns what is called back with."""
    jobs = []

    def start(source, content):
        called = []
        job = pool.start(source, content, called.append, lambda: called.append("ended"))
        jobs.append(job)
        return job, called

    yield start
    for job in jobs:
        pool.cancel(job)


RAW = np.random.default_rng(3).integers(0, 256, (300, 28, 28), np.uint8)
FLAT = orjson.dumps({"images": RAW.reshape(300, 784).tolist()})
BODIES = {
    PNG: seven(),
    "image/jpeg": seven(224, "JPEG"),
    JSON: orjson.dumps({"images": RAW.tolist()}),
    "application/x-npy": None,
    "text/csv": "\n".join(",".join(map(str, one.ravel().tolist())) for one in RAW).encode(),
    FORM: form(seven(), seven(56)),
}


def infer_request(rows):
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="image",
        datatype="UINT8",
        shape=(rows, 28, 28),
        contents=pb.InferTensorContents(uint_contents=RAW[:rows].ravel().tolist()),
    )
    return pb.ModelInferRequest(model_name="lenet", id="7", inputs=[tensor]).SerializeToString()


# Decoding


async def test_each_kind_of_body_is_decoded_as_in_one_process(pool, tmp_path):
    np.save(tmp_path / "a.npy", np.asfortranarray(RAW))
    bodies = {**BODIES, "application/x-npy": (tmp_path / "a.npy").read_bytes()}
    for kind, content in bodies.items():
        for invert in ("auto", "true") if kind in (JSON, "application/x-npy") else ("auto",):
            decoded = await decode_by(pool, body(kind, invert), bytearray(content), PATIENCE_S)
            expected = decode(content, kind, invert=invert, limits=LIMITS)
            np.testing.assert_array_equal(decoded.images, expected)
    assert len(pool.pids) == 1, "one at a time takes one process"


@pytest.mark.parametrize("json_bytes", [None, 150])
async def test_an_infer_request_over_http_is_decoded_with_what_else_it_asks_for(pool, json_bytes):
    entry = {"name": "image", "datatype": "UINT8", "shape": [300, 28, 28]}
    asked = Asked(outputs=ALL_OUTPUTS)
    if json_bytes is None:
        entry["data"] = RAW.ravel().tolist()
        content = json.dumps({"inputs": [entry]}).encode()
    else:
        entry["parameters"] = {"binary_data_size": RAW.size}
        content = json.dumps({"inputs": [entry], "id": "7"}).encode().ljust(json_bytes)
        content += RAW.tobytes()
        asked = replace(asked, id="7")
    decoded = await decode_by(pool, OipJsonForm(json_bytes, Limits(300)), content, PATIENCE_S)
    np.testing.assert_array_equal(decoded.images, RAW)
    assert decoded.asked == asked


@pytest.mark.parametrize(
    ("source", "content", "error", "field"),
    [
        (body(PNG), b"no picture", InvalidInput, "body"),
        (
            body(FORM),
            form(seven(), seven())
            .replace(b"data; name", b"data", 1)
            .replace(b"\r\n\r\n", b"\r\nContent-Type: text/html\r\n\r\n", 1),
            UnsupportedMediaType,
            "parts[0]",
        ),
        (body(JSON, limits=Limits(299)), BODIES[JSON], TooLarge, "images"),
        (body(JSON), FLAT.rpartition(b",")[0] + b",256]]}", InvalidInput, "images[299][783]"),
        (OipProtoForm(Limits(300)), b"\xff\xff", InvalidInput, "message"),
        (OipProtoForm(Limits(299)), infer_request(300), TooLarge, "inputs[0].shape"),
    ],
)
async def test_an_error_is_the_same_as_in_one_process(pool, source, content, error, field):
    with pytest.raises(error) as caught:
        await decode_by(pool, source, content, PATIENCE_S)
    assert type(caught.value) is error
    assert caught.value.field == field
    if isinstance(source, ImageForm) and content:
        with pytest.raises(error, match=re.escape(caught.value.message)):
            decode(content, source.content_type, limits=Limits(source.max_images))


async def test_large_json_takes_little_more_memory_than_its_bytes_and_images():
    images = np.random.default_rng(4).integers(0, 256, (8000, 28, 28), np.uint8)
    content = orjson.dumps(
        {"images": images.tolist()}
    )  # 23 MB, of which orjson would take 12 times
    async with open_pool(memory_bytes=160 << 20) as pool:
        decoded = await decode_by(pool, body(JSON), content, PATIENCE_S)
        np.testing.assert_array_equal(decoded.images, images)


async def test_a_picture_that_takes_too_much_memory_is_too_large():
    async with open_pool(memory_bytes=100 << 20) as pool:
        picture = encoded(np.zeros((4000, 4000, 4), np.uint8))  # 64 MB
        with pytest.raises(TooLarge, match="more than 100 MiB of memory"):
            await decode_by(pool, body(PNG), picture, PATIENCE_S)
        assert (await decode_by(pool, body(PNG), seven(), PATIENCE_S)).images.any()
        assert pool.ends("died") == 0


# Work that ends


async def test_cancelled_work_ends_early(pool, monkeypatch):
    monkeypatch.setattr(decoders, "_CANCEL_S", PATIENCE_S)  # no process is killed
    with outcomes(pool) as start:
        for _ in range(5):
            job, called = start(body(FORM), LONG)
            await until(lambda job=job: job.decoder)
            pool.cancel(job)
            await until(lambda called=called: called)
            assert called == ["ended"]
    assert cpu_s(*pool.pids) < 10, "the five forms take 20 s"
    assert len(pool.pids) == 1


@pytest.mark.states(
    "metrics",
    "`lenet_decoder_ends_total`: cancelled",
    found="a job that was cancelled in a step that cannot be interrupted",
)
async def test_a_step_that_cannot_be_interrupted_is_killed(pool, monkeypatch):
    monkeypatch.setattr(decoders, "_LEAST_RUN_S", 0.1)
    await decode_by(pool, body(PNG), seven(), PATIENCE_S)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)  # a step without an end
    with outcomes(pool) as start:
        job, called = start(body(PNG), seven())
        await asyncio.sleep(0)
        pool.cancel(job)
        assert not called
        await until(lambda: called)
    assert called == ["ended"]
    assert pool.ends("cancelled") == 1
    assert (await decode_by(pool, body(PNG), seven(), PATIENCE_S)).images.any()


async def test_a_process_is_not_killed_for_work_that_has_just_begun(pool, monkeypatch):
    monkeypatch.setattr(decoders, "_LEAST_RUN_S", PATIENCE_S)
    await decode_by(pool, body(PNG), seven(), PATIENCE_S)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    with outcomes(pool) as start:
        job, called = start(body(PNG), seven())
        await asyncio.sleep(0)
        pool.cancel(job)
        await asyncio.sleep(2 * decoders._CANCEL_S)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: called)
    assert called == ["ended"]
    assert (await decode_by(pool, body(PNG), seven(), PATIENCE_S)).images.any()
    assert pool.pids == {pid}


@pytest.mark.parametrize("has_started", [False, True])
async def test_work_that_is_cancelled_in_the_turn_of_its_start_costs_no_process(pool, has_started):
    if has_started:
        await decode_by(pool, body(PNG), seven(), PATIENCE_S)
    with outcomes(pool) as start:
        for _ in range(20):
            job, called = start(body(PNG), seven())
            pool.cancel(job)
            assert called == ["ended"]
        await until(lambda: pool.pids)
    pids = pool.pids
    assert (await decode_by(pool, body(PNG), seven(), PATIENCE_S)).images.any()
    assert pool.pids == pids
    assert len(pids) == 1


async def test_a_process_that_does_not_start_in_time_is_killed(pool, monkeypatch):
    monkeypatch.setattr(decoders, "_ARGUMENTS", ("-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(decoders, "_START_S", 0.1)
    with pytest.raises(InferenceFailed):
        await decode_by(pool, body(PNG), seven(), PATIENCE_S)
    await until(lambda: not pool.pids)


async def test_leaving_ends_what_runs_and_what_waits():
    async with open_pool() as pool:
        calls = []
        for _ in range(2):
            pool.start(body(FORM), LONG, calls.append, lambda: calls.append("ended"))
        await decode_by(pool, body(PNG), seven(), PATIENCE_S)
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)  # only a kill ends it
    assert [call for call in calls if call == "ended"] == ["ended"] * 2
    assert [type(call) for call in calls if call != "ended"] == [Unavailable] * 2
    with pytest.raises(Unavailable):
        pool.start(body(PNG), seven(), print)


# Long work beside short work


@pytest.mark.parametrize("small_bytes", [decoders.SMALL_BYTES, 1 << 30])
async def test_a_small_picture_does_not_wait_for_long_work(pool, monkeypatch, small_bytes):
    monkeypatch.setattr(decoders, "SMALL_BYTES", small_bytes)  # else it is found to be large
    with outcomes(pool) as start:
        long = [start(body(FORM), LONG)[1] for _ in range(3)]
        for _ in range(5):
            await decode_by(pool, body(PNG), seven(), PATIENCE_S)
        assert long == [[], [], []]
        assert len(pool.pids) == 2


@pytest.mark.parametrize(
    ("source", "content"),
    [
        (body(PNG), seven(1680)),
        (body(FORM), form(*[seven()] * 100)),
    ],
)
async def test_few_bytes_of_many_pixels_or_pictures_are_large_work(pool, source, content):
    with outcomes(pool) as start:
        job, called = start(source, content)
        assert not job.is_large
        await until(lambda: len(called) == 2)
        assert job.is_large
    expected = decode(content, source.content_type, limits=LIMITS)
    np.testing.assert_array_equal(called[1].images, expected)


async def test_long_work_goes_on_while_small_pictures_come(pool):
    long = asyncio.create_task(decode_by(pool, body(FORM), long_form(500), PATIENCE_S))
    while not long.done():
        await asyncio.gather(*(decode_by(pool, body(PNG), seven(), PATIENCE_S) for _ in range(4)))
    assert len((await long).images) == 500


@pytest.mark.states(
    "limits", "requests waiting for one", found="small and large requests, until one is refused"
)
@pytest.mark.parametrize("is_large", [False, True])
async def test_work_is_refused_when_too_much_waits(pool, is_large):
    most = int(documented("requests waiting for one")[is_large])
    content = bytes(decoders.SMALL_BYTES + is_large)
    with outcomes(pool) as start:
        for _ in range(most):
            start(body(PNG), content)
        with pytest.raises(Overloaded, match=f"{most} .*wait to be decoded; try again") as caught:
            start(body(PNG), content)
        assert caught.value.retry_after_s == 1
        start(body(PNG), bytes(decoders.SMALL_BYTES + (not is_large)))


# Processes


@pytest.mark.states(
    "metrics", "`lenet_decoder_ends_total`: idle", found="the process ids that are left"
)
async def test_processes_start_when_needed_and_end_when_idle(monkeypatch):
    monkeypatch.setattr(decoders, "_IDLE_S", 0.2)
    async with open_pool() as pool:
        assert not pool.pids
        await decode_by(pool, body(PNG), seven(), PATIENCE_S)
        await decode_by(pool, body(PNG), seven(), PATIENCE_S)
        assert len(pool.pids) == 1
        await until(lambda: not pool.pids)
        assert pool.ends("idle") == 1
        await decode_by(pool, body(PNG), seven(), PATIENCE_S)


@pytest.mark.states(
    "metrics", "`lenet_decoder_ends_total`: died", found="a process that the test killed"
)
@pytest.mark.parametrize("idle", [True, False])
async def test_a_process_that_dies_fails_its_own_request_only(pool, idle, caplog):
    await decode_by(pool, body(PNG), seven(), PATIENCE_S)
    with outcomes(pool) as start:
        job, called = (None, []) if idle else start(body(FORM), LONG)
        await until(lambda: idle or job.decoder)
        (pid,) = pool.pids
        kill(pid)
        assert (await decode_by(pool, body(PNG), seven(), PATIENCE_S)).images.any()
        await until(lambda: pool.ends("died") == 1)
        if not idle:
            await until(lambda: len(called) == 2)
            assert called[0] == "ended"
            assert type(called[1]) is InferenceFailed
    assert len(caplog.records) <= 1


@pytest.mark.states(
    "times and counts in operations.md",
    "decoding processes run at nice 5",
    found="the priority that the system says",
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_decoder_gives_way_to_serving(pool):
    await decode_by(pool, body(PNG), seven(), PATIENCE_S)
    (pid,) = pool.pids
    assert os.getpriority(os.PRIO_PROCESS, pid) >= os.getpriority(os.PRIO_PROCESS, 0) + 5 or (
        os.getpriority(os.PRIO_PROCESS, pid) == 19
    )
    assert read(f"/proc/{pid}/oom_score_adj") == "900\n"


async def test_a_process_that_dies_while_it_starts_is_replaced_beside_long_work(pool, monkeypatch):
    start_process, starts_s = decoders._start, []

    def dies(*arguments):
        process = start_process(*arguments)
        starts_s.append(asyncio.get_running_loop().time())
        if len(starts_s) <= 3:
            process.kill()
        return process

    with outcomes(pool) as start:
        job, called = start(body(FORM), LONG)
        await until(lambda: job.decoder)
        monkeypatch.setattr(decoders, "_start", dies)
        assert (await decode_by(pool, body(PNG), seven(), PATIENCE_S)).images.any()
        assert not called
    assert len(starts_s) == 4
    assert np.diff(starts_s).min() >= decoders._RESTART_S


async def test_a_request_is_unavailable_when_no_process_can_be_started(pool, monkeypatch):
    monkeypatch.setattr(decoders.sys, "executable", "/nowhere/python")
    for _ in range(3):
        with pytest.raises(Unavailable, match="No such file") as caught:
            await decode_by(pool, body(PNG), seven(), PATIENCE_S)
        assert caught.value.retry_after_s == 1
    monkeypatch.undo()
    assert (await decode_by(pool, body(PNG), seven(), PATIENCE_S)).images.any()


def asked_of(*candidates):
    """A reply about one image."""
    text = json.dumps({"asked": asdict(NOTHING) | {"candidates": candidates}}).encode()
    return READY + HEAD.pack(len(text), 784) + text + bytes(784)


CANDIDATE = {"box": [0, 1, 0, 1], "image": "A" * 1048, "digit": 0.5, "mark": 0.5, "chosen": True}

REPLIES = {
    "too many candidates": asked_of(*[CANDIDATE] * 25),
    "a candidate of half a box": asked_of(CANDIDATE | {"box": [0, 1]}),
    "a candidate without an image": asked_of(CANDIDATE | {"image": ""}),
    "a candidate that is more than sure": asked_of(CANDIDATE | {"digit": 1.5}),
    "a reply before it is ready": HEAD.pack(2, 784) + b"{}" + bytes(784),
    "too many images": READY + HEAD.pack(2, 2 * 784),
    "not images": READY + HEAD.pack(2, 783),
    "a long header": READY + HEAD.pack(1 << 31, 784),
    "not JSON": READY + HEAD.pack(2, 784) + b"{]" + bytes(784),
    "neither images nor an error": READY + HEAD.pack(2, 0) + b"{}",
    "an error without a message": READY + HEAD.pack(12, 0) + b'{"error":{}}',
    "no object": READY + HEAD.pack(2, 0) + b"[]",
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
async def test_a_decoder_that_breaks_the_protocol_is_ended(pool, monkeypatch, caplog, reply):
    program = (
        "import socket, sys, time; channel = socket.socket(fileno=int(sys.argv[1])); "
        f"channel.sendall({reply!r}); time.sleep(60)"
    )
    monkeypatch.setattr(decoders, "_ARGUMENTS", ("-c", program))
    with pytest.raises(ServiceError) as caught:
        await decode_by(pool, body(PNG, limits=Limits(1)), seven(), PATIENCE_S)
    assert type(caught.value) is InferenceFailed
    assert "invalid reply" in caplog.text
    await until(lambda: not pool.pids)


async def test_a_decoder_ends_when_the_service_is_gone():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = decoders._start(theirs, MEMORY_BYTES)
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
