from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import random
from functools import partial

import numpy as np
import orjson
import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from lenet.backend import BatchResult
from lenet.context import ExecutionContext
from lenet.reference import logits, softmax
from service.api.schemas import InfoResponse, PredictResponse
from service.observe.metrics import Metrics
from tests.conftest import draw_weights
from tests.documented import documented
from tests.pictures import FORM, PNG, encoded, form
from tests.service_process import PATIENCE_S
from tests.wire.doors import until
from wire.connection import Connection

JSON, RAW, NPY = "application/json", "application/octet-stream", "application/x-npy"


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def as_json(images):
    return orjson.dumps({"images": images})


@pytest.fixture
def expected(tiny, random_weights, images):
    """The NumPy forward of `images`."""
    return softmax(logits(tiny, random_weights(tiny).tensors, images))


# Answers


FORMS = {
    JSON: lambda images: as_json(images.tolist()),
    "Application/JSON; charset=utf-8": lambda images: as_json(images.tolist()),
    RAW: lambda images: images.tobytes(),
    NPY: npy,
    FORM: lambda images: form(*((RAW, image.tobytes()) for image in images)),
}


async def test_images_get_their_predictions_in_order_in_every_form(served, images, expected):
    for content_type, encode in FORMS.items():
        response = await served.post(encode(images), content_type)
        assert response.status_code == 200
        assert response.headers["content-type"] == JSON
        answer = PredictResponse.model_validate_json(response.content, strict=True)
        assert (answer.model, answer.version) == ("tiny", "3")
        found = [prediction.probabilities for prediction in answer.predictions]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        for prediction, row in zip(answer.predictions, expected, strict=True):
            assert prediction.label == row.argmax()
            assert prediction.confidence == max(prediction.probabilities)
        inverted = await served.post(encode(~images), content_type, "?invert=true")
        assert inverted.content == response.content


def bars(count, kind="PNG"):
    """Thick bars of ink beside each other, of several heights."""
    pixels = np.full((100, 40 * count + 40), 255, np.uint8)
    for i in range(count):
        pixels[40 - 2 * (i % 10) : 80, 40 * i + 30 : 40 * i + 40] = 0
    return encoded(pixels, kind)


@pytest.mark.states(
    "limits", "digits in a picture with `digits=several`", found="as many strokes, and one more"
)
async def test_each_digit_of_a_picture_has_a_prediction_when_there_are_several(served):
    answer = (await served.post(bars(4), PNG, query="?digits=several")).json()
    alone = [(await served.post(bars(1), PNG)).json()["predictions"][0]]
    assert len(answer["predictions"]) == 4
    one, other = answer["predictions"][0], alone[0]
    assert one["label"] == other["label"]
    assert one["probabilities"] == pytest.approx(other["probabilities"], abs=0.01)
    assert "warnings" not in answer
    body = form((PNG, bars(3)), (RAW, bytes(784)), (PNG, bars(2)))
    answer = (await served.post(body, FORM, query="?digits=several")).json()
    assert len(answer["predictions"]) == 6
    (most,) = map(int, documented("digits in a picture with"))
    for count, status in ((most, 200), (most + 1, 413)):
        answer = await served.post(bars(count), PNG, query="?digits=several")
        assert answer.status_code == status


@pytest.mark.states(
    "limits", "warnings in an answer", found="a form with a picture more, each with two digits"
)
async def test_several_digits_are_warned_of_where_one_was_expected(served):
    block = np.full((100, 100), 255, np.uint8)
    block[20:80, 20:80] = 0
    kinds = [(f"image/{kind.lower()}", bars(1, kind)) for kind in ("WEBP", "GIF", "BMP", "JPEG")]
    body = form(*kinds, (RAW, bytes(784)), (PNG, bars(2)), (PNG, encoded(block)))
    answer = PredictResponse.model_validate_json((await served.post(body, FORM)).content)
    assert len(answer.predictions) == 7
    found = [(warning.image, warning.code) for warning in answer.warnings]
    assert found == [(5, "several_shapes"), (6, "not_a_digit")]
    assert "?digits=several" in answer.warnings[0].message
    (most,) = map(int, documented("warnings in an answer"))
    found = (await served.post(form(*[(PNG, bars(2))] * (most + 1)), FORM)).json()
    assert (len(found["predictions"]), len(found["warnings"])) == (most + 1, most)


ARRAYS = {
    RAW: lambda images: images.tobytes(),
    NPY: npy,
    JSON: lambda images: as_json(images.tolist()),
    "text/csv": lambda images: b",".join(b"%d" % one for one in images.ravel().tolist()),
}


@pytest.mark.parametrize("kind", ARRAYS)
async def test_an_array_of_dark_ink_is_warned_of_unless_it_is_inverted(served, kind):
    body = ARRAYS[kind](np.full((1, 28, 28), 255, np.uint8))
    answer = (await served.post(body, kind)).json()
    assert [(one["image"], one["code"]) for one in answer["warnings"]] == [(0, "looks_inverted")]
    assert "warnings" not in (await served.post(body, kind, query="?invert=true")).json()


async def test_bytes_are_answered_as_bytes_when_a_picture_is_doubtful(served):
    body = form((RAW, bytes(784)), (PNG, bars(2)))
    answer = await served.post(body, FORM, accept=RAW)
    assert (answer.headers["content-type"], len(answer.content)) == (RAW, 2 * 40)


async def test_a_batch_has_the_images_of_all_its_requests(open_app, device):
    async with open_app(max_wait_us=200_000, max_batch_rows=3) as served:
        answers = await asyncio.gather(*(served.post(bytes(784)) for _ in range(3)))
    for answer in answers:
        assert 'batch;desc="3"' in answer.headers["server-timing"]


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
async def test_a_refused_body_counts_for_its_model_however_it_came(open_app, wait_s):
    head = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
    head += b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    async with open_app(max_body_bytes=10_000) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head)
        await asyncio.sleep(wait_s)
        writer.write(b"2ee0\r\n" + bytes(12_000) + b"\r\n0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()
        assert served.requests("too_large", model="tiny") == 1


async def test_a_fault_behind_an_answer_makes_no_second_one(open_app, monkeypatch):
    write = Connection.write

    def write_and_fail(self, data):
        monkeypatch.setattr(Connection, "write", write)
        write(self, data)
        raise RuntimeError("planted")

    async with open_app() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        monkeypatch.setattr(Connection, "write", write_and_fail)
        writer.write(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 784\r\n")
        writer.write(b"Content-Type: application/octet-stream\r\n\r\n" + bytes(784))
        async with asyncio.timeout(PATIENCE_S):
            answers = await reader.read()
        writer.close()
        assert answers.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("rows", [1, 300])  # answered at once, and in pieces
async def test_classes_with_names_are_named(open_app, tmp_path, tiny, rows):
    names = ("circle", "0", "2", 'a "line"', "お")
    weights = draw_weights(tiny.with_classes(5))
    training = dataclasses.replace(weights.training, labels=names)
    (tmp_path / "named/tiny").mkdir(parents=True)
    dataclasses.replace(weights, training=training).write(tmp_path / "named/tiny/1.safetensors")
    images = np.random.default_rng(1).integers(0, 256, (rows, 28, 28), np.uint8)
    async with open_app(weights=tmp_path / "named", max_batch_rows=512) as served:
        answer = PredictResponse.model_validate_json(
            (await served.post(images.tobytes())).content, strict=True
        )
        info = InfoResponse.model_validate_json((await served.client.get("/info")).content)
    assert {len(prediction.probabilities) for prediction in answer.predictions} == {5}
    for prediction in answer.predictions:
        # A name that is the number of its class is left out: "2" is that of class 2.
        assert prediction.name == ("" if prediction.label == 2 else names[prediction.label])
    assert info.models[0].labels == list(names)


MOST_COMMAS = int(documented("header fields of a request; bytes of its target")[3])
ACCEPTS = {
    "application/octet-stream": RAW,
    "application/json;q=0.1, application/octet-stream": RAW,
    "Application/Octet-Stream ; q=0.1, text/html": RAW,
    "application/json, application/octet-stream;q=0": JSON,
    "application/octet-stream;q=0.000": JSON,
    "application/octet-streams": JSON,
    "application/json, application/octet-stream": JSON,
    "application/json;q=0.9, application/octet-stream;q=0.8": JSON,
    "application/json;q=0.8, application/octet-stream;q=0.9": RAW,
    "application/octet-stream;q=0.5, */*;q=0.4": RAW,
    "application/octet-stream;q=0.5, */*": JSON,
    "application/octet-stream, application/*;q=0.2": RAW,
    "text/html, image/*": JSON,
    "*/*": JSON,
    RAW + "," * MOST_COMMAS: RAW,
    RAW + "," * (MOST_COMMAS + 1): JSON,
}


@pytest.mark.states(
    "limits",
    "header fields of a request; bytes of its target; parameters of its query",
    found="an `Accept` that asks for bytes with as many commas, and one more",
)
async def test_probabilities_are_float32_rows_when_octets_are_accepted(served, images, expected):
    for accept, kind in ACCEPTS.items():
        response = await served.post(images.tobytes(), accept=accept)
        assert response.status_code == 200
        assert sorted(name for name, _ in response.headers.multi_items()) == [
            *("content-length", "content-type", "date", "server-timing", "x-model-version")
        ]
        assert response.headers["content-type"] == kind, accept
        assert response.headers["x-model-version"] == "3"
        if kind == RAW:
            rows = np.frombuffer(response.content, "<f4").reshape(5, 10)
            np.testing.assert_allclose(rows, expected, atol=1e-5)


async def test_a_request_that_cannot_be_traced_is_answered_and_counted_once(
    open_app, one, monkeypatch, caplog
):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(BatchSpanProcessor, "on_end", fail)
    nowhere = {"traces_endpoint": "http://127.0.0.1:9/v1/traces", "traces_one_in": 1}
    async with open_app(**nowhere) as served:
        assert (await served.client.post("/predict", json={"images": list(one)})).status_code == 200
        assert (await served.client.post("/predict", json={})).status_code == 400
        assert served.requests("ok") == served.requests("invalid_input") == 1
        assert served.requests("internal") == 0
    assert caplog.text.count("a request was not traced") == 2


async def test_the_default_model_answers_to_its_alias_in_every_protocol(open_app, one, write):
    write("other/1")
    async with open_app(model_alias="digits") as served:
        for path, body in (
            ("/predict?model=digits", {"images": list(one)}),
            ("/v1/models/digits:predict", {"instances": [list(one)]}),
        ):
            answer = await served.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        for path in ("/v2/models/digits/ready", "/v2/models/digits", "/v1/models/digits"):
            assert (await served.client.get(path)).json()["name"] == "tiny"
        assert served.service.models.names == {"tiny", "other", "digits"}
        refused = await served.client.get("/v2/models/vgg")
        assert refused.json()["error"].endswith("expected one of tiny, other, digits")
        await served.service.repository.unload("tiny")
        assert served.service.models.names == {"other"}
        assert (await served.client.get("/v2/models/digits")).status_code == 404


@pytest.fixture
def table(monkeypatch):
    """Contexts answer with rows of this table: that which the first two pixels of an image name."""
    generator = np.random.default_rng(3)
    table = generator.dirichlet(np.full(10, 0.1), 2100).astype(np.float32)
    table[0] = np.eye(10, dtype=np.float32)[9]
    table[1] = 0.1
    table[2, :3] = 1e-45, 1e-7, 123456.78
    batches = []

    def launch(_, parts):
        images = np.concatenate(parts)
        batches.append(len(images))
        rows = images.reshape(len(images), -1)[:, :2].copy().view("<u2").ravel()
        return BatchResult(table[rows], len(images), captured=False)

    monkeypatch.setattr(ExecutionContext, "launch", launch)
    return table, batches


def tagged(start, count):
    """Images that name the rows `start`, `start` + 1, ... of the table."""
    images = np.zeros((count, 784), np.uint8)
    images[:, :2] = np.arange(start, start + count, dtype="<u2")[:, None].view(np.uint8)
    return images.tobytes()


async def test_answers_are_those_of_their_own_rows_when_requests_share_batches(open_app, table):
    table, batches = table
    asked = [
        *((JSON, 1), (JSON, 2), (JSON, 4), (JSON, 1)),  # one batch
        *((JSON, 1), (RAW, 2), (JSON, 2), (RAW, 1), (JSON, 1), (RAW, 1)),  # another
        *((JSON, 1000), (RAW, 1000), (JSON, 2), (RAW, 9), (JSON, 9), (JSON, 1)),
    ]
    async with open_app(max_batch_rows=8, max_queue_rows=4000, max_images=1000) as served:
        route = served.service.fast_routes[b"POST", b"/predict"]
        replies, start = {}, 0
        for accept, count in asked:
            wanted = route.read(b"", {"content-type": RAW, "accept": accept})
            call = route.open(wanted, partial(replies.__setitem__, (accept, start, count)))
            call.complete(tagged(start, count))
            start += count
        await until(lambda: len(replies) == len(asked))
    assert (batches[:2], max(batches)) == ([8, 8], 8)
    for (accept, start, count), reply in replies.items():
        assert reply.status == 200
        rows = table[start : start + count]
        if accept == RAW:
            assert reply.content == rows.astype("<f4").tobytes()
            continue
        predictions = [
            {
                "label": int(row.argmax()),
                "confidence": float(str(row.max())),
                "probabilities": [float(str(share)) for share in row],
            }
            for row in rows
        ]
        document = {"model": "tiny", "version": "3", "predictions": predictions}
        assert json.loads(reply.content) == document
        assert reply.content.startswith(b'{"model":"tiny","version":"3","predictions":[{"label":')


async def test_small_bodies_start_no_decoding_process_however_their_type_is_written(
    open_app, monkeypatch
):
    def start(*_):
        raise AssertionError("a decoding process is started")

    monkeypatch.setattr("service.decode.pool._start", start)
    async with open_app() as served:
        for kind in (RAW, RAW.upper(), f"{RAW}; a=b", JSON.title(), f"{JSON};charset=UTF-8"):
            body = as_json([[0] * 784]) if "json" in kind.lower() else bytes(784)
            assert (await served.post(body, kind)).status_code == 200


# Errors

WRONG_QUERIES = [
    (400, "invalid_input", "?models=tiny", "models", "is unknown"),
    (400, "invalid_input", "?model=tiny&model=tiny", "model", "given twice"),
    (400, "invalid_input", "?invert=yes", "invert", "'yes', expected one of auto, true, false"),
    (400, "invalid_input", "?invert=", "invert", "''"),
    (400, "invalid_input", "?digits=2", "digits", "'2', expected one of one, several"),
    (400, "invalid_input", "?%ff=%00", "\ufffd", "is unknown"),
    (400, "invalid_input", "?" + "x" * 5000, "x" * 40, "is unknown"),
    (404, "unknown_model", "?model=..%2F..%2Fetc", "model", "is not loaded"),
]


async def test_a_wrong_query_is_refused_by_the_name_of_what_is_wrong(served, refusal, one):
    for status, code, query, field, words in WRONG_QUERIES:
        for body in (one, b"no image"):
            error = refusal(await served.post(body, query=query), status, code)
            assert error.field == field
            assert words in error.message
            assert len(error.message) < 200


# Deadlines and overload


async def test_a_timeout_is_milliseconds_and_anything_else_a_400(served, refusal, one):
    wrong = ("", "0", "-1", "+5", "1.5", "1e3", "5s", "3600001", "99999999", "9" * 5000, "\xb2")
    for value in (*wrong, "1000", "3600000", "0001000"):
        headers = [
            (b"Content-Type", RAW.encode()),
            (b"X-Request-Timeout-Ms", value.encode("latin-1")),
        ]
        response = await served.client.post("/predict", content=one, headers=headers)
        if value not in wrong:
            assert response.status_code == 200
            continue
        error = refusal(response, 400, "invalid_input")
        assert error.field == "X-Request-Timeout-Ms"
        assert repr(value[:40]) in error.message
        assert "from 1 to 3600000" in error.message


# Operations


async def test_a_request_to_the_repository_is_refused_by_the_name_of_what_is_wrong(open_app):
    key = "a-key-of-an-administrator"
    async with open_app(admin_keys=key) as served:
        for body, words in (
            (b'{"ready": "yes"}', "ready: got 'yes', expected a valid boolean"),
            (b'{"ready": 1}', "ready: got 1, expected a valid boolean"),
            (b"[" * 60_000, "body: is not JSON ("),
            (b" \n", '"READY"'),
            (b'{"ready": true, "x": 1}', '"READY"'),
        ):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "text/plain"}
            answer = await served.client.post("/v2/repository/index", content=body, headers=headers)
            assert answer.status_code == (200 if "READY" in words else 400)
            assert words in answer.text


async def test_an_error_in_another_route_is_a_500_in_the_same_shape(served, monkeypatch, refusal):
    monkeypatch.setattr(Metrics, "exposition", None)
    refusal(await served.client.get("/metrics"), 500, "internal")


async def test_strange_requests_make_no_series(served, one):
    draw = random.Random(0)

    async def strange():
        for _ in range(20):
            word = "".join(draw.choices("abc/%$.\u00e9", k=12))
            await served.client.request(
                draw.choice(["GET", "POST", "DELETE", "BREW"]),
                f"/x{word}",
                headers={"Accept": word.encode(), "X-Request-Timeout-Ms": word.encode()},
            )
            await served.post(one, query=f"?model={word}")
            await served.post(one, query=f"?{word}=1")
            await served.post(one, content_type=f"image/x{draw.random()}")
        await served.post(one)

    await strange()
    before = len(served.samples())
    await strange()
    assert len(served.samples()) == before < 600


async def test_no_route_answers_a_method_it_does_not_know(served, refusal):
    for method, path in (
        *(("GET", "/predict"), ("PUT", "/predict"), ("POST", "/healthz"), ("DELETE", "/info")),
        *(("POST", "/metrics"), ("PATCH", "/readyz")),
    ):
        response = await served.client.request(method, path)
        error = refusal(response, 405, "method_not_allowed")
        allowed = "POST, OPTIONS" if path == "/predict" else "GET, HEAD, OPTIONS"
        assert f"got {method!r} for {path!r}, expected {allowed}" in error.message
        assert response.headers["allow"] == allowed


@pytest.mark.states(
    "metrics",
    "`lenet_connections_refused_total`",
    found="connections of clients that were closed at once",
)
async def test_connections_beyond_the_limit_are_counted_and_logged_once_a_minute(open_app, caplog):
    async with open_app() as served:
        assert served.value("lenet_connections_refused_total") == 0
        served.door.max_connections = len(served.door.connections)
        for _ in range(3):
            with contextlib.suppress(ConnectionResetError):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                assert await reader.read() == b""
            writer.close()
        assert served.value("lenet_connections_refused_total") == 3
        lines = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert [line.partition(":")[0] for line in lines] == ["connections"]


async def test_an_unknown_path_is_a_404_in_the_same_shape(served, refusal):
    for path in ("/nope", "/predict/..%2f..%2fetc", "/%00", "/" + "predict" * 20, "/metrics" * 99):
        message = refusal(await served.client.get(path), 404, "not_found").message
        assert (
            "expected /predict, /v2/models/MODEL/infer, /v1/models/MODEL:predict, /info or"
            in message
        )
        assert "did you mean" not in message
        assert len(message) < 200

    for path in ("/explain%0A", "/v1/models/tiny:predict%0A", "/v2/models/tiny/infer%0A"):
        assert (await served.client.post(path, content=bytes(784))).status_code == 404


async def test_a_misspelt_path_is_answered_with_the_nearest(served):
    assert "; /v2/models lists the models" in (await served.client.get("/models")).text
    for path, nearest in (
        ("/predicts/", "/predict"),
        ("/api/predict", "/predict"),
        ("/v2/predict", "/predict"),
        ("/health", "/healthz"),
        ("/doc", "/docs"),
        ("/v2/models/tiny/infers", "/v2/models/tiny/infer"),
        ("/v2/models/tiny/predict", "/v2/models/tiny/infer"),
        ("/v2/models/tiny/version/3/infer", "/v2/models/tiny/versions/3/infer"),
        ("/v1/models/tiny/predict", "/v1/models/tiny:predict"),
        ("/v2/model/a%1bb/ready", "/v2/models/a\\x1bb/ready"),
    ):
        answer = await served.client.get(path)
        assert answer.status_code == 404
        assert f"did you mean '{nearest}'?" in answer.text.replace("\\\\", "\\")
