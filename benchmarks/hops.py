"""How many functions and files a prediction runs through in the serving process.

    python -m benchmarks.hops

The service runs in this process on the CPU, a client in a thread. After warm requests, the calls of
functions of this repository are recorded for one request at a time, in every thread but the
client's. A move is a call in another file than the call before it, a return a move into a file that
was left before. Printed is the request with the fewest calls, as timers may add some.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.command import explained

_ROOT = Path(__file__).parents[1]
_FOLDERS = tuple(f"{_ROOT / package}{os.sep}" for package in ("service", "wire", "lenet"))
_WARM, _RECORDED = 20, 9
_REST_S = 0.05
"""Seconds after an answer in which what the service still does for its request is recorded."""


class Recorder:
    """The calls of this repository's functions, by thread, in their order."""

    def __init__(self) -> None:
        self._calls: collections.defaultdict[int, list[CodeType]] | None = None

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        calls, code = self._calls, frame.f_code
        if calls is None or event != "call" or not code.co_filename.startswith(_FOLDERS):
            return
        if not code.co_name.startswith("<"):  # comprehensions are calls on Python 3.11
            calls[threading.get_ident()].append(code)

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[int, list[CodeType]]]:
        """Record until the end of the block."""
        self._calls = calls = collections.defaultdict(list)
        try:
            yield calls
        finally:
            self._calls = None


def counted(calls: dict[int, list[CodeType]]) -> dict[str, int]:
    """Sums over the threads: calls, moves and returns; functions and files are counted once."""
    codes = [code for of_thread in calls.values() for code in of_thread]
    moves = returns = 0
    for of_thread in calls.values():
        seen: set[str] = set()
        at = None
        for code in of_thread:
            if code.co_filename != at:
                moves += at is not None
                returns += code.co_filename in seen
                at = code.co_filename
                seen.add(at)
    return {
        "calls": len(codes),
        "functions": len(set(codes)),
        "files": len({code.co_filename for code in codes}),
        "moves": moves,
        "returns": returns,
        "threads": len(calls),
    }


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _requests(port: int, grpc_port: int) -> dict[str, Callable[[], Any]]:
    """What is asked, each on a connection of its own that is kept."""
    import grpc

    from service.forms.open_inference_pb2 import ModelInferRequest

    connection = http.client.HTTPConnection("127.0.0.1", port)
    image = bytes(784)

    def raw() -> None:
        connection.request("POST", "/predict", image, {"Content-Type": "application/octet-stream"})
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise RuntimeError(f"POST /predict: status {response.status}, expected 200")

    tensor = ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=[1, 28, 28])
    request = ModelInferRequest(model_name="lenet", inputs=[tensor], raw_input_contents=[image])
    body = request.SerializeToString()
    infer = grpc.insecure_channel(f"127.0.0.1:{grpc_port}").unary_unary(
        "/inference.GRPCInferenceService/ModelInfer"
    )
    return {"POST /predict": raw, "ModelInfer": lambda: infer(body)}


def _drive(recorder: Recorder, ports: Sequence[int], rows: dict[str, dict[str, int]]) -> None:
    """Fill `rows` once the service listens, and stop it; the top of a thread."""
    sys.setprofile(None)  # a new thread begins with that of `threading.setprofile`
    try:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", ports[0])).close()
                break
            time.sleep(0.05)
        for name, ask in _requests(*ports).items():
            for _ in range(_WARM):
                ask()
            recorded = []
            for _ in range(_RECORDED):
                with recorder.recording() as calls:
                    ask()
                    time.sleep(_REST_S)
                recorded.append(counted(calls))
            rows[name] = min(recorded, key=lambda row: row["calls"])
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


@explained
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each kind of request."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hops", description=__doc__)
    parser.parse_args(arguments)
    recorder, ports, rows = Recorder(), _free_ports(2), dict[str, dict[str, int]]()
    threading.Thread(target=_drive, args=(recorder, ports, rows)).start()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    try:
        from service.__main__ import main as serve

        port, grpc_port = map(str, ports)
        sys.argv[1:] = ["--port", port, "--grpc-port", grpc_port, "--device", "cpu"]
        serve()
    finally:
        sys.setprofile(None)
    for name, row in rows.items():
        print(f"{name}: " + ", ".join(f"{count} {unit}" for unit, count in row.items()))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
