"""The service's engine behind Ray Serve, `deploy/ray`: one replica, and Ray's proxy for HTTP.

Ray is started for it on this machine, without its dashboard.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.baselines.model import WEIGHTS_VARIABLE

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"


def main() -> None:
    """Serve on 127.0.0.1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    sys.path.insert(0, str(FOLDER))
    os.environ["PYTHONPATH"] += os.pathsep + str(FOLDER)  # of the replicas
    import digits

    class Probed(digits.Digits.func_or_class):
        """Also answers the GET that asks for readiness; Ray's own is 200 before it serves."""

        async def __call__(self, http: Request) -> Response:
            return Response() if http.method == "GET" else await super().__call__(http)

    one = {"min_replicas": 1, "max_replicas": 1}
    digits.Digits = digits.Digits.options(func_or_class=Probed, autoscaling_config=one)
    ray.init(object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        with tempfile.TemporaryDirectory() as weights:
            shutil.copy(os.environ[WEIGHTS_VARIABLE], weights)
            serve.run(digits.app({"device": "cpu", "weights": weights}), route_prefix="/predict")
            signal.pause()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
