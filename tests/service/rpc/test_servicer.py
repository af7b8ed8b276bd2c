"""The methods that take no images."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from service.forms import open_inference_pb2 as pb


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_answers_and_metadata_bear_the_new_version_when_the_model_was_replaced(
    running, stub, raw_request, tiny, random_weights
):
    file = dataclasses.replace(
        running.models.get().version, version="4", weights=random_weights(tiny, 5)
    )
    assert await running.models.get().replace(file) is None
    response = await stub.ModelInfer(raw_request())
    assert (response.model_name, response.model_version) == ("tiny", "4")
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
    assert list(metadata.versions) == ["4"]
    assert (await stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="4"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="3"))).ready


@pytest.mark.parametrize(
    ("name", "version", "ready"),
    [("mlp", "", True), ("tiny", "3", True), ("mlp", "4", False), ("vgg", "", False)],
)
async def test_a_model_is_ready_when_it_is_loaded(stub, name, version, ready):
    response = await stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))
    assert response.ready == ready


async def test_a_model_is_described_when_asked_for_metadata(stub):
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="mlp"))
    assert (metadata.name, list(metadata.versions)) == ("mlp", ["3"])
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
