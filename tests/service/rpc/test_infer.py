"""ModelInfer: one request, one answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
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
from tests.service_process import PATIENCE_S

Tensor = pb.ModelInferRequest.InferInputTensor

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
    monkeypatch.setattr(decoders, "SMALL_BYTES", -1)

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


async def test_only_large_typed_messages_wait_for_a_decoder(start_grpc, images, busy_decoder):
    flat = typed_request(None, shape=(784,), raw_input_contents=[images[0].tobytes()])
    many = np.resize(images, (100, 28, 28))
    raw = typed_request(None, shape=many.shape, raw_input_contents=[many.tobytes()])
    async with start_grpc(max_images=100) as running, running.connect() as stub:
        with busy_decoder(running):
            for request, rows in ((typed(80), 80), (flat, 1), (raw, 100)):
                assert list((await stub.ModelInfer(request)).outputs[1].shape) == [rows]
            waiting = asyncio.ensure_future(stub.ModelInfer(typed(90)))
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            assert not done
        assert list((await waiting).outputs[1].shape) == [90]


async def test_the_call_ends_in_time_when_no_decoder_is_free(start_grpc, busy_decoder):
    limits = {"request_timeout_ms": 500, "max_images": 100}
    async with start_grpc(**limits) as running, running.connect() as stub:
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
    (timeout_s,) = busy.timeouts_s
    assert 0 < timeout_s < 1.1  # the header carries it rounded up
    # Whichever comes first, our timer or gRPC's: one outcome, no row left behind.
    assert busy.requests("deadline_exceeded") + busy.requests("cancelled") == 1
    assert dropped_rows(busy) == 5


@pytest.mark.states(
    "metrics",
    "`lenet_rows_dropped_total`: cancelled",
    found="images of a call that its client cancelled behind a batch that was held",
)
async def test_waiting_rows_are_dropped_when_the_client_cancels(stub, busy, raw_request, caplog):
    call = stub.ModelInfer(raw_request())
    await asyncio.wait_for(busy.entered.wait(), PATIENCE_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: busy.requests("cancelled"))
    assert dropped_rows(busy) == 5
    assert busy.requests("cancelled") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def dropped_rows(running):
    name = "lenet_rows_dropped_total"
    return sum(running.value(name, reason=why) for why in ("cancelled", "late"))


@pytest.mark.parametrize("count", [0, 2])
async def test_a_call_without_exactly_one_message_is_refused(stub, running, raw_request, count):
    running.gate.clear()
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
    running.error = error

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
