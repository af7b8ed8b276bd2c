"""ModelInfer: one request, one answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import tracemalloc

import grpc
import numpy as np
import pytest

from lenet import reference
from service import errors
from service.decode import pool as decoders
from service.forms import open_inference_pb2 as pb
from service.forms.body import ImageForm, Limits
from tests.pictures import FORM, long_form
from tests.service_process import PATIENCE_S, grpc_call

Tensor = pb.ModelInferRequest.InferInputTensor
Parameter = pb.InferParameter

METHOD = "/inference.GRPCInferenceService/ModelInfer"


def expected(weights, images):
    return reference.softmax(reference.logits(weights.model, weights.tensors, images))


def typed_request(contents, datatype="UINT8", shape=(5, 28, 28), **fields):
    tensor = Tensor(name="image", datatype=datatype, shape=shape, contents=contents)
    return pb.ModelInferRequest(inputs=[tensor], **fields)


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    return error.code(), dict(error.trailing_metadata()), error.details()


async def test_raw_images_get_raw_answers_when_inferred(
    stub, running, raw_request, images, tiny, random_weights
):
    response = await stub.ModelInfer(raw_request(id="a request", model_name="tiny"))
    assert (response.model_name, response.model_version) == ("tiny", "3")
    assert response.id == "a request"
    share, label = response.outputs
    assert (share.name, share.datatype, list(share.shape)) == ("probabilities", "FP32", [5, 10])
    assert (label.name, label.datatype, list(label.shape)) == ("label", "INT64", [5])
    assert not share.HasField("contents")
    raw_share, raw_label = response.raw_output_contents
    probabilities = np.frombuffer(raw_share, "<f4").reshape(5, 10)
    np.testing.assert_allclose(probabilities, expected(random_weights(tiny), images), atol=1e-5)
    assert np.frombuffer(raw_label, "<i8").tolist() == probabilities.argmax(axis=1).tolist()
    assert set(response.parameters) == {"queue_us", "compute_us"}
    assert response.parameters["compute_us"].int64_param > 0
    assert running.requests("ok") == 1
    for stage in ("decode", "queue", "compute", "encode"):
        name = "lenet_stage_duration_seconds_count"
        assert running.value(name, stage=stage) == 1


@pytest.mark.parametrize("form", ["UINT8 contents", "FP32 contents", "FP32 raw", "flat"])
async def test_the_answer_is_the_same_when_the_images_come_in_another_form(
    stub, raw_request, images, form
):
    reference_response = await stub.ModelInfer(raw_request())
    pixels = images.ravel().tolist()
    request = {
        "UINT8 contents": typed_request(pb.InferTensorContents(uint_contents=pixels)),
        "FP32 contents": typed_request(pb.InferTensorContents(fp32_contents=pixels), "FP32"),
        "FP32 raw": typed_request(
            None, "FP32", raw_input_contents=[images.astype("<f4").tobytes()]
        ),
        "flat": typed_request(None, shape=(5, 784), raw_input_contents=[images.tobytes()]),
    }[form]
    response = await stub.ModelInfer(request)
    raw_share, raw_label = reference_response.raw_output_contents
    if request.raw_input_contents:
        assert list(response.raw_output_contents) == [raw_share, raw_label]
    else:
        assert not response.raw_output_contents
        share, label = (output.contents for output in response.outputs)
        assert np.array(share.fp32_contents, "<f4").tobytes() == raw_share
        assert np.array(label.int64_contents, "<i8").tobytes() == raw_label


def contents(**fields):
    return pb.InferTensorContents(**fields)


@pytest.fixture
def busy_decoder(monkeypatch):
    """Inside `busy_decoder(running)` the only decoder is busy."""
    monkeypatch.setattr(decoders, "CHEAP_S", -1.0)

    @contextlib.contextmanager
    def busy(running):
        source = ImageForm.of(FORM, "auto", "one", Limits(16_384))
        job = running.decoders.start(source, long_form(), print)
        yield
        running.decoders.cancel(job)

    return busy


def typed(rows):
    return typed_request(
        pb.InferTensorContents(uint_contents=[1] * rows * 784), shape=(rows, 28, 28)
    )


async def test_only_large_typed_messages_wait_for_a_decoder(running, images, busy_decoder):
    flat = typed_request(None, shape=(784,), raw_input_contents=[images[0].tobytes()])
    many = np.resize(images, (100, 28, 28))
    raw = typed_request(None, shape=many.shape, raw_input_contents=[many.tobytes()])
    async with running.connect(max_images=100) as stub:
        with busy_decoder(running):
            for request, rows in ((typed(80), 80), (flat, 1), (raw, 100)):
                assert list((await stub.ModelInfer(request)).outputs[1].shape) == [rows]
            waiting = asyncio.ensure_future(stub.ModelInfer(typed(90)))
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            assert not done
        assert list((await waiting).outputs[1].shape) == [90]


async def test_the_call_ends_in_time_when_no_decoder_is_free(start_grpc, busy_decoder):
    async with start_grpc(timeout_s=0.5) as running, running.connect(max_images=100) as stub:
        with busy_decoder(running):
            code, _, details = await failure(stub.ModelInfer(typed(90)))
            assert (code, details) == (grpc.StatusCode.DEADLINE_EXCEEDED, "no answer within 500 ms")
            assert running.requests("deadline_exceeded") == 1


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x2a\x7f", b"\x0a\x01\xff"])
async def test_bytes_are_refused_in_silence_when_they_are_no_message(
    stub, running, caplog, message
):
    infer = stub.channel.unary_unary(METHOD)
    code, metadata, details = await failure(infer(message))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata["lenet-error-field"] == "message"
    assert details == "message: not a ModelInferRequest"
    assert running.requests("invalid_input") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.fixture
async def busy(running):
    """The only context of the default model is taken, so requests wait in the queue."""
    pool = running.models.get().pool
    worker = pool.acquire()
    yield running
    pool.release(worker)


async def test_the_call_s_own_deadline_counts_when_it_has_one(stub, busy, raw_request):
    code, _, _ = await failure(stub.ModelInfer(raw_request(), timeout=1))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: busy.requests("deadline_exceeded") + busy.requests("cancelled"))
    (timeout_s,) = busy.models.timeouts_s
    assert 0 < timeout_s < 1.1  # the header carries it rounded up
    # Whichever comes first, our timer or gRPC's: one outcome, no row left behind.
    assert busy.requests("deadline_exceeded") + busy.requests("cancelled") == 1
    assert dropped_rows(busy) == 5


@pytest.mark.parametrize("kind", ["int64_param", "uint64_param"])
async def test_a_timeout_of_the_request_counts_as_its_deadline(stub, busy, raw_request, kind):
    request = raw_request(parameters={"timeout": Parameter(**{kind: 500_000})})
    code, _, details = await failure(stub.ModelInfer(request))
    assert (code, details) == (grpc.StatusCode.DEADLINE_EXCEEDED, "no answer within 500 ms")
    (timeout_s,) = busy.models.timeouts_s
    assert 0 < timeout_s <= 0.5
    assert busy.requests("deadline_exceeded") == 1


@pytest.mark.states(
    "metrics",
    "`lenet_rows_dropped_total`: cancelled",
    found="images of a call that its client cancelled behind a batch that was held",
)
async def test_waiting_rows_are_dropped_when_the_client_cancels(stub, busy, raw_request, caplog):
    call = stub.ModelInfer(raw_request())
    await asyncio.wait_for(busy.models.entered.wait(), PATIENCE_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: busy.requests("cancelled"))
    assert dropped_rows(busy) == 5
    assert busy.requests("cancelled") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("error", "fields", "model", "outcome"),
    [
        (None, {}, "tiny", "ok"),
        (None, {"model_name": "mlp"}, "mlp", "ok"),
        (None, {"model_name": "vgg"}, "none", "unknown_model"),
        (None, {"raw_input_contents": [b"1"]}, "tiny", "invalid_input"),
        (None, {"raw_input_contents": [b"1"], "model_name": "vgg"}, "none", "unknown_model"),
        (errors.Overloaded("full"), {}, "tiny", "overloaded"),
        (errors.DeadlineExceeded("late"), {"model_name": "mlp"}, "mlp", "deadline_exceeded"),
        (RuntimeError("a bug"), {}, "tiny", "internal"),
        ("cancel", {}, "tiny", "cancelled"),
    ],
)
async def test_a_call_has_one_outcome_and_one_range_however_it_ends(
    stub, running, raw_request, ranges, error, fields, model, outcome
):
    if error == "cancel":
        running.models.gate.clear()
    else:
        running.models.error = error
    call = stub.ModelInfer(raw_request(**fields))
    if error == "cancel":
        await asyncio.wait_for(running.models.entered.wait(), PATIENCE_S)
        call.cancel()
    (answer,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(answer, pb.ModelInferResponse) == (outcome == "ok")
    began, ended = ranges
    async with asyncio.timeout(PATIENCE_S):  # the client may be faster than the end of the call
        while not running.outcomes() or len(ended) < len(began):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert running.outcomes() == {(model, outcome): 1}
    timed = running.value("lenet_request_duration_seconds_count", protocol="grpc")
    assert timed == (outcome == "ok")
    assert began.count("request") == 1
    assert sorted(ended) == list(range(1, len(began) + 1))


def dropped_rows(running):
    name = "lenet_rows_dropped_total"
    return sum(running.value(name, reason=why) for why in ("cancelled", "late"))


CODES = {
    errors.InvalidInput: "INVALID_ARGUMENT",
    errors.TooLarge: "INVALID_ARGUMENT",
    errors.UnsupportedMediaType: "INVALID_ARGUMENT",
    errors.UnknownModel: "NOT_FOUND",
    errors.Unauthorized: "UNAUTHENTICATED",
    errors.Forbidden: "PERMISSION_DENIED",
    errors.Overloaded: "RESOURCE_EXHAUSTED",
    errors.Cancelled: "CANCELLED",
    errors.Unavailable: "UNAVAILABLE",
    errors.InferenceFailed: "INTERNAL",
}


@pytest.mark.parametrize(("kind", "code"), CODES.items())
async def test_an_error_keeps_its_sentence_and_its_code(stub, running, raw_request, kind, code):
    running.models.error = kind("the sentence", field="inputs", retry_after_s=2)
    status, metadata, details = await failure(stub.ModelInfer(raw_request()))
    assert (status, details) == (grpc.StatusCode[code], "the sentence")
    assert metadata["lenet-error-code"] == kind.code
    assert metadata["lenet-error-field"] == "inputs"
    assert metadata["grpc-retry-pushback-ms"] == "2000"
    assert running.requests(kind.code) == 1


async def test_an_unexpected_error_is_logged_and_hidden(stub, running, raw_request, caplog):
    running.models.error = RuntimeError("secret of /srv")
    ids = (("x-request-id", "r1"),)
    code, metadata, details = await failure(stub.ModelInfer(raw_request(), metadata=ids))
    (named,) = [record for record in caplog.records if "answered with INTERNAL" in record.message]
    assert named.request_id == "r1"
    assert code is grpc.StatusCode.INTERNAL
    assert metadata["lenet-error-code"] == "internal"
    assert details == "internal error; see the server log"
    assert running.requests("internal") == 1
    assert "secret of /srv" in caplog.text


async def test_a_message_that_does_not_come_is_waited_for_as_long_as_an_answer(running):
    async with running.connect(timeout_s=0.1) as stub:
        code, metadata, details = await failure(stub.channel.stream_unary(METHOD)())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert metadata["lenet-error-code"] == "body_timeout"
    assert details == "message: got 0 bytes in 0.1 s, expected the whole message"
    assert running.requests("body_timeout") == 1


@pytest.mark.parametrize("count", [0, 2])
async def test_a_call_without_exactly_one_message_is_refused(stub, running, raw_request, count):
    running.models.gate.clear()
    message = raw_request().SerializeToString()
    code, metadata, details = await failure(
        stub.channel.stream_unary(METHOD)(iter([message] * count))
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata["lenet-error-field"] == "message"
    assert (
        details
        == {
            0: "message: got none, expected a request",
            2: "message: got a second, expected one request",
        }[count]
    )
    assert running.requests("invalid_input") == 1


@pytest.mark.parametrize("size", [4097, 5 << 20])
async def test_a_message_over_the_limit_is_refused(running, raw_request, size):
    async with running.connect(max_body_bytes=4096) as stub:
        await stub.ModelInfer(raw_request())
        code, metadata, details = await failure(
            stub.ModelInfer(raw_request(raw_input_contents=[bytes(size)]))
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT, "a retry would not help"
        assert re.match(r"message: got \d+ bytes, expected at most 4096 bytes; send", details)
        assert metadata["lenet-error-code"] == "too_large"
        assert metadata["lenet-error-field"] == "message"
        await stub.ModelInfer(raw_request())
    assert (running.requests("ok"), running.requests("too_large")) == (2, 1)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_is_answered_as_any_other(stub, raw_request, compression):
    expected = await stub.ModelInfer(raw_request())
    found = await stub.ModelInfer(raw_request(), compression=compression)
    assert found.raw_output_contents == expected.raw_output_contents


async def test_a_compressed_message_is_limited_by_its_size_decompressed(stub, running, raw_request):
    bomb = raw_request(raw_input_contents=[bytes(1 << 26)])  # 64 KB compressed
    code, metadata, _ = await failure(stub.ModelInfer(bomb, compression=grpc.Compression.Gzip))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata["lenet-error-code"] == "too_large"
    await until(lambda: running.budget.held_bytes == 0)  # it may be freed after the answer
    await stub.ModelInfer(raw_request())


async def test_a_message_is_refused_when_the_budget_has_no_room(running, raw_request):
    running.budget.hold(running.budget.max_bytes - 4096, 0)
    async with running.connect() as stub:
        await stub.ModelInfer(raw_request(5))
        wrong = raw_request(raw_input_contents=[bytes(100_000)])
        code, metadata, _ = await failure(stub.ModelInfer(wrong))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert metadata["lenet-error-code"] == "overloaded"
        assert running.requests("overloaded") == 1
    assert running.budget.held_bytes == running.budget.max_bytes - 4096


async def test_a_message_holds_as_much_of_the_budget_as_has_arrived(running, raw_request):
    message = raw_request(raw_input_contents=[bytes(300_000)]).SerializeToString()
    async with running.connect() as stub:
        with grpc_call(stub.port, METHOD.encode()) as connection:
            part = b"\0" + len(message).to_bytes(4, "big") + message[:10_000]
            connection.sendall(len(part).to_bytes(3, "big") + bytes((0, 0, 0, 0, 0, 1)) + part)
            await until(lambda: running.budget.held_bytes == 10_000)
        await until(lambda: running.requests("cancelled") == 1)
    assert running.budget.held_bytes == 0


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the other side is a socket
            await asyncio.sleep(0.005)


REFUSALS = {
    "wrong": (None, "INVALID_ARGUMENT"),
    "overloaded": (errors.Overloaded("full"), "RESOURCE_EXHAUSTED"),
    "late": (errors.DeadlineExceeded("late"), "DEADLINE_EXCEEDED"),
}


@pytest.mark.parametrize(("error", "code"), REFUSALS.values(), ids=REFUSALS)
async def test_refused_messages_are_freed_when_the_collector_is_off(
    running, stub, raw_request, error, code
):
    tensor = Tensor(name="image", datatype="UINT8", shape=(64, 28, 28))
    size = 64 * 784 if error else 900_000
    message = raw_request(inputs=[tensor], raw_input_contents=[bytes(size)]).SerializeToString()
    infer = stub.channel.unary_unary(METHOD)
    running.models.error = error

    async def refused():
        found, _, _ = await failure(infer(message))
        assert found.name == code

    await refused()
    gc.collect()
    gc.disable()
    try:
        tracemalloc.start()
        for _ in range(20):
            await refused()
        left, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    finally:
        gc.enable()
    # Each call leaves about 10 KB, mostly the client's, but no message.
    assert left < 20 * size / 2


async def test_a_running_call_is_answered_when_the_server_stops(running, raw_request):
    running.models.gate.clear()
    async with running.connect() as stub:
        accepted = stub.ModelInfer(raw_request())
        await asyncio.wait_for(running.models.entered.wait(), PATIENCE_S)
        stopping = asyncio.create_task(stub.server.stop(10.0))
        code = grpc.StatusCode.OK
        async with asyncio.timeout(PATIENCE_S):
            while code is grpc.StatusCode.OK:
                code = await stub.ServerLive(pb.ServerLiveRequest()).code()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        running.models.gate.set()
        assert (await accepted).model_name == "tiny"
        await asyncio.wait_for(stopping, PATIENCE_S)
