"""A scripted service, and requests that it knows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import orjson
import pytest
import uvicorn

from benchmarks.digits import LabelledDigits, PreparedRequest, prepare_requests

TIMING = b"decode;dur=0.250, queue;dur=0.5, compute;dur=1.000, total;dur=1.75"


def answer(labels: Sequence[int]) -> bytes:
    """A well-formed answer that predicts `labels`."""
    predictions = []
    for label in labels:
        probabilities = [0.01] * 10
        probabilities[label] = 0.91
        predictions.append({"label": label, "confidence": 0.91, "probabilities": probabilities})
    return orjson.dumps({"model": "lenet", "version": "1", "predictions": predictions})


class FakeService:
    """Answers each known body with the labels that the local model predicts.

    Replace `behave(number, labels)`, with the number of the request from 0, for another answer:
    status, body, seconds to wait.
    """

    def __init__(self, requests: Sequence[PreparedRequest], sha256: str) -> None:
        self._labels = {request.body: request.own_labels for request in requests}
        model = {"name": "lenet", "version": "1", "sha256": sha256, "device": "cpu"}
        self.info = {"default_model": "lenet", "models": [model]}
        self.behave: Callable[[int, Sequence[int]], tuple[int, bytes, float]] = lambda _, labels: (
            200,
            answer(labels),
            0.0,
        )
        self.scopes: list[dict] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope, receive, send) -> None:
        status, content = 404, b"{}"
        if scope["path"] == "/info":
            status, content = 200, orjson.dumps(self.info)
        elif scope["path"] == "/predict":
            body, more = b"", True
            while more:
                message = await receive()
                body += message["body"]
                more = message.get("more_body", False)
            self.scopes.append(scope)
            self.bodies.append(body)
            number = len(self.scopes) - 1
            status, content, delay_s = self.behave(number, self._labels[body])
            await asyncio.sleep(delay_s)
        headers = [(b"server-timing", TIMING), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        """The URL at which this service answers, from a thread."""
        config = uvicorn.Config(self, port=0, lifespan="off", log_config=None, ws="none")
        server = uvicorn.Server(config)
        with config.bind_socket() as listener:
            listener.listen()  # requests wait for the thread
            port = listener.getsockname()[1]
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                server.should_exit = True
                thread.join()


@pytest.fixture(scope="session")
def say():
    """`say(labels)`: the body of a well-formed answer."""
    return answer


def _wrk_output(**fields: float) -> str:
    latencies = {"p50_us": 1500, "p99_us": 9000, "max_us": 20000}
    latencies |= {"sent_p50_us": 1250, "sent_p99_us": 3000}
    failures = {"bad_status": 0, "socket_errors": 0}
    result = {"requests": 500, "duration_us": 2000000, "done_s": 0.1, **latencies, **failures}
    return f"RESULT {json.dumps(result | fields)}\n"


@pytest.fixture(scope="session")
def wrk_output():
    """`wrk_output(**fields)`: what our script lets wrk print, with other values of `fields`."""
    return _wrk_output


@pytest.fixture
def fake_wrk(tmp_path, monkeypatch):
    """`fake_wrk(**outputs)`: a wrk that sends nothing and ends at once is found on the PATH.

    It prints the output whose name is in its command line, else a good result.
    """

    def install(**outputs: str) -> None:
        cases = [f"*{name}*) echo '{output}';;" for name, output in outputs.items()]
        cases.append(f"*) echo '{_wrk_output()}';;")
        path = tmp_path / "bin" / "wrk"
        path.parent.mkdir()
        path.write_text("\n".join(["#!/bin/sh", 'case "$*" in', *cases, "esac"]))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.fixture(scope="session")
def weights(random_weights):
    return random_weights("lenet")


@pytest.fixture
def tiny_file(tmp_path, random_weights, tiny):
    path = tmp_path / "1.safetensors"
    random_weights(tiny).write(path)
    return path


@pytest.fixture(scope="session")
def digits():
    """Twelve images of a bright box at different places; the labels have no meaning."""
    generator = np.random.default_rng(3)
    images = np.zeros((12, 28, 28), np.uint8)
    for image in images:
        top, left, height, width = generator.integers((2, 2, 4, 4), (12, 12, 14, 14))
        image[top : top + height, left : left + width] = 254
    return LabelledDigits(images, (np.arange(12) % 10).astype(np.uint8), "boxes")


@pytest.fixture(scope="session")
def requests(weights):
    """The requests that the load test sends without a folder of MNIST."""
    golden = LabelledDigits(weights.golden.images, weights.golden.labels, "golden")
    return prepare_requests(golden, weights, "json", 1)


@pytest.fixture
def service(requests, weights):
    return FakeService(requests, weights.digest())
