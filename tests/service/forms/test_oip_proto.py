"""Messages of ModelInfer that are refused; test_tensors has the tensors."""

from __future__ import annotations

import numpy as np
import pytest

from service.errors import InvalidInput
from service.forms import open_inference_pb2 as pb
from service.forms.oip_proto import OipProtoForm, decode_message
from service.forms.reader import Limits, Reader

Tensor = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor
Parameter = pb.InferParameter
RAW = {
    "inputs": [Tensor(name="image", datatype="UINT8", shape=(1, 28, 28))],
    "raw_input_contents": [bytes(784)],
}


def typed(datatype="UINT8", **numbers):
    contents = pb.InferTensorContents(**numbers) if numbers else None
    return {"inputs": [Tensor(name="image", datatype=datatype, shape=(1, 784), contents=contents)]}


def output(name, **value):
    return {
        **RAW,
        "outputs": [Output(name=name, parameters={"classification": Parameter(**value)})],
    }


SHARED = Tensor(name="image", parameters={"shared_memory_region": Parameter(string_param="x")})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "inputs"),
        ({**RAW, "inputs": [Tensor(name="image")] * 2}, "raw_input_contents"),
        ({**RAW, "raw_input_contents": [b"", b""]}, "raw_input_contents"),
        ({**typed(uint_contents=[1]), "raw_input_contents": [bytes(784)]}, "inputs[0].contents"),
        (typed(), "inputs[0].contents"),
        (typed(int_contents=[0] * 784), "inputs[0].contents"),
        (typed("FP16"), "inputs[0].contents"),
        (typed("FP16", fp32_contents=[0] * 784), "inputs[0].contents"),
        (typed(uint_contents=[0] * 784, fp32_contents=[0]), "inputs[0].contents"),
        (output("label", int64_param=3), "outputs[0].parameters.classification"),
        (output("probabilities", int64_param=0), "outputs[0].parameters.classification"),
        (output("probabilities", string_param="1"), "outputs[0].parameters.classification"),
        ({**RAW, "id": "x" * 1025}, "id"),
        ({**RAW, "parameters": {"timeout": Parameter(string_param="5")}}, "parameters.timeout"),
        ({**RAW, "parameters": {"timeout": Parameter(int64_param=-1)}}, "parameters.timeout"),
        ({**RAW, "parameters": {"scale": Parameter(string_param="x")}}, "parameters.scale"),
        ({"inputs": [SHARED]}, "inputs[0].parameters.shared_memory_region"),
    ],
)
def test_a_message_is_refused_with_the_field_that_is_wrong(fields, field):
    with pytest.raises(InvalidInput) as caught:
        decode_message(pb.ModelInferRequest(**fields).SerializeToString(), Reader(Limits(64)))
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_images_of_a_message_that_came_in_pieces_are_not_copied():
    tensor = Tensor(name="image", datatype="UINT8", shape=(1000, 28, 28))
    request = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[bytes(784_000)])
    body = bytearray(request.SerializeToString())
    decoded = OipProtoForm(Limits(1000)).decode_now(body)
    assert np.shares_memory(decoded.images, np.frombuffer(body, np.uint8))


def test_only_large_typed_messages_are_left_to_a_decoding_process():
    def message(rows, raw=False):
        numbers = (
            {} if raw else {"contents": pb.InferTensorContents(uint_contents=[1] * rows * 784)}
        )
        tensor = Tensor(name="image", datatype="UINT8", shape=(rows, 28, 28), **numbers)
        contents = [bytes(784 * rows)] if raw else []
        request = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=contents)
        return request.SerializeToString()

    form = OipProtoForm(Limits(1000))
    assert len(form.decode_now(message(80)).images) == 80
    assert form.decode_now(message(90)) is None
    assert len(form.decode_now(message(1000, raw=True)).images) == 1000
