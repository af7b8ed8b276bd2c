"""A real Prometheus that scrapes a real service, and requests with every kind of outcome."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx
import yaml

from benchmarks.grpc_stub import Stub
from service.forms import open_inference_pb2 as pb
from tests.deploy.proxies import free_ports, issue
from tests.service_process import PATIENCE_S, PROJECT, Service

DASHBOARD = PROJECT / "deploy/grafana/dashboards/lenet-serve.json"
KEY = "a key of 16 characters or more"
STARTS = (
    *("--workers", "2", "--api-keys", KEY, "--fault-injection", "--hang-timeout-s", "3"),
    *("--max-queue-rows", "8", "--max-images", "8", "--max-body-bytes", "100000"),
)
"""Flags of a service to which the requests below go; those of TLS come from `certificate`."""

OUTCOMES = frozenset(
    {
        *("ok", "invalid_input", "unauthorized", "unknown_model", "too_large"),
        *("unsupported_media_type", "overloaded", "deadline_exceeded", "body_timeout"),
        *("cancelled", "unavailable"),
    }
)
"""What the requests below cause. `internal` and `inference_failed` are faults of the service, and
`forbidden` is of requests to the repository, which are not counted."""

IMAGE = bytes(784)


def certificate(folder: Path) -> tuple[str, ...]:
    """Flags for TLS, with files that are made in `folder`."""
    issue(folder, "localhost", not_after=datetime.now(UTC) + timedelta(days=90))
    return "--tls-certificate", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")


def query(target: dict[str, str], interval: str = "15s") -> str:
    """The query of a panel's target, with Grafana's variables filled in."""
    expr = target["expr"].replace("$__rate_interval", interval)
    return expr.replace("$job", "lenet-serve").replace("$instance", ".*")


class Prometheus:
    """The API of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/"

    def query(self, expr: str) -> list[dict]:
        """The series of `expr` now, without those that are not a number."""
        found = self._ask("query", query=expr)
        return [one for one in found if one["value"][1] not in ("NaN", "+Inf", "-Inf")]

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[dict]:
        """The series of `expr` over time."""
        return self._ask("query_range", query=expr, start=start_s, end=end_s, step=step_s)

    def _ask(self, what: str, **parameters: object) -> list[dict]:
        answer = httpx.get(self._url + what, params=parameters, timeout=PATIENCE_S)
        return answer.raise_for_status().json()["data"]["result"]

    def wait_for(self, expr: str) -> None:
        """Wait until `expr` has a result."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.query(expr):
                    return
            assert time.monotonic() < until_s, f"no {expr}"
            time.sleep(0.2)


@contextlib.contextmanager
def prometheus(folder: Path, scraped: int) -> Iterator[Prometheus | None]:
    """A Prometheus with the configuration and the rules of deploy/prometheus that scrapes the port
    `scraped`; None if it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    deployed = PROJECT / "deploy/prometheus"
    config = yaml.safe_load((deployed / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(deployed / "rules/*.yml")]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"localhost:{scraped}"]}]
    job |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
    job["authorization"] = {"credentials": KEY}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [program, f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'series'}", f"--web.listen-address={address}"]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=null, stderr=null) as process:
        try:
            yield Prometheus(address)
        finally:
            process.terminate()


def _post(
    service: Service,
    body: bytes | Iterator[bytes],
    path: str = "/predict",
    timeout_s: float = PATIENCE_S,
    **headers: str,
) -> int:
    """The status of the answer to a request with the key."""
    kind = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/octet-stream"}
    kind |= {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"https://localhost:{service.port}{path}"
    options = {"content": body, "verify": False, "timeout": timeout_s}
    return httpx.post(url, headers=kind, **options).status_code


def good_requests(service: Service, folder: Path) -> None:
    """Predictions over both protocols, an explanation and a picture."""
    for rows in (1, 3, 8):
        assert _post(service, IMAGE * rows) == 200
    picture = (PROJECT / "docs/images/seven.png").read_bytes()
    assert _post(service, picture, Content_Type="image/png") == 200
    assert _post(service, IMAGE, "/explain") == 200
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    tensor = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=(1, 784))
    request = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[IMAGE])
    metadata = [("authorization", f"Bearer {KEY}")]
    with grpc.secure_channel(f"localhost:{service.grpc_port}", credentials) as channel:
        Stub(channel).ModelInfer(request, timeout=PATIENCE_S, metadata=metadata)


def _stalled() -> Iterator[bytes]:
    yield IMAGE[1:]
    time.sleep(0.5)
    yield IMAGE[:1]


def bad_requests(service: Service) -> None:
    """One of each mistake that a client can make."""
    assert _post(service, b"7") == 400
    assert _post(service, IMAGE, Authorization="") == 401
    assert _post(service, IMAGE, "/predict?model=none") == 404
    assert _post(service, _stalled(), X_Request_Timeout_Ms="100") == 408
    assert _post(service, bytes(100_001)) == 413
    assert _post(service, IMAGE, Content_Type="text/html") == 415


def lose_devices(service: Service) -> None:
    """The next batch of each worker hangs; what comes meanwhile waits, is refused, late or left.

    Both workers end, and are replaced.
    """
    for worker in service.started_workers()[-2:]:
        os.kill(worker, signal.SIGUSR1)
    service.wait_for("gets an injected fault: hang", 2)
    statuses: list[int] = []

    def ask(images: int, headers: dict[str, str]) -> None:
        with contextlib.suppress(httpx.HTTPError):
            statuses.append(_post(service, IMAGE * images, **headers))

    def all_at_once(count: int, images: int, **headers: str) -> list[threading.Thread]:
        threads = [threading.Thread(target=ask, args=(images, headers)) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    asked = all_at_once(4, 1)  # each worker has one that it computes
    time.sleep(0.5)
    asked += all_at_once(2, 2, X_Request_Timeout_Ms="300")
    for _ in range(2):
        with contextlib.suppress(httpx.ReadTimeout):  # it leaves
            _post(service, IMAGE, timeout_s=0.3)
    asked += all_at_once(6, 8)
    for thread in asked:
        thread.join()
    assert {429, 503, 504} <= set(statuses), statuses
    service.wait_for(r"worker \d+ ended with 7", 2)
    service.ready(workers=4)
