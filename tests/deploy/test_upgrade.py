"""A rolling upgrade: two instances behind a proxy are replaced in turn while clients ask.

`UPGRADES=10` replaces both ten times. `LENET_TEST_OLD_ROOT` names a checkout of an older version,
which takes turns with this one; without it only the weights differ.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import threading
from collections import Counter
from pathlib import Path

import grpc
import pytest

from benchmarks.grpc_stub import Stub
from lenet.model import Model
from service.forms import open_inference_pb2 as pb
from tests.deploy.proxies import PROXIES, Certificates, Instances, nginx
from tests.service_process import PATIENCE_S, PROGRAM

pytestmark = pytest.mark.process

UPGRADES = int(os.environ.get("UPGRADES", "1"))
OLD_ROOT = Path(os.environ.get("LENET_TEST_OLD_ROOT", PROGRAM))
KEYS = [f"the-key-of-client-{number:03}" for number in range(12)]
PAUSE_S = 0.012  # nginx lets 100 requests a second of each key pass
GRACE_S = "2"  # Envoy asks /readyz once a second
IMAGE = bytes(range(256)) * 3 + bytes(16)
AGAIN = {
    "name": [{"service": "inference.GRPCInferenceService"}],
    "retryPolicy": {
        "maxAttempts": 3,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    },
}
"""nginx keeps no call of gRPC that it sent to an instance whose last GOAWAY was on its way, which a
busy machine delays; a client sends it again, as deploy/nginx says."""


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
    connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=context)
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


def over_grpc(port, credentials, key, again):
    """A function that predicts on one channel, and again where that is allowed."""
    options = [("grpc.service_config", json.dumps({"methodConfig": [AGAIN] * again}))]
    channel = grpc.secure_channel(f"localhost:{port}", credentials, options)
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
        answer = infer(request, timeout=PATIENCE_S, metadata=metadata)
        return answer.model_version, b"".join(answer.raw_output_contents)

    return ask


@pytest.mark.parametrize("proxy", PROXIES)
def test_no_request_is_lost_when_two_instances_behind_a_proxy_are_replaced(
    proxy, tmp_path, random_weights, tiny
):
    for version in (1, 2):
        (tmp_path / f"weights-{version}" / "lenet").mkdir(parents=True)
        path = tmp_path / f"weights-{version}" / "lenet" / f"{version}.safetensors"
        random_weights(Model("lenet", tiny.blocks), version).write(path)

    def start(index, version):
        weights, root = tmp_path / f"weights-{version}", OLD_ROOT if version == 1 else PROGRAM
        instances.start(index, weights, "--grace-s", GRACE_S, root=root)

    instances, certificates = Instances(tmp_path, KEYS), Certificates(tmp_path)
    context = ssl.create_default_context(cafile=certificates.authority)
    credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
    stop, clients = threading.Event(), []
    with contextlib.ExitStack() as opened:
        opened.callback(instances.kill)
        for index in (0, 1):
            start(index, version=1)
        port = opened.enter_context(proxy(tmp_path, certificates, instances.ports))
        try:
            for number, key in enumerate(KEYS):
                ask = (
                    over_grpc(port, credentials, key, again=proxy is nginx)
                    if number < 4
                    else over_http(port, context, key, kept=number < 8)
                )
                clients.append(Client(ask, stop))
            for upgrade in range(UPGRADES):
                for index in (0, 1):
                    instances.stop(index)
                    start(index, version=2 - upgrade % 2)
        finally:
            stop.set()
            for client in clients:
                client.join()
    assert [client.failures for client in clients] == [[]] * len(KEYS)
    for kind in (clients[:4], clients[4:]):  # the answers over gRPC, and those over HTTP
        answers = sum((client.answers for client in kind), Counter())
        assert {version for version, _ in answers} == {"1", "2"}
        assert len(answers) == 2, "a version has one answer to one image"
        assert answers.total() > 100 * UPGRADES
