"""ModelStreamInfer: requests that follow each other in one call."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack

import grpc
import numpy as np
import pytest

from benchmarks.grpc_stub import Stub
from service import allocator
from service.keys import Keys
from service.rpc import calls, servicer
from service.rpc import open_inference_pb2 as pb


def probabilities(answer):
    found = np.frombuffer(answer.raw_output_contents[0], "<f4")
    return found.reshape(answer.outputs[0].shape)


async def test_answers_are_in_the_order_of_requests_errors_among_them(stub, house, raw_request):
    expected = {rows: await stub.ModelInfer(raw_request(rows)) for rows in (1, 2, 5)}
    requests = [
        *(raw_request(rows, id=str(number)) for number, rows in enumerate((1, 5, 2) * 30)),
        raw_request(2, id="wrong", raw_input_contents=[b"short"]),
        raw_request(1, id="unknown", model_name="vgg"),
        raw_request(5, id="last", model_name="mlp"),
    ]
    answers = [answer async for answer in stub.ModelStreamInfer(iter(requests))]
    assert [answer.infer_response.id for answer in answers] == [one.id for one in requests]
    for answer, rows in zip(answers, (1, 5, 2) * 30, strict=False):
        assert not answer.error_message
        np.testing.assert_allclose(
            probabilities(answer.infer_response), probabilities(expected[rows]), atol=1e-6
        )
    wrong, unknown, last = answers[-3:]
    assert wrong.error_message.startswith("raw_input_contents[0]: got 5 bytes, expected 1568")
    assert "model 'vgg' is not loaded" in unknown.error_message
    assert (last.error_message, last.infer_response.model_name) == ("", "mlp")
    assert house.requests("ok") == 3 + 91
    assert house.requests("invalid_input") == house.requests("unknown_model") == 1


async def test_a_stream_goes_on_after_a_request_that_is_too_large(house, raw_request):
    async with house.connect(max_body_bytes=100_000) as stub:
        requests = [
            *(raw_request(1, id=str(number)) for number in range(20)),
            raw_request(1, id="large", raw_input_contents=[bytes(150_000)]),
            raw_request(100, id="many"),
            raw_request(1, id="last"),
        ]
        answers = [answer async for answer in stub.ModelStreamInfer(iter(requests))]
    assert [answer.infer_response.id for answer in answers] == [one.id for one in requests]
    *_, large, many, last = answers
    assert "expected at most 100000; send fewer" in large.error_message
    assert "got 100 images, expected at most 64" in many.error_message
    assert not last.error_message
    for answer in answers:  # what Triton's clients may wait for
        assert answer.infer_response.parameters["triton_final_response"].bool_param
    assert house.requests("too_large") == 2


async def test_a_request_is_answered_before_the_next_is_sent(stub, raw_request, monkeypatch):
    monkeypatch.setattr(calls, "MESSAGE_S", 0.1)
    call = stub.ModelStreamInfer()
    for rows in (1, 5, 2):
        await asyncio.sleep(0.3)  # longer than a message may take
        await call.write(raw_request(rows))
        answer = await asyncio.wait_for(call.read(), 10)
        assert len(probabilities(answer.infer_response)) == rows
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_another_stream_is_answered_while_one_waits(stub, house, raw_request):
    house.models.gate.clear()
    held, other = stub.ModelStreamInfer(), stub.ModelStreamInfer()
    for _ in range(100):  # more than are worked on at a time
        await held.write(raw_request(1))
    await asyncio.wait_for(house.models.entered.wait(), 5)
    await other.write(raw_request(1, model_name="vgg"))
    assert "'vgg' is not loaded" in (await asyncio.wait_for(other.read(), 5)).error_message
    house.models.gate.set()
    for _ in range(100):
        assert len(probabilities((await held.read()).infer_response)) == 1
    held.cancel()
    other.cancel()


async def test_requests_of_a_client_that_leaves_are_cancelled(stub, house, raw_request, caplog):
    house.models.gate.clear()
    call = stub.ModelStreamInfer()
    for _ in range(3):
        await call.write(raw_request(1))
    await asyncio.wait_for(house.models.entered.wait(), 5)
    await asyncio.sleep(0.1)
    call.cancel()
    async with asyncio.timeout(5):
        while house.requests("cancelled") < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    house.models.gate.set()
    assert (await stub.ModelInfer(raw_request(1))).model_name == "tiny"
    assert not caplog.records


async def test_streams_are_bounded_and_end_as_unavailable_when_the_server_stops(
    house, raw_request, caplog
):
    async with house.connect() as stub:
        streams = [stub.ModelStreamInfer() for _ in range(8)]
        for stream in streams:
            await stream.write(raw_request(1))
            assert not (await stream.read()).error_message
        refused = stub.ModelStreamInfer()
        with pytest.raises(grpc.aio.AioRpcError, match="8 streams are open") as caught:
            await refused.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert house.requests("overloaded") == 1
        assert (await stub.ModelInfer(raw_request(1))).model_name == "tiny"
        began_s = asyncio.get_running_loop().time()
        await stub.server.stop(5.0)
        assert asyncio.get_running_loop().time() - began_s < 2
        for stream in streams:
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
    assert not caplog.records


async def test_a_stream_takes_the_place_of_the_one_that_is_idle_longest(
    stub, raw_request, monkeypatch
):
    monkeypatch.setattr(calls, "_IDLE_STREAM_S", 0.3)
    streams = [stub.ModelStreamInfer() for _ in range(8)]
    for stream in streams:
        await stream.write(raw_request(1))
        assert not (await stream.read()).error_message
    await asyncio.sleep(0.4)
    for stream in streams[1:]:
        await stream.write(raw_request(1))
        assert not (await stream.read()).error_message
    late = stub.ModelStreamInfer()
    await late.write(raw_request(1))
    assert not (await late.read()).error_message
    assert await streams[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError, match="8 streams are open"):
        await stub.ModelStreamInfer().read()


async def test_a_client_that_does_not_read_loses_its_stream_to_another(
    house, raw_request, monkeypatch
):
    """Its answers fill what HTTP/2 lets wait, and then the server reads no more of it, too."""
    monkeypatch.setattr(calls, "_IDLE_STREAM_S", 0.3)
    windows = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]

    async def send(stream):
        with contextlib.suppress(asyncio.InvalidStateError):  # it is ended
            while True:  # until it waits
                await stream.write(raw_request(5, id="i" * 128))

    async with house.connect() as stub, AsyncExitStack() as stack:
        deaf, other = [
            Stub(
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(f"127.0.0.1:{stub.port}", windows)
                )
            )
            for _ in range(2)
        ]
        streams = [deaf.ModelStreamInfer() for _ in range(8)]
        sending = [asyncio.create_task(send(stream)) for stream in streams]
        answer = None
        async with asyncio.timeout(20):
            while answer is None:
                await asyncio.sleep(0.1)
                late = other.ModelStreamInfer()
                with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):
                    await late.write(raw_request(1))
                    answer = await late.read()
        assert not answer.error_message
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


async def test_a_message_that_the_budget_refuses_costs_no_answer_before_it(house, raw_request):
    async with house.connect() as stub:
        house.models.gate.clear()
        stream = stub.ModelStreamInfer()
        for number in range(3):
            await stream.write(raw_request(1, id=str(number)))
        await asyncio.wait_for(house.models.entered.wait(), 5)
        await asyncio.sleep(0.1)
        taken = house.budget.limit_bytes(1 << 20)
        house.budget.hold(taken, taken)
        await stream.write(pb.ModelInferRequest(raw_input_contents=[bytes(1 << 18)]))
        await asyncio.sleep(0.1)
        house.models.gate.set()
        for number in range(3):
            assert (await stream.read()).infer_response.id == str(number)
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        house.budget.release(taken)
    assert house.requests("overloaded") == 1


async def test_a_stream_whose_answer_takes_long_is_not_idle(house, raw_request, monkeypatch):
    monkeypatch.setattr(calls, "_IDLE_STREAM_S", 0.0)
    async with house.connect() as stub:
        house.models.gate.clear()
        streams = [stub.ModelStreamInfer() for _ in range(8)]
        for stream in streams:
            await stream.write(raw_request(1))
        await asyncio.sleep(0.3)
        with pytest.raises(grpc.aio.AioRpcError, match="8 streams are open"):
            await stub.ModelStreamInfer().read()
        house.models.gate.set()
        for stream in streams:
            assert not (await stream.read()).error_message


async def test_a_stream_without_a_key_takes_no_place(house, raw_request, monkeypatch):
    monkeypatch.setattr(calls, "_IDLE_STREAM_S", 0.0)
    key = "k" * 16
    async with house.connect(keys=Keys([key])) as stub:
        metadata = (("authorization", f"Bearer {key}"),)
        streams = [stub.ModelStreamInfer(metadata=metadata) for _ in range(8)]
        for _ in range(2):
            for stream in streams:
                await stream.write(raw_request(1))
                assert not (await stream.read()).error_message
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelStreamInfer().read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stream_works_on_few_images_at_a_time(house, raw_request, monkeypatch):
    monkeypatch.setattr(servicer, "_IMAGES_OF_ONE", 1)
    most = servicer._STREAM_AHEAD
    async with house.connect() as stub:
        house.models.gate.clear()
        stream = stub.ModelStreamInfer()

        async def write():
            for _ in range(40):  # it waits, because the server reads no more of them
                await stream.write(raw_request(5))

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.5)
        assert 0 < 5 * len(house.models.timeouts_s) <= most
        house.models.gate.set()
        for _ in range(40):
            assert len(probabilities((await stream.read()).infer_response)) == 5
        await writing


@pytest.mark.parametrize("ended", [False, True])
async def test_what_a_stream_has_sent_is_answered_when_the_server_stops(house, raw_request, ended):
    async with house.connect() as stub:
        house.models.gate.clear()
        stream = stub.ModelStreamInfer()
        for number in range(5):
            await stream.write(raw_request(1, id=str(number)))
        if ended:
            await stream.done_writing()
        await asyncio.wait_for(house.models.entered.wait(), 5)
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(stub.server.stop(5.0))
        await asyncio.sleep(0.3)
        house.models.gate.set()
        for number in range(5):
            assert (await stream.read()).infer_response.id == str(number)
        expected = grpc.StatusCode.OK if ended else grpc.StatusCode.UNAVAILABLE
        assert await stream.code() is expected
        await asyncio.wait_for(stopping, 5)


async def test_the_memory_of_messages_is_counted(house, raw_request):
    async with house.connect() as stub:
        stream = stub.ModelStreamInfer()
        await stream.write(raw_request(5))
        assert not (await stream.read()).error_message
        assert house.budget.held_bytes == 0
        taken = house.budget.limit_bytes(1 << 20)
        house.budget.hold(taken, taken)
        await stream.write(pb.ModelInferRequest(raw_input_contents=[bytes(1 << 18)]))
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        house.budget.release(taken)
        assert house.budget.held_bytes == 0


async def test_the_memory_of_large_messages_is_returned_while_their_stream_is_open(
    house, raw_request, monkeypatch
):
    returned = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(calls, "_TRIMMED_BYTES", 0)
    monkeypatch.setattr(calls, "_TRIM_TICKS", (1,))
    monkeypatch.setattr(allocator, "return_memory", lambda: loop.call_soon_threadsafe(returned.set))
    async with house.connect() as stub:
        stream = stub.ModelStreamInfer()
        await stream.write(raw_request(raw_input_contents=[bytes(900_000)]))
        assert (await stream.read()).error_message
        await asyncio.wait_for(returned.wait(), 5)
        assert not stream.done()
        stream.cancel()
