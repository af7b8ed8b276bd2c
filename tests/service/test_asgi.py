"""The service in another application, by the examples of docs/how-to/in-your-application.md."""

from __future__ import annotations

import asyncio
import json
import re
import warnings

import httpx
import numpy as np
import pytest

import service.asgi
from lenet.errors import InvalidSettings, InvalidWeightFile
from service.api.endpoints import DRAINED, response
from service.assembly import open_service
from service.engine.batcher import Batcher
from service.errors import DeadlineExceeded, InvalidInput, TooLarge, UnknownModel
from service.settings import Settings
from tests.service_process import PROJECT
from wire.answer import Answer

PAGE = (PROJECT / "docs/how-to/in-your-application.md").read_text()
MOUNTED, WITH_ITS_OWN, HTTPX, TESTCLIENT, WITHOUT_HTTP = re.findall(
    r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)
with warnings.catch_warnings():  # it prefers httpx2
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", UserWarning)
    from fastapi.testclient import TestClient

BYTES = {"Content-Type": "application/octet-stream"}
STATE = {"state": {}}


@pytest.fixture
def environment(monkeypatch):
    """The committed weights, by variables as a server has them."""
    monkeypatch.setenv("LENET_WEIGHTS", str(PROJECT / "weights"))
    monkeypatch.setenv("LENET_MODELS", "lenet")
    monkeypatch.setenv("LENET_DEVICE", "cpu")


def run(example):
    names = {}
    exec(compile(example, "in-your-application.md", "exec"), names)
    return names


@pytest.mark.parametrize("example", [MOUNTED, WITH_ITS_OWN], ids=["alone", "with its own"])
def test_a_mounted_service_answers_below_its_path(environment, example):
    app = run(example)["app"]
    with TestClient(app) as client:
        answer = client.post("/digits/predict", content=bytes(784), headers=BYTES)
        assert answer.status_code == 200
        assert answer.headers["x-model-version"] == "2"
        # Paths are those below the mount, in routing as in the words of errors.
        wrong = client.post("/digits/v2/models/none/infer", content=b"{}")
        assert (wrong.status_code, list(wrong.json())) == (404, ["error"])
        assert isinstance(wrong.json()["error"], str)
        unknown = client.get("/digits/predicts").json()["error"]["message"]
        assert unknown.startswith("path: got '/predicts', expected /predict, ")
        # Every link of the pages leads somewhere.
        for page in ("/digits/", "/digits/docs"):
            text = client.get(page, headers={"Accept": "text/html"}).text
            links = re.findall(r"(?:src|href)=\"([^#\"][^\"]*)\"|url: '([^']+)'", text)
            assert len(links) >= 3
            for link in map("".join, links):
                assert client.get(str(httpx.URL(f"http://a{page}").join(link).path)).is_success
        assert client.get("/digits/openapi.json").json()["servers"] == [{"url": "/digits"}]
        index = client.get("/digits/").json()
        assert client.get(index["live"]).json()["live"]


async def test_the_example_with_httpx_passes(environment):
    await run(HTTPX)["test_a_black_image_has_a_label"]()


def test_the_example_with_the_test_client_passes(environment):
    run(TESTCLIENT)["test_the_service_is_ready"]()


def test_the_example_without_http_gives_labels(environment):
    labels = run(WITHOUT_HTTP)["labels"]
    assert len(labels) == 3
    assert len(set(labels)) == 1


def test_a_mounted_service_says_what_it_lacks_when_nobody_opened_it():
    with pytest.raises(RuntimeError, match=r"the service is not open; .*lifespan=service"):
        TestClient(service.asgi.app).get("/readyz")


@pytest.mark.parametrize(
    ("variable", "value", "scope", "error", "words"),
    [
        ("MAX_IMAGES", "0", STATE, InvalidSettings, r"LENET_MAX_IMAGES is '0', expected a .*"),
        ("MODELS", "none", STATE, InvalidWeightFile, r".*none.*"),
        ("MODELS", "none", {}, RuntimeError, r".*the lifespan has no `state`, .* uvicorn"),
    ],
    ids=["variable", "weights", "a server without state, before anything is opened"],
)
async def test_a_start_that_fails_is_one_line(
    environment, monkeypatch, variable, value, scope, error, words
):
    monkeypatch.setenv(f"LENET_{variable}", value)
    sent = []

    async def receive():
        return {"type": "lifespan.startup"}

    async def send(message):
        sent.append(message)

    with pytest.raises(error):
        await service.asgi.app({"type": "lifespan", **scope}, receive, send)
    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    assert re.fullmatch(words, message["message"])


async def call(app, receive, path="/predict", length=784):
    """The messages that answer a POST, of one image by default, whose body `receive` sends."""
    sent = []

    async def send(message):
        sent.append(message)

    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(length).encode()),
        (b"authorization", b"Bearer an-administrators-key"),
    ]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    await app({**scope, "headers": headers}, receive, send)
    return sent


@pytest.mark.parametrize("rows", [1, 600])  # one answer, and one that is sent in pieces
async def test_a_middleware_that_repeats_the_body_for_ever_gets_an_answer(tiny_weights, rows):
    received = 0

    async def receive():
        nonlocal received
        received += 1
        if received > 9:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": bytes(784 * rows)}

    async with open_service(Settings(weights=tiny_weights, device="cpu")) as opened:
        start, *pieces = await call(opened.asgi, receive, length=784 * rows)
    body = b"".join(piece.get("body", b"") for piece in pieces)
    assert (start["status"], received) == (200, 2 if rows == 1 else 3), body
    assert len(json.loads(body)["predictions"]) == rows
    assert (b"x-model-version", b"1") in start["headers"]


async def test_a_large_body_in_one_message_is_no_transfer_when_it_is_complete(tiny_weights):
    body = bytes(784 * 400)

    async def receive():
        return {"type": "http.request", "body": body}

    async with open_service(Settings(weights=tiny_weights, device="cpu")) as opened:
        start, *_ = await call(opened.asgi, receive, length=len(body))
        assert (start["status"], opened.budget._transfers) == (200, {})


@pytest.mark.parametrize("path", ["/predict", "/v2/repository/index"])
async def test_a_middleware_that_sends_empty_pieces_for_ever_gets_an_error(opened, path):
    received = 0

    async def receive():
        nonlocal received
        received += 1
        if received > 9999:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"", "more_body": True}

    start, body = await call(opened.asgi, receive, path)
    assert start["status"] == 400
    assert b"body: got 1001 empty pieces, expected at most 1000" in body["body"]


@pytest.mark.parametrize("length", ["abc", "+784", "7_84", "", "1" * 21])
async def test_a_length_that_is_no_number_is_refused_whatever_the_server_lets_through(
    opened, length
):
    start, body = await call(opened.asgi, None, length=length)
    error = json.loads(body["body"])["error"]
    assert (start["status"], error["code"], error["field"]) == (
        *(400, "invalid_input", "content-length"),
    )
    words = f"content-length: got {length!r}, expected the length of the body in bytes"
    assert error["message"] == words


@pytest.mark.parametrize("words", [DRAINED, None], ids=["uvicorn", "another"])
async def test_a_request_that_is_cancelled_is_sent_elsewhere_only_at_the_end_of_a_drain(
    opened, monkeypatch, words
):
    monkeypatch.setattr(Batcher, "_dispatch", lambda batcher: None)  # nothing is ever computed
    messages = [{"type": "http.request", "body": bytes(784)}]

    async def receive():
        if not messages:
            task.cancel(words)
            await asyncio.Event().wait()
        return messages.pop()

    task = asyncio.create_task(call(opened.asgi, receive))
    if words is None:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        start, body = await task
        assert start["status"] == 503
        assert (b"retry-after", b"1") in start["headers"]
        assert b"the service stopped before the answer; send this to another" in body["body"]
    assert opened.models.get()._queue.requests == 0


def test_header_lines_of_one_name_stay_apart_in_a_response():
    lines = b"Link: a\r\nLink: b\x85c\r\n"
    found = response(Answer(200, b"text/plain", b"", lines)).raw_headers
    assert [value for name, value in found if name == b"link"] == [b"a", b"b\x85c"]
    assert (b"content-type", b"text/plain") in found


# Without HTTP


@pytest.fixture
async def opened(tiny_weights):
    settings = Settings(
        weights=tiny_weights,
        device="cpu",
        max_batch_rows=2,
        max_images=9,
        admin_keys="an-administrators-key",
    )
    async with open_service(settings) as opened:
        yield opened


async def test_predictions_are_those_of_the_images_when_they_are_split(opened):
    images = np.random.default_rng(1).integers(0, 256, (9, 28, 28), np.uint8)
    whole = await opened.predict(images)
    assert (whole.model, whole.version) == ("lenet", "1")
    assert whole.probabilities.shape == (9, 10)
    for index in range(9):
        one = await opened.predict(images[index : index + 1], model="lenet", version="1")
        np.testing.assert_allclose(one.probabilities[0], whole.probabilities[index], rtol=1e-5)
        assert one.labels[0] == whole.labels[index] == whole.probabilities[index].argmax()


@pytest.mark.parametrize(
    ("images", "options", "error", "words"),
    [
        (np.zeros((1, 28, 28)), {}, InvalidInput, r"got float64 \(1, 28, 28\), expected uint8"),
        (np.zeros((28, 28), np.uint8), {}, InvalidInput, r"got uint8 \(28, 28\)"),
        (np.zeros((0, 28, 28), np.uint8), {}, InvalidInput, "got none, expected at least one"),
        (np.zeros((10, 28, 28), np.uint8), {}, TooLarge, "got 10, expected at most 9"),
        (np.zeros((1, 28, 28), np.uint8), {"model": "x"}, UnknownModel, "'x'"),
    ],
)
async def test_what_cannot_be_predicted_is_an_error(opened, images, options, error, words):
    with pytest.raises(error, match=words):
        await opened.predict(images, **options)


async def test_a_deadline_and_a_cancelled_task_take_the_images_out_of_the_queue(
    opened, monkeypatch
):
    monkeypatch.setattr(Batcher, "_dispatch", lambda batcher: None)  # nothing is ever computed
    one = np.zeros((1, 28, 28), np.uint8)
    with pytest.raises(DeadlineExceeded, match="no answer within 20 ms"):
        await opened.predict(one, timeout_s=0.02)
    task = asyncio.create_task(opened.predict(one))
    await asyncio.sleep(0)
    assert opened.models.get()._queue.requests == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert opened.models.get()._queue.requests == 0
