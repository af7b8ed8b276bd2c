"""`python -m benchmarks.engine`: the serving engine on this GPU, compared with PyTorch and JAX.

--only selects parts: `limits`, the copy and matrix rates of the GPU; `buckets`, the network at each
batch size and precision, ours before and after the others' in the same process; `libraries`, our
kernels beside cuDNN with cuBLAS and beside PyTorch for other networks too; `pool`, several contexts
on one GPU; `gpus`, two contexts on each of several GPUs; `cold`, the start of the service;
`figure`, a plot of the results so far. Each replay reads the same buffer: the largest bucket's
pixels are 6 MB and stay in the cache of a large GPU after any copy, so more inputs would change
nothing. Exit code: 0, 1 when PyTorch or JAX was not measured, the service did not start or no
figure was drawn, 2 when there is no GPU or a part failed on it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines import jax_serving
from benchmarks.baselines.torch_serving import Precision, measure
from benchmarks.baselines.torch_step import MODES
from benchmarks.baselines.torch_training import BaselineUnavailable
from benchmarks.command import (
    commit,
    latest_weights,
    missing_library,
    positive_float,
    positive_int,
    provenance,
)
from benchmarks.engine_libraries import run_libraries
from benchmarks.engine_report import (
    PRECISIONS,
    Document,
    FigureUnavailable,
    draw,
    gpus_line,
    head,
    limits_line,
    line,
    pool_line,
)
from benchmarks.servers import ServerFailed, free_port, running
from benchmarks.timing import cupy_timer, host_summary, host_us, rounds_us, summary
from lenet import reference
from lenet.backend import Backend
from lenet.errors import BackendUnavailable, LeNetError
from lenet.model import Model
from lenet.pixels import PIXELS, Images
from lenet.weightfile import WeightFile

ROWS = (*(1 << exponent for exponent in range(11)), 8192)
COMPILED_ROWS = (1, 8, 32, 256, 1024, 8192)
POOL_ROWS, POOL_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4)

CACHES = ("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")
"""Variables that name the folders of cached plans, compiled kernels and translated kernels."""

_CONTEXTS = 2  # the service's default
_SAMPLE = 64
_GPUS_ROUNDS = 3
_PATIENCE_S = 120.0  # how long contexts wait for one that failed
_COPY_BYTES = 256 * 2**20
_SIDE = 8192  # of the square matrices
_BLOCK = 1 << 20  # random values, repeated: filling a matrix would take longer than multiplying
_DISTRIBUTIONS = (
    *("cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-cudnn-frontend", "torch", "triton", "jax"),
)

Open: TypeAlias = Callable[[int], AbstractContextManager[Backend]]
"""`Open(device)`: a new backend on that GPU, for the thread that opens it."""


class ContextFailed(Exception):
    """A process with contexts failed; the message is its own."""


@contextmanager
def open_cuda(device: int, precision: str = "fp16") -> Iterator[Any]:
    """The engine on GPU number `device`, by default in the service's default precision."""
    from lenet.cuda.backend import CudaBackend
    from lenet.cuda.engine_cache import EngineCache, default_cache

    with CudaBackend(device, precision, cache=EngineCache(default_cache())) as backend:
        yield backend


def run_limits(weights: WeightFile, options: argparse.Namespace, document: Document) -> int:
    """Measure the limits of GPU 0."""
    found = limits(weights.model)
    document.add({"limits": found})
    print(limits_line(found), flush=True)
    return 0


def limits(model: Model) -> dict[str, float]:
    """Measured upper bounds of any engine on GPU 0: medians of rounds, also as images of `model`.

    `copy_gb_s`: from pinned memory to the device, 256 MiB at a time. `matmul_tflops`: a product of
    two 8192 x 8192 matrices of random float16, accumulated in float32.

    Raises:
        DeviceError: the GPU cannot be used.
    """
    import cupy

    from lenet.cuda.device import Handle, translated

    random = np.random.default_rng(1)
    with Handle(0) as handle, translated("measuring the limits"):
        timer = cupy_timer(handle.stream)
        memory = cupy.cuda.alloc_pinned_memory(_COPY_BYTES)
        pinned = np.frombuffer(memory, np.uint8, _COPY_BYTES)
        pinned[...] = random.integers(0, 256, _COPY_BYTES, np.uint8)
        target = cupy.empty(_COPY_BYTES, np.uint8)
        copy_us = rounds_us(lambda: target.set(pinned, handle.stream), timer)
        blocks = (random.uniform(-1, 1, _BLOCK).astype(np.float16) for _ in range(2))
        a, b = (cupy.asarray(np.resize(block, (_SIDE, _SIDE))) for block in blocks)
        product = cupy.empty_like(a)
        product_us = rounds_us(lambda: handle.cublas.product(a, b, product, "fp16"), timer)
    return rates(model, statistics.median(copy_us), statistics.median(product_us))


def rates(model: Model, copy_us: float, product_us: float) -> dict[str, float]:
    """The limits, from the times of one copy and one product."""
    copy_bytes_s, operations_s = 1e6 * _COPY_BYTES / copy_us, 1e6 * 2 * _SIDE**3 / product_us
    return {
        "copy_gb_s": copy_bytes_s / 1e9,
        "matmul_tflops": operations_s / 1e12,
        "copy_images_per_s": copy_bytes_s / PIXELS,
        "matmul_images_per_s": operations_s / operations(model),
    }


def operations(model: Model) -> int:
    """Multiplications and additions of the layers of `model` per image."""
    parameters = model.parameters()
    return sum(
        2 * math.prod(shape.linear) * math.prod(parameters[f"{shape.name}.weight"][1:])
        for shape in model.shapes()
    )


def run_buckets(weights: WeightFile, options: argparse.Namespace, document: Document) -> int:
    """Measure each precision and batch size; 1 if PyTorch or JAX was not measured."""
    sample = digits(weights, _SAMPLE)
    # Repeated, so that every row of every bucket is compared with the reference.
    indices = np.arange(max(options.rows)) % _SAMPLE
    images, expected = sample[indices], exact(weights, sample)[indices]
    missing: BaselineUnavailable | None = None
    for precision in options.precisions:
        print(head(precision), flush=True)
        with open_cuda(0, precision) as backend:
            timer = cupy_timer(backend.stream)
            for rows in options.rows:
                plan, batch, wanted = backend.plan(weights, rows), images[:rows], expected[:rows]
                error = float(np.abs(plan.run(batch).probabilities - wanted).max())
                # `run` left the images in the plan's page-locked memory.
                single_us = host_us(partial(plan.run_in_place, rows))
                device_us = rounds_us(plan.replay, timer)
                modes = MODES if rows in options.compile_buckets else MODES[:-1]
                torch: dict[str, Any] = {}
                jax: dict[str, Any] = {}
                try:
                    torch = measure(weights, batch, wanted, precision, modes, _report)
                    jax = jax_serving.measure(weights, batch, wanted, precision, _report)
                except BaselineUnavailable as exc:
                    missing = exc
                device_us += rounds_us(plan.replay, timer)
                found = bucket(plan, rows, precision, device_us, single_us, error, torch, jax)
                document.add({"buckets": [found]})
                print(line(found), flush=True)
    if missing is not None:
        _report(str(missing))
    return int(missing is not None)


def bucket(
    plan: Any,
    rows: int,
    precision: Precision,
    device_us: Sequence[float],
    single_us: Sequence[float],
    error: float,
    torch: dict[str, Any],
    jax: dict[str, Any],
) -> dict[str, Any]:
    """The JSON entry of a `CudaPlan`; `torch` and `jax` are empty where they were not measured."""
    found = {"rows": rows, "precision": precision, **summary("device", device_us)}
    return {
        **found,
        **host_summary(single_us),
        "images_per_s": 1e6 * rows / found["device_us"],
        "max_error": error,
        "way": plan.strategy,
        "torch": {
            **{f"{mode}_us": torch.get(f"{mode}_us") for mode in MODES},
            **({"details": torch} if torch else {}),
        },
        "jax": jax,
    }


def digits(weights: WeightFile, count: int) -> Images:
    """Golden images of `weights`, each with its own noise: uint8 (count, 28, 28)."""
    random = np.random.default_rng(1)
    chosen = random.integers(0, len(weights.golden.images), count)
    noise = random.integers(0, 64, (count, 28, 28), np.uint8)
    images: Images = np.maximum(weights.golden.images[chosen], noise)
    return images


def exact(weights: WeightFile, images: Images) -> NDArray[np.float64]:
    """Probabilities (n, classes) of the reference in float64."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    probabilities: NDArray[np.float64] = reference.softmax(
        reference.logits(weights.model, tensors, images)
    )
    return probabilities


def run_pool(weights: WeightFile, options: argparse.Namespace, document: Document) -> int:
    """Measure several contexts on GPU 0."""
    pool_all = measure_pool(open_cuda, weights, POOL_ROWS, POOL_CONTEXTS, options.duration)
    document.add({"pool": best(pool_all, _CONTEXTS), "pool_all": pool_all})
    for found in pool_all:
        print(pool_line(found, document.content.get("limits", {})), flush=True)
    return 0


def run_gpus(weights: WeightFile, options: argparse.Namespace, document: Document) -> int:
    """Measure contexts on several GPUs, at the batch size that was fastest on one."""
    rows = document.content.get("pool", {}).get("rows", POOL_ROWS[-2])
    found = measure_gpus(
        open_cuda, options.weights, options.gpus, _CONTEXTS, rows, options.duration
    )
    document.add({"gpus": found})
    for kind in ("threads", "processes"):
        print(gpus_line(found, kind), flush=True)
    return 0


class Context:
    """A thread with its own backend and a plan for each of `rows`.

    It runs one batch again and again, host to host, in a closed loop: the images are in page-locked
    memory, where a caller's images would first be copied to.

    Raises:
        LeNetError: what opening or planning raises.
    """

    def __init__(
        self, open_backend: Open, device: int, weights: WeightFile, rows: Sequence[int]
    ) -> None:
        self._thread = ThreadPoolExecutor(1)
        random = np.random.default_rng(device)

        def opened() -> None:
            self._opening = open_backend(device)
            backend = self._opening.__enter__()
            self._plans: dict[int, Any] = {count: backend.plan(weights, count) for count in rows}
            for count, plan in self._plans.items():
                plan.run(random.integers(0, 256, (count, 28, 28), np.uint8))

        try:
            self._thread.submit(opened).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def start(self, rows: int, duration_s: float, together: threading.Barrier) -> Any:
        """A future of images/s over `duration_s`, counted from when all have reached `together`."""

        def loop() -> float:
            plan = self._plans[rows]
            together.wait()
            count, start_s = 0, time.perf_counter()
            passed_s = 0.0
            while passed_s < duration_s:
                plan.run_in_place(rows)  # `run` left the images in page-locked memory
                count += 1
                passed_s = time.perf_counter() - start_s
            return count * rows / passed_s

        return self._thread.submit(loop)

    def close(self) -> None:
        """Close the backend on its thread and end the thread."""

        def closed() -> None:
            del self._plans
            self._opening.__exit__(None, None, None)

        try:
            self._thread.submit(closed).result()
        finally:
            self._thread.shutdown()


@contextmanager
def contexts(
    open_backend: Open, devices: Sequence[int], weights: WeightFile, rows: Sequence[int]
) -> Iterator[list[Context]]:
    """A context on each of `devices`, made one after another, as in the service."""
    with ExitStack() as opened:
        yield [
            opened.enter_context(closing(Context(open_backend, device, weights, rows)))
            for device in devices
        ]


def together_per_s(members: Sequence[Context], rows: int, duration_s: float) -> float:
    """Images/s of all `members` at the same time, each with batches of `rows`."""
    together = threading.Barrier(len(members), timeout=_PATIENCE_S)
    running = [member.start(rows, duration_s, together) for member in members]
    return float(sum(future.result() for future in running))


def measure_pool(
    open_backend: Open,
    weights: WeightFile,
    rows: Sequence[int],
    counts: Sequence[int],
    duration_s: float,
) -> list[dict[str, Any]]:
    """Images/s on GPU 0 of each number of contexts with each batch size."""
    with contexts(open_backend, [0] * max(counts), weights, rows) as members:
        return [
            {
                "contexts": count,
                "rows": size,
                "images_per_s": together_per_s(members[:count], size, duration_s),
            }
            for size in rows
            for count in counts
        ]


def best(pool_all: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    """The fastest entry with `count` contexts."""
    return max(
        (found for found in pool_all if found["contexts"] == count),
        key=lambda found: found["images_per_s"],
    )


def measure_gpus(
    open_backend: Open,
    path: Path,
    gpus: int,
    count: int,
    rows: int,
    duration_s: float,
) -> dict[str, Any]:
    """`count` contexts on each of `gpus` GPUs, compared with one of the GPUs alone.

    Measured in one process, whose threads share an interpreter, and in one process per GPU, which
    get `open_backend` pickled and read the weight file at `path`.

    Returns: `threads` and `processes`, each with `one_gpu_images_per_s`, `images_per_s`, medians
    of three rounds, and `ratio`.

    Raises:
        ContextFailed: in one of the processes.
    """
    weights = WeightFile.read(path)
    devices = [device for device in range(gpus) for _ in range(count)]
    with contexts(open_backend, devices, weights, [rows]) as members:
        # Alternating, so that a drift affects both alike.
        pairs = [
            [together_per_s(some, rows, duration_s) for some in (members[:count], members)]
            for _ in range(_GPUS_ROUNDS)
        ]
    found: dict[str, Any] = {"n": gpus, "contexts": count, "rows": rows}
    found["threads"] = _compared(pairs)
    with _processes(open_backend, path, gpus, count, rows, duration_s) as pipes:
        pairs = [[_round(some) for some in (pipes[:1], pipes)] for _ in range(_GPUS_ROUNDS)]
    found["processes"] = _compared(pairs)
    return found


def _compared(pairs: Sequence[Sequence[float]]) -> dict[str, float]:
    one, several = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    return {"one_gpu_images_per_s": one, "images_per_s": several, "ratio": several / one}


def _round(pipes: Sequence[Connection]) -> float:
    for pipe in pipes:
        pipe.send("go")
    return sum(_answer(pipe) for pipe in pipes)


def _answer(pipe: Connection) -> float:
    try:
        answer = pipe.recv()
    except EOFError:
        raise ContextFailed("a process with contexts died without a message") from None
    if isinstance(answer, str):
        raise ContextFailed(answer)
    return float(answer)


@contextmanager
def _processes(
    open_backend: Open, path: Path, gpus: int, count: int, rows: int, duration_s: float
) -> Iterator[list[Connection]]:
    """The pipes of one process per GPU, each ready: it answers a message with its images/s."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for device in range(gpus):
            pipe, remote = spawn.Pipe()
            arguments = (remote, open_backend, path, [device] * count, rows, duration_s)
            process = spawn.Process(target=_serve_rounds, args=arguments, daemon=True)
            process.start()
            remote.close()
            pipes.append(pipe)
            processes.append(process)
        for pipe in pipes:
            _answer(pipe)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(_PATIENCE_S)


def _serve_rounds(
    pipe: Connection,
    open_backend: Open,
    path: Path,
    devices: Sequence[int],
    rows: int,
    duration_s: float,
) -> None:
    """Answer each message with images/s, until the pipe is closed; send a string on failure."""
    try:
        weights = WeightFile.read(path)
        with contexts(open_backend, devices, weights, [rows]) as members:
            pipe.send(0.0)
            while True:
                pipe.recv()
                pipe.send(together_per_s(members, rows, duration_s))
    except EOFError:
        pass  # the parent has finished
    except LeNetError as exc:
        pipe.send(str(exc))


def run_cold(weights: WeightFile, options: argparse.Namespace, document: Document) -> int:
    """Start the service twice with its default settings; 1 if it did not become ready."""
    try:
        found = cold_start_s()
    except ServerFailed as exc:
        _report(str(exc))
        return 1
    document.add({"cold_start_s": found})
    for name, after_s in found.items():
        print(f"the service is ready after {after_s:.1f} s, {name.replace('_', ' ')}", flush=True)
    return 0


def cold_start_s(command: Sequence[str] = ("service", "--device=cuda")) -> dict[str, float]:
    """Seconds from the start of `command`, a Python module with arguments, until /readyz is 200.

    Returns: `no_cache`, with empty folders for all of `CACHES`, and `warm_cache`, the next start
    with the same folders. Readiness is polled 20 times a second.

    Raises:
        ServerFailed: it did not become ready within a minute.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = dict.fromkeys(CACHES, folder)
        for name in ("no_cache", "warm_cache"):
            port = free_port()
            start_s = time.monotonic()
            arguments = [*command, f"--port={port}", "--grpc-port=0"]
            with running("lenet-serve", arguments, port, {}, environment):
                found[name] = time.monotonic() - start_s
    return found


def run_figure(weights: WeightFile, options: argparse.Namespace, document: Document) -> int:
    """Draw the document's buckets; 1 if that is impossible."""
    try:
        draw(document.content, options.figure)
    except FigureUnavailable as exc:
        _report(str(exc))
        return 1
    return 0


PARTS = {
    "limits": run_limits,
    "buckets": run_buckets,
    "libraries": run_libraries,
    "pool": run_pool,
    "gpus": run_gpus,
    "cold": run_cold,
    "figure": run_figure,
}
"""Commands in the order in which they run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = _parser()
    options = parser.parse_args(arguments)
    parts = options.only or [
        *("limits", "buckets", "pool", "cold"),
        *(["gpus"] if options.gpus > 1 else []),
        *(["figure"] if options.figure else []),
    ]
    if "figure" in parts and not options.figure:
        parser.error("--only figure needs --figure PATH")
    code = 0
    try:
        document = Document(options.json)
        options.weights = options.weights or latest_weights()
        weights = WeightFile.read(options.weights)
        if set(parts) != {"figure"}:
            document.add(_provenance(options))
        for part, run in PARTS.items():
            if part in parts:
                code |= run(weights, options, document)
    except ImportError as exc:
        _report(missing_library(exc))
        return 2
    except (OSError, json.JSONDecodeError, LeNetError, ContextFailed) as exc:
        _report(str(exc))
        return 2
    return code


def _provenance(options: argparse.Namespace) -> dict[str, Any]:
    """Device, date, machine, versions and commit.

    Raises:
        BackendUnavailable: there is no GPU, or not as many as were requested.
    """
    from lenet.cuda.device import devices

    count = devices()
    if "gpus" in (options.only or ["gpus"]) and count < options.gpus:
        raise BackendUnavailable(f"--gpus is {options.gpus}, but this machine has {count}")
    import cupy

    return {
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        **provenance(_DISTRIBUTIONS),
        "commit": options.commit or commit(),
        "weights": options.weights.name,
    }


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description="Measure the serving engine on this GPU, compared with PyTorch and JAX.",
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, help="default: limits, buckets, pool and cold")
    add("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    add("--rows", nargs="+", type=positive_int, default=ROWS, help="batch sizes of the buckets")
    add(
        "--compile-buckets",
        nargs="*",
        type=positive_int,
        default=COMPILED_ROWS,
        help="those of --rows to measure with torch.compile, which takes up to minutes each",
    )
    add("--networks", nargs="+", help="names of those to compare with libraries (default: all)")
    add("--duration", type=positive_float, default=2.0, help="seconds of a round of contexts")
    add("--gpus", type=positive_int, default=1, help="above 1: also measure that many GPUs")
    add("--weights", type=Path, help="weight file (default: the latest in weights/lenet)")
    add("--commit", help="commit to record where there is no repository")
    add("--json", type=Path, help="file to update with the results")
    add("--figure", type=Path, help="PNG to draw from the results in --json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
