"""Models that come, go and change while they are served, in a worker and in its neighbours.

The neighbours are files in the folder that the workers share, or processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import threading
import time
from http.client import HTTPConnection

import grpc
import numpy as np
import orjson
import pytest

from benchmarks.grpc_stub import Stub
from lenet.context import ExecutionContext, Target, open_backend
from lenet.errors import DeviceError
from lenet.model import Model
from service.engine import repository
from service.engine.repository import Repository, Wish, _write_wish, forget, unloaded
from service.engine.versions import WeightsFolder
from service.errors import ExitCode, InvalidInput, Unavailable, UnknownModel
from service.forms import open_inference_pb2 as pb
from tests.documented import documented
from tests.service.engine.conftest import spoil_golden
from tests.service_process import PATIENCE_S
from tests.wire.doors import until


def reloads(engine, name="a"):
    """How many ended ok and were refused."""
    return tuple(
        engine.value("lenet_reloads_total", model=name, outcome=outcome)
        for outcome in ("ok", "refused")
    )


def loaded(engine, name="a"):
    """The versions and digests that the metrics name."""
    engine.metrics.flush()
    return [
        (sample.labels["version"], sample.labels["sha256"])
        for family in engine.registry.collect()
        for sample in family.samples
        if sample.name == "lenet_model_info" and sample.labels["model"] == name
    ]


def versions(engine, name="a"):
    return [one.version.version for one in engine.models.select(name)]


@pytest.fixture
def reads(monkeypatch):
    """Each reading of a file waits for `go`; `begun` counts them."""

    class Reads:
        begun = 0
        go = threading.Event()

    def held(folder, name):
        Reads.begun += 1
        assert Reads.go.wait(PATIENCE_S)
        return read(folder, name)

    read = WeightsFolder.read
    monkeypatch.setattr(WeightsFolder, "read", held)
    yield Reads
    Reads.go.set()


# Reloads


@pytest.mark.states(
    "metrics",
    "`lenet_reloads_total`: ok; log: how many were replaced, unchanged, refused",
    found="a newer file that answers afterwards, beside one that did not change",
)
async def test_the_highest_version_replaces_the_served_one_and_the_log_says_so(
    engine, write, caplog
):
    path = write("a/10", seed=2)
    write("a/4", seed=3)
    caplog.set_level(logging.INFO)
    await engine.repository.reload()
    assert await engine.ask(2) == "10"
    version = engine.models.get("a", "10").version
    assert version.path == path
    assert loaded(engine) == [("10", version.sha256)]
    assert (reloads(engine), reloads(engine, "b")) == ((1, 0), (1, 0))
    changed, summary = caplog.messages
    assert changed.startswith(
        f"model a: version 10 (sha256 {version.sha256[:12]}) replaced version 3, golden logits "
    )
    assert summary == "reload: 1 replaced, 1 unchanged, 0 refused"
    write("a/10", seed=4)
    await engine.repository.reload()
    assert await engine.ask(4) == "10"
    ((number, digest),) = loaded(engine)
    assert (number, digest != version.sha256) == ("10", True)


def broken(write, folder, draw, random_weights):
    path = write("a/4", seed=2)
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path}: is not a valid safetensors file"


def of_another_architecture(write, folder, draw, random_weights):
    path = folder / "a" / "4.safetensors"
    random_weights(Model("a", random_weights("mlp").model.blocks)).write(path)
    return f"{path}: model 'a' has another architecture than the served 'a'"


def invalid(write, folder, draw, random_weights):
    path = folder / "a" / "4.safetensors"
    spoil_golden(draw("a", 2)).write(path)
    return f"{path}: model 'a' on backend cpu: golden logits differ"


def gone(write, folder, draw, random_weights):
    for path in (folder / "a").iterdir():
        path.unlink()
    return f"{folder / 'a'}: holds no VERSION.safetensors"


@pytest.mark.parametrize("spoil", [broken, of_another_architecture, invalid, gone])
async def test_a_file_is_refused_by_name_and_the_old_version_answers_on(
    engine, write, folder, draw, random_weights, caplog, spoil
):
    before = loaded(engine)
    reason = spoil(write, folder, draw, random_weights)
    await engine.repository.reload()
    (record,) = caplog.records
    assert record.message.startswith(f"model a: reload refused, still serving version 3: {reason}")
    assert record.exc_info is None
    assert "\n" not in record.message
    assert (reloads(engine), reloads(engine, "b")) == ((0, 1), (1, 0))
    assert loaded(engine) == before
    assert await engine.ask(1) == "3"
    if spoil is not gone:
        with pytest.raises(InvalidInput) as caught:
            await engine.repository.load("a")
        assert str(caught.value).startswith("model: 'a' was not loaded: ")
        assert reason.rpartition(": ")[2] in str(caught.value)
        assert caught.value.field == "model"
    write("a/5", seed=4)
    await engine.repository.reload()
    assert await engine.ask(4) == "5"


async def test_the_newest_files_are_read_when_reloads_are_requested_at_once(engine, write, reads):
    engine.repository.request_reload()
    await until(lambda: reads.begun)
    write("a/4", seed=2)
    for _ in range(100):
        engine.repository.request_reload()
    reads.go.set()
    await until(lambda: versions(engine) == ["4"] and reloads(engine, "b") == (2, 0))
    assert await engine.ask(2) == "4"
    assert reads.begun == 2 * 2, "the reload under way, and one for all that came meanwhile"


async def test_a_reload_keeps_as_many_versions_as_are_wanted(open_engine, write):
    write("a/1", seed=1)
    two = write("a/2", seed=2)
    async with open_engine(latest=2) as engine:
        write("a/4", seed=4)
        await engine.repository.reload()
        assert versions(engine) == ["4", "2"]
        two.unlink()
        await engine.repository.reload()
        assert versions(engine) == ["4", "1"]
        for version, seed in (("4", 4), ("1", 1)):
            assert await engine.ask(seed, "a", version) == version
        (engine.models.get("a", "4").version.path).unlink()
        await engine.repository.reload()
        assert versions(engine) == ["1"]
        assert [version for version, _ in loaded(engine)] == ["1"]
        assert engine.value("lenet_contexts", model="a", version="4") is None
        write("a/3", seed=3)
        await engine.repository.reload()
        assert versions(engine) == ["3", "1"]


async def test_a_label_moves_at_a_reload_and_stays_when_that_is_refused(open_engine, write):
    for version in (1, 2):
        write(f"a/{version}", seed=version)
    labels = write("b/1", seed=9).parents[1] / "a" / "labels.json"
    labels.write_text('{"stable": 1, "canary": 2}')
    async with open_engine(latest=2) as engine:

        async def assert_named(**named):
            for label, version in named.items():
                assert await engine.ask(version, "a", label) == str(version)

        await assert_named(stable=1, canary=2)
        with pytest.raises(UnknownModel, match="expected one of '2', '1', 'canary', 'stable'; a r"):
            engine.models.get("a", "latest")
        with pytest.raises(UnknownModel):
            engine.models.get("b", "canary")
        write("a/3", seed=3)  # version 1 is no longer served
        await engine.repository.reload()
        assert versions(engine) == ["2", "1"]
        await assert_named(stable=1, canary=2)
        labels.write_text('{"stable": 2, "canary": 3}')
        await engine.repository.reload()
        await assert_named(stable=2, canary=3)
        labels.write_text('{"stable": 3}')
        await engine.repository.reload()
        await assert_named(stable=3)
        assert engine.models.find("a", "canary") is None


async def test_a_label_is_found_all_the_time_that_its_version_is_replaced(open_engine, write):
    labels = write("a/1", seed=1).with_name("labels.json")
    labels.write_text('{"stable": 1}')
    async with open_engine() as engine:
        write("a/2", seed=2)
        labels.write_text('{"stable": 2}')
        reload = asyncio.create_task(engine.repository.reload())
        seen = []
        while not reload.done():
            seen.append(engine.models.get("a", "stable").version.version)
            await asyncio.sleep(0)
        assert (seen[0], await engine.ask(2, "a", "stable")) == ("1", "2")


# Requests to one worker


async def test_a_model_comes_and_goes_and_its_requests_are_finished(engine, write, monkeypatch):
    monkeypatch.setattr("lenet.cpu._QUICK_S", 0.0)  # batches of `c` are computed by its threads
    run, may_run = ExecutionContext.run, threading.Event()
    monkeypatch.setattr(
        ExecutionContext, "run", lambda *batch: may_run.wait(PATIENCE_S) and run(*batch)
    )
    write("c/1", seed=5)
    index = {one.name: one.loaded for one in await engine.models.index()}
    assert index == {"a": True, "b": True, "c": False}
    with pytest.raises(UnknownModel):
        engine.models.get("c")
    await engine.repository.load("c")
    running = [asyncio.ensure_future(engine.ask(5, "c")) for _ in range(9)]
    await asyncio.sleep(0)
    unloading = asyncio.create_task(engine.repository.unload("c"))
    await until(lambda: engine.models.find("c") is None)
    may_run.set()
    await unloading
    assert [task.result() for task in running] == ["1"] * 9
    assert not [t for t in threading.enumerate() if t.name.startswith("context-c")]
    for name in ("c", ""):
        with pytest.raises(UnknownModel, match=r"is not loaded, expected one of a, b"):
            await engine.repository.unload(name)
    for name in ("z", "../weights/a", "", "a/3"):
        with pytest.raises(UnknownModel, match="in the weights folder, expected one of a, b, c"):
            await engine.repository.load(name)
    await engine.repository.unload("a")
    with pytest.raises(UnknownModel, match="model 'a' is not loaded, expected one of b"):
        engine.models.get()
    await engine.repository.load("a")
    assert engine.models.get().version.key == ("a", "3")


async def test_the_worker_is_lost_when_the_device_is_while_a_model_is_loaded(
    engine, write, monkeypatch
):
    def broken(*_):
        raise DeviceError("illegal address", sticky=True)

    write("c/1")
    monkeypatch.setattr("service.engine.models.open_backend", broken)
    with pytest.raises(Unavailable, match="'c' was not loaded: illegal address"):
        await engine.repository.load("c")
    assert engine.models.lost.is_set()


async def test_a_refused_load_is_not_tried_again_by_a_reload(engine, write):
    path = write("c/1", seed=5)
    path.write_bytes(b"broken")
    with pytest.raises(InvalidInput, match="model: 'c' was not loaded: "):
        await engine.repository.load("c")
    write("c/1", seed=5)
    await engine.repository.reload()
    assert engine.models.loaded == ("a", "b")
    await engine.repository.load("c")
    assert await engine.ask(5, "c") == "1"


async def test_a_load_goes_on_when_its_caller_leaves_and_ends_with_the_service(
    open_engine, write, reads, caplog
):
    write("a/3", seed=1)
    write("b/1", seed=2)
    reads.go.set()
    async with open_engine(wanted=("a",)) as engine:
        reads.go.clear()
        reads.begun = 0
        caller = asyncio.create_task(engine.repository.load("b"))
        await until(lambda: reads.begun)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        reads.go.set()
        await until(lambda: engine.models.find("b") is not None)
        assert await engine.ask(2, "b") == "1"
        reads.go.clear()
        waiting = asyncio.create_task(engine.repository.load("b"))
        begun = reads.begun
        await until(lambda: reads.begun > begun)
    with pytest.raises(Unavailable, match="stopping"):
        await waiting
    begun = reads.begun
    with pytest.raises(Unavailable, match="stopping"):
        await engine.repository.load("b")
    assert reads.begun == begun, "a closed service reloads nothing"
    reads.go.set()
    assert not caplog.records, "nobody waited for the file"


# Requests to several workers


@pytest.fixture
async def worker(engine, tmp_path, monkeypatch):
    """A repository whose supervisor is this process, which passes SIGHUP on to it."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    made = Repository(engine.models, tmp_path, alone=False)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, made.request_reload)
    yield made
    await made.close(PATIENCE_S)
    loop.remove_signal_handler(signal.SIGHUP)


def report(folder, **followed):
    """What another worker followed."""
    (folder / "repository-1").write_bytes(orjson.dumps(followed))


LATER = 1 << 62
"""Number of a wish that is later than those of this test."""


async def test_a_worker_that_starts_follows_the_latest_wish_about_each_model(
    open_engine, worker, engine, write, tmp_path, reads
):
    reads.go.set()
    write("c/1", seed=5)
    write("d/1", seed=6)
    for name in ("c", "d"):
        await worker.load(name)
    for name in ("b", "c"):
        await worker.unload(name)
    assert unloaded(tmp_path) == {"b", "c"}
    assert engine.models.loaded == ("a", "d")
    async with open_engine(wanted=("a", "b")) as another:
        late = Repository(another.models, tmp_path, alone=False)
        await late.start()
        assert another.models.loaded == ("a", "d")
        reads.begun = 0
        await late.reload()
        assert reads.begun == 2, "a wish is followed once"


async def test_a_request_waits_for_a_worker_that_starts_and_it_is_ready_with_what_came_meanwhile(
    worker, engine, write, tmp_path, reads
):
    reads.go.set()
    write("c/1", seed=5)
    await worker.load("c")
    reads.go.clear()
    starting = Repository(engine.models, tmp_path, alone=False)
    begun = reads.begun
    start = asyncio.create_task(starting.start())
    await until(lambda: reads.begun > begun)
    mine = tmp_path / f"repository-{os.getpid()}"
    assert orjson.loads(mine.read_bytes()) == {}, "requests see that it has followed nothing"
    wish = Wish(LATER, load=False)
    (tmp_path / "wishes" / "b").write_bytes(orjson.dumps(wish))
    reads.go.set()
    await start
    assert engine.models.loaded == ("a", "c")
    assert orjson.loads(mine.read_bytes())["b"]["number"] == LATER


def test_the_later_of_two_wishes_at_once_stays(tmp_path, monkeypatch):
    clock, first = time.monotonic_ns, threading.current_thread()
    other = threading.Thread(target=lambda: _write_wish(tmp_path, "a", load=False))

    def number():
        taken = clock()
        if threading.current_thread() is first:
            other.start()  # another worker, before this one has written the file
            other.join(0.2)
        return taken

    monkeypatch.setattr(repository.time, "monotonic_ns", number)
    _write_wish(tmp_path, "a", load=True)
    other.join()
    assert unloaded(tmp_path) == {"a"}


@pytest.mark.parametrize("kind", [InvalidInput, Unavailable])
async def test_the_answer_says_that_another_worker_refused(worker, engine, tmp_path, kind):
    loading = asyncio.create_task(worker.load("b"))
    report(tmp_path, b={"number": 0})
    await until(lambda: (tmp_path / "wishes" / "b").exists())
    number = orjson.loads((tmp_path / "wishes" / "b").read_bytes())["number"]
    await asyncio.sleep(0.1)
    assert not loading.done(), "the other has not followed"
    message = "model: 'b' was not loaded: it"
    report(tmp_path, b={"number": number, "code": kind.code, "message": message})
    with pytest.raises(kind, match=r"^another worker refused it: .*: it$"):
        await loading
    outcome = {"number": LATER, "code": kind.code, "message": message}
    report(tmp_path, b=outcome)
    with pytest.raises(kind):  # as a load that came meanwhile
        await worker.load("b")
    await worker.unload("b")


async def test_a_worker_reports_what_it_refuses_and_serves_on(worker, engine, write, tmp_path):
    write("c/1").write_bytes(b"broken")
    write("d/1", seed=6)
    (tmp_path / "wishes").mkdir()
    for number, name in enumerate(("c", "d", "z"), 6):
        content = orjson.dumps({"number": number, "load": True})
        (tmp_path / "wishes" / name).write_bytes(content)
    await worker.start()
    found = orjson.loads((tmp_path / f"repository-{os.getpid()}").read_bytes())
    assert {name: (one["number"], one["code"]) for name, one in found.items()} == {
        "c": (6, "invalid_input"),
        "d": (7, ""),
        "z": (8, "invalid_input"),
    }
    assert "model: 'c' was not loaded: " in found["c"]["message"]
    assert engine.models.loaded == ("a", "b", "d")


async def test_the_answer_says_that_others_are_late_until_they_have_ended(
    worker, tmp_path, monkeypatch
):
    monkeypatch.setattr(repository, "_FOLLOW_S", 0.5)
    report(tmp_path)
    with pytest.raises(Unavailable, match=r"not all workers have done it within 0\.5 s"):
        await worker.load("b")
    forget(tmp_path, 1)
    monkeypatch.setattr(repository, "_FOLLOW_S", PATIENCE_S)
    await worker.load("b")


async def test_nothing_is_changed_when_the_wish_cannot_be_written(worker, engine, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(repository, "_replace", full)
        with pytest.raises(Unavailable, match=r"could not be reached; see .* and ask again"):
            await worker.unload("b")
    assert engine.models.loaded == ("a", "b")
    await worker.unload("b")
    assert engine.models.loaded == ("a",)
    with pytest.raises(Unavailable, match="the workers share no folder"):
        await Repository(engine.models, alone=False).load("b")
    assert engine.models.loaded == ("a",)


# Over HTTP and gRPC, in processes of their own

USER, ADMIN = "a-key-of-somebody", "a-key-of-an-administrator"
RAW = "application/octet-stream"
REPOSITORY_ROW = "bytes of a request to the repository; characters of an `id`; classifications"
MOST_BYTES = int(documented(REPOSITORY_ROW)[0])
IMAGES = np.random.default_rng(7).integers(0, 256, (3, 28, 28), np.uint8)
READY, UNLOADED = ("READY", ""), ("UNAVAILABLE", "unloaded")


def ask(service, path, body="{}"):
    """The status, and the message of an error or what was asked for."""
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with contextlib.closing(HTTPConnection("127.0.0.1", service.port)) as connection:
        connection.request("POST", f"/v2/repository/{path}", body, headers)
        response = connection.getresponse()
        found = json.loads(response.read() or '""')
        return response.status, found["error"] if type(found) is dict else found


def load(service, name):
    return ask(service, f"models/{name}/load")


def unload(service, name):
    return ask(service, f"models/{name}/unload", '{"parameters": {"unload_dependents": true}}')


def index(service, **document):
    status, rows = ask(service, "index", json.dumps(document))
    assert status == 200
    return {(row["name"], row["version"]): (row["state"], row["reason"]) for row in rows}


def predict(service, model):
    """Status, version and probabilities; of whichever worker accepts the connection."""
    headers = {"Content-Type": RAW, "Accept": RAW, "Authorization": f"Bearer {USER}"}
    with contextlib.closing(HTTPConnection("127.0.0.1", service.port)) as connection:
        connection.request("POST", f"/predict?model={model}", IMAGES.tobytes(), headers)
        response = connection.getresponse()
        return response.status, response.headers["X-Model-Version"], response.read()


@pytest.fixture
def answers(random_weights, tiny):
    """`answers(seed)`: what the file drawn with it says of `IMAGES`."""

    def answers(seed, name="lenet"):
        weights = random_weights(Model(name, tiny.blocks), seed)
        plan = open_backend(Target("cpu")).plan(weights, len(IMAGES))
        return plan.run(IMAGES).probabilities.astype("<f4").tobytes()

    return answers


@pytest.fixture
def serve(start, write):
    def serve_(workers):
        write("extra/1", seed=5)
        flags = ("--models", "lenet", "--api-keys", USER, "--admin-keys", ADMIN)
        return start("--workers", str(workers), *flags).ready(workers)

    return serve_


def test_every_worker_loads_and_unloads_what_one_of_them_was_asked_for(serve, write, answers):
    service = serve(2)
    assert index(service) == {("lenet", "1"): READY, ("extra", "1"): UNLOADED}
    assert index(service, ready=True) == {("lenet", "1"): READY}

    def assert_everywhere(*answer):
        for _ in range(12):
            assert predict(service, "extra") == answer

    assert load(service, "extra") == (200, "")
    assert_everywhere(200, "1", answers(5))
    write("extra/2", seed=6).write_bytes(b"broken")
    status, message = load(service, "extra")
    assert (status, "'extra' was not loaded: " in message) == (400, True)
    assert load(service, "vgg")[0] == 404
    assert_everywhere(200, "1", answers(5))
    write("extra/2", seed=6)
    assert load(service, "extra") == (200, "")
    assert_everywhere(200, "2", answers(6))
    assert unload(service, "extra") == (200, "")
    for _ in range(12):
        assert predict(service, "extra")[0] == 404
    assert unload(service, "extra")[0] == 404
    assert index(service)["extra", "2"] == UNLOADED
    assert predict(service, "") == (200, "1", answers(0))
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_a_model_comes_and_goes_over_grpc(serve, write, answers):
    service = serve(1)
    metadata = (("authorization", f"Bearer {ADMIN}"),)
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        stub = Stub(channel)

        def call(method, request):
            return getattr(stub, method)(request, metadata=metadata, timeout=PATIENCE_S)

        def assert_refused(code, method, request):
            with pytest.raises(grpc.RpcError) as caught:
                call(method, request)
            assert caught.value.code() is code

        def found(**options):
            rows = call("RepositoryIndex", pb.RepositoryIndexRequest(**options)).models
            return {(row.name, row.version): (row.state, row.reason) for row in rows}

        loading = "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="extra")
        unloading = "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="extra")
        assert found() == {("lenet", "1"): READY, ("extra", "1"): UNLOADED}
        assert found(ready=True) == {("lenet", "1"): READY}
        call(*loading)
        assert predict(service, "extra") == (200, "1", answers(5))
        write("extra/2").write_bytes(b"broken")
        assert_refused(grpc.StatusCode.INVALID_ARGUMENT, *loading)
        call(*unloading)
        assert predict(service, "extra")[0] == 404
        assert_refused(grpc.StatusCode.NOT_FOUND, *unloading)


@pytest.mark.states("limits", REPOSITORY_ROW, found="bodies of as many bytes, and one more")
def test_a_wrong_body_is_refused(serve):
    service = serve(1)
    for body, status, message in (
        ("{", 400, "body: is not JSON"),
        ("[]", 400, "body: got a list of 0, expected an object"),
        ('{"parameters": []}', 400, "parameters: got a list of 0, expected an object"),
        ('{"parameters": {"config": "{}"}}', 400, "parameters.'config': got a model's content"),
        ('{"parameters": {"file:1/model": "eA=="}}', 400, "models are read from the folder"),
        ("{".ljust(MOST_BYTES), 400, "body: is not JSON"),
        (" " * (MOST_BYTES + 1), 413, f"body: got more than {MOST_BYTES} bytes"),
    ):
        found, words = ask(service, "models/lenet/load", body)
        assert (found, message in words) == (status, True)


def test_a_worker_that_replaces_another_has_the_same_models_though_files_are_broken(
    start, write, answers
):
    write("extra/1", seed=5)
    write("other/1", seed=6)
    service = start("--workers", "2", "--admin-keys", ADMIN).ready(2)
    write("added/1", seed=7)
    assert load(service, "added") == (200, "")
    for name in ("lenet", "extra"):  # the default one, and another
        assert unload(service, name) == (200, "")
        write(f"{name}/1").write_bytes(b"broken")
    write("late/1").write_bytes(b"broken")
    os.kill(service.started_workers()[0], signal.SIGKILL)
    service.ready(3)
    for _ in range(12):
        for seed, name in enumerate(("other", "added"), 6):
            assert predict(service, name) == (200, "1", answers(seed, name))
        assert predict(service, "")[0] == 404
    service.signal()
    assert service.wait() == ExitCode.STOPPED
