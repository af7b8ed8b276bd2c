"""Clients of other projects, gRPC and HTTP/2: each is ready, reads one digit, knows an error by its
code, keeps a deadline and sends a message larger than a window of flow control."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from PIL import Image

from service.forms import open_inference_pb2 as pb
from tests.service_process import PATIENCE_S, PROJECT, committed

HERE = Path(__file__).parent
SEVEN = np.asarray(Image.open(PROJECT / "docs" / "images" / "seven.png"))
MANY = 4096
VERSION = max(path.stem for path in (PROJECT / "weights" / "lenet").glob("*.safetensors"))
SERVICE = "/inference.GRPCInferenceService/"
REPLIES = {
    "ServerReady": pb.ServerReadyResponse,
    "ModelMetadata": pb.ModelMetadataResponse,
    "ModelInfer": pb.ModelInferResponse,
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    with committed(tmp_path_factory.mktemp("service"), "--models", "lenet") as service:
        yield service


def infer(images=1, model="lenet"):
    tensor = {"name": "image", "datatype": "UINT8", "shape": (images, 28, 28)}
    contents = [SEVEN.tobytes() * images]
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=contents)


# Method, message, seconds. Nobody computes 4,096 images in 5 ms on a CPU.
CALLS = (
    ("ServerReady", pb.ServerReadyRequest(), 30),
    ("ModelMetadata", pb.ModelMetadataRequest(name="lenet"), 30),
    ("ModelInfer", infer(), 30),
    ("ModelInfer", infer(model="vgg"), 30),
    ("ModelInfer", infer(MANY), 30),
    ("ModelInfer", infer(MANY), 0.005),
)


def check(outcomes):
    """Check the outcome of each of CALLS: (code, message, reply as bytes)."""
    assert [code for code, _, _ in outcomes] == [0, 0, 0, 5, 0, 4], outcomes
    ready, metadata, one, many = (
        REPLIES[method].FromString(reply)
        for (method, _, _), (code, _, reply) in zip(CALLS, outcomes, strict=True)
        if code == 0
    )
    assert ready.ready
    assert (metadata.name, list(metadata.versions)) == ("lenet", [VERSION])
    for answer, images in ((one, 1), (many, MANY)):
        labels = [tensor.name for tensor in answer.outputs].index("label")
        assert np.frombuffer(answer.raw_output_contents[labels], np.int64).tolist() == [7] * images
    assert "model 'vgg' is not loaded" in outcomes[3][1]


def test_grpcio(serving):
    outcomes = []
    with grpc.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
        for method, message, timeout_s in CALLS:
            call = channel.unary_unary(SERVICE + method)
            try:
                reply = call(message.SerializeToString(), timeout=timeout_s)
                outcomes.append((0, "", reply))
            except grpc.RpcError as error:
                outcomes.append((error.code().value[0], error.details(), b""))
    check(outcomes)


async def test_grpclib(serving):
    client = pytest.importorskip("grpclib.client", reason="grpclib is not installed")
    exceptions = pytest.importorskip("grpclib.exceptions")
    outcomes = []
    async with client.Channel("127.0.0.1", serving.grpc_port) as channel:
        for method, message, timeout_s in CALLS:
            call = client.UnaryUnaryMethod(
                channel, SERVICE + method, type(message), REPLIES[method]
            )
            try:
                reply = await call(message, timeout=timeout_s)
                outcomes.append((0, "", reply.SerializeToString()))
            except exceptions.GRPCError as error:
                outcomes.append((error.status.value, error.message, b""))
            except TimeoutError:  # grpclib's word for a deadline that it saw pass itself
                outcomes.append((4, "", b""))
    check(outcomes)


def call_all(command, serving, tmp_path, port=0, descriptors=b"", **variables):
    """Let a program make CALLS and check what it prints."""
    path = tmp_path / "calls.json"
    calls = [
        {
            "path": SERVICE + method,
            "request": base64.b64encode(message.SerializeToString()).decode(),
            "timeout_ms": round(timeout_s * 1000),
        }
        for method, message, timeout_s in CALLS
    ]
    if descriptors:
        calls = {"calls": calls, "descriptors": base64.b64encode(descriptors).decode()}
    path.write_text(json.dumps(calls))
    line = [*command, f"127.0.0.1:{port or serving.grpc_port}", str(path)]
    outcomes = json.loads(run(line, env={**os.environ, **variables}))
    replies = [base64.b64decode(one["reply"] or "") for one in outcomes]
    check(
        [(one["code"], one["message"], reply) for one, reply in zip(outcomes, replies, strict=True)]
    )


def run(line, **options):
    """The output of a program, which must exit with 0."""
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=PATIENCE_S, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def node_with(*packages):
    """The path of Node, where it finds the packages; else the test is skipped."""
    node = shutil.which("node") or pytest.skip("node is not installed")
    for package in packages:
        find = [node, "-e", f"require.resolve('{package}')"]
        if subprocess.run(find, capture_output=True, check=False).returncode:
            pytest.skip(f"node finds no {package}: npm install it and name its folder in NODE_PATH")
    return node


def test_grpc_js(serving, tmp_path):
    call_all((node_with("@grpc/grpc-js"), str(HERE / "client.js")), serving, tmp_path)


@pytest.mark.parametrize(
    ("protocol", "packages"),
    [
        ("connect", ("@bufbuild/protobuf", "@connectrpc/connect", "@connectrpc/connect-web")),
        ("grpc-web", ("@bufbuild/protobuf", "@connectrpc/connect", "@connectrpc/connect-web")),
        ("grpc-web of Google", ("grpc-web", "xhr2")),
    ],
)
def test_clients_of_browsers(serving, tmp_path, protocol, packages):
    command = (node_with(*packages), str(HERE / "web.js"), protocol)
    files = FileDescriptorSet()
    pb.DESCRIPTOR.CopyToProto(files.file.add())
    call_all(command, serving, tmp_path, serving.port, files.SerializeToString())


def test_grpc_go(serving, tmp_path):
    go = shutil.which("go") or pytest.skip("go is not installed")
    sources = "/usr/share/gocode"
    if not Path(sources, "src/google.golang.org/grpc").is_dir():
        pytest.skip("grpc-go is not installed: apt install golang-google-grpc-dev")
    # GOCACHE is where the user has it, so that grpc-go is compiled once.
    command = (go, "run", str(HERE / "client.go"))
    call_all(command, serving, tmp_path, GOPATH=sources, GO111MODULE="off", GOFLAGS="")


OCTETS = "application/octet-stream"
LATE = "x-request-timeout-ms"


def large_picture():
    """Few bytes, which arrive in time and take 100 ms to decode."""
    file = io.BytesIO()
    Image.new("L", (3000, 3000), 255).save(file, "PNG")
    return file.getvalue()


def check_http(ask):
    """Check five requests. `ask(path, body, headers)` returns status and body; no body is a GET."""
    kind = {"content-type": OCTETS}
    seven = SEVEN.tobytes()
    assert ask("/readyz", None, {})[0] == 200
    status, body = ask("/v2/models/lenet", None, {})
    assert (status, json.loads(body)["name"]) == (200, "lenet")
    for images in (1, MANY):
        status, body = ask("/predict", seven * images, kind)
        labels = [one["label"] for one in json.loads(body)["predictions"]]
        assert (status, labels) == (200, [7] * images)
    status, body = ask("/predict?model=vgg", seven, kind)
    assert (status, json.loads(body)["error"]["code"]) == (404, "unknown_model")
    status, body = ask("/predict", large_picture(), {"content-type": "image/png", LATE: "20"})
    late = (status, json.loads(body)["error"]["code"])
    assert late in ((504, "deadline_exceeded"), (408, "body_timeout"))  # 408: while it arrived


def test_httpx_over_http_2(serving):
    with httpx.Client(http1=False, http2=True, timeout=PATIENCE_S) as client:

        def ask(path, body, headers):
            method = "GET" if body is None else "POST"
            url = f"http://127.0.0.1:{serving.port}{path}"
            answer = client.request(method, url, content=body, headers=headers)
            assert answer.http_version == "HTTP/2"
            return answer.status_code, answer.content

        check_http(ask)


def test_httpx_over_http_2_with_a_body_that_comes_value_by_value(serving):
    def body():
        for before in ('{"images":[[', "],["):
            yield before.encode()
            for number, value in enumerate(SEVEN.ravel().tolist()):
                yield b",%d" % value if number else b"%d" % value
        yield b"]]}"

    with httpx.Client(http1=False, http2=True, timeout=PATIENCE_S) as client:
        url = f"http://127.0.0.1:{serving.port}/predict"
        answer = client.post(url, content=body(), headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert [one["label"] for one in answer.json()["predictions"]] == [7, 7]


def test_curl_over_http_2(serving, tmp_path):
    curl = shutil.which("curl") or pytest.skip("curl is not installed")
    if "HTTP2" not in run([curl, "--version"]):
        pytest.skip("this curl has no HTTP/2")
    path = tmp_path / "body"

    def ask(url, body, headers):
        line = [curl, "-sS", "--http2-prior-knowledge", "-w", "\n%{http_version} %{http_code}"]
        line += [part for name, text in headers.items() for part in ("-H", f"{name}: {text}")]
        if body is not None:
            path.write_bytes(body)
            line += ["--data-binary", f"@{path}"]
        answer, _, last = run([*line, f"http://127.0.0.1:{serving.port}{url}"]).rpartition("\n")
        version, status = last.split()
        assert version == "2"
        return int(status), answer

    check_http(ask)


NODE = """
const [,, origin, path, file, headers] = process.argv;
const settings = { headerTableSize: 0 };
const session = require('http2').connect(origin, { settings });
const body = file === '' ? undefined : require('fs').readFileSync(file);
const method = body === undefined ? 'GET' : 'POST';
const stream = session.request({ ':path': path, ':method': method, ...JSON.parse(headers) });
let [status, answer] = [0, ''];
stream.on('response', (found) => { status = found[':status']; });
stream.on('data', (piece) => { answer += piece; });
stream.on('end', () => { console.log(JSON.stringify([status, answer])); session.close(); });
stream.end(body);
"""


def test_node_with_an_empty_header_table(serving, tmp_path):
    node = shutil.which("node") or pytest.skip("node is not installed")
    path, script = tmp_path / "body", tmp_path / "ask.js"
    script.write_text(NODE)

    def ask(url, body, headers):
        if body is not None:
            path.write_bytes(body)
        file = "" if body is None else str(path)
        origin = f"http://127.0.0.1:{serving.port}"
        return json.loads(run([node, str(script), origin, url, file, json.dumps(headers)]))

    check_http(ask)
