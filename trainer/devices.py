"""Opens the device, or the GPUs, that a network is trained on.

It knows which device can do what, and refuses in one sentence what none can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from threading import Barrier, Thread
from typing import TYPE_CHECKING, TypeVar

from lenet.cuda.device import devices, translated
from lenet.cuda.engine_cache import PlanCache, default_cache
from lenet.errors import BackendUnavailable
from trainer.errors import DeviceUnavailable
from trainer.ops import TrainingOps
from trainer.ops_cpu import CpuOps
from trainer.settings import Device, Precision, Recipe

if TYPE_CHECKING:
    from trainer.ops_cuda.ranks import Ranks

Result = TypeVar("Result")

_PATIENCE_S = 10.0  # with ranks that were asked to end, before they are made to

Work = Callable[[TrainingOps, int], Result]
"""What is done on a device: it is given the operations and its rank, from 0."""


def unavailable(device: Device) -> str | None:
    """Why `device` means no GPU here; None if it means one.

    Raises:
        DeviceUnavailable: a GPU is asked for and cannot be used; the message says what to do.
    """
    if device == "cpu":
        return "--device is cpu"
    try:
        devices()
    except BackendUnavailable as exc:
        if device == "cuda":
            raise DeviceUnavailable(f"--device is cuda: {exc}") from exc
        return str(exc)
    return None


def choose(device: Device, say: Callable[[str], None]) -> Device:
    """The device meant: auto is the GPU where there is one, else the CPU, and says why.

    Raises:
        DeviceUnavailable: see `unavailable`.
    """
    reason = unavailable(device)
    if reason is None:
        return "cuda"
    if device == "auto":
        say(f"training on the CPU: {reason}")
    return "cpu"


def check(recipe: Recipe, gpus: int) -> None:
    """Refuse what the device of a resolved `recipe` cannot do.

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
            f"--batch is {recipe.batch}, expected a multiple of --gpus {gpus}: each GPU has an "
            "equal part of every batch"
        )


def on_devices(recipe: Recipe, gpus: int, work: Work[Result]) -> Result:
    """Do `work` on the device of a resolved `recipe`, once for each of `gpus`; give rank 0's.

    Raises:
        DeviceUnavailable: see `check`.
        DeviceError: a GPU failed, or has too little memory.
        Exception: whatever else `work` raises; of several ranks the first that failed, as the
            others are then told to stop.
    """
    check(recipe, gpus)
    if recipe.device == "cpu":
        return work(CpuOps(), 0)
    assert recipe.precision != "auto", "bug: the recipe is not resolved"
    if gpus == 1:
        return _on_gpu(recipe.precision, work)
    return _on_gpus(recipe.precision, gpus, work)


def _on_gpu(precision: Precision, work: Work[Result]) -> Result:
    from trainer.ops_cuda.ops import CudaOps

    cache = PlanCache(default_cache())
    with translated("training on GPU 0"), CudaOps(precision, cache=cache) as ops:
        return work(ops, 0)


def _on_gpus(precision: Precision, gpus: int, work: Work[Result]) -> Result:
    """One thread a rank, each with its own GPU; a rank that fails lets the others stop waiting."""
    from trainer.ops_cuda.ops import CudaOps
    from trainer.ops_cuda.ranks import Ranks, new_identity

    identity = new_identity()
    cache = PlanCache(default_cache())  # shared: what one rank measures, all take
    ready = Barrier(gpus)
    joined: list[Ranks] = []
    failures: list[BaseException] = []

    def rank_work(rank: int) -> Result:
        try:
            with translated(f"training on GPU {rank}"), CudaOps(precision, rank, cache) as ops:
                ready.wait()  # NCCL would wait for ever for a rank whose GPU cannot be opened
                ranks = Ranks(identity, rank, gpus, ready)
                joined.append(ranks)
                ready.wait()  # whoever fails from here on, all can be told to stop
                ops.join(ranks)
                result = work(ops, rank)
            ranks.close()  # NCCL cannot be left before the graphs with its sums are gone
            return result
        except BaseException as exc:
            failures.append(exc)
            ready.abort()
            raise

    with ThreadPoolExecutor(gpus, thread_name_prefix="rank") as executor:
        futures: list[Future[Result]] = [executor.submit(rank_work, rank) for rank in range(gpus)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            if failures:
                raise failures[0]  # those that it causes come after it
        except BaseException:
            # On a thread of its own, which a second Ctrl-C does not keep from telling the ranks.
            ending = Thread(target=_end, args=(ready, joined, futures, failures))
            ending.start()
            ending.join()
            raise
    return futures[0].result()


def _end(
    ready: Barrier,
    joined: Sequence[Ranks],
    futures: Sequence[Future[Result]],
    failures: Sequence[BaseException],
) -> None:
    """Let every rank end: together if all are well, else by aborting what they wait for."""
    ready.abort()
    if not failures:  # an interruption
        for ranks in joined:
            ranks.ask()
        wait(futures, _PATIENCE_S)
    for ranks in joined:
        ranks.stop()  # all of them first: what an aborted rank computes is no result
    for ranks in joined:
        ranks.abort()
