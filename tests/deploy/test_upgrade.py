"""Two instances behind nginx or Envoy with the configurations of deploy/."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections import Counter

import grpc
import httpx
import pytest

from benchmarks.grpc_stub import Stub, health_stub
from lenet.model import Model
from service.api import health_pb2
from service.forms import open_inference_pb2 as pb
from tests.deploy.proxies import PROXIES, Instances, free_ports, issue, nginx
from tests.service_process import PATIENCE_S

pytestmark = pytest.mark.process

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
TENSOR = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=(1, 28, 28))
REQUEST = pb.ModelInferRequest(model_name="lenet", inputs=[TENSOR], raw_input_contents=[IMAGE])


class Client:
    """A client over HTTPS and gRPC of one port, with a key or without."""

    def __init__(self, stack, port, folder, key=None, again=False):
        headers = {"Content-Type": "application/octet-stream"}
        headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
        self._metadata = [("authorization", f"Bearer {key}")] * (key is not None)
        trusted = ssl.create_default_context(cafile=folder / "ca.pem")
        limits = {"verify": trusted, "timeout": PATIENCE_S, "headers": headers}
        url = f"https://localhost:{port}"
        self.http = stack.enter_context(httpx.Client(base_url=url, **limits))
        credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
        options = [("grpc.service_config", json.dumps({"methodConfig": [AGAIN] * again}))]
        channel = grpc.secure_channel(f"localhost:{port}", credentials, options)
        self.channel = stack.enter_context(channel)
        self._infer = Stub(channel).ModelInfer

    def post(self, body=IMAGE, path="/predict", **headers):
        return self.http.post(path, content=body, headers=headers)

    def codes(self, count=1):
        """The statuses of so many calls at once."""
        options = {"timeout": PATIENCE_S, "metadata": self._metadata}
        calls = [self._infer.future(REQUEST, **options) for _ in range(count)]
        return {call.code().name for call in calls}

    def version_over_http(self, **headers):
        """The version that answers, and its answer."""
        answer = self.post(**headers).raise_for_status()
        return answer.headers["X-Model-Version"], answer.content

    def version_over_grpc(self):
        answer = self._infer(REQUEST, timeout=PATIENCE_S, metadata=self._metadata)
        return answer.model_version, b"".join(answer.raw_output_contents)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, random_weights, tiny):
    """A folder with certificates and two versions of weights."""
    folder = tmp_path_factory.mktemp("upgrade")
    issue(folder, "localhost")
    for version in (1, 2):
        path = folder / f"weights-{version}" / "lenet" / f"{version}.safetensors"
        path.parent.mkdir(parents=True)
        random_weights(Model("lenet", tiny.blocks), version).write(path)
    return folder


@pytest.fixture(scope="module")
def start(folder):
    """`start(index)` replaces an instance, of version 1 by version 2 or back; both run already."""
    versions = [2, 2]

    def start_(index):
        if index in instances.running:
            instances.stop(index)
        version = versions[index] = 3 - versions[index]
        instances.start(index, folder / f"weights-{version}", "--grace-s", GRACE_S)

    instances = start_.instances = Instances(folder, KEYS)
    try:
        for index in (0, 1):
            start_(index)
        yield start_
    finally:
        for service in instances.running.values():
            service.end()


@pytest.mark.parametrize("proxy", PROXIES)
def test_a_proxy_lets_predictions_pass_and_limits_each_key(proxy, folder, start):
    with contextlib.ExitStack() as stack:
        ports = start.instances.ports
        port = stack.enter_context(proxy(folder, ports, refills=False))
        hasty, other, nobody = (Client(stack, port, folder, key) for key in (*KEYS[:2], None))
        infer = "/v2/models/lenet/versions/1/infer"
        assert other.post().status_code == 200
        assert other.post(bytes(784 * 16_384)).status_code == 200
        assert other.post(b"{}", "/v1/models/lenet:predict").status_code == 400
        assert other.post(b"{}", infer).status_code == 400
        assert nobody.post().status_code == 401
        assert (other.codes(), nobody.codes()) == ({"OK"}, {"UNAUTHENTICATED"})
        for path in ("/", "/docs", "/healthz", "/readyz", "/metrics", "/info", "/v2/models/lenet"):
            assert other.http.get(path).status_code == 404, path
        assert other.post(b"{}", "/v2/repository/index").status_code == 404
        with pytest.raises(grpc.RpcError):
            health_stub(other.channel).Check(health_pb2.HealthCheckRequest())
        assert hasty.codes(500) == {"OK", "RESOURCE_EXHAUSTED"}
        assert hasty.post().status_code == 429
        assert other.codes(50) == {"OK"}
    with contextlib.ExitStack() as stack:
        nowhere = list(zip(free_ports(2), free_ports(2), strict=True))
        client = Client(stack, stack.enter_context(proxy(folder, nowhere)), folder, KEYS[1])
        assert client.post().status_code in (502, 503)
        assert client.codes() == {"UNAVAILABLE"}


@pytest.mark.parametrize("proxy", PROXIES)
def test_no_request_is_lost_when_two_instances_behind_a_proxy_are_replaced(proxy, folder, start):
    stop, answers, failures = threading.Event(), (Counter(), Counter()), []

    def ask(kind, predict, options):
        while not stop.wait(PAUSE_S):
            try:
                answers[kind][predict(**options)] += 1
            except (httpx.HTTPError, grpc.RpcError) as exc:
                failures.append(repr(exc))

    with contextlib.ExitStack() as stack:
        port = stack.enter_context(proxy(folder, start.instances.ports))
        threads = []
        for number, key in enumerate(KEYS):
            client, over_grpc = Client(stack, port, folder, key, again=proxy is nginx), number < 4
            predict = client.version_over_grpc if over_grpc else client.version_over_http
            options = {"Connection": "close"} if number >= 8 else {}  # on a new one each time
            threads.append(threading.Thread(target=ask, args=(over_grpc, predict, options)))
            threads[-1].start()
        try:
            for index in (0, 1):
                start(index)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert failures == []
    for kind in answers:  # over HTTP, and over gRPC
        assert {version for version, _ in kind} == {"1", "2"}
        assert len(kind) == 2, "a version has one answer to one image"
        assert kind.total() > 100
