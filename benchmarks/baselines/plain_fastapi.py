"""A plain service on FastAPI and ONNX Runtime, as an experienced engineer writes in 20 minutes.

This is the fastest plain variant that we found: the model runs inline in an async endpoint (a
thread costs more than the model), with one intra-op thread, on uvicorn with httptools and, where
installed, uvloop. It has no batching, limits, deadlines or metrics.
"""

from __future__ import annotations

import argparse
import importlib.util

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from benchmarks.baselines.model import Model, answer, images_of_bytes


class PredictRequest(BaseModel):
    """Images of 784 integers each. Accepting 28 rows of 28, too, would cost another 1 us."""

    images: list[list[int]]


def create_app(model: Model | None = None) -> FastAPI:
    """The app: POST /predict takes JSON, POST /predict/raw 784 bytes per image."""
    model = model or Model()
    app = FastAPI()

    @app.post("/predict")
    async def predict(request: PredictRequest) -> Response:
        images = np.array(request.images, np.uint8).reshape(-1, 28, 28)
        return Response(answer(model.predict(images)), media_type="application/json")

    @app.post("/predict/raw")
    async def predict_raw(request: Request) -> Response:
        images = images_of_bytes(await request.body())
        return Response(answer(model.predict(images)), media_type="application/json")

    @app.get("/readyz")
    async def readyz() -> dict[str, bool]:
        return {"ready": True}

    return app


def main() -> None:
    """Serve on 127.0.0.1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    uvicorn.run(
        "benchmarks.baselines.plain_fastapi:create_app",
        factory=True,
        port=arguments.port,
        workers=arguments.workers,
        loop="uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
