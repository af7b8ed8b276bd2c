"""The composition root: settings in, an application out; everything is made and closed here.

Start: weight files are read and doubted, contexts warmed and proven, gRPC and HTTP opened, ready.
Stop is the exact reverse. It refuses to do any work of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from service import distribution_version
from service.decode import Limits
from service.devices import Placement, place
from service.faults import Faults
from service.http import errors
from service.http.limits import Bodies
from service.http.operations import operations_router
from service.http.predict import Application, predict_route
from service.http.schemas import InfoResponse, LoadedModel
from service.metrics import Metrics
from service.model_files import read_models
from service.predictor import Predictor
from service.reloader import Reloader
from service.repository import Batching, Repository, ServedModel
from service.rpc import server as rpc
from service.settings import Settings

_log = logging.getLogger(__name__)


def create_app(settings: Settings, *, shared: bool = False) -> Application:
    """The service as an ASGI application; its lifespan opens and closes all it needs.

    With `shared` other processes may open the same gRPC port.

    While it runs, `app.state.predictor` answers, `app.state.reloader` can be asked to read the
    weights folder again, `app.state.grpc_port` is the bound port, `app.state.stop` tells how
    much time a stop has left, `app.state.lost` is set when the device is lost, and
    `app.state.faults` takes those of a test, if the settings allow it.
    """

    @asynccontextmanager
    async def lifespan(app: Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await _start(app, settings, stack, shared)
            try:
                yield
            finally:
                app.state.predictor.ready = False

    app = Application(
        title="lenet-serve",
        summary="Handwritten digits, recognised over HTTP and gRPC.",
        version=distribution_version(),
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would be made of the Host header
    )
    errors.install(app)
    return app


async def _start(app: Application, settings: Settings, stack: AsyncExitStack, shared: bool) -> None:
    metrics = Metrics(CollectorRegistry())
    stack.enter_context(metrics.tallies.flushed_regularly())
    began = time.perf_counter()
    files = read_models(settings.weights, settings.models, settings.default_model)
    read = time.perf_counter()
    _log.info("read %s: warming up", ", ".join(str(file.path) for file in files))

    placement = place(settings)
    placed = time.perf_counter()
    app.state.faults = Faults() if settings.fault_injection else None
    batching = _batching(settings, placement, app.state.faults)
    repository = Repository(files, settings.default_model, batching, metrics)
    await stack.enter_async_context(repository)
    app.state.lost = repository.lost
    opening_s, warm_up_s = repository.start_s()
    phases = {
        "weights": read - began,
        "device": placed - read + opening_s,
        "warm_up": warm_up_s,
        "contexts": time.perf_counter() - placed,
    }
    for phase, seconds in phases.items():
        metrics.started(phase, seconds)
    _log.info(
        "the start took, in seconds: %s", ", ".join(f"{name} {s:.2f}" for name, s in phases.items())
    )
    app.state.reloader = await stack.enter_async_context(
        Reloader(settings.weights, repository, metrics)
    )

    timeout_s = settings.request_timeout_ms / 1e3
    predictor = Predictor(repository, metrics, timeout_s)
    app.state.predictor = predictor
    app.state.stop = repository.stop
    app.state.grpc_port = await stack.enter_async_context(
        rpc.serve(
            predictor,
            repository,
            host=settings.host,
            port=settings.grpc_port,
            max_body_bytes=settings.max_body_bytes,
            max_images=settings.max_images,
            stop_timeout_s=settings.drain_timeout_s,
            shared=shared,
        )
    )
    bodies = Bodies(settings.max_body_bytes, settings.max_bodies_bytes)
    route = predict_route(predictor, Limits(settings.max_images), bodies, timeout_s)
    app.router.routes.append(route)  # for the documentation, and below a root path
    app.predict_route = route
    info = partial(_info, settings, placement, repository.models)
    app.include_router(operations_router(predictor, metrics, info))
    predictor.ready = True


def _batching(settings: Settings, placement: Placement, faults: Faults | None) -> Batching:
    return Batching(
        placement=placement,
        max_queue_rows=settings.max_queue_rows,
        max_wait_s=settings.max_wait_us / 1e6,
        hang_timeout_s=settings.hang_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        faults=faults,
    )


def _info(
    settings: Settings, placement: Placement, models: tuple[ServedModel, ...]
) -> InfoResponse:
    return InfoResponse(
        name="lenet-serve",
        version=distribution_version(),
        default_model=settings.default_model,
        models=[_loaded(model, placement.name) for model in models],
        limits={
            "max_batch_rows": placement.max_batch_rows,
            "max_queue_rows": settings.max_queue_rows,
            "max_images": settings.max_images,
            "max_picture_pixels": Limits(settings.max_images).max_picture_pixels,
            "max_body_bytes": settings.max_body_bytes,
            "request_timeout_ms": settings.request_timeout_ms,
        },
    )


def _loaded(model: ServedModel, device: str) -> LoadedModel:
    weights = model.file.weights
    training = weights.training
    return LoadedModel(
        name=model.file.name,
        version=model.file.version,
        device=device,
        sha256=model.file.sha256,
        parameters=sum(math.prod(shape) for shape in weights.model.parameters().values()),
        accuracy=training.accuracy,
        epochs=training.epochs,
        seed=training.seed,
        dataset_sha256=training.dataset_sha256,
        labels=list(training.labels),
    )
