"""A service on LitServe: two processes for HTTP, and for each type of body two for the model.

LitServe compares annotations with types, so this module does not postpone their evaluation.
"""

import argparse
from typing import Annotated, Any

from fastapi import Body, Request, Response
from litserve import LitAPI, LitServer

from benchmarks.baselines.model import Model, answer, images_of_bytes, images_of_lists
from lenet.pixels import Images

PROCESSES = 2


class JsonApi(LitAPI):
    """Predicts the images of JSON bodies."""

    def setup(self, device: str) -> None:
        """Called by LitServe in each process of the model."""
        self._model = Model()

    def decode_request(self, request: Request) -> Images:
        """LitServe decodes the JSON itself, and passes the object that it holds."""
        return images_of_lists(request["images"])

    def predict(self, x: Images) -> list[dict[str, Any]]:
        """Called by LitServe for each request."""
        return self._model.predict(x)

    def encode_response(self, output: list[dict[str, Any]]) -> Response:
        """A response of its own saves LitServe's conversion of each number."""
        return Response(answer(output), media_type="application/json")


class RawApi(JsonApi):
    """Predicts the images of bodies of 784 bytes an image."""

    def decode_request(self, request: Annotated[bytes, Body()]) -> Images:
        """LitServe passes the body."""
        return images_of_bytes(request)


def main() -> None:
    """Serve on 127.0.0.1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    server = LitServer(
        [JsonApi(api_path="/predict"), RawApi(api_path="/predict/raw")],
        accelerator="cpu",
        workers_per_device=PROCESSES,
        healthcheck_path="/readyz",
    )
    server.run(
        host="127.0.0.1",
        port=arguments.port,
        num_api_servers=PROCESSES,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main()
