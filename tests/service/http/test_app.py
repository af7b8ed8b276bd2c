from __future__ import annotations

import asyncio
import base64
import io
import logging
import re

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lenet.reference import logits, softmax
from service.engine.batcher import Batcher
from service.errors import ServiceError, Unavailable
from service.http.app import STATUS
from service.http.openapi import ErrorResponse, PredictResponse
from service.images import ACCEPTED

JSON, RAW, NPY = "application/json", "application/octet-stream", "application/x-npy"
PNG, JPEG, FORM = "image/png", "image/jpeg", "multipart/form-data; boundary=x"
STAGES = ["decode", "queue", "compute", "encode", "total"]


def picture(kind, size=(40, 30)):
    """A bar of ink, as a file of `kind`."""
    pixels = np.full(size, 255, np.uint8)
    pixels[8:-8, 12:16] = 0
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def form(*parts):
    body = b""
    for kind, content in parts:
        body += b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n'
        body += b"Content-Type: " + kind.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + b"--x--\r\n"


def as_json(images):
    return orjson.dumps({"images": images})


def text(image):
    return base64.b64encode(image.tobytes()).decode()


@pytest.fixture
def expected(tiny, random_weights, images):
    """What the NumPy forward makes of `images`."""
    return softmax(logits(tiny, random_weights(tiny).tensors, images))


# What is answered


@pytest.mark.parametrize(
    ("content_type", "encode"),
    [
        (JSON, lambda images: as_json(images.tolist())),
        (JSON, lambda images: as_json(images.reshape(-1, 784).tolist())),
        (JSON, lambda images: as_json([text(image) for image in images])),
        ("Application/JSON; charset=utf-8", lambda images: as_json(images.tolist())),
        (RAW, lambda images: images.tobytes()),
        (NPY, npy),
        (FORM, lambda images: form(*((RAW, image.tobytes()) for image in images))),
    ],
    ids=["nested", "flat", "base64", "charset", "octets", "npy", "multipart"],
)
@pytest.mark.parametrize("count", [1, 5])
async def test_images_get_their_predictions_in_order_in_every_form(
    served, images, expected, content_type, encode, count
):
    response = await served.post(encode(images[:count]), content_type)
    assert response.status_code == 200
    assert response.headers["content-type"] == JSON
    answer = PredictResponse.model_validate_json(response.content, strict=True)
    assert (answer.model, answer.version) == ("tiny", "3")
    found = [prediction.probabilities for prediction in answer.predictions]
    np.testing.assert_allclose(found, expected[:count], atol=1e-5)
    for prediction, row in zip(answer.predictions, expected, strict=False):
        assert prediction.label == row.argmax()
        assert prediction.confidence == max(prediction.probabilities)


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "listed"])
async def test_one_json_image_is_one_prediction_when_it_stands_alone(served, images, bare):
    image = images[0].tolist()
    response = await served.post(as_json(image if bare else [image]), JSON)
    assert len(response.json()["predictions"]) == 1


@pytest.mark.parametrize(("kind", "content_type"), [("PNG", PNG), ("JPEG", JPEG)])
async def test_a_picture_is_the_same_digit_as_body_and_as_part(served, kind, content_type):
    body = picture(kind)
    alone = await served.post(body, content_type)
    part = await served.post(form((content_type, body)), FORM)
    assert alone.status_code == part.status_code == 200
    assert alone.content == part.content
    assert len(alone.json()["predictions"]) == 1


async def test_parts_of_different_types_are_answered_in_their_order(served, images):
    parts = [(PNG, picture("PNG")), (RAW, images[0].tobytes()), (NPY, npy(images[1]))]
    together = (await served.post(form(*parts), FORM)).json()["predictions"]
    alone = [(await served.post(content, kind)).json()["predictions"][0] for kind, content in parts]
    assert [p["label"] for p in together] == [p["label"] for p in alone]
    np.testing.assert_allclose(
        [p["probabilities"] for p in together], [p["probabilities"] for p in alone], atol=1e-6
    )


async def test_ink_is_turned_over_when_invert_says_so(served, images, one):
    turned = await served.post(one, query="?invert=true")
    assert turned.content == (await served.post((~images[0]).tobytes())).content
    assert turned.content != (await served.post(one, query="?invert=false")).content


@pytest.mark.parametrize("accept", [RAW, f"{JSON};q=0.1, {RAW}"])
async def test_probabilities_are_float32_rows_when_octets_are_accepted(
    served, images, expected, accept
):
    response = await served.post(images.tobytes(), accept=accept)
    assert response.status_code == 200
    assert response.headers["content-type"] == RAW
    assert response.headers["x-model-version"] == "3"
    rows = np.frombuffer(response.content, "<f4").reshape(5, 10)
    np.testing.assert_allclose(rows, expected, atol=1e-5)


@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/html, image/*"])
async def test_json_is_answered_when_anything_else_is_accepted(served, one, accept):
    assert (await served.post(one, accept=accept)).headers["content-type"] == JSON


@pytest.mark.parametrize("query", ["?model=tiny", "?version=3", "?model=tiny&version=3", "?model="])
async def test_the_loaded_model_answers_when_it_is_named(served, one, query):
    assert (await served.post(one, query=query)).json()["model"] == "tiny"


@pytest.mark.parametrize("accept", [JSON, RAW])
async def test_an_answer_has_its_own_type_length_and_version_and_nothing_twice(
    served, images, accept
):
    response = await served.post(images.tobytes(), accept=accept)
    assert sorted(name for name, _ in response.headers.multi_items()) == [
        *("content-length", "content-type", "server-timing", "x-model-version")
    ]
    assert response.headers["content-type"] == accept
    assert response.headers["content-length"] == str(len(response.content))
    assert response.headers["x-model-version"] == "3"


async def test_server_timing_tells_of_every_stage_when_a_prediction_is_answered(served, one):
    response = await served.post(one)
    entries = response.headers["server-timing"].split(", ")
    parsed = [re.fullmatch(r"(\w+);dur=(\d+\.\d{3})", entry) for entry in entries]
    times = {match[1]: float(match[2]) for match in parsed}
    assert sorted(times) == sorted(STAGES)
    total = times.pop("total")
    assert 0 < sum(times.values()) <= total + 0.005


async def test_a_request_larger_than_a_batch_is_answered_whole(served, images):
    many = np.resize(images, (11, 28, 28))
    response = await served.post(many.tobytes())
    single = await served.post(images[0].tobytes())
    predictions = response.json()["predictions"]
    assert len(predictions) == 11
    np.testing.assert_allclose(
        predictions[10]["probabilities"],
        single.json()["predictions"][0]["probabilities"],
        atol=1e-6,
    )


async def test_a_large_body_is_decoded_beside_the_loop(served, monkeypatch, images):
    monkeypatch.setattr("service.http.app._DECODE_HERE_BYTES", 1000)
    here = await served.post(as_json(images.tolist()), JSON)
    assert here.status_code == 200
    assert len(here.json()["predictions"]) == 5


# What is refused

ONE = [[0] * 28 for _ in range(28)]
MALFORMED = {
    "no body": (JSON, b"", "body", "got nothing, expected"),
    "half a document": (JSON, b'{"images": [', "body", "not JSON"),
    "not utf-8": (JSON, b'{"images": "\xff"}', "body", "not JSON"),
    "a lone surrogate": (JSON, b'{"images": "\\ud800"}', "body", "not JSON"),
    "NaN": (JSON, b'{"images": [NaN]}', "body", "not JSON"),
    "nested too deep": (JSON, b"[" * 100_000, "body", "not JSON"),
    "nested too deep, closed": (JSON, b"[" * 100_000 + b"]" * 100_000, "body", "not JSON"),
    "not an object": (JSON, b"[1, 2]", "body", "a list of 2"),
    "no images": (JSON, b"{}", "images", "got nothing"),
    "an unknown key": (JSON, b'{"images": [], "invert": true}', "invert", "an unknown key"),
    "null": (JSON, b'{"images": null}', "images", "got null"),
    "0 images": (JSON, b'{"images": []}', "images", "0 images, expected at least 1"),
    "783 pixels": (JSON, as_json([[0] * 783]), "images[0]", "783 values"),
    "27 rows": (JSON, as_json([ONE, ONE[1:]]), "images[1]", "27 rows"),
    "a short row": (JSON, as_json([[*ONE[1:], [0] * 27]]), "images[0][27]", "a list of 27"),
    "a fraction": (JSON, as_json([[0.5] * 784]), "images[0][0]", "got 0.5"),
    "a float": (JSON, as_json([[*[0] * 783, 1.0]]), "images[0][783]", "got 1.0"),
    "256": (JSON, as_json([[*[0] * 783, 256]]), "images[0][783]", "got 256"),
    "-1": (JSON, as_json([[-1, *[0] * 783]]), "images[0][0]", "got -1"),
    "1e999": (JSON, b'{"images": [[1e999' + b",0" * 783 + b"]]}", "body", "not JSON"),
    "a boolean": (JSON, as_json([[True] * 784]), "images[0][0]", "got true"),
    "a word": (JSON, as_json([[*[0] * 783, "7"]]), "images[0][783]", "got '7'"),
    "not base64": (JSON, as_json(["?" * 1048]), "images[0]", "not base64"),
    "base64 of 3 bytes": (JSON, as_json(["AAAA"]), "images[0]", "base64 of 3 bytes"),
    "0 bytes": (RAW, b"", "body", "got nothing, expected"),
    "785 bytes": (RAW, bytes(785), "body", "785 bytes, expected n x 784"),
    "not npy": (NPY, bytes(784), "body", "an npy file"),
    "npy of floats": (NPY, npy(np.zeros((28, 28), np.float32)), "body", "float32"),
    "npy of 27 rows": (NPY, npy(np.zeros((27, 28), np.uint8)), "body", "27,28"),
    "npy of 0 images": (NPY, npy(np.zeros((0, 28, 28), np.uint8)), "body", "0 images"),
    "npy that is short": (NPY, npy(np.zeros((28, 28), np.uint8))[:-1], "body", "783 bytes"),
    "not a PNG": (PNG, b"GIF89a" + bytes(50), "body", "expected image/png"),
    "a JPEG called PNG": (PNG, picture("JPEG"), "body", "got image/jpeg"),
    "half a PNG": (PNG, picture("PNG")[:60], "body", "not a readable image/png"),
    "half a JPEG": (JPEG, picture("JPEG")[:100], "body", "not a readable image/jpeg"),
    "an empty PNG": (PNG, b"", "body", "got nothing, expected"),
    "no boundary": ("multipart/form-data", form((RAW, bytes(784))), "content-type", "no boundary"),
    "no parts": (FORM, b"--x--\r\n", "body", "at least one part"),
    "half a form": (FORM, form((RAW, bytes(784)))[:-9], "body", "no closing boundary"),
    "a bad part": (FORM, form((RAW, bytes(784)), (RAW, bytes(3))), "parts[1]", "3 bytes"),
}


@pytest.mark.parametrize(
    ("content_type", "body", "field", "words"), MALFORMED.values(), ids=MALFORMED.keys()
)
async def test_a_malformed_body_is_a_400_that_names_what_is_wrong(
    served, refusal, content_type, body, field, words
):
    error = refusal(await served.post(body, content_type), 400, "invalid_input")
    assert error.field == field
    assert error.message.startswith(field)
    assert words in error.message
    assert len(error.message) < 400
    assert await served.requests("invalid_input") == 1


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_type_that_nobody_reads_is_a_415(served, refusal, one, content_type):
    response = await served.post(one, content_type)
    error = refusal(response, 415, "unsupported_media_type")
    assert error.field == "content-type"
    assert content_type in error.message
    assert all(kind in error.message for kind in ACCEPTED)


async def test_a_body_without_a_type_is_a_415(served, refusal, one):
    response = await served.client.post("/predict", content=one)
    assert refusal(response, 415, "unsupported_media_type").field == "content-type"


async def test_one_image_too_many_is_a_413(open_app, refusal, images):
    async with open_app(max_images=4) as served:
        assert (await served.post(images[:4].tobytes())).status_code == 200
        for body, kind in ((images.tobytes(), RAW), (as_json(images.tolist()), JSON)):
            error = refusal(await served.post(body, kind), 413, "too_large")
            assert "5 images, expected at most 4" in error.message


@pytest.mark.parametrize(
    ("query", "field", "words"),
    [
        ("?models=tiny", "models", "is unknown"),
        ("?model=tiny&model=tiny", "model", "given twice"),
        ("?invert=yes", "invert", "'yes', expected one of auto, true, false"),
        ("?invert=", "invert", "''"),
        ("?%ff=%00", "\ufffd", "is unknown"),
        ("?" + "x" * 5000, "x" * 40, "is unknown"),
    ],
)
async def test_a_wrong_query_parameter_is_a_400_that_names_it(
    served, refusal, one, query, field, words
):
    error = refusal(await served.post(one, query=query), 400, "invalid_input")
    assert error.field == field
    assert words in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize(
    ("query", "field", "words"),
    [
        ("?model=vgg", "model", "'vgg' is not loaded, expected one of tiny"),
        ("?version=2", "version", "'2' of model 'tiny' is not loaded, expected '3'"),
        ("?model=..%2F..%2Fetc", "model", "is not loaded"),
    ],
)
async def test_an_unknown_model_is_a_404_that_lists_what_there_is(
    served, refusal, one, query, field, words
):
    error = refusal(await served.post(one, query=query), 404, "unknown_model")
    assert error.field == field
    assert words in error.message


# Deadlines and overload


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "+5", "1.5", "1e3", "5s", "3600001", "99999999", "9" * 5000, "\xb2"]
)
async def test_a_timeout_that_is_no_time_is_a_400_that_shows_it(served, refusal, one, value):
    headers = [
        (b"Content-Type", RAW.encode()),
        (b"X-Request-Timeout-Ms", value.encode("latin-1")),
    ]
    response = await served.client.post("/predict", content=one, headers=headers)
    error = refusal(response, 400, "invalid_input")
    assert error.field == "X-Request-Timeout-Ms"
    assert repr(value[:40]) in error.message
    assert "from 1 to 3600000" in error.message


@pytest.mark.parametrize("value", ["1000", "3600000", "0001000"])
async def test_an_answer_in_time_is_an_answer_when_a_timeout_is_asked_for(served, one, value):
    assert (await served.post(one, x_request_timeout_ms=value)).status_code == 200


async def test_a_request_that_waits_too_long_is_a_504_and_its_rows_are_dropped(
    served, hold, refusal, one
):
    first = asyncio.create_task(served.post(one))
    await hold.begun()
    late = await served.post(one + one, x_request_timeout_ms="30")
    error = refusal(late, 504, "deadline_exceeded")
    assert "30 ms" in error.message
    hold.release()
    assert (await first).status_code == 200
    assert await served.value("lenet_rows_dropped_total", reason="late") == 2
    assert await served.requests("deadline_exceeded") == 1


async def test_the_services_own_deadline_holds_when_a_longer_one_is_asked_for(
    open_app, hold, refusal, one
):
    async with open_app(request_timeout_ms=40) as served:
        for headers in ({}, {"x_request_timeout_ms": "3600000"}):
            error = refusal(await served.post(one, **headers), 504, "deadline_exceeded")
            assert "40 ms" in error.message
        hold.release()


async def test_one_image_and_many_are_refused_alike_when_the_queue_is_full(
    open_app, hold, refusal, images
):
    async with open_app(max_queue_rows=3, max_images=3) as served:
        waiting = [asyncio.create_task(served.post(images[:1].tobytes()))]
        await hold.submitted()
        await hold.begun()
        waiting.append(asyncio.create_task(served.post(images[1:4].tobytes())))
        await hold.submitted()
        for rows in (1, 3):
            refused = await served.post(images[:rows].tobytes())
            error = refusal(refused, 429, "overloaded")
            assert refused.headers["retry-after"] == "1"
            assert f"3 rows wait and {rows} more would pass the limit of 3" in error.message
        hold.release()
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]
        assert await served.requests("overloaded") == 2
        assert (await served.post(images[:3].tobytes())).status_code == 200


# Faults of ours


async def test_a_batch_that_fails_is_a_500_that_tells_nothing_of_the_inside(
    served, monkeypatch, refusal, one
):
    def fail(context, images):
        raise RuntimeError("CUDA error 700 in /srv/secret.py")

    monkeypatch.setattr("lenet.context.ExecutionContext.run", fail)
    refusal(await served.post(one), 500, "inference_failed")
    monkeypatch.undo()
    assert (await served.post(one)).status_code == 200
    assert await served.requests("inference_failed") == 1


async def test_an_unforeseen_error_is_a_500_without_trace_or_path(
    served, monkeypatch, refusal, one
):
    async def fail(*_):
        raise RuntimeError("surprise in /srv/secret.py")

    with monkeypatch.context() as patch:
        patch.setattr(Batcher, "submit", fail)
        error = refusal(await served.post(one), 500, "internal")
    assert "surprise" not in error.message
    assert (await served.post(one)).status_code == 200
    assert await served.requests("internal") == 1


async def test_an_unforeseen_error_is_logged_once_when_a_server_stands_in_front(
    listen, monkeypatch, refusal, one, caplog
):
    async def fail(*_):
        raise RuntimeError("surprise")

    async with listen() as served:
        monkeypatch.setattr(Batcher, "submit", fail)
        refusal(await served.post(one), 500, "internal")
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [
        ("surprise",)
    ]


async def test_a_stopping_service_is_a_503_with_retry_after(served, monkeypatch, refusal, one):
    async def refuse(*_):
        raise Unavailable("the service is stopping", retry_after_s=1)

    monkeypatch.setattr(Batcher, "submit", refuse)
    response = await served.post(one)
    refusal(response, 503, "unavailable")
    assert response.headers["retry-after"] == "1"


def test_every_error_has_a_status_and_none_is_422():
    def codes(kind):
        return {kind.code}.union(*map(codes, kind.__subclasses__()))

    assert codes(ServiceError) == set(STATUS)
    assert 422 not in STATUS.values()


# Anything at all

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 300) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=40,
)
IMAGE = st.one_of(
    st.just(ONE),
    st.lists(st.integers(-1, 256), min_size=783, max_size=785),
    st.binary(min_size=783, max_size=785).map(lambda data: base64.b64encode(data).decode()),
    st.lists(st.lists(st.integers(0, 255), min_size=27, max_size=28), min_size=27, max_size=28),
    ANYTHING,
)
DOCUMENT = st.one_of(
    ANYTHING,
    st.fixed_dictionaries({"images": ANYTHING}),
    st.fixed_dictionaries({"images": st.lists(IMAGE, max_size=3)}),
)
FIXTURES_STAY = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)


def judged(response):
    """Nothing is a fault of ours, and what is refused has the one shape."""
    assert response.status_code in (200, 400, 404, 413, 415), response.text
    if response.status_code == 200:
        PredictResponse.model_validate_json(response.content)
    else:
        error = ErrorResponse.model_validate_json(response.content, strict=True).error
        assert STATUS[error.code] == response.status_code


@FIXTURES_STAY
@given(document=DOCUMENT)
async def test_any_json_is_answered_or_refused(served, document):
    judged(await served.post(orjson.dumps(document), JSON))


@FIXTURES_STAY
@given(
    content_type=st.sampled_from([*ACCEPTED[:-1], FORM, "multipart/form-data; boundary="])
    | st.text(st.characters(max_codepoint=255, exclude_categories=["Cc"]), max_size=40),
    start=st.sampled_from(
        [b"", b"{", b"\x93NUMPY\x01\x00", picture("PNG"), picture("JPEG"), form((RAW, b"1"))]
    ),
    keep=st.integers(0, 300),
    rest=st.binary(max_size=900),
    query=st.sampled_from(["", "?invert=true", "?invert=false"]),
)
async def test_any_bytes_are_answered_or_refused_under_any_type(
    served, content_type, start, keep, rest, query
):
    headers = [(b"Content-Type", content_type.encode("latin-1"))]
    url = f"/predict{query}"
    judged(await served.client.post(url, content=start[:keep] + rest, headers=headers))


async def test_requests_at_the_same_time_get_their_own_answers(served, images):
    singles = [(await served.post(image.tobytes(), accept=RAW)).content for image in images]
    order = list(range(5)) * 4
    together = await asyncio.gather(*(served.post(images[i].tobytes(), accept=RAW) for i in order))
    for i, response in zip(order, together, strict=True):
        np.testing.assert_allclose(
            np.frombuffer(response.content, "<f4"), np.frombuffer(singles[i], "<f4"), atol=1e-6
        )


async def test_a_connection_serves_on_when_a_request_on_it_was_refused(listen, one, caplog):
    async with listen() as served:
        statuses = [
            (await served.post(body, kind)).status_code
            for body, kind in ((b"{", JSON), (one, RAW), (one, "text/plain"), (one, RAW))
        ]
    assert statuses == [400, 200, 415, 200]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_unread_body_is_not_taken_for_the_next_request(listen, one):
    async with listen() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = f"Host: a\r\nContent-Type: {RAW}\r\nContent-Length: 784\r\n\r\n".encode()
        inner = b"GET /info HTTP/1.1\r\nHost: a\r\n\r\n"
        writer.write(b"POST /predict?nope=1 HTTP/1.1\r\n" + head + inner.ljust(784))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answers = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    assert re.findall(r"HTTP/1.1 (\d+)", answers) == ["400", "200"]
    assert '"live":true' in answers


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/octet-stream", RAW),
        ("Application/Octet-Stream ; q=0.1, text/html", RAW),
        ("application/json, application/octet-stream;q=0", JSON),
        ("application/octet-stream;q=0.000", JSON),
        ("application/octet-streams", JSON),
        ("*/*", JSON),
    ],
)
async def test_bytes_are_answered_only_to_those_who_accept_them(served, one, accept, kind):
    response = await served.post(one, accept=accept)
    assert response.headers["content-type"] == kind


async def test_the_service_answers_alike_below_a_root_path(served, monkeypatch, refusal, one):
    async def fail(*_):
        raise RuntimeError("surprise")

    here = served.client
    transport = httpx.ASGITransport(served.app, raise_app_exceptions=False, root_path="/x")
    async with httpx.AsyncClient(transport=transport, base_url="http://service/x") as below:
        for client in (here, below):
            client.headers["Content-Type"] = RAW
        answers = [await client.post("/predict", content=one) for client in (here, below)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[0].content == answers[1].content
        for client in (here, below):
            refusal(await client.post("/predict"), 400, "invalid_input")
            refusal(await client.get("/predict"), 405, "method_not_allowed")
            refusal(await client.post("/predict/x", content=one), 404, "not_found")
        monkeypatch.setattr(Batcher, "submit", fail)
        refusal(await below.post("/predict", content=one), 500, "internal")
