from __future__ import annotations

import asyncio
import gc
import re
import socket
from contextlib import AsyncExitStack

import grpc
import pytest

from benchmarks.grpc_stub import Stub
from service.errors import CannotListen
from service.rpc import health_pb2, server
from service.rpc import open_inference_pb2 as pb
from tests.service_process import grpc_call

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(stub, service=""):
    check = stub.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return (await check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "tiny", "mlp"])
async def test_health_follows_readiness_when_checked(stub, house, service):
    assert await health(stub, service) == SERVING
    house.models.ready = False
    assert await health(stub, service) == NOT_SERVING


async def test_health_is_not_found_when_the_name_is_unknown(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(stub, "vgg")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == (
        "service: got 'vgg', expected one of inference.GRPCInferenceService, mlp, tiny"
    )


async def test_a_message_over_the_limit_is_refused_and_one_far_over_it_unread(house, raw_request):
    async with house.connect(max_body_bytes=4096) as stub:
        await stub.ModelInfer(raw_request())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(raw_request(raw_input_contents=[bytes(4097)]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, "a retry would not help"
        assert re.match(r"message: got 4\d+ bytes, expected at most 4096; ", caught.value.details())
        assert dict(caught.value.trailing_metadata())["lenet-error-code"] == "too_large"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(raw_request(raw_input_contents=[bytes(5 << 20)]))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in caught.value.details()
        assert house.requests("ok") == house.requests("too_large") == 1


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_is_answered_as_any_other(stub, raw_request, compression):
    expected = await stub.ModelInfer(raw_request())
    found = await stub.ModelInfer(raw_request(), compression=compression)
    assert found.raw_output_contents == expected.raw_output_contents


async def test_a_compressed_message_is_limited_by_its_size_decompressed(stub, raw_request):
    bomb = raw_request(raw_input_contents=[bytes(1 << 26)])  # 64 KB compressed
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(bomb, compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await stub.ModelInfer(raw_request())


async def test_a_server_says_so_when_the_port_goes_between_probe_and_bind(house, monkeypatch):
    monkeypatch.setattr(server, "probe", lambda *_, **__: ("127.0.0.1",))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CannotListen, match="cannot listen on"):
            async with house.serve(port=port):
                raise AssertionError


async def test_two_servers_answer_on_one_port_when_they_share_it(house, raw_request):
    async with (
        house.serve(shared=True) as first,
        house.connect(shared=True, port=first.port) as stub,
    ):
        assert stub.port == first.port
        await stub.ModelInfer(raw_request())


async def test_a_start_that_is_cancelled_at_any_moment_logs_nothing(house, caplog):
    async def serve():
        async with house.serve(stop_timeout_s=0.1):
            await asyncio.Event().wait()

    for turns in range(1, 6):
        task = asyncio.create_task(serve())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await asyncio.sleep(0.02)
    assert not caplog.records


async def test_a_running_call_is_answered_when_the_server_stops(house, raw_request):
    house.models.gate.clear()
    async with AsyncExitStack() as clients:
        opened = AsyncExitStack()
        port = (await opened.enter_async_context(house.serve())).port
        stubs = [
            Stub(
                await clients.enter_async_context(
                    grpc.aio.insecure_channel(
                        f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)
                    )
                )
            )
            for _ in range(2)
        ]
        accepted = stubs[0].ModelInfer(raw_request())
        await asyncio.wait_for(house.models.entered.wait(), 5)
        stopping = asyncio.create_task(opened.aclose())
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stubs[1].ServerLive(pb.ServerLiveRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        house.models.gate.set()
        assert (await accepted).model_name == "tiny"
        await asyncio.wait_for(stopping, 5)


async def test_a_path_that_is_not_text_stops_nothing(house, raw_request, caplog):
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with house.serve() as server, AsyncExitStack() as clients:

        async def new_stub():
            address = f"127.0.0.1:{server.port}"
            channel = await clients.enter_async_context(grpc.aio.insecure_channel(address, options))
            return Stub(channel)

        house.models.gate.clear()
        running = (await new_stub()).ModelInfer(raw_request())
        await asyncio.wait_for(house.models.entered.wait(), 5)
        for _ in range(3):
            grpc_call(server.port, b"/x\xff").close()
            await asyncio.sleep(0.2)
            live = (await new_stub()).ServerLive(
                pb.ServerLiveRequest(), wait_for_ready=True, timeout=5
            )
            assert (await live).live
        stopping = asyncio.create_task(server.stop(5))
        await asyncio.sleep(0.3)
        house.models.gate.set()
        assert (await asyncio.wait_for(running, 5)).model_name == "tiny"
        await asyncio.wait_for(stopping, 5)
    ours = [record for record in caplog.records if record.name.startswith("service")]
    assert len(ours) == 3


async def test_new_calls_are_refused_as_soon_as_the_server_is_stopped(stub):
    await stub.ServerLive(pb.ServerLiveRequest())
    await stub.server.stop(5.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ServerLive(pb.ServerLiveRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stuck_call_is_cut_off_when_the_stop_takes_too_long(house, raw_request):
    house.models.gate.clear()
    async with AsyncExitStack() as clients:
        async with house.serve(stop_timeout_s=0.05) as server:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
            stub = Stub(await clients.enter_async_context(channel))
            call = stub.ModelInfer(raw_request())
            await asyncio.wait_for(house.models.entered.wait(), 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(house.models.left.wait(), 5)
    assert house.requests("unavailable") == 1
