"""Resolves the device to train on, and runs the training there, on one or several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from threading import Barrier, Event, Thread
from typing import TYPE_CHECKING, TypeVar

from lenet.cuda import device as cuda
from lenet.cuda.device import devices, translated
from lenet.cuda.engine_cache import EngineCache, default_cache
from lenet.cuda.layers import MAX_CLASSES as SERVED_CLASSES
from lenet.errors import BackendUnavailable
from trainer.errors import DeviceUnavailable
from trainer.ops import TrainingOps
from trainer.ops_cpu import CpuOps
from trainer.settings import Precision, Recipe

if TYPE_CHECKING:
    from trainer.ops_cuda.ranks import Ranks

Result = TypeVar("Result")

MAX_CLASSES = 64
"""A thread holds a whole row of logits in `loss.cu`."""

_POLL_S = 0.2
_STOP_TIMEOUT_S = 3.0  # how long ranks may take to stop before they are aborted

Work = Callable[[TrainingOps, int], Result]
"""Runs on a device: takes the operations and the rank, from 0."""


def number_of(device: str) -> int:
    """The number of the GPU that `device` names: 0 for cuda and auto, N for cuda:N."""
    return int(device.partition(":")[2] or 0)


def unavailable(device: str) -> str | None:
    """Why no GPU is used for `device`; None if one is.

    Raises:
        DeviceUnavailable: `device` is cuda or cuda:N and that GPU cannot be used; the message says
            what to do.
    """
    if device == "cpu":
        return "--device is cpu"
    try:
        check_gpu(number_of(device))
    except BackendUnavailable as exc:
        if device != "auto":
            raise DeviceUnavailable(f"--device is {device}: {exc}") from exc
        return "no usable GPU was found (--device cuda says why)"
    return None


def check_gpu(device: int) -> None:
    """Check that GPU number `device` and cuDNN can be used.

    Raises:
        BackendUnavailable: the message says what is missing.
    """
    cuda.check(device)
    cuda.load_cudnn()


def choose(device: str, report: Callable[[str], None]) -> str:
    """Resolve auto: the GPU if one can be used, else the CPU, which is reported in one line.

    Raises:
        DeviceUnavailable: see `unavailable`.
    """
    reason = unavailable(device)
    if reason is None:
        return "cuda" if device == "auto" else device
    if device == "auto":
        report(f"training on the CPU: {reason}")
    return "cpu"


def check(recipe: Recipe, gpus: int) -> None:
    """Check that the device of a resolved `recipe` supports it.

    Raises:
        DeviceUnavailable: the message names the setting, its value and what is expected.
    """
    if recipe.device == "cpu":
        if recipe.precision != "fp32":
            raise DeviceUnavailable(
                f"--precision is {recipe.precision}, expected fp32: the CPU has no other"
            )
        if gpus != 1:
            raise DeviceUnavailable(f"--gpus is {gpus}, expected 1: no GPU is used")
        return
    found = devices()
    if gpus > found:
        raise DeviceUnavailable(f"--gpus is {gpus}, expected at most {found}: there are no more")
    if recipe.batch % gpus:
        raise DeviceUnavailable(
            f"--batch is {recipe.batch}, expected a multiple of --gpus {gpus}: each GPU takes an "
            "equal part of every batch"
        )


def check_classes(device: str, classes: int, report: Callable[[str], None]) -> None:
    """Check that `device` can train so many classes; report if a GPU cannot serve them.

    Raises:
        DeviceUnavailable: the message names the number and what is expected.
    """
    if device != "cpu" and classes > MAX_CLASSES:
        raise DeviceUnavailable(
            f"the dataset has {classes} classes, expected at most {MAX_CLASSES} on a GPU; "
            "--device cpu trains them"
        )
    if classes > SERVED_CLASSES:
        report(
            f"{classes} classes: a GPU serves at most {SERVED_CLASSES}, so the cpu device of the "
            "service is for this network"
        )


def on_devices(recipe: Recipe, gpus: int, work: Work[Result]) -> Result:
    """Run `work` on the device of a resolved `recipe`, on each of `gpus`; return rank 0's result.

    Raises:
        DeviceUnavailable: see `check`.
        DeviceError: a GPU failed, or has too little memory.
        Exception: what `work` raises; of several ranks the first that failed, after the others
            were stopped.
    """
    check(recipe, gpus)
    if recipe.device == "cpu":
        return work(CpuOps(), 0)
    assert recipe.precision != "auto", "bug: the recipe is not resolved"
    if gpus == 1:
        return on_gpu(recipe.precision, work, number_of(recipe.device))
    return _on_gpus(recipe.precision, gpus, work)


def side_by_side(recipe: Recipe, count: int, work: Work[Result]) -> list[Result]:
    """Run `work` of 0 to `count` - 1 at the same time on the device of a resolved `recipe`.

    Each has its own thread and operations: on a GPU its own streams, in one CUDA context. Results
    are the same as of one after another.

    Raises:
        DeviceUnavailable: see `check`.
        DeviceError: the GPU failed, or has too little memory.
        Exception: what `work` raised first; the others stop when their next losses are read.
    """
    check(recipe, 1)
    cache, stopping = EngineCache(default_cache()), Event()

    def one(number: int) -> Result:
        if recipe.device == "cpu":
            return work(CpuOps(stopping=stopping), number)
        assert recipe.precision != "auto", "bug: the recipe is not resolved"
        return on_gpu(recipe.precision, work, number_of(recipe.device), number, cache, stopping)

    return _in_threads(count, one, lambda _interrupted, _futures: stopping.set())


def on_gpu(
    precision: Precision,
    work: Work[Result],
    device: int = 0,
    number: int = 0,
    cache: EngineCache | None = None,
    stopping: Event | None = None,
) -> Result:
    """Run `work` of `number` on GPU `device`, in this thread; see `CudaOps` for `stopping`.

    Raises:
        DeviceError: the GPU failed, or has too little memory.
    """
    from trainer.ops_cuda.ops import CudaOps

    cache = cache or EngineCache(default_cache())
    with (
        translated(f"training on GPU {device}"),
        CudaOps(precision, device, cache, stopping=stopping) as ops,
    ):
        return work(ops, number)


def _on_gpus(precision: Precision, gpus: int, work: Work[Result]) -> Result:
    """One thread a rank, each with its own GPU; a rank that fails stops the others."""
    from trainer.ops_cuda.ops import CudaOps
    from trainer.ops_cuda.ranks import Ranks, new_identity

    identity = new_identity()
    cache = EngineCache(default_cache())  # shared: all ranks use the engines that one has measured
    barrier, stopping = Barrier(gpus), Event()
    joined: list[Ranks] = []

    def rank_work(rank: int) -> Result:
        with (
            translated(f"training on GPU {rank}"),
            CudaOps(precision, rank, cache, stopping=stopping) as ops,
        ):
            barrier.wait()  # NCCL would wait for ever for a rank whose GPU cannot be opened
            ranks = Ranks(identity, rank, gpus, barrier, stopping)
            joined.append(ranks)
            barrier.wait()  # from here on every rank can be aborted
            ops.join(ranks)
            result = work(ops, rank)
        ranks.close()  # after the graphs with its all-reduces are gone
        return result

    def end(interrupted: bool, futures: Sequence[Future[Result]]) -> None:
        """End every rank: interrupted ones have time to stop by themselves, then are aborted."""
        barrier.abort()
        stopping.set()
        if interrupted:
            wait(futures, _STOP_TIMEOUT_S)
        for ranks in joined:
            ranks.mark_aborted()  # all before the first abort
        for ranks in joined:
            ranks.abort()

    return _in_threads(gpus, rank_work, end)[0]


def _in_threads(
    count: int,
    work: Callable[[int], Result],
    end: Callable[[bool, Sequence[Future[Result]]], None],
) -> list[Result]:
    """The results of `work` of 0 to `count` - 1, each in a thread.

    After the first failure, or an interruption of this thread, `end` makes all threads end: it
    takes whether it was an interruption, and the futures. Then the failure is raised.
    """
    failures: list[BaseException] = []

    def noted(number: int) -> Result:
        try:
            return work(number)
        except BaseException as exc:
            failures.append(exc)
            raise

    with ThreadPoolExecutor(count, thread_name_prefix="training") as executor:
        futures: list[Future[Result]] = []
        try:
            futures.extend(executor.submit(noted, number) for number in range(count))
            waiting = set(futures)
            while waiting and not failures:
                # Not without a timeout: a Ctrl-C whose signal another thread gets would not end it.
                _, waiting = wait(waiting, _POLL_S, return_when=FIRST_EXCEPTION)
            if failures:
                raise failures[0]  # the later ones are its consequences
        except BaseException:
            # On a thread of its own, which a second Ctrl-C does not interrupt.
            ending = Thread(target=end, args=(not failures, futures))
            ending.start()
            ending.join()
            raise
    return [future.result() for future in futures]
