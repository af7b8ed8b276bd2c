"""Keys and TLS of a running service: one body over every route of HTTP and every call of gRPC."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import struct
import time

import grpc
import pytest
import trustme

from service.errors import ExitCode
from service.rpc import open_inference_pb2 as pb

KEY, OTHER = "a-key-that-nobody-knows", "another/key+that=nobody"
SEVEN = bytes(784)
BYTES = {"Content-Type": "application/octet-stream"}
RAW = {"Inference-Header-Content-Length": "0"}
HEALTH = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
ROUTES = [
    *(("GET", path, None, {}) for path in ("/info", "/metrics", "/openapi.json", "/docs", "/v2")),
    *(("GET", f"/v2/models/lenet{rest}", None, {}) for rest in ("", "/ready", "/config", "/stats")),
    ("GET", "/v2/models/stats", None, {}),
    ("POST", "/predict", SEVEN, BYTES),
    ("POST", "/v2/models/lenet/infer", SEVEN, RAW),
    ("POST", "/v2/models/lenet/versions/1/infer", SEVEN, RAW),
]
TENSOR = pb.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=(1, 784))
CALLS = {
    "ServerMetadata": pb.ServerMetadataRequest(),
    "ModelMetadata": pb.ModelMetadataRequest(name="lenet"),
    "ModelReady": pb.ModelReadyRequest(name="lenet"),
    "ModelConfig": pb.ModelConfigRequest(name="lenet"),
    "ModelStatistics": pb.ModelStatisticsRequest(name="lenet"),
    "ModelInfer": pb.ModelInferRequest(inputs=[TENSOR], raw_input_contents=[SEVEN]),
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

    def renew(self):
        server = self.authority.issue_cert("127.0.0.1", "localhost")
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
    connection = kind("127.0.0.1", service.port, timeout=20, **options)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def call(service, name, request, key=None, credentials=None):
    """How a call ends: the name of its status."""
    address = f"localhost:{service.grpc_port}"
    channel = (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials)
    )
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    path = name if name.startswith("/") else f"/inference.GRPCInferenceService/{name}"
    with channel:
        try:
            channel.unary_unary(path)(request.SerializeToString(), timeout=10, metadata=metadata)
        except grpc.RpcError as exc:
            return exc.code().name
    return "OK"


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "TLS"])
def test_every_request_needs_a_key_but_those_for_health(start, certificates, encrypted):
    flags = certificates.flags if encrypted else ()
    context = certificates.context() if encrypted else None
    credentials = certificates.credentials() if encrypted else None
    service = start("--log-level", "debug", "--api-keys", f"{KEY},{OTHER}", *flags).ready()
    for method, path, body, headers in ROUTES:
        for wrong in ({}, bearer("wrong"), bearer(KEY[:-1]), {"Authorization": f"Basic {KEY}"}):
            status, found, answer = ask(service, method, path, body, {**headers, **wrong}, context)
            assert (status, found["WWW-Authenticate"]) == (401, "Bearer"), path
            error = json.loads(answer)["error"]
            message = error if path.startswith("/v2") else error["message"]
            assert message.startswith("authorization: got ")
        for key in (KEY, OTHER):
            right = {**headers, **bearer(key)}
            assert ask(service, method, path, body, right, context)[0] == 200, path
    for path in HEALTH:
        assert ask(service, "GET", path, context=context)[0] == 200
    for name, request in CALLS.items():
        for key in (None, "wrong"):
            assert call(service, name, request, key, credentials) == "UNAUTHENTICATED", name
        assert call(service, name, request, KEY, credentials) == "OK", name
    for name in ("ServerLive", "ServerReady", "/grpc.health.v1.Health/Check"):
        assert call(service, name, pb.ServerLiveRequest(), credentials=credentials) == "OK"
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert KEY not in service.log
    assert OTHER not in service.log


def test_a_body_that_comes_without_a_key_does_not_end_the_connection(start):
    service = start("--api-keys", KEY).ready()
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    for _ in range(2):
        connection.request("POST", "/predict", SEVEN, BYTES)
        assert connection.getresponse().read().startswith(b'{"error":{"code":"unauthorized"')
        first = connection.sock
        connection.request("POST", "/predict", SEVEN, {**BYTES, **bearer(KEY)})
        assert connection.getresponse().read().startswith(b'{"model":"lenet"')
        assert connection.sock is first
    connection.close()


def test_nothing_is_answered_in_the_clear_with_tls(start, certificates):
    service = start(*certificates.flags).ready()
    with socket.create_connection(("127.0.0.1", service.port), 20) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert not connection.recv(100).startswith(b"HTTP")  # at most an alert
    assert call(service, "ServerLive", pb.ServerLiveRequest()) == "UNAVAILABLE"


def test_a_client_needs_a_certificate_with_mutual_tls(start, certificates):
    service = start(*certificates.flags, "--tls-client-ca", str(certificates.ca)).ready()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(service, "GET", "/healthz", context=certificates.context())
    context = certificates.context(client=True)
    assert ask(service, "GET", "/healthz", context=context)[0] == 200
    live = pb.ServerLiveRequest()
    credentials = certificates.credentials()
    assert call(service, "ServerLive", live, credentials=credentials) == "UNAVAILABLE"
    credentials = certificates.credentials(client=True)
    assert call(service, "ServerLive", live, credentials=credentials) == "OK"


def test_the_certificate_is_read_again_on_a_hangup(start, certificates):
    service = start(*certificates.flags).ready()

    def serial_numbers():
        with (
            socket.create_connection(("127.0.0.1", service.port), 20) as plain,
            certificates.context().wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            yield secured.getpeercert()["serialNumber"]
        pem = ssl.get_server_certificate(
            ("127.0.0.1", service.grpc_port), ca_certs=certificates.ca, timeout=20
        )
        yield ssl.PEM_cert_to_DER_cert(pem)

    before = list(serial_numbers())
    key = certificates.folder / "server.key"
    good = key.read_bytes()
    key.write_bytes(b"no key")
    service.signal(signal.SIGHUP)
    service.wait_for("certificate: not read again, still presenting the earlier one")
    assert list(serial_numbers()) == before
    key.write_bytes(good)
    certificates.renew()
    service.signal(signal.SIGHUP)
    service.wait_for("certificate: read again")
    assert not set(serial_numbers()) & set(before)


def test_handshakes_that_never_end_are_ended_and_shut_nobody_out(start, certificates):
    service = start(*certificates.flags).ready()
    silent = [socket.create_connection(("127.0.0.1", service.port), 20) for _ in range(50)]
    began_s = time.monotonic()
    assert ask(service, "GET", "/healthz", context=certificates.context())[0] == 200
    assert time.monotonic() - began_s < 5
    for connection in silent:
        with connection:
            assert connection.recv(1) == b""  # after 10 s, what headers may take
    assert time.monotonic() - began_s < 20
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_clients_that_leave_in_the_handshake_leave_nothing(start, certificates):
    service = start(*certificates.flags).ready()
    before = len(service.lines)
    reset = struct.pack("ii", 1, 0)
    hello = bytes.fromhex("160301")
    for number in range(90):
        with socket.create_connection(("127.0.0.1", service.port), 20) as connection:
            connection.sendall((b"x", hello, b"GET / HTTP/1.1\r\n\r\n")[number % 3])
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            time.sleep(0.001 * (number % 5))
    assert ask(service, "GET", "/healthz", context=certificates.context())[0] == 200
    assert service.lines[before:] == []
    service.signal()
    assert service.wait() == ExitCode.STOPPED


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("missing.pem", "server.key", "--tls-certificate: "),
        ("server.pem", "missing.key", "--tls-key: "),
        ("server.pem", "client.pem", "they are not a certificate and its key"),
        ("server.key", "server.key", "they are not a certificate and its key"),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_wrong_files_are_one_line_and_exit_code_2(
    start, certificates, certificate, key, message, workers
):
    folder = certificates.folder
    service = start(
        *("--workers", workers, "--tls-certificate", str(folder / certificate)),
        *("--tls-key", str(folder / key)),
    )
    assert service.wait() == ExitCode.SETTINGS
    (line,) = [line for line in service.lines if "ERROR" in line]
    assert message in line
