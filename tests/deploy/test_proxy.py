"""nginx and Envoy with the configurations of deploy/."""

from __future__ import annotations

import contextlib
import http.client
import ssl

import grpc
import pytest

from benchmarks.grpc_stub import Stub, health_stub
from service.api import health_pb2
from service.forms import open_inference_pb2 as pb
from tests.deploy.proxies import PROXIES, Certificates, Instances
from tests.service_process import PATIENCE_S

pytestmark = pytest.mark.process

KEYS = ("the-key-of-a-hasty-client", "the-key-of-another-client")
OK = grpc.StatusCode.OK


class Clients:
    """Clients over HTTPS and gRPC of one port, with one of the keys or none."""

    def __init__(self, port, certificates):
        self._port = port
        self._context = ssl.create_default_context(cafile=certificates.authority)
        credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
        self.channel = grpc.secure_channel(f"localhost:{port}", credentials)

    def http(self, method, path, body=None, key=None):
        """Status and body of the answer."""
        connection = http.client.HTTPSConnection(
            "localhost", self._port, timeout=PATIENCE_S, context=self._context
        )
        headers = {"Content-Type": "application/octet-stream"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def grpc(self, key=None, count=1):
        """The statuses of so many predictions at once."""
        request = pb.ModelInferRequest(
            model_name="lenet",
            inputs=[pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8")],
            raw_input_contents=[bytes(784)],
        )
        request.inputs[0].shape[:] = [1, 28, 28]
        metadata = [] if key is None else [("authorization", f"Bearer {key}")]
        infer = Stub(self.channel).ModelInfer.future
        calls = [infer(request, timeout=PATIENCE_S, metadata=metadata) for _ in range(count)]
        return {call.code() for call in calls}


@pytest.mark.parametrize("proxy", PROXIES)
def test_a_proxy_lets_predictions_pass_and_limits_each_key(proxy, tmp_path, tiny_weights):
    certificates, instances = Certificates(tmp_path), Instances(tmp_path, KEYS)
    with contextlib.ExitStack() as opened:
        opened.callback(instances.kill)
        for index in (0, 1):
            instances.start(index, tiny_weights)
        port = opened.enter_context(proxy(tmp_path, certificates, instances.ports, refills=False))
        clients = Clients(port, certificates)
        opened.callback(clients.channel.close)

        hasty, other = KEYS
        assert clients.http("POST", "/predict", bytes(784), other)[0] == 200
        assert clients.http("POST", "/predict", bytes(784 * 16_384), other)[0] == 200
        assert clients.http("POST", "/v1/models/lenet:predict", b"{}", other)[0] == 400
        assert clients.http("POST", "/v2/models/lenet/versions/1/infer", b"{}", other)[0] == 400
        assert clients.grpc(other) == {OK}
        assert clients.http("POST", "/predict", bytes(784))[0] == 401
        assert clients.grpc() == {grpc.StatusCode.UNAUTHENTICATED}

        for path in ("/", "/docs", "/healthz", "/readyz", "/metrics", "/info", "/v2/models/lenet"):
            assert clients.http("GET", path, None, other)[0] == 404, path
        assert clients.http("POST", "/v2/repository/index", b"{}", other)[0] == 404
        with pytest.raises(grpc.RpcError):
            health_stub(clients.channel).Check(health_pb2.HealthCheckRequest())

        assert clients.grpc(hasty, count=500) == {OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert clients.http("POST", "/predict", bytes(784), hasty)[0] == 429
        assert clients.grpc(other, count=50) == {OK}

        for index in (0, 1):
            instances.stop(index)
        assert clients.http("POST", "/predict", bytes(784), other)[0] in (502, 503)
        assert clients.grpc(other) == {grpc.StatusCode.UNAVAILABLE}
