"""The methods of the Open Inference Protocol that take no images.

Statuses are Triton's where its clients act on them, with one difference: a full queue is
RESOURCE_EXHAUSTED, so that a client can tell "send less" from UNAVAILABLE, "send elsewhere". Too
many images are INVALID_ARGUMENT as in Triton, because a retry would not help.
"""

# ruff: noqa: N802 - methods are named like the protocol's calls

from __future__ import annotations

from google.protobuf.json_format import ParseDict

from lenet import DISTRIBUTION, distribution_version
from service.api.descriptions import (
    GRPC_EXTENSIONS,
    check_repository_parameters,
    model_config,
    model_metadata,
    model_statistics,
    repository_entries,
)
from service.engine.models import Models
from service.engine.repository import Repository
from service.errors import UnknownModel
from service.forms import open_inference_pb2 as pb
from service.forms.tensors import (
    TensorMetadata,
)
from service.observe.metrics import Metrics


class InferenceServicer:
    """Answers questions about the loaded models.

    A model that is not loaded is not ready, without an error, as in Triton, whose clients poll
    `ModelReady` until a model is loaded; every other call answers NOT_FOUND.
    """

    def __init__(
        self, models: Models, repository: Repository, metrics: Metrics, max_images: int
    ) -> None:
        self._models, self._repository = models, repository
        self._metrics, self._max_images = metrics, max_images

    def ServerLive(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """True."""
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Like /readyz."""
        return pb.ServerReadyResponse(ready=self._models.ready)

    def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Whether the model is loaded and the server ready."""
        try:
            self._models.get(request.name, request.version)
        except UnknownModel:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._models.ready)

    def ServerMetadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Name, version and the extensions of the protocol that are supported."""
        return pb.ServerMetadataResponse(
            name=DISTRIBUTION, version=distribution_version(), extensions=GRPC_EXTENSIONS
        )

    def ModelMetadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """The model's tensors."""
        version = self._models.get(request.name, request.version).version
        loaded = [one.version.version for one in self._models.select(version.name)]
        metadata = model_metadata(version, loaded)
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=map(_tensor_metadata, metadata.inputs),
            outputs=map(_tensor_metadata, metadata.outputs),
        )

    def ModelConfig(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """The model's configuration, as Triton's clients read it."""
        version = self._models.get(request.name, request.version).version
        config = model_config(version, self._max_images)
        return ParseDict({"config": config}, pb.ModelConfigResponse())

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest
    ) -> pb.ModelStatisticsResponse:
        """Counts and durations since the start; of all models if the request names none."""
        named = request.name or request.version
        served = (
            self._models.select(request.name, request.version) if named else self._models.served
        )
        totals = await self._metrics.totals()
        found = [model_statistics(one.version, totals[one.version.key]) for one in served]
        return ParseDict({"model_stats": found}, pb.ModelStatisticsResponse())

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest
    ) -> pb.RepositoryIndexResponse:
        """Every version of a model in the weights folder, or those that are loaded."""
        entries = repository_entries(await self._repository.index(), request.ready)
        return ParseDict({"models": entries}, pb.RepositoryIndexResponse())

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest
    ) -> pb.RepositoryModelLoadResponse:
        """Load a model, or what its files are now if it is loaded."""
        check_repository_parameters(request.parameters)
        await self._repository.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model; requests that came before are answered."""
        await self._repository.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()


def _tensor_metadata(tensor: TensorMetadata) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )
