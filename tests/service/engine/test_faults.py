"""Real processes whose device is lost: an injected fault on the CPU, which only claims it."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.grpc_stub import Stub
from service.api import health_pb2
from service.errors import ExitCode
from service.forms import open_inference_pb2 as pb
from tests.service_process import PATIENCE_S

POISON, HANG = signal.SIGUSR2, signal.SIGUSR1


WITHOUT_METRICS = """
import sys
from service import __main__
from service.observe.metrics import Metrics
def fail(*_):
    raise OSError(28, "No space left on device")
def lost(*_):
    Metrics.flush = fail
    fail()
if __name__ == "__main__":
    Metrics.device_lost = lost
    sys.exit(__main__.main())
"""
"""A service whose metrics can no longer be written when it loses its device."""

TENSOR = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=(1, 28, 28))
INFER = pb.ModelInferRequest(inputs=[TENSOR], raw_input_contents=[bytes(784)])
HEALTH = health_pb2.HealthCheckRequest()


class Caller:
    """One connection, open before anything happens; a service that is gone answers None."""

    def __init__(self, service):
        self._connection = HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)
        self.ask("GET", "/healthz")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.close()

    def ask(self, method, path, *request):
        """(status, headers, body), or None."""
        try:
            self._connection.request(method, path, *request)
            response = self._connection.getresponse()
            return response.status, response.headers, response.read().decode()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return None

    def predict(self):
        headers = {"Content-Type": "application/octet-stream"}
        return self.ask("POST", "/predict", bytes(784), headers)


def assert_unavailable(answer):
    status, headers, body = answer
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert '"code":"unavailable"' in body
    assert "lost its device" in body


def assert_not_ready(answer):
    """The probe was refused, or what answered is gone."""
    assert answer is None or answer[0] == 503


def counted(service, name, label):
    """The samples called `name`, by one of their labels, summed, as any worker exposes them."""
    with Caller(service) as caller:
        answer = caller.ask("GET", "/metrics")
    found = Counter()
    for family in text_string_to_metric_families(answer[2]):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels[label]] += sample.value
    return found


def losses(service):
    """How often a device was lost, by reason."""
    return counted(service, "lenet_device_losses_total", "reason")


def inject(service, fault, pid=None):
    """Send the signal to the service or to one of its workers, and wait until it was heard."""
    before = len([line for line in service.lines if "injected fault" in line])
    os.kill(pid or service.process.pid, fault)
    service.wait_for("the next batch gets an injected fault", before + 1)


@pytest.mark.parametrize("counts", [True, False])
def test_a_poisoned_batch_ends_the_process_with_7_and_its_caller_may_try_again(
    start, tmp_path, counts
):
    (tmp_path / "without_metrics.py").write_text(WITHOUT_METRICS)
    program = {} if counts else {"program": [tmp_path / "without_metrics.py"]}
    service = start("--fault-injection", **program).ready()
    with Caller(service) as caller, Caller(service) as probe, Caller(service) as other:
        assert caller.predict()[0] == 200
        assert probe.ask("GET", "/readyz")[0] == 200
        inject(service, POISON)
        assert_unavailable(caller.predict())
        assert_not_ready(probe.ask("GET", "/readyz"))
        alive = probe.ask("GET", "/healthz")
        assert alive is None or alive[0] == 200, "it lives until it is gone"
        later = other.predict()
        if later is not None:
            assert_unavailable(later)
    assert service.wait() == ExitCode.DEVICE
    if counts:
        (error,) = [line for line in service.lines if "ERROR" in line]
        assert "the device is lost, this process ends: context-lenet-0: poisoned for a" in error
        assert "Traceback" not in service.log


def test_whoever_runs_or_waits_is_answered_when_a_batch_hangs(start):
    service = start("--fault-injection", "--hang-timeout-s", "2").ready()
    with (
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(12) as threads,
        grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel,
    ):
        stub = Stub(channel)
        assert stub.ServerReady(pb.ServerReadyRequest()).ready
        callers = [stack.enter_context(Caller(service)) for _ in range(11)]
        probe = stack.enter_context(Caller(service))
        inject(service, HANG)
        answers = [threads.submit(caller.predict) for caller in callers]
        infer = stub.ModelInfer.future(INFER)
        assert probe.ask("GET", "/healthz")[0] == 200
        assert probe.ask("GET", "/readyz")[0] == 200
        for answer in answers:
            assert_unavailable(answer.result(PATIENCE_S))
        with pytest.raises(grpc.RpcError) as caught:
            infer.result(PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        assert_not_ready(probe.ask("GET", "/readyz"))
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        with contextlib.suppress(grpc.RpcError):  # it is gone
            assert check(HEALTH).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert service.wait() == ExitCode.DEVICE
    (error,) = [line for line in service.lines if "ERROR" in line]
    assert "context-lenet-0 has been at the same work for 2 s" in error


def until_lost(service):
    """Ask until a worker says that it lost its device."""
    give_up_s = time.monotonic() + PATIENCE_S
    answer = None
    while (answer is None or answer[0] == 200) and time.monotonic() < give_up_s:
        with Caller(service) as caller:
            answer = caller.predict()
    assert_unavailable(answer)


@pytest.mark.states(
    "metrics", "`lenet_device_losses_total`: sticky", found="a fault that the test injected once"
)
def test_a_worker_that_lost_its_device_is_replaced_while_the_other_answers(start):
    service = start("--workers", "2", "--fault-injection").ready(workers=2)
    struck, other = service.started_workers()
    assert losses(service) == {"sticky": 0, "hang": 0}
    inject(service, POISON, struck)
    until_lost(service)
    service.wait_for(f"ERROR .* worker {struck} ended with 7")
    service.ready(workers=3)
    assert other in service.started_workers()
    with Caller(service) as caller:
        assert caller.ask("GET", "/readyz")[0] == 200
        assert caller.predict()[0] == 200
    assert losses(service) == {"sticky": 1, "hang": 0}
    assert counted(service, "lenet_requests_total", "outcome")["unavailable"] >= 1
    service.signal()
    assert service.wait() == ExitCode.STOPPED
