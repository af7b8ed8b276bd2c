"""A service on mosec: its server in Rust, workers in Python, batches of up to 8 requests.

Two workers and batches of 8 were the fastest setting with 32 connections on two cores. A batch
waits 1 ms for more requests, the shortest wait that mosec offers. Without batches 32 connections
get half of the throughput; a lone request and requests of 64 images are faster (2026-11-20).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
from mosec import Server, Worker
from mosec.errors import ValidationError

from benchmarks.baselines.model import Model, answer, images_of_bytes, images_of_json
from lenet.pixels import Images

WORKERS = 2
BATCH_REQUESTS = 8
WAIT_MS = 1


class JsonWorker(Worker):
    """Predicts the images of JSON bodies."""

    decode = staticmethod(images_of_json)

    def __init__(self) -> None:
        super().__init__()
        self._model = Model()

    def deserialize(self, data: bytes) -> Images:
        """Called by mosec for each body."""
        try:
            return self.decode(data)
        except (ValueError, TypeError, KeyError) as exc:
            raise ValidationError(str(exc)) from exc

    def forward(self, data: list[Images]) -> list[list[dict[str, Any]]]:
        """Called by mosec with the images of each request of a batch."""
        predictions = iter(self._model.predict(np.concatenate(data)))
        return [[next(predictions) for _ in images] for images in data]

    def serialize(self, data: list[dict[str, Any]]) -> bytes:
        """Called by mosec for each request."""
        return answer(data)


class RawWorker(JsonWorker):
    """Predicts the images of bodies of 784 bytes an image."""

    decode = staticmethod(images_of_bytes)


def main() -> None:
    """Serve on 127.0.0.1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    # mosec reads its settings from the command line and from variables.
    os.environ |= {
        "MOSEC_ADDRESS": "127.0.0.1",
        "MOSEC_PORT": str(arguments.port),
        "MOSEC_LOG_LEVEL": "warning",
    }
    server = Server()
    # The type of a body is not passed to a worker, so each type has a route and workers.
    for worker, route in ((JsonWorker, "/predict"), (RawWorker, "/predict/raw")):
        server.append_worker(
            worker,
            num=WORKERS,
            max_batch_size=BATCH_REQUESTS,
            max_wait_time=WAIT_MS,
            route=route,
        )
    server.run()


if __name__ == "__main__":
    main()
