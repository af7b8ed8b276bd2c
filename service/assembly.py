"""All of a service but its listeners: models, routes, methods, opened and closed in order."""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from lenet import distribution_commit, distribution_version
from lenet.pixels import Images
from service import direct
from service.api.app import create_app
from service.api.explain import explain_endpoint
from service.api.grpc_methods import methods
from service.api.middleware import Middleware
from service.api.open_inference import OpenInference
from service.api.paths import POLICY, PROBES, image_routes
from service.api.schemas import InfoResponse, LoadedModel
from service.decode.pool import Decoders
from service.direct import Predictions
from service.engine.batcher import Batcher
from service.engine.deadlines import Deadlines
from service.engine.devices import Placement, place
from service.engine.faults import Faults
from service.engine.models import EngineConfig, Models
from service.engine.repository import Repository, unloaded
from service.engine.versions import WeightsFolder
from service.errors import GRPC_STATUS, STATUS
from service.forms.reader import Limits
from service.observe.metrics import NO_MODEL, Metrics
from service.observe.traces import Traces
from service.request import Request, Requests
from service.settings import Settings
from wire.access_log import AccessLog, access_log
from wire.budget import Budget
from wire.gate import Gate
from wire.head import FastRoutes
from wire.http2_head import Methods
from wire.keys import Keys

_log = logging.getLogger(__name__)

_DECODER_BYTES = 256 << 20
"""60 MiB for the process itself, 155 for the largest WebP or PNG. With 384 JSON of 30 MB killed the
process instead of being refused."""


@dataclass(frozen=True, slots=True)
class Service:
    """An open service.

    Our own server serves `app`, `fast_routes` and the `methods` of gRPC; any other `asgi`.
    """

    settings: Settings
    models: Models
    repository: Repository
    app: FastAPI
    fast_routes: FastRoutes
    methods: Methods
    budget: Budget
    gate: Gate
    metrics: Metrics
    access: AccessLog | None
    faults: Faults | None
    """Set by `--fault-injection`."""

    @property
    def asgi(self) -> ASGIApp:
        """Every HTTP route, keys and CORS included, as an ASGI application."""
        return Middleware(self.app, self.gate, self.access)

    async def predict(
        self, images: Images, *, model: str = "", version: str = "", timeout_s: float | None = None
    ) -> Predictions:
        """Classify `images`, uint8 (n, 28, 28), ink high, in batches with all other requests.

        `model`: the default one for "". `timeout_s`: at most, and by default, the service's limit.

        Raises:
            InvalidInput, TooLarge: not such images, or more than a request may have.
            UnknownModel, Overloaded, DeadlineExceeded, InferenceFailed, Unavailable.
        """
        limit_s = self.settings.request_timeout_ms / 1e3
        return await direct.predict(
            self.models,
            images,
            model,
            version,
            timeout_s=min(timeout_s or limit_s, limit_s),
            max_images=self.settings.max_images,
        )


@asynccontextmanager
async def open_service(
    settings: Settings,
    *,
    grpc_port: int | None = None,
    shared: bool = False,
    folder: Path | None = None,
) -> AsyncIterator[Service]:
    """Open everything but the listeners, and close it on leaving.

    `grpc_port`: None if gRPC is not served. `shared`: this is a worker of a supervisor; others may
    share `folder`, if there is one.

    Raises:
        InvalidWeightFile, GoldenMismatch: the weights must not be served.
        BackendUnavailable, DeviceError: the device cannot be used.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics(CollectorRegistry(), folder)
        stack.enter_context(metrics.flushed_regularly())

        began = time.perf_counter()
        weights = WeightsFolder(settings.weights, settings.latest_versions)
        versions = weights.read_all(
            settings.models, settings.default_model, unloaded(folder), settings.model_alias
        )
        read = time.perf_counter()
        names = ", ".join(f"{version.name}/{version.version}" for version in versions)
        what = names or "nothing, as all models are unloaded,"
        _log.info("read %s from %s: warming up", what, settings.weights)

        watched: dict[Request, None] = {}
        deadlines = Deadlines(watched.copy, Request.expire)
        stack.callback(deadlines.close)
        thread = stack.enter_context(ThreadPoolExecutor(1, "explainer"))  # which the first starts
        placement = place(settings)
        placed = time.perf_counter()
        faults = Faults() if settings.fault_injection else None
        config = EngineConfig(
            placement=placement,
            max_queue_rows=settings.max_queue_rows,
            max_wait_s=settings.max_wait_us / 1e6,
            hang_timeout_s=settings.hang_timeout_s,
            drain_timeout_s=settings.drain_timeout_s,
            faults=faults,
        )
        models = await stack.enter_async_context(
            Models(
                weights,
                versions,
                settings.default_model or versions[0].name,
                config,
                metrics,
                settings.model_alias,
            )
        )
        opening_s, warm_up_s = models.start_s()
        phases = {
            "weights": read - began,
            "device": placed - read + opening_s,
            "warm_up": warm_up_s,
            "contexts": time.perf_counter() - placed,
        }
        for phase, seconds in phases.items():
            metrics.started(phase, seconds)
        took = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        _log.info("start phases, in seconds: %s", took)

        repository = Repository(models, folder, alone=not shared)
        stack.push_async_callback(repository.close, settings.drain_timeout_s)
        await repository.start()
        # For a decoder itself and the largest picture, and a body and its copy.
        decoder_bytes = _DECODER_BYTES + 2 * settings.max_body_bytes
        decoders = await stack.enter_async_context(
            Decoders(metrics, _decoder_count(settings), decoder_bytes)
        )
        budget = Budget(settings.max_in_flight_bytes)
        metrics.watch_in_flight(lambda: budget.held_bytes)
        timeout_s = settings.request_timeout_ms / 1e3
        left_out = () if settings.access_log_probes == "on" else PROBES
        access = stack.enter_context(access_log(settings.access_log, left_out))
        keys = Keys(
            (key.get_secret_value() for key in settings.api_keys),
            (key.get_secret_value() for key in settings.admin_keys),
            "loading and unloading models by requests is disabled; "
            "start the service with LENET_ADMIN_KEYS",
        )
        build = distribution_version(), distribution_commit()  # read from files
        requests = Requests(
            models,
            metrics,
            Limits(settings.max_images),
            settings.max_body_bytes,
            budget,
            decoders,
            watched,
            deadlines,
            timeout_s,
            metrics.predicted,
            traces=stack.enter_context(_traces(settings, build[0], metrics)),
        )
        routes = image_routes(requests, settings.predict_route)
        explain = None
        if settings.explain == "on":
            explain = explain_endpoint(requests, thread)
        answers = OpenInference(models, repository, metrics, settings.max_images)
        app = create_app(
            answers=answers,
            metrics=metrics,
            keys=keys,
            info=partial(_info, settings, grpc_port, placement, models, build),
            images=routes,
            explain=explain,
            health=settings.health_route,
        )
        gate = Gate(
            keys,
            settings.cors_origins,
            lambda error: metrics.request_done(NO_MODEL, "http", error.code),
            POLICY,
        )
        models.ready = True
        try:
            yield Service(
                settings=settings,
                models=models,
                repository=repository,
                app=app,
                fast_routes=routes,
                methods=methods(replace(requests, protocol="grpc"), answers, keys),
                budget=budget,
                gate=gate,
                metrics=metrics,
                access=access,
                faults=faults,
            )
        finally:
            models.ready = False


@contextmanager
def _traces(settings: Settings, version: str, metrics: Metrics) -> Iterator[Traces | None]:
    """Samples requests and exports their spans; None if tracing is off."""
    url = settings.traces_endpoint
    if not url:
        yield None
        return
    from service.observe import spans  # needs an extra

    chosen = f"one request in {settings.traces_one_in}" if settings.traces_one_in else "none"
    _log.info("traces to %s: %s, besides what callers, faults and slowness choose", url, chosen)
    statuses: spans.Statuses = {"http": STATUS | {"": 200}, "grpc": GRPC_STATUS | {"": "OK"}}
    scheme = "http" if settings.certificate is None else "https"
    with spans.exported(url, version, statuses, scheme, metrics.traced) as note:
        yield Traces(settings.traces_one_in, (settings.traces_slower_ms or math.inf) / 1e3, note)


def _decoder_count(settings: Settings) -> int:
    """The setting; by default one for each core of this worker, two to eight."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    return settings.decoders or min(8, max(2, cores // settings.workers))


def _info(
    settings: Settings,
    grpc_port: int | None,
    placement: Placement,
    models: Models,
    build: tuple[str, str],
) -> InfoResponse:
    version, commit = build
    return InfoResponse(
        name="lenet-serve",
        version=version,
        commit=commit,
        python=platform.python_version(),
        grpc_port=grpc_port,
        default_model=models.default,
        models=[_loaded(model, placement, models.labels_of(model)) for model in models.served],
        limits={
            "max_batch_rows": placement.max_batch_rows,
            "max_queue_rows": settings.max_queue_rows,
            "max_images": settings.max_images,
            "max_picture_pixels": Limits(settings.max_images).max_picture_pixels,
            "max_body_bytes": settings.max_body_bytes,
            "request_timeout_ms": settings.request_timeout_ms,
        },
        explain=settings.explain == "on",
    )


def _loaded(model: Batcher, placement: Placement, labels: list[str]) -> LoadedModel:
    version = model.version
    training = version.weights.training
    return LoadedModel(
        name=version.name,
        version=version.version,
        version_labels=labels,
        device=placement.name,
        precision=placement.precision,
        strategies=model.pool.workers[0].context.strategies,
        layers=model.pool.workers[0].context.layers,
        sha256=version.sha256,
        parameters=sum(math.prod(shape) for shape in version.weights.model.parameters().values()),
        accuracy=training.accuracy,
        epochs=training.epochs,
        seed=training.seed,
        dataset_sha256=training.dataset_sha256,
        labels=list(training.labels),
        loaded_at=datetime.fromtimestamp(version.read_at, UTC),
    )
