"""Models listed, loaded and unloaded by requests, over HTTP and gRPC, in one worker and in two."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from http.client import HTTPConnection

import grpc
import numpy as np
import pytest

from benchmarks.grpc_stub import Stub
from lenet.context import Target, open_backend
from lenet.model import Model
from service.errors import ExitCode
from service.forms import open_inference_pb2 as pb
from tests.documented import documented
from tests.service_process import PATIENCE_S

USER, ADMIN = "a-key-of-somebody", "a-key-of-an-administrator"
RAW = "application/octet-stream"
REPOSITORY_ROW = "bytes of a request to the repository; characters of an `id`; classifications"
MOST_BYTES = int(documented(REPOSITORY_ROW)[0])
IMAGES = np.random.default_rng(7).integers(0, 256, (3, 28, 28), np.uint8)


class Administrator:
    """A client of the repository, over one transport; answers are (status, message)."""

    def __init__(self, service, key=ADMIN):
        self.service = service
        self.headers = {"authorization": f"Bearer {key}"} if key else {}


class OverHttp(Administrator):
    OK, BAD, UNKNOWN = 200, 400, 404

    def ask(self, path, **document):
        body = json.dumps(document)
        with contextlib.closing(HTTPConnection("127.0.0.1", self.service.port)) as connection:
            connection.request("POST", f"/v2/repository/{path}", body, self.headers)
            response = connection.getresponse()
            text = response.read()
            found = json.loads(text) if text else ""
            return response.status, found["error"] if type(found) is dict else found

    def index(self, ready=False):
        status, rows = self.ask("index", ready=ready)
        assert status == 200
        return {(row["name"], row["version"]): (row["state"], row["reason"]) for row in rows}

    def load(self, name):
        return self.ask(f"models/{name}/load")

    def unload(self, name):
        return self.ask(f"models/{name}/unload", parameters={"unload_dependents": True})


class OverGrpc(Administrator):
    OK, BAD, UNKNOWN = "OK", "INVALID_ARGUMENT", "NOT_FOUND"

    def ask(self, method, request):
        address = f"127.0.0.1:{self.service.grpc_port}"
        metadata = tuple(self.headers.items())
        with grpc.insecure_channel(address) as channel:
            call = getattr(Stub(channel), method)
            try:
                return "OK", call(request, metadata=metadata, timeout=PATIENCE_S)
            except grpc.RpcError as exc:
                return exc.code().name, exc.details()

    def index(self, ready=False):
        status, found = self.ask("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
        assert status == "OK"
        return {(row.name, row.version): (row.state, row.reason) for row in found.models}

    def load(self, name):
        return self.ask("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=name))

    def unload(self, name):
        return self.ask("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name))


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


OF_BOTH = pytest.mark.parametrize("kind", [OverHttp, OverGrpc])


@OF_BOTH
@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_loads_and_unloads_what_one_of_them_was_asked_for(
    serve, write, answers, kind, workers
):
    service = serve(workers)
    administrator = kind(service)
    everywhere = range(1 if workers == 1 else 12)
    ready, unloaded = ("READY", ""), ("UNAVAILABLE", "unloaded")
    assert administrator.index() == {("lenet", "1"): ready, ("extra", "1"): unloaded}
    assert administrator.index(ready=True) == {("lenet", "1"): ready}
    assert administrator.load("extra")[0] == kind.OK
    for _ in everywhere:
        assert predict(service, "extra") == (200, "1", answers(5))
    write("extra/2", seed=6).write_bytes(b"broken")
    status, message = administrator.load("extra")
    assert status == kind.BAD
    assert "'extra' was not loaded: " in message
    assert administrator.load("vgg")[0] == kind.UNKNOWN
    for _ in everywhere:
        assert predict(service, "extra") == (200, "1", answers(5))
    write("extra/2", seed=6)
    assert administrator.load("extra")[0] == kind.OK
    for _ in everywhere:
        assert predict(service, "extra") == (200, "2", answers(6))
    assert administrator.unload("extra")[0] == kind.OK
    for _ in everywhere:
        assert predict(service, "extra")[0] == 404
    assert administrator.unload("extra")[0] == kind.UNKNOWN
    assert administrator.index()["extra", "2"] == unloaded
    assert predict(service, "") == (200, "1", answers(0))
    service.signal()
    assert service.wait() == ExitCode.STOPPED


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("{", 400, "body: is not JSON"),
        ("[]", 400, "body: got a list of 0, expected an object"),
        ('{"parameters": []}', 400, "parameters: got a list of 0, expected an object"),
        ('{"parameters": {"config": "{}"}}', 400, "parameters.'config': got a model's content"),
        ('{"parameters": {"file:1/model": "eA=="}}', 400, "models are read from the folder"),
        ("{".ljust(MOST_BYTES), 400, "body: is not JSON"),
        (" " * (MOST_BYTES + 1), 413, f"body: got more than {MOST_BYTES} bytes"),
    ],
)
@pytest.mark.states("limits", REPOSITORY_ROW, found="bodies of as many bytes, and one more")
def test_a_wrong_body_is_refused(serve, body, status, message):
    service = serve(1)
    with contextlib.closing(HTTPConnection("127.0.0.1", service.port)) as connection:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        connection.request("POST", "/v2/repository/models/lenet/load", body, headers)
        response = connection.getresponse()
        assert response.status == status
        assert message in json.loads(response.read())["error"]


@pytest.mark.parametrize("workers", [1, 2])
def test_loads_and_unloads_under_traffic_lose_nothing(serve, answers, workers):
    service = serve(workers)
    over = threading.Event()
    wrong, answered = [], {"lenet": 0, "extra": 0}
    expected = {"lenet": {(200, "1", answers(0))}, "extra": {(200, "1", answers(5))}}

    def ask(model):
        while not over.is_set():
            found = predict(service, model)
            if found in expected[model]:
                answered[model] += 1
            elif (model, found[0]) != ("extra", 404):
                wrong.append((model, found))
                return

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("lenet", "extra") * 2]
    for thread in threads:
        thread.start()
    administrators = OverHttp(service), OverGrpc(service)
    for number in range(20):
        administrator = administrators[number % 2]
        assert administrator.load("extra")[0] == administrator.OK
        assert administrator.unload("extra")[0] == administrator.OK
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(answered.values()) > 0
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "Traceback" not in service.log


def test_a_worker_that_replaces_another_has_the_same_models(serve, answers):
    service = serve(2)
    administrator = OverHttp(service)
    assert administrator.load("extra")[0] == 200
    assert administrator.unload("lenet")[0] == 200
    os.kill(service.started_workers()[0], signal.SIGKILL)
    service.ready(3)
    for _ in range(12):
        assert predict(service, "extra") == (200, "1", answers(5))
        assert predict(service, "lenet")[0] == 404


@pytest.mark.parametrize("models", ["extra,lenet,other", ""])
def test_a_worker_replaces_another_when_files_of_unloaded_models_are_broken(
    start, write, answers, models
):
    write("extra/1", seed=5)
    write("other/1", seed=6)
    service = start("--workers", "2", "--models", models, "--admin-keys", ADMIN).ready(2)
    for name in ("lenet", "extra"):  # the default one, and another
        assert OverHttp(service).unload(name) == (200, "")
        write(f"{name}/1").write_bytes(b"broken")
    write("late/1").write_bytes(b"broken")
    os.kill(service.started_workers()[0], signal.SIGKILL)
    service.ready(3)
    for _ in range(12):
        assert predict(service, "other") == (200, "1", answers(6, "other"))
        assert predict(service, "")[0] == 404
    service.signal()
    assert service.wait() == ExitCode.STOPPED
