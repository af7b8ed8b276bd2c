"""The methods of the Open Inference Protocol that take no images.

Statuses are Triton's where its clients act on them, with one difference: a full queue is
RESOURCE_EXHAUSTED, so that a client can tell "send less" from UNAVAILABLE, "send elsewhere". Too
many images are INVALID_ARGUMENT as in Triton, because a retry would not help.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeAlias

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
from service.observe.metrics import Metrics

Fields: TypeAlias = dict[str, Any]
"""The fields of an answer by name."""


def small_methods(
    models: Models, repository: Repository, metrics: Metrics, max_images: int
) -> dict[str, Callable[[Any], Fields | Awaitable[Fields]]]:
    """The methods by name; each gets the request's message.

    A model that is not loaded is not ready, without an error, as in Triton, whose clients poll
    `ModelReady` until a model is loaded; every other call answers NOT_FOUND.
    """

    def model_ready(request: Any) -> Fields:
        found = models.find(request.name, request.version)
        return {"ready": found is not None and models.ready}

    def metadata(request: Any) -> Fields:
        version = models.get(request.name, request.version).version
        loaded = [one.version.version for one in models.select(version.name)]
        return asdict(model_metadata(version, loaded))

    def config(request: Any) -> Fields:
        version = models.get(request.name, request.version).version
        return {"config": model_config(version, max_images)}

    async def statistics(request: Any) -> Fields:
        named = request.name or request.version
        served = models.select(request.name, request.version) if named else models.served
        totals = await metrics.totals()
        found = [model_statistics(one.version, totals[one.version.key]) for one in served]
        return {"model_stats": found}

    async def index(request: Any) -> Fields:
        return {"models": repository_entries(await repository.index(), request.ready)}

    async def load(request: Any) -> Fields:
        check_repository_parameters(request.parameters)
        await repository.load(request.model_name)
        return {}

    async def unload(request: Any) -> Fields:
        await repository.unload(request.model_name)
        return {}

    server = {"name": DISTRIBUTION, "version": distribution_version()}
    return {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": models.ready},
        "ServerMetadata": lambda _: {**server, "extensions": GRPC_EXTENSIONS},
        "ModelReady": model_ready,
        "ModelMetadata": metadata,
        "ModelConfig": config,
        "ModelStatistics": statistics,
        "RepositoryIndex": index,
        "RepositoryModelLoad": load,
        "RepositoryModelUnload": unload,
    }
