"""Model metadata of the Open Inference Protocol, for HTTP and gRPC.

Source: https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lenet.pixels import HEIGHT, WIDTH
from service.engine.versions import Listed, ModelVersion
from service.errors import invalid, shown
from service.forms.tensors import ALL_OUTPUTS, INPUT, TensorMetadata, output_metadata
from service.observe.metrics import Totals

PLATFORM = "lenet_safetensors"
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
"""Over HTTP, by the names that Triton gave them."""

GRPC_EXTENSIONS = ("classification", "model_configuration", "model_repository", "statistics")


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Description of a model for its clients."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def model_metadata(version: ModelVersion, versions: Sequence[str] = ()) -> ModelMetadata:
    """The description of a model; FP32 images are accepted besides the stated UINT8.

    `versions` are those that are loaded.
    """
    return ModelMetadata(
        version.name,
        tuple(versions),
        PLATFORM,
        (TensorMetadata(INPUT, "UINT8", (-1, HEIGHT, WIDTH)),),
        output_metadata(ALL_OUTPUTS, -1, version.weights.model.classes),
    )


def model_config(version: ModelVersion, max_images: int) -> dict[str, Any]:
    """The model's configuration in the form of Triton's, for its clients.

    A shape there has no dimension for the images of a request, of which there are `max_images` at
    most, and an empty one is spelled as a single 1 that is taken away again.
    """

    def tensor(one: TensorMetadata) -> dict[str, Any]:
        entry = {"name": one.name, "data_type": f"TYPE_{one.datatype}", "dims": [*one.shape[1:]]}
        return entry if entry["dims"] else {**entry, "dims": [1], "reshape": {"shape": []}}

    metadata = model_metadata(version)
    return {
        "name": metadata.name,
        "platform": metadata.platform,
        "backend": "",
        "max_batch_size": max_images,
        "input": [tensor(one) for one in metadata.inputs],
        "output": [tensor(one) for one in metadata.outputs],
        "dynamic_batching": {},
    }


def model_statistics(version: ModelVersion, totals: Totals) -> dict[str, Any]:
    """The statistics extension: counts, and durations in nanoseconds, since the start.

    `inference_count` are computed images, `execution_count` batches. Requests are not timed when
    they fail, and of a batch only the computing is. `batch_size` is the next power of two.
    """

    def duration(count: float, seconds: float) -> dict[str, int]:
        return {"count": int(count), "ns": round(1e9 * seconds)}

    requests, stages_s = totals.predicted, totals.stages_s
    stages = {"queue": "queue", "compute_input": "decode", "compute_infer": "compute"}
    durations = {
        name: duration(requests, stages_s.get(stage, 0.0))
        for name, stage in {**stages, "compute_output": "encode"}.items()
    }
    return {
        "name": version.name,
        "version": version.version,
        "last_inference": round(1e3 * totals.last_s),
        "inference_count": totals.images,
        "execution_count": totals.batches,
        "inference_stats": {
            "success": duration(requests, stages_s.get("total", 0.0)),
            "fail": duration(totals.failed, 0.0),
            **durations,
            "cache_hit": duration(0, 0.0),
            "cache_miss": duration(0, 0.0),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": duration(count, 0.0),
                "compute_infer": duration(count, seconds),
                "compute_output": duration(count, 0.0),
            }
            for rows, (count, seconds) in sorted(totals.sized.items())
        ],
    }


def repository_entries(listed: Iterable[Listed], ready: bool) -> list[dict[str, str]]:
    """The entries of a repository's index, with `ready` of the loaded versions alone."""
    return [
        {
            "name": one.name,
            "version": one.version,
            "state": "READY" if one.loaded else "UNAVAILABLE",
            "reason": "" if one.loaded else "unloaded",
        }
        for one in listed
        if one.loaded or not ready
    ]


def check_repository_parameters(parameters: object) -> None:
    """Reject parameters of a load that would change what is loaded. Raises: InvalidInput."""
    if not isinstance(parameters, Mapping):
        raise invalid("parameters", shown(parameters), "an object")
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            field = f"parameters.{shown(name)}"
            raise invalid(field, "a model's content", "none: models are read from the folder")
