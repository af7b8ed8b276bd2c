"""`python -m benchmarks.costly_bodies`: single images beside the worst bodies that are allowed.

For each kind of body, in turns: the latency of single raw images with nothing else going on, and
while clients in other processes send that body again and again. Exit code: 0, or 1 when an answer
to a single image was not 200, or the service did not start.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import multiprocessing
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import orjson

from benchmarks.command import latest_weights, positive_int, provenance
from benchmarks.digits import BINARY, JSON
from benchmarks.servers import Server, ServerFailed, lenet_serve
from benchmarks.timing import percentile

_DISTRIBUTIONS = ("lenet-serve", "uvicorn", "uvloop", "numpy")
_PAUSE_S = 0.001
_REFUSED_S = 0.2
"""A client waits so long after a refusal; `Retry-After` asks for more."""

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A costly body, and how many clients send it at a time."""

    content_type: str
    body: Callable[[], bytes]
    clients: int = 1


def _picture(pixels: np.ndarray, level: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=level)
    return file.getvalue()


def _form() -> bytes:
    pixels = np.zeros((28, 28), np.uint8)
    pixels[4:24, 12:16] = 255
    part = b'--b\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n%s\r\n'
    return part % _picture(pixels, 6) * 16_000 + b"--b--\r\n"


def _megapixels() -> bytes:
    return _picture(np.random.default_rng(0).integers(0, 30, (4096, 4096), np.uint8), 1)


def _images_as_json() -> bytes:
    images = np.random.default_rng(0).integers(0, 256, (11_600, 28, 28), np.uint8)
    return orjson.dumps({"images": images}, option=orjson.OPT_SERIALIZE_NUMPY)


KINDS = {
    "16,000 PNGs": Kind("multipart/form-data; boundary=b", _form, clients=4),
    "16 megapixels": Kind("image/png", _megapixels),
    "32 MB of JSON": Kind(JSON, _images_as_json),
    "JSON of zeros": Kind(JSON, lambda: b'{"images":[' + b"0," * 15_000_000 + b"0]}"),
    "16,384 images": Kind(BINARY, lambda: bytes(16_384 * 784)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    options = _parser().parse_args(arguments)
    service = [f"--device={options.device}", *shlex.split(options.service_args)]
    found = {}
    try:
        with lenet_serve(latest_weights(), "lenet", service) as server:
            for name in options.kinds or KINDS:
                found[name] = _measure(server, KINDS[name], options)
                print(f"{name:16} {_line(found[name])}", flush=True)
    except (ServerFailed, OSError, http.client.HTTPException) as exc:
        print(f"costly_bodies: {exc}", file=sys.stderr)
        return 1
    if options.json is not None:
        document = {**provenance(_DISTRIBUTIONS), "device": options.device}
        document |= {"connections": options.connections, "rounds": options.rounds, "kinds": found}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _measure(server: Server, kind: Kind, options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each round, and how many costly bodies were answered and refused."""
    found: dict[str, list[float]] = {
        name: [] for name in ("quiet_p50", "quiet_p99", "beside_p50", "beside_p99", "ratio")
    }
    answered = refused = 0
    for _ in range(options.rounds):
        quiet = _latencies_ms(server, options)
        with _sending(server, kind) as (served, others):
            beside = _latencies_ms(server, options)
            answered, refused = answered + served.value, refused + others.value
        for name, times in (("quiet", quiet), ("beside", beside)):
            for share in (50, 99):
                found[f"{name}_p{share}"].append(round(percentile(times, share), 3))
        found["ratio"].append(round(found["beside_p99"][-1] / found["quiet_p99"][-1], 2))
    return {**found, "bodies": [answered, refused]}


def _line(found: dict[str, list[float]]) -> str:
    median = {name: statistics.median(values) for name, values in found.items()}
    low, high = min(found["ratio"]), max(found["ratio"])
    answered, refused = found["bodies"]
    return (
        f"quiet p50 {median['quiet_p50']:.2f} p99 {median['quiet_p99']:.2f} ms, "
        f"beside p50 {median['beside_p50']:.2f} p99 {median['beside_p99']:.2f} ms, "
        f"ratio of p99 {median['ratio']:.1f} ({low:.1f}..{high:.1f}), "
        f"{answered} bodies answered, {refused} refused"
    )


def _latencies_ms(server: Server, options: argparse.Namespace) -> list[float]:
    """Latencies of single images, one at a time on each connection, with pauses."""
    times_ms: list[float] = []
    failures: list[str] = []
    end_s = time.perf_counter() + options.duration
    headers = {"Content-Type": BINARY, "Accept": BINARY}

    def ask() -> None:
        connection = http.client.HTTPConnection(_address(server), timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            while (began_s := time.perf_counter()) < end_s and not failures:
                connection.request("POST", "/predict", bytes(784), headers)
                response = connection.getresponse()
                content = response.read()
                times_ms.append(1e3 * (time.perf_counter() - began_s))
                if response.status != 200:
                    failures.append(f"{response.status}: {content[:200]!r}")
                time.sleep(_PAUSE_S)

    threads = [threading.Thread(target=ask) for _ in range(options.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures or not times_ms:
        raise ServerFailed(f"a single image was not answered: {failures[:1]}")
    return times_ms


@contextlib.contextmanager
def _sending(server: Server, kind: Kind) -> Iterator[tuple[Synchronized[int], Synchronized[int]]]:
    """Send the body again and again, from the first answer on.

    Yields:
        How many were answered, with 200 or an error, and refused.
    """
    context = multiprocessing.get_context("spawn")
    served, refused = context.Value("i"), context.Value("i")
    name = next(name for name, one in KINDS.items() if one is kind)
    clients = [
        context.Process(target=send, args=(_address(server), name, served, refused), daemon=True)
        for _ in range(kind.clients)
    ]
    for client in clients:
        client.start()
    try:
        while not served.value and not refused.value and any(one.is_alive() for one in clients):
            time.sleep(_PAUSE_S)
        yield served, refused
    finally:
        for client in clients:
            client.kill()
            client.join()


def send(address: str, name: str, served: Synchronized[int], refused: Synchronized[int]) -> None:
    """A client: sends the body of `name` until it is killed."""
    kind = KINDS[name]
    body = kind.body()
    while True:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/predict", body, {"Content-Type": kind.content_type})
                response = connection.getresponse()
                response.read()
            except OSError:  # refused, and closed while the body was being sent
                status = 429
            else:
                status = response.status
        counter = refused if status == 429 else served
        with counter.get_lock():
            counter.value += 1
        if status == 429:
            time.sleep(_REFUSED_S)


def _address(server: Server) -> str:
    return server.url.removeprefix("http://")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.costly_bodies",
        description="The latency of single images beside the worst bodies that are allowed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--kinds", nargs="+", choices=tuple(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}")
    add("--connections", default=1, type=positive_int, help="that send single images")
    add("--rounds", default=3, type=positive_int, help="quiet and beside in turns")
    add("--duration", default=4, type=positive_int, help="seconds of each measurement")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the service")
    add("--service-args", default="", help="more arguments for the service, as one string")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
