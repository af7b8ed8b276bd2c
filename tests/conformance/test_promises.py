"""What the service promises, through each of its doors."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from lenet.model import Model
from lenet.reference import logits, softmax
from service.engine.batcher import Batcher
from service.engine.contexts import BusyPoll
from service.engine.models import Models
from service.observe.metrics import Metrics
from service.request import Request
from tests.conformance.conftest import images
from tests.conformance.doors import Ask, Predict, doors_that
from tests.conformance.transports import Message
from tests.wire.doors import until

IDS = {"x-request-id": "r1", "traceparent": f"00-{'4b' * 16}-{'0a' * 8}-01"}
KEY, OTHER = "a-key-that-nobody-knows", "another-key-of-a-user"


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def in_both(key, other):
    return {**bearer(key), "x-api-key": other}


@pytest.fixture
def expected(tiny, random_weights):
    """`expected(images, seed=0)`: what NumPy says to them with the weights drawn from `seed`."""

    def expected(pixels, seed=0):
        weights = random_weights(Model("tiny", tiny.blocks), seed)
        return softmax(logits(weights.model, weights.tensors, pixels))

    return expected


def assert_answers(outcome, rows, version):
    assert outcome.code in ("ok", None)
    np.testing.assert_allclose(outcome.probabilities, rows, atol=1e-5)
    assert outcome.labels == rows.argmax(axis=1).tolist()
    assert outcome.model in ("tiny", None)
    assert outcome.version == version


# Answers


@pytest.mark.parametrize("rows", [1, 5])
async def test_each_image_has_its_probabilities_and_the_version_that_computed_them(
    opened, device, expected, rows
):
    pixels = images(rows)
    async with opened() as service:
        for named in ({}, {"model": "tiny"}, {"model": "tiny", "version": "3"}):
            assert_answers(await service.ask(Ask(pixels, **named)), expected(pixels), "3")
        await service.assert_counted(ok=3)
        for name in ("lenet_images_total", "lenet_batch_rows_sum"):
            assert await service.value(name) == 3 * rows
        assert device.rows == 3 * rows


async def test_callers_of_one_batch_get_their_own_rows(opened, device, expected):
    asked = [images(rows, seed) for seed, rows in enumerate((1, 2, 9, 1, 3, 1))]
    async with opened() as service:
        device.hold()
        first = await service.begin()
        await until(lambda: device.batches)
        clients = [await service.begin(Ask(pixels)) for pixels in asked]
        await service.until_waiting(sum(map(len, asked)))
        device.release()
        await service.end(first)
        for client, pixels in zip(clients, asked, strict=True):
            assert_answers(await service.end(client), expected(pixels), "3")
        assert len(device.batches) < 1 + len(asked)
        await service.assert_counted(ok=1 + len(asked))


# Refusals


@pytest.mark.parametrize(
    ("named", "field", "words"),
    [
        ({"model": "vgg"}, "model", "model 'vgg' is not loaded, expected one of tiny"),
        ({"version": "2"}, "version", "version '2' of model 'tiny' is not loaded, expected '3'"),
    ],
)
@pytest.mark.parametrize("cut", [0, 1])
async def test_an_unknown_model_is_named_whatever_else_is_wrong(
    opened, door, device, named, field, words, cut
):
    async with opened() as service:
        outcome = await service.ask(Ask(cut=cut, **named))
        door.assert_refused(outcome, "unknown_model", words, field=field)
        assert await service.counted("model") == {("none", "unknown_model"): 1}
    assert device.rows == 0


BAD = {
    "garbage": (Ask(garbage=True), "invalid_input", "content", ""),
    "a byte too few": (Ask(cut=1), "invalid_input", "pixels", "783 bytes, expected"),
    "an image too many": (Ask(images(5)), "too_large", "count", "got 5 images, expected at most 4"),
}


@pytest.mark.states(
    "limits",
    "images in a request; bytes of its body or of a gRPC message",
    found="as many images as are set, and one more",
)
@pytest.mark.parametrize(("ask", "code", "field", "words"), BAD.values(), ids=BAD)
async def test_a_bad_request_is_refused_in_the_same_words_and_the_next_is_answered(
    opened, door, device, ask, code, field, words
):
    async with opened(max_images=4) as service:
        outcome = await service.ask(ask)
        door.assert_refused(outcome, code, words, field=field)
        assert device.rows == 0
        assert (await service.ask(Ask(images(4)))).version == "3"
        await service.assert_counted(**{code: 1, "ok": 1})


LARGE = Ask(images(60))
"""47,040 bytes of pixels, 62,720 in base64."""


@pytest.mark.states(
    "limits",
    "images in a request; bytes of its body or of a gRPC message",
    found="a message of as many bytes as are set, and one that announces a byte more",
)
async def test_a_body_that_is_too_large_is_refused_before_it_has_come(opened, door, device):
    prefix = 5 if door.form.protocol == "grpc" else 0  # of a message, which the limit leaves out
    size = len(door.form.message(LARGE).body) - prefix
    for most, counted in ((size, {"ok": 1}), (size - 1, {"too_large": 1})):
        async with opened(max_body_bytes=most) as service:
            client = await service.begin(LARGE, held_back=40_000)
            if most < size:
                words = f"got {size} bytes, expected at most {most} bytes"
                door.assert_refused(await service.end(client), "too_large", words, field="content")
            else:
                client.send_rest()
                assert (await service.end(client)).version == "3"
            await service.assert_counted(**counted)
    assert device.rows == len(LARGE.images)


async def test_a_body_of_unknown_length_in_one_piece_has_the_limit_too(opened, door, device):
    message = door.form.message(Ask(images(13)))._replace(has_length=False)
    async with opened(max_body_bytes=10_000) as service:
        outcome = await service.end(await service.send(message))
        words = ", expected at most 10000 bytes"
        door.assert_refused(outcome, "too_large", words, field="content")
        await service.assert_counted(too_large=1)
    assert device.rows == 0


async def test_a_key_is_needed_where_there_are_keys(opened, door, device):
    async with opened(api_keys=f"{KEY},{OTHER}") as service:
        wrongs = [{}, bearer(KEY[:-1]), bearer("wrong"), {"authorization": f"Basic {KEY}"}]
        wrongs += [{"x-api-key": key} for key in ("", KEY[:-1], f"Bearer {KEY}")]
        wrongs += [in_both(KEY, OTHER), in_both(KEY, ""), in_both("wrong", KEY)]
        for wrong in wrongs:
            field = "x-api-key" if [*wrong] == ["x-api-key"] else "authorization"
            outcome = await service.ask(Ask(headers=wrong))
            words = ", expected 'Authorization: Bearer KEY' or 'X-API-Key: KEY' with one of "
            door.assert_refused(outcome, "unauthorized", words, field=field)
            assert outcome.message.startswith(f"{field}: got ")
            assert outcome.status == door.status("unauthorized")
            assert KEY not in outcome.message
        assert device.rows == 0
        rights = [bearer(KEY), bearer(OTHER), {"x-api-key": OTHER}, in_both(KEY, KEY)]
        for right in rights:
            assert (await service.ask(Ask(headers=right))).version == "3"
        await service.assert_counted(unauthorized=len(wrongs), ok=len(rights))


@pytest.mark.states(
    "limits", "images waiting for one model", found="requests behind a batch that is held"
)
async def test_a_queue_without_room_refuses_by_images_and_says_when_to_come_back(
    opened, door, device
):
    async with opened(max_queue_rows=3, max_images=3) as service:
        accepted = await service.fill(3)
        for rows in (1, 3):
            outcome = await service.ask(Ask(images(rows)))
            words = f"3 images wait and {rows} more would pass the limit of 3"
            door.assert_refused(outcome, "overloaded", words, retry_after_s=1)
        device.release()
        for client in accepted:
            assert (await service.end(client)).version == "3"
        assert (await service.ask(Ask(images(3)))).version == "3"
        assert device.rows == 1 + 3 + 3
        await service.assert_counted(overloaded=2, ok=3)


async def test_a_body_that_memory_has_no_room_for_is_refused_until_there_is(opened, door, device):
    async with opened(max_body_bytes=70_000, max_in_flight_bytes=80_000) as service:
        client = await service.begin(LARGE, held_back=1)
        await until(lambda: service.service.budget.held_bytes)
        refused = await service.begin(LARGE, held_back=1)
        outcome = await service.end(refused)
        door.assert_refused(outcome, "overloaded", "", field="body", retry_after_s=1)
        client.send_rest()
        assert len((await service.end(client)).labels) == 60
        assert (await service.ask(LARGE)).version == "3"
        await service.assert_counted(overloaded=1, ok=2)


# Deadlines


@pytest.mark.states(
    "metrics",
    "`lenet_rows_dropped_total`: late",
    found="images of a request whose deadline passed behind a batch that was held",
)
async def test_images_behind_others_are_dropped_at_their_deadline_and_not_computed(
    opened, door, device
):
    async with opened() as service:
        accepted = await service.fill(1)
        outcome = await service.ask(Ask(images(2), timeout_ms=30))
        door.assert_refused(outcome, "deadline_exceeded", "no answer within 30 ms")
        await service.until_waiting(1)
        device.release()
        for client in accepted:
            assert (await service.end(client)).version == "3"
        assert device.rows == 2
        assert await service.value("lenet_rows_dropped_total", reason="late") == 2
        await service.assert_counted(deadline_exceeded=1, ok=2)


@pytest.mark.states(
    "limits", "time from arrival to answer", found="requests behind a batch that is held for ever"
)
@pytest.mark.parametrize("asked_ms", [None, 3_600_000])
async def test_the_deadline_of_the_service_holds_whatever_is_asked_for(opened, door, asked_ms):
    async with opened(request_timeout_ms=20) as service:
        with service.without_contexts():
            outcome = await service.ask(Ask(timeout_ms=asked_ms))
        door.assert_refused(outcome, "deadline_exceeded", "no answer within 20 ms")
        await service.assert_counted(deadline_exceeded=1)


@pytest.mark.states("limits", "time from arrival to answer", found="a body that does not come")
async def test_a_body_that_does_not_come_is_given_up_at_the_deadline(opened, door, device):
    async with opened(request_timeout_ms=100) as service:
        outcome = await service.end(await service.begin(held_back=100))
        door.assert_refused(outcome, "body_timeout", " bytes in 0.1 s, expected", field="content")
        await service.assert_counted(body_timeout=1)
    assert device.rows == 0


# Clients that leave


@pytest.mark.states(
    "metrics",
    "`lenet_rows_dropped_total`: cancelled",
    found="images of a client that left behind a batch that was held",
)
async def test_images_of_a_client_that_leaves_are_not_computed(opened, door, device):
    async with opened() as service:
        accepted = await service.fill(1)
        for gone, how in enumerate(door.transport.leaves, 1):
            client = await service.begin(Ask(images(2)))
            await service.until_waiting(3)
            client.leave(how)
            await service.until_waiting(1)
            await service.assert_counted(cancelled=gone)
        device.release()
        for client in accepted:
            assert (await service.end(client)).version == "3"
        assert device.rows == 2
        assert await service.value("lenet_rows_dropped_total", reason="cancelled") == 2 * gone
        await service.assert_counted(cancelled=gone, ok=2)


async def test_a_client_that_leaves_while_its_images_are_computed_is_counted_as_cancelled(
    opened, door, device
):
    async with opened() as service:
        device.hold()
        for gone, how in enumerate(door.transport.leaves, 1):
            client = await service.begin()
            await until(lambda gone=gone: device.batches or gone > 1)
            client.leave(how)
            await service.assert_counted(cancelled=gone)
        device.release()
        assert (await service.ask()).version == "3"
        await service.assert_counted(cancelled=gone, ok=1)


async def test_a_client_that_leaves_amid_its_body_takes_no_memory_with_it(opened, door, device):
    async with opened() as service:
        for gone, how in enumerate(door.transport.leaves, 1):
            client = await service.begin(held_back=100)
            await until(lambda: service.service.budget.held_bytes)
            client.leave(how)
            await service.assert_counted(cancelled=gone)
            await service.assert_idle()
    assert device.rows == 0


# Faults


async def test_a_batch_that_fails_is_an_error_without_its_cause(opened, door, device, caplog):
    async with opened() as service:
        device.error = RuntimeError("CUDA error 700 in /srv/secret.py")
        outcome = await service.ask()
        door.assert_refused(outcome, "inference_failed", "")
        assert "secret" not in outcome.message
        assert "secret" in caplog.text
        device.error = None
        assert (await service.ask()).version == "3"
        await service.assert_counted(inference_failed=1, ok=1)


BUGS = {
    (Batcher, "enqueue"): "internal",
    (Request, "reply"): "internal",
    (Batcher, "_deliver"): "inference_failed",
    (Metrics, "batch_ended"): "ok",
    (BusyPoll, "extend"): "ok",
}
"""Functions that raise, and how the request ends. All that come after it are answered."""


@pytest.mark.parametrize(("place", "code"), BUGS.items(), ids=[name for _, name in BUGS])
async def test_a_bug_is_logged_with_the_id_of_its_request_and_hidden(
    opened, door, monkeypatch, caplog, place, code
):
    def fail(*_, **__):
        raise RuntimeError("bug in /srv/secret.py")

    async with opened(busy_poll_us=100) as service:
        with monkeypatch.context() as patch:
            owner, name = place
            for kind in (owner, *owner.__subclasses__()):
                patch.setattr(kind, name, fail)
            outcome = await service.ask(Ask(headers=IDS))
        if code == "ok":
            assert outcome.version == "3"
        else:
            words = {"internal": "internal error; see the server log"}
            door.assert_refused(outcome, code, words.get(code, ""))
        (record,) = [record for record in caplog.records if record.exc_info]
        assert "secret" in str(record.exc_info[1])
        assert record.name != "asyncio", "nobody expected it"
        named = [one.request_id for one in caplog.records if "was answered with" in one.message]
        assert named == ["r1"] * (code != "ok" and "status" in door.form.says)
        assert (await service.ask()).version == "3"
        await service.assert_counted(**({code: 1, "ok": 1} if code != "ok" else {"ok": 2}))


# Versions


async def test_each_answer_is_of_one_version_when_the_weights_change_amid_its_batches(
    opened, device, write, expected
):
    asked = [images(rows, rows) for rows in (9, 8, 1)]
    async with opened() as service:

        def version():
            return service.service.models.get().version.version

        async def begin(pixels):
            clients.append((pixels, await service.begin(Ask(pixels))))
            rows = sum(len(pixels) for pixels, _ in clients)
            await until(lambda: rows == device.rows + service.waiting)

        device.hold()
        clients = []
        await begin(asked[0])
        write("tiny/4", seed=1)
        reloading = asyncio.create_task(service.service.repository.reload())
        while version() == "3":  # while many images of version 3 wait, one batch after another
            while service.waiting < 20:
                await begin(asked[1])
            device.hold(batches=1)
            await asyncio.sleep(0)
        # Of the images of version 3 one is left over when all batches of four are full.
        for _ in range(2):
            await begin(asked[2])
        device.release()
        seen = []
        for pixels, client in clients:
            outcome = await service.end(client)
            seen.append(outcome.version)
            rows = expected(pixels, seed=int(outcome.version) - 3)
            assert_answers(outcome, rows, outcome.version)
        assert seen == sorted(seen)
        assert set(seen) == {"3", "4"}
        await reloading
        assert (await service.ask(Ask(version="4"))).version == "4"
        assert (await service.ask(Ask(version="3"))).version is None
        await service.assert_counted(ok=len(clients) + 1, unknown_model=1)


# Stops


async def test_a_service_that_stops_says_it_is_not_ready_and_answers_on(opened):
    async with opened() as service:
        assert await service.is_ready()
        service.service.models.ready = False  # as a stop begins
        assert not await service.is_ready()
        assert (await service.ask()).version == "3"


@doors_that("stop")
async def test_a_stop_answers_what_was_accepted_and_takes_no_more(opened, device):
    async with opened() as service:
        accepted = await service.fill(2)
        half_sent = await service.begin(held_back=100)
        await until(lambda: service.service.budget.held_bytes)
        service.stop()
        await service.until_refused()
        assert not service.service.models.ready
        await asyncio.sleep(0.5)  # beyond what a connection of HTTP/2 gives its client to notice
        device.release()
        half_sent.send_rest()
        for client in (*accepted, half_sent):
            assert (await service.end(client)).version == "3"
        await service.serving
        await service.assert_counted(ok=3)


@doors_that("give up")
async def test_what_a_stop_has_no_time_for_is_sent_elsewhere(opened, door, device):
    async with opened(drain_timeout_s=0) as service:
        clients = [*await service.fill(2), await service.begin(held_back=100)]
        await until(lambda: service.service.budget.held_bytes)
        service.stop()
        for client in clients:
            words = "the service stopped before the answer; send this to another instance"
            outcome = await service.end(client)
            door.assert_refused(outcome, "unavailable", words, retry_after_s=1)
        device.release()
        await service.serving
        await service.assert_counted(unavailable=3)


@doors_that("give up", Predict)
@pytest.mark.parametrize(
    ("path", "held", "is_plain"),
    [
        ("/v2/repository/index", (Models, "index"), True),
        ("/metrics", (Metrics, "exposition"), False),
    ],
)
async def test_what_a_stop_has_no_time_for_is_sent_elsewhere_without_images_too(
    opened, monkeypatch, path, held, is_plain
):
    began = asyncio.Event()

    async def hang(*_):
        began.set()
        await asyncio.Event().wait()

    async with opened(drain_timeout_s=0, admin_keys=KEY) as service:
        with monkeypatch.context() as patch:
            patch.setattr(*held, hang)
            method = "POST" if is_plain else "GET"
            client = await service.send(Message(method, path, {**bearer(KEY), **IDS}, b""))
            await began.wait()
            service.stop()
            reply = await client.reply()
            await service.serving
        words = "the service stopped before the answer; send this to another instance"
        error = {"code": "unavailable", "field": "", "message": words}
        assert json.loads(reply.body) == {"error": words if is_plain else error}
        expected = {"content-type": "application/json", "retry-after": "1", "x-request-id": "r1"}
        assert reply.status == 503
        assert expected.items() <= reply.headers.items()


# Ids


async def test_an_answer_returns_the_id_of_its_request_where_there_are_headers(opened, door):
    async with opened() as service:
        outcome = await service.ask(Ask(headers=IDS))
        assert outcome.headers.get("x-request-id") == door.form.returned_id("r1")


@doors_that("log")
async def test_the_ids_of_a_request_are_in_its_line_of_the_access_log(opened, door, capfd):
    printed = []

    def lines():
        printed.append(capfd.readouterr().out)
        return [json.loads(line) for line in "".join(printed).splitlines()]

    async with opened(access_log="json", access_log_probes="off") as service:
        await service.ask(Ask(headers=IDS))
        await until(lines)
        (line,) = lines()
        assert (line["protocol"], line["status"]) == (door.form.protocol, door.status("ok"))
        found = [line[name] for name in ("request_id", "trace_id", "span_id")]
        assert found == ["r1", "4b" * 16, "0a" * 8]
