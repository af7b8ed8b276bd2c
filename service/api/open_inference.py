"""Answers of the Open Inference Protocol besides inference, for HTTP and gRPC.

Source: https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from lenet import DISTRIBUTION, distribution_version
from service.engine.models import Models
from service.engine.repository import Repository
from service.engine.versions import ModelVersion
from service.errors import invalid, shown
from service.forms.tensors import ALL_OUTPUTS, INPUT_METADATA, TensorMetadata, output_metadata
from service.observe.metrics import Metrics, Totals

PLATFORM = "lenet_safetensors"
GRPC_EXTENSIONS = ("classification", "model_configuration", "model_repository", "statistics")
EXTENSIONS = tuple(sorted((*GRPC_EXTENSIONS, "binary_tensor_data", "parameters")))
"""Over HTTP, by the names that Triton gave them."""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The server."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Description of a model for its clients."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class RepositoryEntry:
    """A version of a model."""

    name: str
    version: str
    state: Annotated[
        Literal["READY", "UNAVAILABLE"], Field(description="UNAVAILABLE: it is not loaded.")
    ]
    reason: str


class OpenInference:
    """Answers about the server, its models and the repository.

    `max_images`: images that a request may have. With a model that is not loaded, the methods raise
    UnknownModel.
    """

    def __init__(
        self, models: Models, repository: Repository, metrics: Metrics, max_images: int
    ) -> None:
        self.models = models
        self._repository, self._metrics, self._max_images = repository, metrics, max_images
        self._server = DISTRIBUTION, distribution_version()  # which is read from files

    def server(self, extensions: tuple[str, ...]) -> ServerMetadata:
        """Name, version and `extensions`."""
        return ServerMetadata(*self._server, extensions)

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """The tensors of a model, and its loaded versions.

        FP32 images are accepted besides the stated UINT8.
        """
        found = self.models.get(model, version).version
        return ModelMetadata(
            found.name,
            tuple(one.version.version for one in self.models.select(found.name)),
            PLATFORM,
            (INPUT_METADATA,),
            output_metadata(ALL_OUTPUTS, -1, found.weights.model.classes),
        )

    def config(self, model: str, version: str = "") -> dict[str, Any]:
        """The model's configuration in the form of Triton's, for its clients.

        A shape there has no dimension for the images of a request, and an empty one is spelled as a
        single 1 that is taken away again.
        """

        def tensor(one: TensorMetadata) -> dict[str, Any]:
            dims = [*one.shape[1:]]
            entry = {"name": one.name, "data_type": f"TYPE_{one.datatype}", "dims": dims or [1]}
            return entry if dims else {**entry, "reshape": {"shape": []}}

        metadata = self.metadata(model, version)
        return {
            "name": metadata.name,
            "platform": metadata.platform,
            "backend": "",
            "max_batch_size": self._max_images,
            "input": [tensor(one) for one in metadata.inputs],
            "output": [tensor(one) for one in metadata.outputs],
            "dynamic_batching": {},
        }

    async def statistics(self, model: str = "", version: str = "") -> dict[str, Any]:
        """Statistics of a version, of all of a model, or without either of all models."""
        models = self.models
        served = models.select(model, version) if model or version else models.served
        totals = await self._metrics.totals()
        found = [_statistics(one.version, totals[one.version.key]) for one in served]
        return {"model_stats": found}

    async def index(self, ready: bool) -> list[RepositoryEntry]:
        """Every version in the weights folder; with `ready` those that are loaded."""
        return [
            RepositoryEntry(one.name, one.version, "READY", "")
            if one.loaded
            else RepositoryEntry(one.name, one.version, "UNAVAILABLE", "unloaded")
            for one in await self.models.index()
            if one.loaded or not ready
        ]

    async def load(self, model: str, parameters: Iterable[str]) -> None:
        """Load a model, or its files as they are now.

        Raises: InvalidInput, for `parameters` that would change what is loaded; as `Repository`.
        """
        for name in parameters:
            if name == "config" or name.startswith("file:"):
                field = f"parameters.{shown(name)}"
                raise invalid(field, "a model's content", "none: models are read from the folder")
        await self._repository.load(model)

    async def unload(self, model: str) -> None:
        """Unload a model. Raises: as `Repository`."""
        await self._repository.unload(model)


def _statistics(version: ModelVersion, totals: Totals) -> dict[str, Any]:
    """The statistics extension: counts, and durations in nanoseconds, since the start.

    `inference_count` are computed images, `execution_count` batches. Requests are not timed when
    they fail, and of a batch only the computing is. `batch_size` is the next power of two.
    """

    def duration(count: float, seconds: float = 0.0) -> dict[str, int]:
        return {"count": int(count), "ns": round(1e9 * seconds)}

    stages = {"success": "total", "queue": "queue", "compute_input": "decode"}
    stages |= {"compute_infer": "compute", "compute_output": "encode"}
    return {
        "name": version.name,
        "version": version.version,
        "last_inference": round(1e3 * totals.last_s),
        "inference_count": totals.images,
        "execution_count": totals.batches,
        "inference_stats": {
            name: duration(totals.predicted, totals.stages_s.get(stage, 0.0))
            for name, stage in stages.items()
        }
        | {"fail": duration(totals.failed), "cache_hit": duration(0), "cache_miss": duration(0)},
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": duration(count),
                "compute_infer": duration(count, seconds),
                "compute_output": duration(count),
            }
            for rows, (count, seconds) in sorted(totals.sized.items())
        ],
    }
