"""A service on MLServer with one process: the model runs inline, in endpoints of the runtime.

MLServer 1.7 requires FastAPI before 0.116, so pip does not install it beside the service.
"""

from __future__ import annotations

import argparse
import asyncio

from fastapi import Request, Response
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.handlers import custom_handler

from benchmarks.baselines.model import Model, answer, images_of_bytes, images_of_json
from lenet.pixels import Images


class Runtime(MLModel):
    """Takes our bodies, so that every server decodes the same bytes."""

    async def load(self) -> bool:
        """Called by MLServer once."""
        self._model = Model()
        return True

    @custom_handler(rest_path="/predict")
    async def predict_json(self, request: Request) -> Response:
        """The images of JSON."""
        return self._answer(images_of_json(await request.body()))

    @custom_handler(rest_path="/predict/raw")
    async def predict_raw(self, request: Request) -> Response:
        """The images of 784 bytes each."""
        return self._answer(images_of_bytes(await request.body()))

    def _answer(self, images: Images) -> Response:
        return Response(answer(self._model.predict(images)), media_type="application/json")


def main() -> None:
    """Serve on 127.0.0.1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    settings = Settings(
        host="127.0.0.1",
        http_port=arguments.port,
        grpc_port=0,
        metrics_endpoint=None,
        parallel_workers=0,
        debug=False,
    )
    model = ModelSettings(name="digits", implementation=Runtime)

    async def serve() -> None:
        await MLServer(settings).start([model])

    asyncio.run(serve())


if __name__ == "__main__":
    main()
