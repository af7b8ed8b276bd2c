"""Reloads of a real process, from real files, while it answers."""

from __future__ import annotations

import contextlib
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

pytestmark = pytest.mark.process  # files change under load

RELOADS = 60
"""`benchmarks/reload.py` does 1,000."""

RAW = "application/octet-stream"


@pytest.fixture
def versions(tmp_path, tiny_weights, tiny, random_weights):
    """What each version answers to `images`: `{"1": ..., "2": ...}`; only file 1 is there yet."""
    model = Model("lenet", tiny.blocks)
    random_weights(model, 1).write(tmp_path / "2.safetensors")
    plans = [open_backend(Target("cpu")).plan(random_weights(model, seed), 200) for seed in (0, 1)]
    return {str(number): plan.run(IMAGES).probabilities for number, plan in enumerate(plans, 1)}


IMAGES = np.random.default_rng(7).integers(0, 256, (200, 28, 28), np.uint8)


class Callers:
    """Threads that ask on and on, each for its own rows; the first wrong answer ends them all."""

    def __init__(self, service, versions):
        self.service = service
        self.versions = versions
        self.over = threading.Event()
        self.wrong = []
        self.answered = dict.fromkeys(versions, 0)
        self._lock = threading.Lock()

    def judge(self, start, stop, version, content):
        expected = self.versions[version][start:stop].astype("<f4").tobytes()
        with self._lock:
            self.answered[version] += 1
            if content != expected:
                self.wrong.append(f"rows {start} to {stop} are not what version {version} says")

    def over_http(self, start, stop):
        body = IMAGES[start:stop].tobytes()
        headers = {"Content-Type": RAW, "Accept": RAW}
        with contextlib.closing(HTTPConnection("127.0.0.1", self.service.port)) as connection:
            while not self.over.is_set():
                connection.request("POST", "/predict", body, headers)
                response = connection.getresponse()
                content = response.read()
                if response.status != 200:
                    self.wrong.append(content.decode())
                    return
                self.judge(start, stop, response.headers["X-Model-Version"], content)

    def over_grpc(self, start, stop):
        shape = (stop - start, 28, 28)
        tensor = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=shape)
        request = pb.ModelInferRequest(
            inputs=[tensor],
            outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="probabilities")],
            raw_input_contents=[IMAGES[start:stop].tobytes()],
        )
        with grpc.insecure_channel(f"127.0.0.1:{self.service.grpc_port}") as channel:
            stub = Stub(channel)
            while not self.over.is_set():
                try:
                    answer = stub.ModelInfer(request)
                except grpc.RpcError as exc:
                    self.wrong.append(repr(exc))
                    return
                (content,) = answer.raw_output_contents
                self.judge(start, stop, answer.model_version, content)

    @contextlib.contextmanager
    def asking(self, *calls):
        threads = [threading.Thread(target=call, args=rows) for call, *rows in calls]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join()


def test_each_answer_is_wholly_of_the_version_that_it_bears_when_files_change_under_load(
    start, tmp_path, tiny_weights, versions
):
    service = start("--contexts", "2").ready()
    second = tiny_weights / "lenet" / "2.safetensors"
    spare = tmp_path / "2.safetensors"
    callers = Callers(service, versions)
    before = len(service.lines)
    with callers.asking(
        (callers.over_http, 0, 1), (callers.over_http, 0, 200), (callers.over_grpc, 3, 4)
    ):
        for number in range(1, RELOADS + 1):
            if number % 2:
                os.link(spare, second)
                expected = "version 2 .* replaced version 1,"
            else:
                second.unlink()
                expected = "version 1 .* replaced version 2,"
            service.signal(signal.SIGHUP)
            service.wait_for(expected, (number + 1) // 2)
            if callers.wrong:
                break
    assert not callers.wrong
    assert len(service.lines) <= before + 2 * RELOADS
    assert min(callers.answered.values()) > 20
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "ERROR" not in service.log
