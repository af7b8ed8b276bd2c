"""Several contexts at once, host to host: threads on one GPU, and threads or processes on several.

Each context is a thread with a backend of its own, which asks for the next batch as soon as it has
an answer (a closed loop): one batch again and again, in page-locked memory, where a caller's images
would first be copied to. It refuses to add up what did not run at the same time.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from lenet.backend import Backend
from lenet.errors import LeNetError
from lenet.weightfile import WeightFile

Open: TypeAlias = Callable[[int], AbstractContextManager[Backend]]
"""`Open(device)`: a fresh backend on that GPU, for the thread that opens it."""

_PATIENCE_S = 120.0  # with a context that failed, which the others would wait for
_ROUNDS = 3


class ContextFailed(Exception):
    """A process with contexts failed; the message is its own."""


@contextmanager
def open_cuda(device: int, precision: str = "fp16") -> Iterator[Any]:
    """The engine on GPU number `device`, in the precision that the service takes by itself."""
    from lenet.cuda.backend import CudaBackend
    from lenet.cuda.engine_cache import PlanCache, default_cache

    with CudaBackend(device, precision, cache=PlanCache(default_cache())) as backend:
        yield backend


class Context:
    """One backend with plans for batches of each of `rows`, on a thread of its own.

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
            self._plans = {count: backend.plan(weights, count) for count in rows}
            for count, plan in self._plans.items():
                plan.run(random.integers(0, 256, (count, 28, 28), np.uint8))

        try:
            self._thread.submit(opened).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def start(self, rows: int, duration_s: float, together: threading.Barrier) -> Any:
        """A future of images/s in a closed loop of `duration_s`, from when all are `together`."""

        def loop() -> float:
            plan = self._plans[rows]
            together.wait()
            count, start_s = 0, time.perf_counter()
            passed_s = 0.0
            while passed_s < duration_s:
                plan.run_in_place(rows)  # from page-locked memory, as `run` left it there
                count += 1
                passed_s = time.perf_counter() - start_s
            return count * rows / passed_s

        return self._thread.submit(loop)

    def close(self) -> None:
        """Close the backend on its thread and end that."""

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
    """A context on each of `devices`, made one after another, as a service makes them."""
    with ExitStack() as opened:
        yield [
            opened.enter_context(closing(Context(open_backend, device, weights, rows)))
            for device in devices
        ]


def together_per_s(members: Sequence[Context], rows: int, duration_s: float) -> float:
    """Images/s of all `members`, each in a closed loop of batches of `rows`, at the same time."""
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
    """Images/s of each number of contexts on GPU 0 with each of `rows` in a batch."""
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
    """The fastest of those with `count` contexts."""
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
    """`count` contexts on each of `gpus` GPUs against one of them; weights are read from `path`.

    In one process, whose threads share an interpreter, and in a process for each GPU.
    `open_backend` is pickled.

    Returns: `threads` and `processes`, each with `one_gpu_images_per_s`, `images_per_s`, medians
    of three rounds, and `ratio`.

    Raises:
        ContextFailed: in one of the processes.
    """
    weights = WeightFile.read(path)
    devices = [device for device in range(gpus) for _ in range(count)]
    with contexts(open_backend, devices, weights, [rows]) as members:
        # In turns, so that what changes with time changes both.
        pairs = [
            [together_per_s(some, rows, duration_s) for some in (members[:count], members)]
            for _ in range(_ROUNDS)
        ]
    found: dict[str, Any] = {"n": gpus, "contexts": count, "rows": rows}
    found["threads"] = _compared(pairs)
    with _workers(open_backend, path, gpus, count, rows, duration_s) as workers:
        pairs = [[_ask(some) for some in (workers[:1], workers)] for _ in range(_ROUNDS)]
    found["processes"] = _compared(pairs)
    return found


def _compared(pairs: Sequence[Sequence[float]]) -> dict[str, float]:
    one, several = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    return {"one_gpu_images_per_s": one, "images_per_s": several, "ratio": several / one}


class _Pipe(Protocol):
    def send(self, message: Any) -> None: ...
    def recv(self) -> Any: ...


def _ask(pipes: Sequence[_Pipe]) -> float:
    for pipe in pipes:
        pipe.send("go")
    return sum(_told(pipe) for pipe in pipes)


def _told(pipe: _Pipe) -> float:
    try:
        answer = pipe.recv()
    except EOFError:
        raise ContextFailed("a process with contexts died without a word") from None
    if isinstance(answer, str):
        raise ContextFailed(answer)
    return float(answer)


@contextmanager
def _workers(
    open_backend: Open, path: Path, gpus: int, count: int, rows: int, duration_s: float
) -> Iterator[list[Connection]]:
    """A process for each GPU, ready: it answers any message with images/s, or with what failed."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for device in range(gpus):
            mine, theirs = spawn.Pipe()
            arguments = (theirs, open_backend, path, [device] * count, rows, duration_s)
            process = spawn.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        for pipe in pipes:
            _told(pipe)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(_PATIENCE_S)


def _work(
    pipe: Connection,
    open_backend: Open,
    path: Path,
    devices: Sequence[int],
    rows: int,
    duration_s: float,
) -> None:
    try:
        weights = WeightFile.read(path)
        with contexts(open_backend, devices, weights, [rows]) as members:
            pipe.send(0.0)
            while True:
                pipe.recv()
                pipe.send(together_per_s(members, rows, duration_s))
    except EOFError:
        pass  # the other side has what it wanted
    except LeNetError as exc:
        pipe.send(str(exc))
