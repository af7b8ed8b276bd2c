"""Rules of every route and every call: keys, TLS, CORS, ids, the access log."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import signal
import socket
import ssl
import threading
import time
from datetime import UTC, datetime

import grpc
import httpx
import pytest
import trustme

from benchmarks.grpc_stub import health_stub
from service import healthcheck
from service.api import health_pb2, reflection_pb2
from service.errors import ExitCode
from service.forms import open_inference_pb2 as pb
from tests.service_process import PATIENCE_S, grpc_call

KEY, OTHER = "a-key-that-nobody-knows", "another/key+that=nobody"
ADMIN = "a-key-of-an-administrator"
SEVEN = bytes(784)
BYTES = {"Content-Type": "application/octet-stream"}
RAW = {"Inference-Header-Content-Length": "0"}
TENSORFLOW = json.dumps({"instances": [[0] * 784]})
HEALTH = ("/healthz", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready")
PAGES = ("/", "/page/page.js", "/openapi.json", "/docs", "/docs/static/swagger-ui.css")
INDEX = ("/info", "/metrics", "/v2", "/v2/models", "/v1/models")
ROUTES = [
    *(("GET", path, None, {}) for path in INDEX),
    ("GET", "/v2/models/stats", None, {}),
    ("POST", "/predict", SEVEN, BYTES),
    ("POST", "/explain", SEVEN, BYTES),
    ("POST", "/invocations", SEVEN, BYTES),
    *(
        route
        for model in ("/models/lenet", "/models/lenet/versions/1", "/models/lenet/labels/1")
        for route in (
            *(
                ("GET", f"/v2{model}{rest}", None, {})
                for rest in ("", "/ready", "/config", "/stats")
            ),
            ("POST", f"/v2{model}/infer", SEVEN, RAW),
            ("GET", f"/v1{model}", None, {}),
            ("GET", f"/v1{model}/metadata", None, {}),
            ("POST", f"/v1{model}:predict", TENSORFLOW, {}),
        )
        if "labels" not in model or route[1].startswith("/v1")
    ),
]
REPOSITORY = [
    ("POST", "/v2/repository/index", None, {}),
    ("POST", "/v2/repository/models/lenet/unload", None, {}),
    ("POST", "/v2/repository/models/lenet/load", None, {}),
]
TENSOR = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=(1, 784))
LIST = reflection_pb2.ServerReflectionRequest(list_services="")
CALLS = {
    "ServerMetadata": pb.ServerMetadataRequest(),
    "ModelMetadata": pb.ModelMetadataRequest(name="lenet"),
    "ModelReady": pb.ModelReadyRequest(name="lenet"),
    "ModelConfig": pb.ModelConfigRequest(name="lenet"),
    "ModelStatistics": pb.ModelStatisticsRequest(name="lenet"),
    "ModelInfer": pb.ModelInferRequest(inputs=[TENSOR], raw_input_contents=[SEVEN]),
}
ADMIN_CALLS = {
    "RepositoryIndex": pb.RepositoryIndexRequest(),
    "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name="lenet"),
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name="lenet"),
}


class Certificates:
    """Files of an authority, a server's certificate, and a client's."""

    def __init__(self, folder):
        authority = self.authority = trustme.CA()
        self.folder = folder
        self.ca, self.client = folder / "ca.pem", folder / "client.pem"
        authority.cert_pem.write_to_path(self.ca)
        authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(self.client)
        self.flags = (
            *("--tls-certificate", str(folder / "server.pem")),
            *("--tls-key", str(folder / "server.key")),
        )
        self.renew()

    def renew(self, kind=trustme.KeyType.ECDSA, end=None):
        names = ("127.0.0.1", "localhost")
        server = self.authority.issue_cert(*names, key_type=kind, not_after=end)
        server.private_key_pem.write_to_path(self.folder / "server.key")
        (self.folder / "server.pem").write_bytes(
            b"".join(blob.bytes() for blob in server.cert_chain_pems)
        )

    def context(self, *, client=False):
        context = ssl.create_default_context(cafile=self.ca)
        if client:
            context.load_cert_chain(self.client)
        return context

    def credentials(self, *, client=False):
        pem = self.client.read_bytes() if client else None
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), pem, pem)


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


def ask(service, method, path, body=None, headers=(), context=None):
    """Status, headers and body of an answer."""
    kind = http.client.HTTPConnection
    options = {}
    if context is not None:
        kind, options = http.client.HTTPSConnection, {"context": context}
    connection = kind("127.0.0.1", service.port, timeout=PATIENCE_S, **options)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def call(service, name, request, key=None, credentials=None, **metadata):
    """How a call ends: the name of its status."""
    address = f"localhost:{service.grpc_port}"
    channel = (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials)
    )
    metadata |= {} if key is None else {"authorization": f"Bearer {key}"}
    path = name if name.startswith("/") else f"/inference.GRPCInferenceService/{name}"
    with channel:
        try:
            channel.unary_unary(path)(
                request.SerializeToString(), timeout=PATIENCE_S, metadata=tuple(metadata.items())
            )
        except grpc.RpcError as exc:
            return exc.code().name
    return "OK"


def assert_all_are_listed(document):
    """Every route of `document` and every call of the protocol is in the lists above."""
    served = {
        (method.upper(), path.format(model="lenet", version="1"))
        for path, methods in document["paths"].items()
        for method in methods
    }
    listed = {(method, path) for method, path, *_ in (*ROUTES, *REPOSITORY)}
    assert served - listed == {("GET", path) for path in (*HEALTH, "/")}
    calls = {call.name for call in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    others = {"ServerLive", "ServerReady", "ModelStreamInfer"}
    assert calls == {*CALLS, *ADMIN_CALLS, *others}


@pytest.mark.parametrize("by", ["wire", "uvicorn"])
def test_every_request_needs_a_key_but_those_for_health_and_pages(start, by):
    keys = ("--api-keys", f"{KEY},{OTHER}", "--admin-keys", ADMIN)
    service = start("--log-level", "debug", *keys, "--http-server", by).ready()
    assert_all_are_listed(json.loads(service.get("/openapi.json")[1]))
    for method, path, body, headers in (*ROUTES, *REPOSITORY):
        for wrong in ({}, bearer("wrong"), bearer(KEY[:-1]), {"Authorization": f"Basic {KEY}"}):
            status, found, answer = ask(service, method, path, body, {**headers, **wrong})
            assert (status, found["WWW-Authenticate"]) == (401, "Bearer"), path
            error = json.loads(answer)["error"]
            message = error if path.startswith(("/v1", "/v2")) else error["message"]
            assert message.startswith("authorization: got ")
        for key in (ADMIN,) if "repository" in path else (KEY, OTHER, ADMIN):
            right = {**headers, **bearer(key)}
            assert ask(service, method, path, body, right)[0] == 200, path
    for path in (*HEALTH, *PAGES):
        assert ask(service, "GET", path)[0] == 200
    for name, request in CALLS.items():
        for key in (None, "wrong"):
            assert call(service, name, request, key) == "UNAUTHENTICATED", name
        assert call(service, name, request, KEY) == "OK", name
    for name, request in ADMIN_CALLS.items():
        for key in (None, "wrong"):
            assert call(service, name, request, key) == "UNAUTHENTICATED", name
        assert call(service, name, request, KEY) == "PERMISSION_DENIED", name
        assert call(service, name, request, ADMIN) == "OK", name
    stream = CALLS["ModelInfer"]
    assert call(service, "ModelStreamInfer", stream, None) == "UNAUTHENTICATED"
    assert call(service, "ModelStreamInfer", stream, KEY) == "OK"
    reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    assert call(service, reflection, LIST, None) == "UNAUTHENTICATED"
    assert call(service, reflection, LIST, KEY) == "OK"
    for name in ("ServerLive", "ServerReady", "/grpc.health.v1.Health/Check"):
        assert call(service, name, pb.ServerLiveRequest()) == "OK"
    index = ADMIN_CALLS["RepositoryIndex"]
    assert call(service, "RepositoryIndex", index, **{"x-api-key": ADMIN}) == "OK"
    for authorization in (b"Bearer " + KEY.encode() + b"\xff", b"\xff"):
        with grpc_call(service.grpc_port, authorization=authorization) as connection:
            assert connection.recv(1000)
    with grpc.insecure_channel(f"localhost:{service.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError, match="expected one of inference") as caught:
            health_stub(channel).Check(health_pb2.HealthCheckRequest(service="none"))
        assert "lenet" not in caught.value.details(), "a client without a key learns no model names"
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    for key in (KEY, OTHER, ADMIN):
        assert key not in service.log


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "TLS, two workers"])
def test_one_port_carries_http_1_and_2_and_grpc(start, certificates, encrypted):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers = 1 + encrypted
    flags = certificates.flags if encrypted else ()
    service = start("--workers", str(workers), *flags, port=port, grpc_port=port).ready(workers)
    assert (service.port, service.grpc_port) == (port, port)
    context = certificates.context() if encrypted else None
    scheme = "https" if encrypted else "http"
    # In the clear a client has to know that there is HTTP/2; TLS says so.
    for version, first in (("HTTP/1.1", {}), ("HTTP/2", {"http1": encrypted, "http2": True})):
        with httpx.Client(verify=context or False, timeout=PATIENCE_S, **first) as client:
            address = f"{scheme}://localhost:{port}"
            answers = [
                client.post(f"{address}/predict", content=SEVEN, headers=BYTES),
                client.get(f"{address}/info"),
            ]
        assert [(one.http_version, one.status_code) for one in answers] == [(version, 200)] * 2
        assert answers[0].json()["model"] == "lenet"
        assert answers[1].json()["grpc_port"] == port
    credentials = certificates.credentials() if encrypted else None
    assert call(service, "ModelInfer", CALLS["ModelInfer"], credentials=credentials) == "OK"
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "Traceback" not in service.log


@pytest.mark.parametrize("by", ["wire", "uvicorn"])
def test_a_client_needs_a_certificate_with_mutual_tls(start, certificates, by):
    flags = (*certificates.flags, "--tls-client-ca", str(certificates.ca))
    service = start(*flags, "--http-server", by).ready()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(service, "GET", "/healthz", context=certificates.context())
    context = certificates.context(client=True)
    assert ask(service, "GET", "/healthz", context=context)[0] == 200
    for client, status in ((False, "UNAVAILABLE"), (True, "OK")):
        credentials = certificates.credentials(client=client)
        assert call(service, "ServerLive", pb.ServerLiveRequest(), None, credentials) == status


@pytest.mark.parametrize("secured", ["clear", "TLS", "mutual TLS"])
def test_the_health_check_of_the_image_needs_no_key_and_no_certificate(
    start, certificates, monkeypatch, secured
):
    flags = () if secured == "clear" else certificates.flags
    if secured == "mutual TLS":
        flags += ("--tls-client-ca", str(certificates.ca))
    service = start("--api-keys", KEY, *flags).ready()
    monkeypatch.setenv("LENET_PORT", str(service.port))
    for name, value in zip(flags[::2], flags[1::2], strict=True):
        monkeypatch.setenv("LENET_" + name[2:].upper().replace("-", "_"), value)
    assert healthcheck.obstacle() is None
    service.signal()
    service.wait()
    assert "ConnectionRefusedError" in healthcheck.obstacle()


@pytest.mark.states(
    "metrics",
    "`lenet_certificate_end_timestamp_seconds`",
    found="the date that the certificate was made with",
)
def test_the_certificate_is_read_again_on_a_hangup(start, certificates):
    service = start(*certificates.flags).ready()

    def serial_numbers():
        with (
            socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as plain,
            certificates.context().wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            yield secured.getpeercert()["serialNumber"]
        pem = ssl.get_server_certificate(
            ("127.0.0.1", service.grpc_port), ca_certs=certificates.ca, timeout=20
        )
        yield ssl.PEM_cert_to_DER_cert(pem)

    service.wait_for(r"certificate: read, its end is \d{4}-\d\d-\d\dT")
    before = list(serial_numbers())
    key = certificates.folder / "server.key"
    good = key.read_bytes()
    key.write_bytes(b"no key")
    service.signal(signal.SIGHUP)
    service.wait_for("certificate: not read again, still presenting the earlier one")
    assert list(serial_numbers()) == before
    key.write_bytes(good)
    # Another type of key has a place of its own in OpenSSL's context, beside the former one.
    for count, kind in enumerate((trustme.KeyType.RSA, trustme.KeyType.ECDSA), 1):
        end = datetime(2040 + count, 8, 9, 1, 2, 3, tzinfo=UTC)
        certificates.renew(kind, end)
        service.signal(signal.SIGHUP)
        service.wait_for(r"certificate: read again, its end is \d{4}-\d\d-\d\dT", count)
        *_, found = ask(service, "GET", "/metrics", context=certificates.context())
        (end_s,) = re.findall(rb"\nlenet_certificate_end_timestamp_seconds (\S+)\n", found)
        assert float(end_s) == end.timestamp()
        now = list(serial_numbers())
        assert not set(now) & set(before)
        before = now


ORIGIN = "https://digits.example"
IDS = {
    "X-Request-Id": "one/of-many",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}
EVERY = [
    *ROUTES,
    *(("GET", path, None, {}) for path in (*HEALTH, *PAGES)),
    ("GET", "/nothing", None, {}),
]


@pytest.mark.parametrize(("form", "by"), [("json", "wire"), ("text", "uvicorn")])
def test_every_answer_bears_its_id_and_is_in_the_access_log(start, tmp_path, form, by):
    flags = ("--access-log", form, "--admin-keys", ADMIN, "--http-server", by)
    with (tmp_path / "access").open("w") as output:
        service = start(*flags, output=output).ready()
    expected = []
    of_admin = [(*route, bearer(ADMIN)) for *route, _ in REPOSITORY]
    for method, path, body, headers in (*EVERY, *of_admin):
        status, found, answer = ask(service, method, path, body, {**headers, **IDS})
        assert found["X-Request-Id"] == IDS["X-Request-Id"]
        expected.append((f"{method} {path}", status, len(answer)))
    ask(service, "HEAD", "/metrics", headers=IDS)
    expected.append(("HEAD /metrics", 200, 0))
    assert "X-Request-Id" not in ask(service, "POST", "/predict", b"7", BYTES)[1]
    for name, request in CALLS.items():
        metadata = [(name.lower(), text) for name, text in IDS.items()]
        with grpc.insecure_channel(f"localhost:{service.grpc_port}") as channel:
            infer = channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
            answer = infer(request.SerializeToString(), timeout=PATIENCE_S, metadata=metadata)
        expected.append((name, "OK", len(answer)))
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    lines = (tmp_path / "access").read_text().splitlines()
    if form == "json":
        rows = [json.loads(line) for line in lines]
        found = [(row["request"], row["status"], row["bytes"]) for row in rows]
        assert all(row["client"].split(":")[-1].isdecimal() for row in rows)
        assert all(0 < row["ms"] < 10_000 for row in rows)
        ids = [(row.get("request_id"), row.get("trace_id")) for row in rows]
    else:
        shape = r'\S+Z (?:http|grpc) \S+:\d+ "([^"]+)" (\w+) (\d+) [0-9.]+ms(?: (.+))?'
        rows = [re.fullmatch(shape, line).groups() for line in lines]
        found = [
            (row[0], int(row[1]) if row[1].isdecimal() else row[1], int(row[2])) for row in rows
        ]
        ids = [tuple(re.findall("(?:request|traceparent) ([^, ]+)", row[3] or "")) for row in rows]
    trace = IDS["traceparent"].split("-")[1] if form == "json" else IDS["traceparent"]
    named = [row for row, of in zip(found, ids, strict=True) if of == (IDS["X-Request-Id"], trace)]
    # In any order: a client may ask again as soon as it has its answer, before the line is written.
    assert sorted(named, key=str) == sorted(expected, key=str)
    (without,) = [row for row, of in zip(found, ids, strict=True) if not any(of)]
    assert without[:2] == ("POST /predict", 400)


def test_a_stream_that_its_client_ends_is_in_the_access_log(start, tmp_path):
    ended = threading.Event()

    def requests():
        yield CALLS["ModelInfer"].SerializeToString()
        ended.wait(PATIENCE_S)  # else the stream ends by itself

    with (tmp_path / "access").open("w") as output:
        service = start("--access-log", "json", output=output).ready()
    with grpc.insecure_channel(f"localhost:{service.grpc_port}") as channel:
        infer = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = infer(requests(), timeout=PATIENCE_S)
        next(answers)
        answers.cancel()
        ended.set()
        watch = health_stub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watch)
        watch.cancel()
        until_s = time.monotonic() + PATIENCE_S
        while len((tmp_path / "access").read_text().splitlines()) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.02)
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    rows = [json.loads(line) for line in (tmp_path / "access").read_text().splitlines()]
    found = [(row["request"], row["status"]) for row in rows]
    assert found == [("ModelStreamInfer", "CANCELLED"), ("Watch", "CANCELLED")]


@pytest.mark.parametrize("ends", [False, True], ids=["stalled", "closed"])
def test_an_access_log_that_nobody_reads_delays_nothing(start, ends):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    service = start("--access-log", "json", "--drain-timeout-s", "3600", output=writer).ready()
    os.close(writer)
    for _ in range(200):
        assert service.get("/healthz")[0] == 200
    if ends:
        os.close(reader)
        assert service.get("/healthz")[0] == 200
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "Traceback" not in service.log
    if not ends:
        os.close(reader)


def test_pages_of_the_allowed_origins_read_every_answer(start):
    service = start("--cors-origins", f"{ORIGIN},http://localhost:3000", "--api-keys", KEY).ready()
    for method, path, body, headers in EVERY:
        for key, wanted in (({}, {200, 401}), (bearer(KEY), {200, 404})):
            request = {**headers, **key, "Origin": ORIGIN}
            status, found, _ = ask(service, method, path, body, request)
            assert status in wanted
            assert found["Access-Control-Allow-Origin"] == ORIGIN, path
            assert "x-model-version" in found["Access-Control-Expose-Headers"]
            other = ask(service, method, path, body, {**request, "Origin": "https://other.example"})
            assert "Access-Control-Allow-Origin" not in other[1]
            assert "origin" in other[1].get_all("Vary")
        asked = {"Origin": ORIGIN, "Access-Control-Request-Method": method}
        status, found, _ = ask(service, "OPTIONS", path, headers=asked)
        assert (status, found["Access-Control-Allow-Origin"]) == (200, ORIGIN)
        assert method in found["Access-Control-Allow-Methods"]
        assert "authorization" in found["Access-Control-Allow-Headers"]
    with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as connection:
        connection.sendall(
            b"OPTIONS /predict HTTP/1.1\r\nHost: a\r\nAccess-Control-Request-Method: POST\r\n"
            b"Content-Length: 5\r\n\r\n"  # which never come
        )
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 200")
    service = start("--cors-origins", "*").ready()
    assert ask(service, "GET", "/info")[1]["Access-Control-Allow-Origin"] == "*"
