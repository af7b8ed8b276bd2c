"""Promises of HTTP alone, by each server of HTTP: our own, and others."""

from __future__ import annotations

import asyncio
import base64
import gzip
import re
import zlib
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from service.assembly import open_service
from service.server import _uvicorn as _uvicorn_of
from service.settings import Settings
from tests.service.api.conftest import settled
from tests.service_process import PATIENCE_S
from wire.door import HttpService
from wire.listener import listen
from wire.server import HttpServer

DOORS = ("HTTP/1.1", "HTTP/2", "uvicorn", "ASGITransport")


@dataclass
class Opened:
    """A service behind a door, and a client of it."""

    service: Any
    client: httpx.AsyncClient

    async def outcomes(self):
        """How many requests ended in each way."""
        text = (await self.service.metrics.exposition())[0].decode()
        found = re.findall(
            r'^lenet_requests_total\{.*outcome="(\w+)".*\} (\d+)', text, re.MULTILINE
        )
        counts = Counter()
        for outcome, count in found:
            counts[outcome] += int(count)
        return +counts

    async def until(self, outcomes):
        """Wait until requests have ended so, and in no other way."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.outcomes() != outcomes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def _wire(service):
    door = HttpService(service.fast_routes, service.budget, gate=service.gate, app=service.app)
    return HttpServer(door, PATIENCE_S)


def _uvicorn(service):
    server, server.stop = _uvicorn_of(service.asgi, service.settings)
    return server


@asynccontextmanager
async def _served(server, **versions):
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        listener.listen()
        port = listener.getsockname()[1]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{port}"
        transport = httpx.AsyncHTTPTransport(**versions)
        try:
            yield httpx.AsyncClient(base_url=url, transport=transport, timeout=PATIENCE_S)
        finally:
            server.stop()
            await serving


@asynccontextmanager
async def _called(service):
    transport = httpx.ASGITransport(service.asgi, raise_app_exceptions=False)
    url = "http://127.0.0.1"
    yield httpx.AsyncClient(base_url=url, transport=transport, timeout=PATIENCE_S)


_OPEN = {
    "HTTP/1.1": lambda service: _served(_wire(service)),
    "HTTP/2": lambda service: _served(_wire(service), http1=False, http2=True),
    "uvicorn": lambda service: _served(_uvicorn(service)),
    "ASGITransport": _called,
}


@pytest.fixture
def open_doors(folder, write):
    """`open_doors("uvicorn", max_images=2)`: a context with an `Opened` for each door, by name.

    When it is left, nothing of any request is held any more, however it ended.
    """
    write("tiny/3")

    @asynccontextmanager
    async def open_(*doors, **changes):
        options = {"weights": folder, "default_model": "tiny", "max_batch_rows": 4, **changes}
        async with open_service(Settings(device="cpu", **options), grpc_port=0) as service:
            async with AsyncExitStack() as stack:
                opened = {}
                for door in doors:
                    client = await stack.enter_async_context(_OPEN[door](service))
                    opened[door] = Opened(service, await stack.enter_async_context(client))
                yield opened
            await settled(service)

    return open_


@pytest.fixture(params=DOORS)
def door(request):
    return request.param


@pytest.fixture
def open_door(door, open_doors):
    """`open_door(max_images=2)`: a context with the `Opened` of the door that is tested."""

    @asynccontextmanager
    async def open_(**changes):
        async with open_doors(door, **changes) as opened:
            yield opened[door]

    return open_


RAW = "application/octet-stream"
BYTES = {"Content-Type": RAW}
ONE = bytes(784)
INFER, TENSORFLOW = "/v2/models/tiny/infer", "/v1/models/tiny:predict"
KEY, ADMIN = "a-key-that-nobody-knows", "an-administrators-key"


async def slowly(*pieces, end=None):
    """A body of unknown length in `pieces`, which is complete once `end` is set."""
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)
    if end is not None:
        await end.wait()


def error(response):
    """Status, code and message of an answer that is an error."""
    assert response.headers["content-type"] == "application/json"
    found = response.json()["error"]
    return response.status_code, found["code"], found["message"]


# Answers


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/predict", ONE, BYTES),
        ("/explain", ONE, BYTES),
        (INFER, ONE, {"Inference-Header-Content-Length": "0"}),
        (TENSORFLOW, orjson.dumps({"instances": [[0] * 784]}), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_answer_has_its_body_its_version_and_its_times(open_door, path, body, headers):
    async with open_door() as opened:
        for content in (body, slowly(body[:100], body[100:])):
            response = await opened.client.post(path, content=content, headers=headers)
            assert response.status_code == 200, response.text
            assert response.headers["x-model-version"] == "3"
            assert response.headers["server-timing"].startswith("decode;dur=")
            assert int(response.headers["content-length"]) == len(response.content)
        assert await opened.outcomes() == ({} if path == "/explain" else {"ok": 2})


IMAGES = orjson.dumps({"images": [[0] * 784]})
TENSOR = {"name": "image", "datatype": "UINT8", "shape": [1, 28, 28]}
TENSORS = [{**TENSOR, "parameters": {"binary_data_size": 784}}]
HEADED = orjson.dumps({"id": "a", "inputs": TENSORS})
BODIES = {
    "bytes": ("/predict", ONE, BYTES),
    "JSON": ("/predict", IMAGES, {"Content-Type": "application/json"}),
    "much JSON": ("/predict", IMAGES + b" " * 300_000, {"Content-Type": "application/json"}),
    "explanation": ("/explain", ONE, BYTES),
    "tensor": (INFER, HEADED + ONE, {"Inference-Header-Content-Length": str(len(HEADED))}),
    "numbers": (INFER, orjson.dumps({"id": "a", "inputs": [{**TENSOR, "data": [0] * 784}]}), {}),
    "instances": (TENSORFLOW, orjson.dumps({"instances": [[0] * 784]}), {}),
    "invocation": ("/invocations", ONE, BYTES),
}


def without_times(response):
    document = response.json()
    document.pop("parameters", None)
    return document


@pytest.mark.parametrize(("path", "body", "headers"), BODIES.values(), ids=BODIES)
async def test_a_compressed_body_is_answered_as_it_is_without_compression(
    open_door, path, body, headers
):
    async with open_door() as opened:
        plain = await opened.client.post(path, content=body, headers=headers)
        assert plain.status_code == 200, plain.text
        for coding, pack in (("GZip", gzip.compress), ("deflate", zlib.compress)):
            packed, coded = pack(body), {**headers, "Content-Encoding": coding}
            for content in (packed, slowly(packed[:20], packed[20:])):
                response = await opened.client.post(path, content=content, headers=coded)
                assert response.status_code == 200, response.text
                assert without_times(response) == without_times(plain)


@pytest.mark.parametrize("rows", [100, 1000])
@pytest.mark.parametrize("path", ["/predict", INFER, TENSORFLOW, "/invocations"])
async def test_a_long_answer_is_compressed_where_the_client_takes_gzip(open_door, path, rows):
    kind, body = BYTES, rows * ONE
    if path in (INFER, TENSORFLOW):
        tensor = {**TENSOR, "shape": [rows, 28, 28], "data": [0] * 784 * rows}
        image = {"b64": base64.b64encode(ONE).decode()}
        document = {"inputs": [tensor]} if path == INFER else {"instances": rows * [image]}
        kind, body = {}, orjson.dumps(document)
    async with open_door() as opened:
        answers = {}
        for taken in ("identity", "gzip;q=0", "gzip"):
            headers = {**kind, "Accept-Encoding": taken}
            response = await opened.client.post(path, content=body, headers=headers)
            assert response.status_code == 200, response.text
            coded = response.headers.get("content-encoding")
            assert coded == ("gzip" if taken == "gzip" else None)
            assert response.headers.get("vary") == (coded and "accept-encoding")
            assert int(response.headers["content-length"]) == response.num_bytes_downloaded
            answers[taken] = without_times(response)
            answers[taken].pop("id", None)
        assert answers["gzip"] == answers["gzip;q=0"] == answers["identity"]


@pytest.mark.parametrize("headers", [{}, {"Accept": RAW}])
async def test_a_short_answer_and_bytes_are_not_compressed(open_door, headers):
    async with open_door() as opened:
        headers = {**BYTES, **headers, "Accept-Encoding": "gzip"}
        rows = 1000 if "Accept" in headers else 20
        response = await opened.client.post("/predict", content=rows * ONE, headers=headers)
        assert response.status_code == 200
        assert "content-encoding" not in response.headers


async def test_large_bodies_and_large_answers_are_whole(open_door):
    rows = 1000
    images = (bytes(range(256)) * rows * 4)[: 784 * rows]
    pieces = [images[at : at + 99_999] for at in range(0, len(images), 99_999)]
    async with open_door(max_batch_rows=64) as opened:
        answers = []
        for content in (images, slowly(*pieces)):
            headers = {**BYTES, "Accept-Encoding": "identity"}
            response = await opened.client.post("/predict", content=content, headers=headers)
            assert response.status_code == 200
            assert int(response.headers["content-length"]) == len(response.content)
            answers.append(response.json()["predictions"])
        one = await opened.client.post("/predict", content=images[-784:], headers=BYTES)
    assert [len(answer) for answer in answers] == [rows, rows]
    assert answers[0] == answers[1]
    assert answers[0][-1]["label"] == one.json()["predictions"][0]["label"]


ORIGIN = "https://a.example"
SAME = {
    "request id": ("GET", "/healthz", {"X-Request-Id": "abc"}, b"", 200),
    "another origin": (
        "GET",
        "/info",
        {"Origin": ORIGIN, "Authorization": f"Bearer {KEY}"},
        b"",
        200,
    ),
    "an origin that may not": ("GET", "/healthz", {"Origin": "https://b.example"}, b"", 200),
    "preflight": (
        *("OPTIONS", "/predict", {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}),
        *(b"", 200),
    ),
    "options": ("OPTIONS", "/predict", {"Authorization": f"Bearer {KEY}"}, b"", 204),
    "head": ("HEAD", "/v2/health/ready", {}, b"", 200),
    "page": ("GET", "/", {"Accept": "text/html"}, b"", 200),
    "slashes": ("GET", "/v2/health/ready//", {}, b"", 200),
    "slashes of a prediction": (
        *("POST", "/predict/", {**BYTES, "Authorization": f"Bearer {KEY}"}),
        *(ONE, 200),
    ),
    "slashes within": (
        *("POST", f"/{INFER.replace('/', '///')}", {"Authorization": f"Bearer {KEY}"}),
        *(b"{}", 400),
    ),
    "slashes of an open path": ("GET", "//v2//health/ready", {}, b"", 200),
    "slashes without a key": ("GET", "//metrics//", {}, b"", 401),
    "slashes that are escaped": ("GET", "/%2Fmetrics", {}, b"", 401),
    "slashes below an open path": ("GET", "/page//..//metrics", {}, b"", 404),
    "document": ("GET", "/openapi.json", {}, b"", 200),
    "metadata": ("GET", "/v2/models/tiny", {"Authorization": f"Bearer {KEY}"}, b"", 200),
    "no key": ("POST", "/predict", BYTES, ONE, 401),
    "no key of v2": ("POST", INFER, {}, ONE, 401),
    "a wrong key": ("GET", "/info", {"Authorization": "Bearer x"}, b"", 401),
    "a key in another header": ("GET", "/info", {"X-API-Key": KEY}, b"", 200),
    "an administrator's in another header": (
        *("POST", "/v2/repository/index", {"X-API-Key": ADMIN}),
        *(b"", 200),
    ),
    "a key that may not": (
        "POST",
        "/v2/repository/index",
        {"Authorization": f"Bearer {KEY}"},
        b"",
        403,
    ),
    "an administrator": (
        "POST",
        "/v2/repository/index",
        {"Authorization": f"Bearer {ADMIN}"},
        b"",
        200,
    ),
}
WRONG = {
    "parameter": ("/predict?colour=red", {}, ONE, 400),
    "choice": ("/predict?digits=two", {}, ONE, 400),
    "parameters": ("/predict?" + "&" * 100, {}, ONE, 400),
    "timeout": ("/predict", {"X-Request-Timeout-Ms": "0"}, ONE, 400),
    "coding": ("/predict", {"Content-Encoding": "br"}, ONE, 415),
    "not compressed": ("/predict", {"Content-Encoding": "gzip"}, ONE, 400),
    "bomb": ("/predict", {"Content-Encoding": "gzip"}, gzip.compress(bytes(784 * 14)), 413),
    "compressed images": ("/predict", {"Content-Encoding": "gzip"}, gzip.compress(5 * ONE), 413),
    "type": ("/predict", {"Content-Type": "text/plain"}, ONE, 415),
    "length": ("/predict", {}, ONE[1:], 400),
    "nothing": ("/predict", {}, b"", 400),
    "model": ("/predict?model=none", {}, ONE, 404),
    "images": ("/predict", {}, bytes(784 * 5), 413),
    "body": ("/predict", {}, bytes(784 * 14), 413),
    "tensors": (INFER, {}, b"{", 400),
    "tensors of too many bytes": (INFER, {}, bytes(10_001), 413),
    "instances": (TENSORFLOW, {}, b"{}", 400),
    "model of v2": ("/v2/models/none/infer", {}, b"{}", 404),
    "header of v2": (INFER, {"Inference-Header-Content-Length": "x"}, ONE, 400),
    "index": ("/explain?index=5", {}, ONE, 400),
    "path": ("/predicts", {}, ONE, 404),
    "line break": ("/predict%0A", {}, ONE, 404),
    "method": ("/info", {}, ONE, 405),
    "method of v2": ("/v2", {}, ONE, 405),
}
OWN = ("date", "connection", "server-timing", "content-encoding", "content-length")
"""Headers in which answers differ from time to time, and those of the server."""


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        *(pytest.param(*row, id=name) for name, row in SAME.items()),
        *(
            pytest.param(
                *("POST", path, {**BYTES, "Authorization": f"Bearer {KEY}", **headers}),
                *(body, status),
                id=name,
            )
            for name, (path, headers, body, status) in WRONG.items()
        ),
    ],
)
async def test_status_headers_and_words_are_the_same_by_every_door(
    open_doors, method, path, headers, body, status
):
    settings = {"max_images": 4, "max_body_bytes": 10_000, "cors_origins": ORIGIN}
    answers = {}
    async with open_doors(*DOORS, api_keys=KEY, admin_keys=ADMIN, **settings) as opened:
        for door, one in opened.items():
            url = str(one.client.base_url) + path  # else "//metrics" is a host
            response = await one.client.request(method, url, content=body, headers=headers)
            kept = {name: text for name, text in response.headers.items() if name not in OWN}
            answers[door] = response.status_code, kept, response.content
    assert answers["HTTP/1.1"][0] == status
    for door, answer in answers.items():
        assert answer == answers["HTTP/1.1"], door


async def test_a_header_that_may_be_given_once_is_refused_when_it_is_given_twice(open_door):
    async with open_door() as opened:
        for name in ("authorization", "x-api-key"):
            response = await opened.client.get("/info", headers=[(name, "Bearer x")] * 2)
            words = f"{name}: got 2 fields, expected at most one"
            assert error(response) == (400, "invalid_input", words)


def refused_head(response, status, words):
    """`response` is an error in JSON, for which CORS is on."""
    found = error(response)
    assert response.headers["vary"] == "origin"
    assert found[:2] == (status, "invalid_input")
    assert re.fullmatch(words, found[2])


async def test_the_fields_and_the_target_of_a_request_have_a_limit(open_door):
    async with open_door(cors_origins=ORIGIN) as opened:
        fields = [(f"x-{number}", "") for number in range(150)]
        response = await opened.client.get("/healthz", headers=fields)
        refused_head(response, 431, r"headers: got (at least )?1\d\d fields, expected at most 100")
        response = await opened.client.get("/healthz?" + 9000 * "a")
        refused_head(response, 414, "target: got (at least )?9009 bytes, expected at most 8192")


@pytest.mark.parametrize("door", ["HTTP/1.1", "uvicorn"], indirect=True)
async def test_a_header_that_does_not_end_is_refused(open_door, door):
    async with open_door() as opened:
        url = opened.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: " + bytes(66_000).replace(b"\0", b"x")
        )
        async with asyncio.timeout(PATIENCE_S):
            line = await reader.readline()
        assert line.split()[1] == {"HTTP/1.1": b"431", "uvicorn": b"400"}[door]
        writer.close()


@pytest.mark.parametrize("door", ["HTTP/1.1", "uvicorn", "ASGITransport"], indirect=True)
async def test_a_length_beside_chunks_is_refused(open_door):
    headers = {**BYTES, "Content-Length": "5", "Transfer-Encoding": "chunked"}
    async with open_door(cors_origins=ORIGIN) as opened:
        content = slowly(bytes(392_000), bytes(392_000))
        response = await opened.client.post("/predict", content=content, headers=headers)
        refused_head(response, 400, "malformed HTTP request; expected HTTP/1.1(, in the clear)?")


@pytest.mark.parametrize("door", ["ASGITransport"], indirect=True)
@pytest.mark.parametrize("pieces", [(ONE,), (bytes(392_000), bytes(392_000))], ids=len)
async def test_a_body_longer_than_its_length_is_refused(open_door, pieces):
    async with open_door() as opened:
        headers = {**BYTES, "Content-Length": "783"}
        response = await opened.client.post("/predict", content=slowly(*pieces), headers=headers)
        words = "body: got more, expected 783 bytes, the announced length"
        assert error(response) == (400, "invalid_input", words)


# Metrics

TEXT = "text/plain; version=0.0.4; charset=utf-8", text_string_to_metric_families
OPEN_METRICS = (
    "application/openmetrics-text; version=1.0.0; charset=utf-8",
    openmetrics.text_string_to_metric_families,
)
OPEN = "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", TEXT),
        ("text/plain", TEXT),
        (f"{OPEN};q=0.1, text/plain;q=0.2", TEXT),
        (OPEN, OPEN_METRICS),
        # Prometheus 2.42 and 3.5
        (
            f"{OPEN};version=1.0.0,{OPEN};version=0.0.1;q=0.75,text/plain;q=0.5,*/*;q=0.1",
            OPEN_METRICS,
        ),
        (
            f"{OPEN};version=1.0.0;escaping=allow-utf-8;q=0.6,{OPEN};version=0.0.1;q=0.5,"
            "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            OPEN_METRICS,
        ),
    ],
)
async def test_metrics_are_exposed_as_their_reader_prefers(open_door, accept, expected):
    content_type, families = expected
    async with open_door() as opened:
        await opened.client.post("/predict", content=2 * ONE, headers=BYTES)
        for coding in ("gzip", "identity"):
            headers = {"Accept": accept, "Accept-Encoding": coding}
            response = await opened.client.get("/metrics", headers=headers)
            assert response.headers["content-type"] == content_type
            assert response.headers["vary"] == "Accept, Accept-Encoding"
            assert response.headers.get("content-encoding", "identity") == coding
            samples = [one for family in families(response.text) for one in family.samples]
            (images,) = [one for one in samples if one.name == "lenet_images_total"]
            assert images.value == 2


# Limits


async def test_a_body_of_unknown_length_ends_at_the_limit(open_door):
    async with open_door(max_body_bytes=10_000) as opened:
        content = slowly(bytes(6000), bytes(6000), bytes(6000))
        response = await opened.client.post("/predict", content=content, headers=BYTES)
        words = "body: got more, expected at most 10000 bytes; send fewer images at a time"
        assert error(response) == (413, "too_large", words)
        assert await opened.outcomes() == {"too_large": 1}
