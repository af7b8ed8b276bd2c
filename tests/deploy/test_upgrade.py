"""A rolling upgrade: two instances behind nginx are replaced in turn while clients ask.

`UPGRADES=10` replaces both ten times. `LENET_TEST_OLD_ROOT` names a checkout of an older version,
which takes turns with this one; without it only the weights differ.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import threading
from collections import Counter
from pathlib import Path

import grpc
import pytest

from benchmarks.grpc_stub import Stub
from service.errors import ExitCode
from service.forms import open_inference_pb2 as pb
from tests.deploy.proxies import Certificates, free_ports, nginx
from tests.service_process import PROGRAM, Service

UPGRADES = int(os.environ.get("UPGRADES", "1"))
OLD_ROOT = Path(os.environ.get("LENET_TEST_OLD_ROOT", PROGRAM))
KEYS = [f"the-key-of-client-{number:03}" for number in range(12)]
PAUSE_S = 0.012  # nginx lets 100 requests a second of each key pass
DEADLINE_S = 20
IMAGE = bytes(range(256)) * 3 + bytes(16)


class Client:
    """Asks for the same image until told to stop; notes answers by version, and what failed."""

    def __init__(self, ask, stop):
        self.answers = Counter()
        self.failures = []
        self._ask, self._stop = ask, stop
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.join = self._thread.join

    def _run(self):
        with contextlib.ExitStack() as opened:
            while not self._stop.wait(PAUSE_S):
                try:
                    self.answers[self._ask(opened)] += 1
                except (http.client.HTTPException, OSError, grpc.RpcError) as exc:
                    self.failures.append(repr(exc))


def over_http(port, context, key, kept):
    """A function that predicts on one connection, or on a new one each time."""
    connection = http.client.HTTPSConnection("localhost", port, timeout=DEADLINE_S, context=context)
    headers = {"Content-Type": "application/octet-stream", "Authorization": f"Bearer {key}"}

    def ask(opened):
        opened.callback(connection.close)
        connection.request("POST", "/predict", IMAGE, headers)
        answer = connection.getresponse()
        body = answer.read()
        if not kept:
            connection.close()
        if answer.status != 200:
            raise http.client.HTTPException(f"{answer.status} {body[:200]}")
        return answer.headers["X-Model-Version"], body

    return ask


def over_grpc(port, credentials, key):
    """A function that predicts on one channel."""
    channel = grpc.secure_channel(f"localhost:{port}", credentials)
    infer = Stub(channel).ModelInfer
    request = pb.ModelInferRequest(
        model_name="lenet",
        inputs=[pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8")],
        raw_input_contents=[IMAGE],
    )
    request.inputs[0].shape[:] = [1, 28, 28]
    metadata = [("authorization", f"Bearer {key}")]

    def ask(opened):
        opened.callback(channel.close)
        answer = infer(request, timeout=DEADLINE_S, metadata=metadata)
        return answer.model_version, b"".join(answer.raw_output_contents)

    return ask


@pytest.fixture
def instances(tmp_path, tiny_weights, random_weights, tiny):
    """`instances.start(index, version)` serves on the ports of `index`; all are killed at the end."""

    class Instances:
        ports = tuple(zip(free_ports(2), free_ports(2), strict=True))
        running = {}

        def start(self, index, version):
            weights = tmp_path / f"weights-{version}" / "lenet"
            if not weights.exists():
                weights.mkdir(parents=True)
                model = random_weights(tiny.__class__("lenet", tiny.blocks), version)
                model.write(weights / f"{version}.safetensors")
            folder = tmp_path / f"instance-{index}"
            folder.mkdir(exist_ok=True)
            port, grpc_port = self.ports[index]
            line = ("--port", str(port), "--grpc-port", str(grpc_port), "--workers", "2")
            line += ("--device", "cpu", "--weights", str(weights.parent))
            line += ("--api-keys", ",".join(KEYS))
            root = OLD_ROOT if version == 1 else PROGRAM
            self.running[index] = Service(line, folder, root=root).ready(2)

        def replace(self, index, version):
            self.running[index].signal()
            assert self.running[index].wait() == ExitCode.STOPPED
            self.running[index].end()
            self.start(index, version)

    found = Instances()
    yield found
    for service in found.running.values():
        service.end()


def test_no_request_is_lost_when_two_instances_behind_nginx_are_replaced(instances, tmp_path):
    certificates = Certificates(tmp_path)
    context = ssl.create_default_context(cafile=certificates.authority)
    credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
    for index in (0, 1):
        instances.start(index, version=1)
    stop = threading.Event()
    with nginx(tmp_path, certificates, instances.ports) as port:
        clients = [
            *(Client(over_http(port, context, key, kept=True), stop) for key in KEYS[:4]),
            *(Client(over_http(port, context, key, kept=False), stop) for key in KEYS[4:8]),
            *(Client(over_grpc(port, credentials, key), stop) for key in KEYS[8:]),
        ]
        try:
            for upgrade in range(UPGRADES):
                for index in (0, 1):
                    instances.replace(index, version=2 - upgrade % 2)
        finally:
            stop.set()
            for client in clients:
                client.join()
    assert [client.failures for client in clients] == [[]] * len(clients)
    for kind in (clients[:8], clients[8:]):  # the answers of HTTP, and those of gRPC
        answers = sum((client.answers for client in kind), Counter())
        assert {version for version, _ in answers} == {"1", "2"}
        assert len(answers) == 2, "a version has one answer to one image"
    print(sum(sum(client.answers.values()) for client in clients), "requests")
