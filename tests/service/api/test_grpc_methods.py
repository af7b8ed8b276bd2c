"""The list of methods, their access rights, health and reflection."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

import tests.wire.test_http2 as h2
from benchmarks.grpc_stub import health_stub
from service.api import health_pb2, reflection_pb2
from service.api.grpc_methods import HealthServicer
from service.forms import open_inference_pb2 as pb
from tests.faults.http2 import message
from tests.service.api.conftest import failure
from tests.service_process import PATIENCE_S
from tests.wire.doors import until
from tests.wire.test_statements import Client, check

SERVICE = "inference.GRPCInferenceService"
Check = health_pb2.HealthCheckRequest
Status = health_pb2.HealthCheckResponse.ServingStatus
Question = reflection_pb2.ServerReflectionRequest


async def health(stub, service=""):
    return Status.Name((await health_stub(stub.channel).Check(Check(service=service))).status)


async def next_status(watch):
    return Status.Name((await asyncio.wait_for(anext(aiter(watch)), PATIENCE_S)).status)


def reflect(stub, version="v1", **options):
    return stub.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        Question.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )(**options)


async def test_health_follows_readiness_and_an_unknown_name_is_not_found(stub, running):
    for status in ("SERVING", "NOT_SERVING"):
        for service in ("", SERVICE, "tiny", "mlp"):
            assert await health(stub, service) == status
        running.models.ready = False
    error = await failure(health(stub, "vgg"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == f"service: got 'vgg', expected one of {SERVICE}, mlp, tiny"


def test_a_change_right_behind_a_status_is_reported(run_virtually):
    async def main(loop):
        models = SimpleNamespace(ready=True, names=set())

        async def requests():
            yield Check()

        watch = HealthServicer(models, tells_names=True).watch(requests())
        assert (await anext(watch)).status == Status.SERVING
        change = asyncio.create_task(anext(watch))
        await asyncio.sleep(0)  # it begins to wait
        models.ready = False
        assert (await asyncio.wait_for(change, 1)).status == Status.NOT_SERVING
        await watch.aclose()

    run_virtually(main)


async def test_watchers_hear_of_each_change_also_when_others_leave(stub, running):
    await health(stub)
    idle = len(asyncio.all_tasks())
    names = ("", SERVICE, "tiny", "tiny", "nothing")
    watches = [health_stub(stub.channel).Watch(Check(service=name)) for name in names]
    expected = ["SERVING"] * 4 + ["SERVICE_UNKNOWN"]
    assert [await next_status(watch) for watch in watches] == expected
    watches[2].cancel()
    running.models.ready = False
    for number in (0, 1, 3):
        assert await next_status(watches[number]) == "NOT_SERVING"
    for watch in watches:
        watch.cancel()
    await until(lambda: len(asyncio.all_tasks()) <= idle)  # a watch ends with its client


@pytest.mark.parametrize("is_old", [False, True])
async def test_streams_do_not_prolong_a_stop_and_end_as_unavailable(running, caplog, is_old):
    running.door.max_connection_age_s = 0.1 if is_old else math.inf
    async with running.connect() as stub:
        watch, reflection = health_stub(stub.channel).Watch(Check()), reflect(stub)
        assert await next_status(watch) == "SERVING"
        await reflection.write(Question(list_services=""))
        await reflection.read()
        if is_old:  # which no stream notices
            (connection,) = running.door.connections
            await until(lambda: connection.exchanges.http2.ending)
            await reflection.write(Question(list_services=""))
            await reflection.read()
        await asyncio.wait_for(running.stop(3600.0), PATIENCE_S)
        for stream in (watch, reflection):
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
    assert not caplog.records


async def test_a_client_that_knows_nothing_finds_the_calls_and_makes_one(stub):
    stream = reflect(stub, timeout=PATIENCE_S)

    async def ask(**question):
        await stream.write(Question(**question))
        return await stream.read()

    listed = (await ask(list_services="")).list_services_response.service
    assert {one.name for one in listed} >= {SERVICE, "grpc.health.v1.Health"}
    pool = DescriptorPool()
    known = set()

    async def add(answer):
        for content in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(content)
            for name in {*file.dependency} - known:
                await add(await ask(file_by_filename=name))
            known.add(file.name)
            pool.Add(file)

    await add(await ask(file_containing_symbol=SERVICE))
    method = pool.FindServiceByName(SERVICE).FindMethodByName("ModelInfer")
    request = GetMessageClass(method.input_type)(model_name="tiny")
    request.inputs.add(name="image", datatype="UINT8", shape=(1, 784))
    request.raw_input_contents.append(bytes(784))
    call = stub.channel.unary_unary(
        f"/{SERVICE}/{method.name}",
        lambda message: message.SerializeToString(),
        GetMessageClass(method.output_type).FromString,
    )
    assert (await call(request)).model_name == "tiny"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_answers_in_both_versions_and_says_what_is_unknown(stub, version):
    questions = [
        (Question(file_containing_symbol=SERVICE), "file_descriptor_response"),
        (Question(file_containing_symbol=f"{SERVICE}.ModelInfer"), "file_descriptor_response"),
        (
            Question(file_containing_symbol="grpc.health.v1.Health.Watch"),
            "file_descriptor_response",
        ),
        (Question(file_containing_symbol=f"{SERVICE}.None"), "error_response"),
        (Question(file_containing_symbol="none.Such"), "error_response"),
        (Question(file_by_filename="none.proto"), "error_response"),
        (
            Question(all_extension_numbers_of_type="inference.ModelInferRequest"),
            "all_extension_numbers_response",
        ),
        (Question(all_extension_numbers_of_type="none.Such"), "error_response"),
        (Question(), "error_response"),
    ]
    stream = reflect(stub, version, timeout=PATIENCE_S)
    for question, kind in questions:
        await stream.write(question)
        answer = await stream.read()
        assert answer.WhichOneof("message_response") == kind
        assert answer.original_request == question
        if kind == "error_response":
            assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
            assert answer.error_response.error_message
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_a_question_is_refused_when_it_is_not_one(stub, caplog):
    info = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    for method, messages in (
        (f"{SERVICE}/ModelReady", [b"\xff\xff\xff"]),
        ("grpc.health.v1.Health/Check", [b"\xff\xff\xff"]),
        (info, [b"\xff\xff\xff"]),
        (info, [bytes(5000)]),
        ("grpc.health.v1.Health/Watch", []),
    ):
        error = await failure(stub.channel.stream_unary(f"/{method}")(iter(messages)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(error.trailing_metadata())["lenet-error-field"] == "message"
        assert error.details().startswith("message: ")
    assert not caplog.records


async def test_an_unexpected_error_is_logged_and_hidden(stub, running, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("secret of /srv")

    monkeypatch.setattr(type(running.models), "served", property(fail))
    monkeypatch.setattr(type(running.models), "find", fail)
    for call in (
        stub.ModelStatistics(pb.ModelStatisticsRequest()),
        health(stub, "tiny"),
        anext(aiter(health_stub(stub.channel).Watch(Check(service="tiny")))),
    ):
        error = await failure(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "internal error; see the server log"
    assert caplog.text.count("RuntimeError: secret of /srv") == 3


async def test_a_model_that_is_replaced_is_ready_and_described_in_its_new_version(
    running, stub, raw_request, tiny, random_weights
):
    new = {"version": "4", "weights": random_weights(tiny, 5)}
    file = dataclasses.replace(running.models.get().version, **new)
    assert await running.models.get().replace(file) is None
    response = await stub.ModelInfer(raw_request())
    assert (response.model_name, response.model_version) == ("tiny", "4")
    for name, version, ready in (
        *(("tiny", "4", True), ("tiny", "3", False), ("mlp", "", True), ("mlp", "3", True)),
        *(("mlp", "4", False), ("vgg", "", False)),
    ):
        asked = pb.ModelReadyRequest(name=name, version=version)
        assert (await stub.ModelReady(asked)).ready == ready
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
    assert (metadata.name, list(metadata.versions)) == ("tiny", ["4"])
    assert metadata.platform == "lenet_safetensors"
    described = [
        (tensor.name, tensor.datatype, list(tensor.shape))
        for tensor in (*metadata.inputs, *metadata.outputs)
    ]
    assert described == [
        ("image", "UINT8", [-1, 28, 28]),
        ("probabilities", "FP32", [-1, 10]),
        ("label", "INT64", [-1]),
    ]


async def test_triton_s_additions_are_unimplemented_when_called(stub):
    call = stub.channel.unary_unary("/inference.GRPCInferenceService/SystemSharedMemoryRegister")
    error = await failure(call(b""))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "Service/SystemSharedMemoryRegister', expected one that" in error.details()


def test_a_second_message_of_a_unary_call_is_refused_whenever_it_comes():
    one, status = message(b""), "3"  # INVALID_ARGUMENT
    assert Client(check(one)).outcome() == "0"
    assert Client(check(one + one)).outcome() == status
    later = Client(check(one, end=False))
    assert later.outcome() is None
    assert later.send(h2.data(1, one, h2.END)).outcome() == status
