"""What those who run the service ask it: is it alive, is it ready, how fast, what is loaded."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response

from service.http.schemas import Health, InfoResponse
from service.metrics import CONTENT_TYPE, Metrics
from service.predictor import Predictor


def operations_router(
    predictor: Predictor, metrics: Metrics, info: Callable[[], InfoResponse]
) -> APIRouter:
    """The routes, bound to what they tell of; `info` says what runs at the moment."""
    router = APIRouter(tags=["operations"])

    @router.get("/healthz", summary="Is the process alive")
    async def healthz() -> Health:
        """200 as long as the event loop turns; no reason to restart it."""
        return Health(live=True, ready=predictor.ready)

    @router.get("/readyz", summary="May traffic come", responses={503: {"model": Health}})
    async def readyz(response: Response) -> Health:
        """200 once every context is warm and has proven its weights, until the stop begins."""
        response.status_code = 200 if predictor.ready else 503
        return Health(live=True, ready=predictor.ready)

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def exposition() -> Response:
        """The Prometheus text format, of all workers."""
        return Response(metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    @router.get("/info", summary="What runs here")
    async def show_info() -> InfoResponse:
        """Models, versions, digests, accuracy, device and limits."""
        return info()

    return router
