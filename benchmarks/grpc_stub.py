"""A gRPC client of a service that protobuf describes."""

from __future__ import annotations

from typing import Any

from google.protobuf.message_factory import GetMessageClass

from service.api import health_pb2
from service.forms import open_inference_pb2


def health_stub(channel: Any) -> Stub:
    """A client of the health protocol."""
    return Stub(channel, health_pb2.DESCRIPTOR.services_by_name["Health"])


class Stub:
    """Has a callable for each method of `service`, as a stub that grpcio-tools generates."""

    def __init__(
        self,
        channel: Any,
        service: Any = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    ) -> None:
        for method in service.methods:
            arity = "_".join(
                "stream" if streams else "unary"
                for streams in (method.client_streaming, method.server_streaming)
            )
            call = getattr(channel, arity)(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)
