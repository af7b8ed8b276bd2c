"""A real Prometheus that scrapes a real service, and requests with every kind of outcome."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from urllib.error import HTTPError

import grpc
import trustme
import yaml

from service.forms import open_inference_pb2 as pb
from tests.service_process import PATIENCE_S, Service

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/lenet-serve.json"
KEY = "a key of 16 characters or more"
HANG_S = 3
STARTS = (
    *("--workers", "2", "--api-keys", KEY, "--fault-injection"),
    *("--hang-timeout-s", str(HANG_S), "--max-queue-rows", "8", "--max-images", "8"),
    *("--max-body-bytes", "100000"),
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

_AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
_BYTES = {**_AUTHORIZED, "Content-Type": "application/octet-stream"}
_INSECURE = ssl.create_default_context()
_INSECURE.check_hostname, _INSECURE.verify_mode = False, ssl.CERT_NONE


def certificate(folder: Path) -> tuple[str, ...]:
    """Flags for TLS, with files that are made in `folder`."""
    end = datetime.now(UTC) + timedelta(days=90)
    leaf = trustme.CA().issue_cert("localhost", not_after=end)
    leaf.private_key_pem.write_to_path(folder / "server.key")
    leaf.cert_chain_pems[0].write_to_path(folder / "server.pem")
    return "--tls-certificate", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")


def query(target: dict[str, str], interval: str = "15s") -> str:
    """The query of a panel's target, with Grafana's variables filled in."""
    expr = target["expr"].replace("$__rate_interval", interval)
    return expr.replace("$job", "lenet-serve").replace("$instance", ".*")


class Prometheus:
    """A Prometheus with the configuration and the rules of deploy/prometheus, on a free port."""

    def __init__(self, program: str, folder: Path, scraped: int) -> None:
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(ROOT / "deploy/prometheus/rules/*.yml")]
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": [f"localhost:{scraped}"]}]
        job |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
        job["authorization"] = {"credentials": KEY}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self.process = subprocess.Popen(
            [
                *(program, f"--config.file={folder / 'prometheus.yml'}"),
                f"--storage.tsdb.path={folder / 'series'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def query(self, expr: str) -> list[dict]:
        """The series of `expr` now, without those that are not a number."""
        found = self._ask("query", query=expr)
        return [one for one in found if one["value"][1] not in ("NaN", "+Inf", "-Inf")]

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[dict]:
        """The series of `expr` over time."""
        return self._ask("query_range", query=expr, start=start_s, end=end_s, step=step_s)

    def _ask(self, what: str, **parameters: object) -> list[dict]:
        text = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{what}?{text}") as answer:
            return json.load(answer)["data"]["result"]

    def wait_for(self, expr: str) -> None:
        """Wait until `expr` has a result."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self.query(expr):
                    return
            except HTTPError as exc:  # it holds the connection
                exc.close()
            except OSError:
                pass
            assert time.monotonic() < until_s, f"no {expr}"
            time.sleep(0.2)


@contextlib.contextmanager
def prometheus(folder: Path, scraped: int) -> Iterator[Prometheus | None]:
    """A Prometheus that scrapes port `scraped`; None if it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    running = Prometheus(program, folder, scraped)
    try:
        yield running
    finally:
        running.process.terminate()
        running.process.wait()


def _ask(port: int, method: str, path: str, *request: object) -> int:
    connection = HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=_INSECURE)
    with contextlib.closing(connection):
        connection.request(method, path, *request)
        return connection.getresponse().status


def good_requests(service: Service, folder: Path) -> None:
    """Predictions over both protocols, an explanation and a picture."""
    for rows in (1, 3, 8):
        assert _ask(service.port, "POST", "/predict", bytes(784 * rows), _BYTES) == 200
    picture = (ROOT / "docs/images/seven.png").read_bytes()
    kind = {**_AUTHORIZED, "Content-Type": "image/png"}
    assert _ask(service.port, "POST", "/predict", picture, kind) == 200
    assert _ask(service.port, "POST", "/explain", bytes(784), _BYTES) == 200
    credentials = grpc.ssl_channel_credentials((folder / "server.pem").read_bytes())
    tensor = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=(1, 784))
    request = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[bytes(784)])
    metadata = [(name.lower(), value) for name, value in _AUTHORIZED.items()]
    with grpc.secure_channel(f"localhost:{service.grpc_port}", credentials) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        infer(request.SerializeToString(), timeout=PATIENCE_S, metadata=metadata)


def bad_requests(service: Service) -> None:
    """One of each mistake that a client can make."""
    late = {**_BYTES, "X-Request-Timeout-Ms": "100"}
    for expected, method, path, *request in (
        (400, "POST", "/predict", b"7", _BYTES),
        (401, "POST", "/predict", bytes(784)),
        (404, "POST", "/predict?model=none", bytes(784), _BYTES),
        (413, "POST", "/predict", bytes(100_001), _BYTES),
        (415, "POST", "/predict", bytes(784), {**_AUTHORIZED, "Content-Type": "text/csv"}),
    ):
        assert _ask(service.port, method, path, *request) == expected
    with _raw(service.port, late) as connection:  # the body never comes
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def lose_devices(service: Service) -> None:
    """The next batch of each worker hangs; what comes meanwhile waits, is refused, late or left.

    Both workers end, and are replaced.
    """
    workers = service.started_workers()[-2:]
    for worker in workers:
        os.kill(worker, signal.SIGUSR1)
    service.wait_for("gets an injected fault: hang", 2)
    statuses: list[int] = []

    def ask(images: int, **headers: str) -> None:
        with contextlib.suppress(OSError, HTTPException):
            more = {name.replace("_", "-"): value for name, value in headers.items()}
            found = _ask(service.port, "POST", "/predict", bytes(784 * images), {**_BYTES, **more})
            statuses.append(found)

    def all_at_once(count: int, *arguments: int, **headers: str) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=ask, args=arguments, kwargs=headers) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        return threads

    hung = all_at_once(4, 1)  # each worker has one that it computes
    time.sleep(0.5)
    waiting = all_at_once(2, 2, X_Request_Timeout_Ms="300")
    leaving = [_raw(service.port, _BYTES, bytes(784)) for _ in range(2)]
    time.sleep(0.3)
    for connection in leaving:
        connection.close()
    refused = all_at_once(6, 8)
    for thread in (*hung, *waiting, *refused):
        thread.join()
    assert {429, 503, 504} <= set(statuses), statuses
    service.wait_for(r"worker \d+ ended with 7", 2)
    service.ready(workers=4)


def _raw(port: int, headers: dict[str, str], body: bytes = b"") -> ssl.SSLSocket:
    plain = socket.create_connection(("localhost", port), PATIENCE_S)
    connection = _INSECURE.wrap_socket(plain, server_hostname="localhost")
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 784\r\n{lines}\r\n"
    connection.sendall(head.encode() + body)
    return connection
