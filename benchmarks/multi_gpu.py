"""`python -m benchmarks.multi_gpu`: one network trained on one GPU and on several of a host.

Both use the same recipe, seed and global batch. Measured are the losses of the first steps, the
time of a step and, with --trace, the share of NCCL's time that overlaps other kernels. The learning
rate is low, so that rounding is hardly amplified from step to step: at the default recipe's rate,
rounding alone (NumPy in float32 against float64) moved the hundredth loss by 3e-4. Exit code: 0,
1 when the losses differ by more than 1e-4, 2 when there are too few GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import explained, positive_int
from lenet.model import named
from trainer.devices import on_devices
from trainer.mnist import load
from trainer.network import Network, initial_tensors, take_step
from trainer.ops import TrainingOps
from trainer.optimizer import Sgd
from trainer.settings import Fit

TOLERANCE = 1e-4
"""The largest relative difference of the last loss, from sums in another order over 100 steps."""

_TIMED = 200
_PATIENCE_S = 120.0  # how long ranks wait for one that failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """`losses` float (steps,), `step_us` of the captured step, `tensors` after the steps."""

    losses: np.ndarray
    step_us: float
    tensors: dict[str, np.ndarray]


def steps(recipe: Fit, gpus: int, count: int, trace: Path | None) -> list[Outcome]:
    """Train for `count` steps at a constant rate on `gpus` GPUs: the outcome of each rank."""
    from trainer.loop import run_of

    training, _ = load(recipe.data).hold_out(recipe.validation_images)
    # Every step needs a learning rate, those that are only timed too.
    rates = np.full(count + 5 * _TIMED + 5, recipe.rate, np.float32)
    run = replace(run_of(recipe, training), rates=rates)
    outcomes: dict[int, Outcome] = {}
    together = threading.Barrier(gpus, timeout=_PATIENCE_S)

    def work(ops: TrainingOps, rank: int) -> None:
        model = named(recipe.model)
        tensors = initial_tensors(model, np.random.default_rng(recipe.seed))
        network = Network(model, tensors, ops)
        optimizer = Sgd(
            model, network.parameters, ops, recipe.momentum, recipe.weight_decay, recipe.nesterov
        )
        state = ops.start(run)
        repeat = ops.capture(lambda: take_step(network, optimizer, state))
        # An all-reduce of a rank that runs would block the allocations of one that still captures.
        ops.barrier()
        for _ in range(count):
            repeat()
        losses, _ = ops.losses(state, 0, count)
        after = network.tensors
        times = []
        for _ in range(5):
            together.wait()
            start = time.perf_counter()
            for _ in range(_TIMED):
                repeat()
            ops.losses(state, 0, 1)
            times.append(1e6 * (time.perf_counter() - start) / _TIMED)
        outcomes[rank] = Outcome(losses, statistics.median(times), after)
        together.wait()
        with _traced(trace if rank == 0 else None):
            # The profiler's start may wait for all GPUs, so no GPU may be waiting for this rank.
            together.wait()
            for _ in range(5):
                repeat()
            ops.losses(state, 0, 1)
            together.wait()

    on_devices(recipe, gpus, work)
    return [outcomes[rank] for rank in range(gpus)]


@contextmanager
def _traced(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def overlap(trace: Path, device: int = 0) -> dict[str, Any]:
    """NCCL's kernels on a GPU: count, time in us, and the share that overlaps other kernels.

    The time includes waiting for other ranks.
    """
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") == "kernel" and event["args"].get("device") == device
    ]
    spans = [
        (event["ts"], event["ts"] + event["dur"], "nccl" in event["name"].lower(), event["name"])
        for event in events
    ]
    sums = [span for span in spans if span[2]]
    others = sorted(span for span in spans if not span[2])
    shared, beside = 0.0, set()
    for start, stop, _, _ in sums:
        reached = start
        for first, last, _, name in others:
            begin, end = max(first, reached), min(last, stop)
            if begin < end:
                shared += end - begin
                reached = end
                beside.add(name[:70])
    total = sum(stop - start for start, stop, _, _ in sums)
    return {
        "nccl_kernels": len(sums),
        "nccl_us": total,
        "overlapped_us": shared,
        "overlapped_share": shared / total if total else 0.0,
        "beside": sorted(beside),
    }


def compared(alone: Outcome, several: Sequence[Outcome]) -> dict[str, Any]:
    """One GPU's outcome and those of several ranks: losses, their differences, weights, times."""
    last, expected = float(several[0].losses[-1]), float(alone.losses[-1])
    mean, expected_mean = float(several[0].losses.mean()), float(alone.losses.mean())
    same = all(
        (one.tensors[name] == several[0].tensors[name]).all()
        for one in several[1:]
        for name in one.tensors
    )
    return {
        "loss_one_gpu": expected,
        "loss_several": last,
        "relative_difference": abs(last - expected) / abs(expected),
        "relative_difference_of_mean": abs(mean - expected_mean) / expected_mean,
        "same_weights_on_every_rank": bool(same),
        "step_us_one_gpu": alone.step_us,
        "step_us_several": several[0].step_us,
    }


@explained
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = _parser().parse_args(arguments)
    result: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "gpus": options.gpus}
    code = 0
    if options.trace:
        import torch.profiler  # noqa: F401  # its absence should show before minutes of training
    for precision in options.precisions:
        recipe = Fit(
            precision=precision, data=options.data, batch=options.batch, rate=options.rate
        ).resolved("cuda")
        (alone,) = steps(recipe, 1, options.steps, None)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json" if options.trace else None
            several = steps(recipe, options.gpus, options.steps, trace)
            traced = {"trace": overlap(trace)} if trace else {}
        found = {
            "steps": options.steps,
            "batch": options.batch,
            "rate": options.rate,
            **compared(alone, several),
            **traced,
        }
        result[precision] = found
        print(json.dumps({precision: found}, indent=1), flush=True)
        agrees = found["relative_difference"] <= TOLERANCE
        if precision == "fp32" and not (agrees and found["same_weights_on_every_rank"]):
            code = 1
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.multi_gpu",
        description="Train one network on one GPU and on several, and compare losses and times.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gpus", type=positive_int, default=2, help="to compare with one")
    add("--steps", type=positive_int, default=100, help="whose losses are compared")
    add("--batch", type=positive_int, default=256, help="images per step, over all GPUs")
    add("--rate", type=float, default=5e-4, help="learning rate of every step")
    add("--precisions", nargs="+", default=["fp32", "tf32", "mixed"], help="of the arithmetic")
    add("--data", type=Path, default=Path("data/mnist"), help="folder of the MNIST files")
    add("--trace", action="store_true", help="measure NCCL's overlap with PyTorch's profiler")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
