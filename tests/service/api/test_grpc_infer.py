"""ModelInfer, and ModelStreamInfer: requests that follow each other in one call."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from service.forms import open_inference_pb2 as pb
from tests.documented import documented
from tests.service.api.conftest import failure
from tests.service_process import PATIENCE_S
from tests.wire.doors import until

Tensor = pb.ModelInferRequest.InferInputTensor


def typed_request(contents, datatype="UINT8", shape=(5, 28, 28), **fields):
    tensor = Tensor(name="image", datatype=datatype, shape=shape, contents=contents)
    return pb.ModelInferRequest(inputs=[tensor], **fields)


async def test_an_answer_describes_its_outputs_and_says_where_its_time_went(
    stub, running, raw_request
):
    response = await stub.ModelInfer(raw_request(id="a request", model_name="tiny"))
    assert response.id == "a request"
    share, label = response.outputs
    assert (share.name, share.datatype, list(share.shape)) == ("probabilities", "FP32", [5, 10])
    assert (label.name, label.datatype, list(label.shape)) == ("label", "INT64", [5])
    assert not share.HasField("contents")
    assert [len(raw) for raw in response.raw_output_contents] == [5 * 10 * 4, 5 * 8]
    assert set(response.parameters) == {"queue_us", "compute_us"}
    assert response.parameters["compute_us"].int64_param > 0
    for stage in ("decode", "queue", "compute", "encode"):
        assert running.value("lenet_stage_duration_seconds_count", stage=stage) == 1


@pytest.mark.parametrize("form", ["UINT8 contents", "FP32 contents", "FP32 raw", "flat"])
async def test_the_answer_is_the_same_when_the_images_come_in_another_form(
    stub, raw_request, images, form
):
    many = np.resize(images, (64, 28, 28))  # a decoding process reads so many numbers
    for part in (images, many):
        rows, pixels = len(part), part.ravel().tolist()
        raw = {"raw_input_contents": [part.tobytes()]}
        floats = {"raw_input_contents": [part.astype("<f4").tobytes()]}
        request = {
            "UINT8 contents": typed_request(
                pb.InferTensorContents(uint_contents=pixels), shape=part.shape
            ),
            "FP32 contents": typed_request(
                pb.InferTensorContents(fp32_contents=pixels), "FP32", part.shape
            ),
            "FP32 raw": typed_request(None, "FP32", part.shape, **floats),
            "flat": typed_request(None, shape=(rows, 784), **raw),
        }[form]
        expected = await stub.ModelInfer(typed_request(None, shape=part.shape, **raw))
        response = await stub.ModelInfer(request)
        if request.raw_input_contents:
            assert response.raw_output_contents == expected.raw_output_contents
        else:
            assert not response.raw_output_contents
            share, label = (output.contents for output in response.outputs)
            numbers = np.array(share.fp32_contents, "<f4"), np.array(label.int64_contents, "<i8")
            assert [one.tobytes() for one in numbers] == list(expected.raw_output_contents)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_is_limited_by_its_size_decompressed(
    stub, running, raw_request, compression
):
    expected = await stub.ModelInfer(raw_request())
    bomb = raw_request(raw_input_contents=[bytes(1 << 26)])  # 64 KB compressed
    error = await failure(stub.ModelInfer(bomb, compression=compression))
    assert dict(error.trailing_metadata())["lenet-error-code"] == "too_large"
    await until(lambda: running.budget.held_bytes == 0)  # it may be freed after the answer
    found = await stub.ModelInfer(raw_request(), compression=compression)
    assert found.raw_output_contents == expected.raw_output_contents


@pytest.mark.parametrize("kind", ["application/grpc-web+proto", "application/proto"])
async def test_a_page_of_a_browser_gets_the_answers_of_grpc(open_grpc, raw_request, images, kind):
    headers = {"content-type": kind, "x-request-id": "mine", "origin": "https://a.test"}

    def parts(body):
        """The message, and the rest: trailers."""
        size = int.from_bytes(body[1:5], "big")
        return (body[5 : 5 + size], body[5 + size :]) if "web" in kind else (body, b"")

    async def infer(client, request):
        message = request.SerializeToString()
        prefix = b"\0" + len(message).to_bytes(4, "big") if "web" in kind else b""
        path = "/inference.GRPCInferenceService/ModelInfer"
        return await client.post(path, content=prefix + message, headers=headers)

    async with open_grpc(cors_origins=["https://a.test"]) as running, running.connect() as stub:
        for rows in (1, 64):
            raw = [np.resize(images, (rows, 28, 28)).tobytes()]
            request = raw_request(rows, raw_input_contents=raw)
            request.inputs[0].shape[0] = rows
            expected = await stub.ModelInfer(request)
            before = running.requests("ok")
            answer = await infer(running.client, request)
            message, trailers = parts(answer.content)
            found = pb.ModelInferResponse.FromString(message)
            assert found.raw_output_contents == expected.raw_output_contents
            assert running.requests("ok") == before + 1
            assert answer.headers["x-request-id"] == "mine"
            assert answer.headers["access-control-allow-origin"] == "https://a.test"
            assert answer.headers["content-type"] == kind
            assert trailers[5:] == (b"grpc-status: 0\r\n" if trailers else b"")
        error = await failure(stub.ModelInfer(raw_request(model_name="vgg")))
        answer = await infer(running.client, raw_request(model_name="vgg"))
        if "web" in kind:
            assert b"grpc-status: 5\r\n" in answer.content
            assert b"lenet-error-code: unknown_model\r\n" in answer.content
        else:
            document = {"code": "not_found", "message": error.details()}
            assert (answer.status_code, answer.json()) == (404, document)
        assert running.requests("unknown_model") == 2
        too_large = raw_request(1, raw_input_contents=[bytes(2 << 20)])
        answer = await infer(running.client, too_large)
        assert b"expected at most 1048576 bytes" in answer.content


# Streams


def probabilities(answer):
    found = np.frombuffer(answer.raw_output_contents[0], "<f4")
    return found.reshape(answer.outputs[0].shape)


async def test_answers_are_in_the_order_of_requests_errors_among_them(
    open_grpc, raw_request, images
):
    async with open_grpc(max_body_bytes=100_000) as running, running.connect() as stub:
        expected = {rows: await stub.ModelInfer(raw_request(rows)) for rows in (1, 2, 5)}
        counts = (1, 5, 2) * 30
        requests = [
            *(raw_request(rows, id=str(number)) for number, rows in enumerate(counts)),
            raw_request(2, id="wrong", raw_input_contents=[b"short"]),
            raw_request(1, id="unknown", model_name="vgg"),
            raw_request(1, id="large", raw_input_contents=[bytes(150_000)]),
            raw_request(100, id="many"),
            raw_request(5, id="last", model_name="mlp"),
        ]
        answers = [answer async for answer in stub.ModelStreamInfer(iter(requests))]
    *found, wrong, unknown, large, many, last = answers
    requests[-3].id = ""  # it is not read
    assert [answer.infer_response.id for answer in answers] == [one.id for one in requests]
    for answer, rows in zip(found, counts, strict=True):
        assert not answer.error_message
        np.testing.assert_allclose(
            probabilities(answer.infer_response), probabilities(expected[rows]), atol=1e-6
        )
    assert wrong.error_message.startswith("raw_input_contents[0]: got 5 bytes, expected 1568")
    assert "model 'vgg' is not loaded" in unknown.error_message
    assert "expected at most 100000 bytes; send fewer" in large.error_message
    assert "got 100 images, expected at most 64" in many.error_message
    assert (last.error_message, last.infer_response.model_name) == ("", "mlp")
    for answer in answers:  # what Triton's clients may wait for
        assert answer.infer_response.parameters["triton_final_response"].bool_param
    assert running.requests("ok") == 3 + 91
    assert running.requests("invalid_input") == running.requests("unknown_model") == 1
    assert running.requests("too_large") == 2


async def test_a_message_that_is_not_parsed_has_its_id_in_the_error(running, raw_request):
    """Neither are messages whose model is unknown, which is the mistake to know first."""
    wrong = {"more than 1024 fields": b"\x2a\0" * 1025, "not a ModelInferRequest": b"\x2a\x7f"}
    wrong |= {"more than 65536 bytes besides the pixels": b"\x22\x80\x80\x08" + bytes(2**17)}
    messages = [
        raw_request(0, id=words, model_name=model).SerializeToString() + part
        for words, part in wrong.items()
        for model in ("mlp", "vgg")
    ]
    async with running.connect() as stub:
        stream = stub.channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        answers = [answer async for answer in stream(iter(messages))]
    assert [one.infer_response.id for one in answers] == [words for words in wrong for _ in "12"]
    for words, known in zip(wrong, answers[::2], strict=True):
        assert words in known.error_message
    for unknown in answers[1::2]:
        assert "model 'vgg' is not loaded" in unknown.error_message


async def test_a_request_is_answered_before_the_next_is_sent(open_grpc, raw_request):
    async with open_grpc(request_timeout_ms=1000) as running, running.connect() as stub:
        call = stub.ModelStreamInfer()
        for rows, rest_s in ((1, 0.0), (5, 1.2)):  # longer than a request may take
            await asyncio.sleep(rest_s)
            await call.write(raw_request(rows))
            answer = await asyncio.wait_for(call.read(), PATIENCE_S)
            assert len(probabilities(answer.infer_response)) == rows
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.states(
    "limits",
    "requests of a stream of gRPC that wait for their answers",
    found="requests that are in the queue of a batch that is held, of a client that sends more",
)
async def test_a_stream_works_on_few_requests_at_a_time_and_holds_no_other_up(
    stub, running, raw_request, device
):
    (most,) = map(int, documented("requests of a stream of gRPC"))
    device.hold()
    held, other = stub.ModelStreamInfer(iter([raw_request(1)] * 100)), stub.ModelStreamInfer()
    await until(lambda: len(running.in_time) == most)
    await other.write(raw_request(1, model_name="vgg"))
    assert "'vgg' is not loaded" in (await asyncio.wait_for(other.read(), PATIENCE_S)).error_message
    for _ in range(100):  # turns of the event loop, which is the server's, too
        await asyncio.sleep(0)
    assert len(running.in_time) == most
    device.release()
    assert [answer.error_message async for answer in held] == [""] * 100
    other.cancel()


@pytest.mark.parametrize("ended", [False, True])
async def test_what_a_stream_has_sent_is_answered_when_the_server_stops(
    running, raw_request, device, ended
):
    async with running.connect() as stub:
        device.hold()
        stream = stub.ModelStreamInfer()
        for number in range(5):
            await stream.write(raw_request(1, id=str(number)))
        if ended:
            await stream.done_writing()
        await until(lambda: len(running.in_time) == 5)
        stopping = asyncio.create_task(running.stop(PATIENCE_S))
        await asyncio.sleep(0.3)
        device.release()
        for number in range(5):
            assert (await stream.read()).infer_response.id == str(number)
        expected = grpc.StatusCode.OK if ended else grpc.StatusCode.UNAVAILABLE
        assert await stream.code() is expected
        await asyncio.wait_for(stopping, PATIENCE_S)


SMALL_WINDOWS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))


async def test_a_client_that_does_not_read_in_time_loses_its_stream(open_grpc, raw_request):
    async with (
        open_grpc(write_timeout_s=0.1) as running,
        running.connect(*SMALL_WINDOWS) as deaf,
    ):
        stream = deaf.ModelStreamInfer()

        async def send():
            while True:
                await stream.write(raw_request(5, id="i" * 128))

        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await asyncio.wait_for(send(), PATIENCE_S)
        async with running.connect() as other:
            assert (await other.ModelInfer(raw_request(1))).model_name == "tiny"
    assert running.budget.held_bytes == 0


async def test_a_compressed_message_that_is_refused_costs_no_other_its_answer(
    open_grpc, raw_request
):
    compressed = {"compression": grpc.Compression.Gzip}
    async with open_grpc(max_body_bytes=500_000) as running, running.connect() as stub:
        requests = [
            raw_request(1, id="first"),
            raw_request(1, raw_input_contents=[bytes(1 << 25)]),  # 32 KB compressed
            raw_request(1, id="last"),
        ]
        answers = [answer async for answer in stub.ModelStreamInfer(iter(requests), **compressed)]
    assert [answer.infer_response.id for answer in answers] == ["first", "", "last"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, False]


async def fill(stream, raw_request):
    """Write requests and read no answers until no more are taken: their number, the last write."""
    for sent in range(1, 20_000):
        writing = asyncio.ensure_future(stream.write(raw_request(5, id=f"{sent:0128}")))
        for _ in range(1000):  # turns of the event loop, which is the server's, too
            if writing.done():
                break
            await asyncio.sleep(0.001)
        else:
            return sent, writing
    raise AssertionError("the server reads on")


async def test_a_client_that_does_not_read_is_read_no_further(running, raw_request):
    """Answers fill the HTTP/2 windows, then the server takes no more requests."""
    async with running.connect(*SMALL_WINDOWS) as deaf:
        stream = deaf.ModelStreamInfer()
        sent, writing = await fill(stream, raw_request)
        computed = running.requests("ok")
        assert 0 < computed < sent
        async with running.connect() as other:
            assert (await other.ModelInfer(raw_request(1))).model_name == "tiny"
        assert running.requests("ok") == computed + 1
        for number in range(1, sent + 1):
            answer = await asyncio.wait_for(stream.read(), PATIENCE_S)
            assert (answer.error_message, answer.infer_response.id) == ("", f"{number:0128}")
        await writing
        stream.cancel()
