"""Health that is watched, and reflection: calls that last."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from service.rpc.calls import MAX_STREAMS

from benchmarks.grpc_stub import health_stub
from service.errors import ExitCode
from service.rpc import health_pb2

SERVICE = "inference.GRPCInferenceService"
Status = health_pb2.HealthCheckResponse.ServingStatus


def channel(service):
    return grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc_port}")


async def next_status(watch):
    return Status.Name((await asyncio.wait_for(anext(aiter(watch)), 10)).status)


def test_a_client_that_knows_nothing_finds_the_calls_and_makes_one(start):
    service = start().ready()
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as blocking:
        database = ProtoReflectionDescriptorDatabase(blocking)
        assert SERVICE in database.get_services()
        assert "grpc.health.v1.Health" in database.get_services()
        pool = DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("ModelInfer")
        request = GetMessageClass(method.input_type)(model_name="lenet")
        request.inputs.add(name="image", datatype="UINT8", shape=(1, 784))
        request.raw_input_contents.append(bytes(784))
        call = blocking.unary_unary(
            f"/{SERVICE}/{method.name}",
            lambda message: message.SerializeToString(),
            GetMessageClass(method.output_type).FromString,
        )
        assert call(request, timeout=10).model_name == "lenet"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_answers_in_both_versions_and_says_what_is_unknown(start, version):
    service = start().ready()
    async with channel(service) as found:
        stream = found.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )(timeout=10)
        for symbol, known in ((SERVICE, True), ("none.Such", False)):
            await stream.write(
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
            )
            answer = await stream.read()
            assert answer.HasField("file_descriptor_response") == known
            assert answer.HasField("error_response") != known
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_watchers_hear_of_each_change_also_when_others_leave(start):
    service = start("--grace-s", "3").ready()
    async with channel(service) as found:
        stub = health_stub(found)
        names = ("", SERVICE, "lenet", "lenet", "nothing")
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]
        expected = ["SERVING"] * 4 + ["SERVICE_UNKNOWN"]
        assert [await next_status(watch) for watch in watches] == expected
        watches[2].cancel()
        service.signal()
        for number in (0, 1, 3):
            assert await next_status(watches[number]) == "NOT_SERVING"


async def test_streams_do_not_prolong_a_stop_and_end_as_unavailable(start):
    service = start("--drain-timeout-s", "20").ready()
    async with channel(service) as found:
        watch = health_stub(found).Watch(health_pb2.HealthCheckRequest())
        assert await next_status(watch) == "SERVING"
        service.signal()
        assert await asyncio.wait_for(watch.code(), 10) is grpc.StatusCode.UNAVAILABLE
    assert service.wait() == ExitCode.STOPPED
    assert service.stopped_after_s() < 5
    assert "Traceback" not in service.log


async def test_streams_are_bounded_and_leave_room_for_calls(start):
    service = start().ready()
    async with channel(service) as found:
        stub = health_stub(found)
        request = health_pb2.HealthCheckRequest()
        watches = [stub.Watch(request) for _ in range(MAX_STREAMS)]
        for watch in watches:
            assert await next_status(watch) == "SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await next_status(stub.Watch(request))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(request)).status == Status.SERVING
        watches.pop().cancel()
        await asyncio.sleep(0.5)
        assert await next_status(stub.Watch(request)) == "SERVING"


async def test_a_stream_that_says_nothing_ends_and_a_broken_message_is_refused(start):
    service = start().ready()
    async with channel(service) as found:
        method = found.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        silent, broken, large = method(), method(), method()
        await broken.write(b"\xff")
        assert await broken.code() is grpc.StatusCode.INVALID_ARGUMENT
        await large.write(bytes(5000))
        assert await large.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await asyncio.wait_for(silent.code(), 15) is grpc.StatusCode.DEADLINE_EXCEEDED
