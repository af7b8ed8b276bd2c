# Written by hand: grpc_tools makes types for messages only. For grpc.aio.
from grpc.aio import Channel, Server, ServicerContext, UnaryUnaryMultiCallable

from service.rpc import open_inference_pb2 as pb

class GRPCInferenceServiceStub:
    ServerLive: UnaryUnaryMultiCallable[pb.ServerLiveRequest, pb.ServerLiveResponse]
    ServerReady: UnaryUnaryMultiCallable[pb.ServerReadyRequest, pb.ServerReadyResponse]
    ModelReady: UnaryUnaryMultiCallable[pb.ModelReadyRequest, pb.ModelReadyResponse]
    ServerMetadata: UnaryUnaryMultiCallable[pb.ServerMetadataRequest, pb.ServerMetadataResponse]
    ModelMetadata: UnaryUnaryMultiCallable[pb.ModelMetadataRequest, pb.ModelMetadataResponse]
    ModelInfer: UnaryUnaryMultiCallable[pb.ModelInferRequest, pb.ModelInferResponse]
    def __init__(self, channel: Channel) -> None: ...

class GRPCInferenceServiceServicer:
    async def ServerLive(
        self,
        request: pb.ServerLiveRequest,
        context: ServicerContext[pb.ServerLiveRequest, pb.ServerLiveResponse],
    ) -> pb.ServerLiveResponse: ...
    async def ServerReady(
        self,
        request: pb.ServerReadyRequest,
        context: ServicerContext[pb.ServerReadyRequest, pb.ServerReadyResponse],
    ) -> pb.ServerReadyResponse: ...
    async def ModelReady(
        self,
        request: pb.ModelReadyRequest,
        context: ServicerContext[pb.ModelReadyRequest, pb.ModelReadyResponse],
    ) -> pb.ModelReadyResponse: ...
    async def ServerMetadata(
        self,
        request: pb.ServerMetadataRequest,
        context: ServicerContext[pb.ServerMetadataRequest, pb.ServerMetadataResponse],
    ) -> pb.ServerMetadataResponse: ...
    async def ModelMetadata(
        self,
        request: pb.ModelMetadataRequest,
        context: ServicerContext[pb.ModelMetadataRequest, pb.ModelMetadataResponse],
    ) -> pb.ModelMetadataResponse: ...
    async def ModelInfer(
        self,
        request: pb.ModelInferRequest,
        context: ServicerContext[pb.ModelInferRequest, pb.ModelInferResponse],
    ) -> pb.ModelInferResponse: ...

def add_GRPCInferenceServiceServicer_to_server(
    servicer: GRPCInferenceServiceServicer, server: Server
) -> None: ...
