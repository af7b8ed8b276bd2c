"""`python -m benchmarks.several_gpus`: one network trained on one GPU and on several of a host.

The same recipe, seed and global batch on both: the losses of the first steps beside each other, the
time of a step, and, with PyTorch's profiler where PyTorch is, how much of NCCL's time runs beside
other kernels. The rate is one at which rounding is hardly amplified from step to step: at that of
the default recipe it alone (NumPy in float32 against float64) moved the hundredth loss by 3e-4.
Exit code: 0, 1 when the losses differ by more than 1e-4, 2 when there are too few GPUs.
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

from benchmarks.arguments import positive_int
from lenet.errors import LeNetError
from lenet.model import named
from trainer.devices import on_devices
from trainer.errors import TrainerError
from trainer.loop import run_of
from trainer.mnist import load
from trainer.network import Network, initial_tensors
from trainer.ops import TrainingOps
from trainer.optimizer import Sgd
from trainer.settings import Fit
from trainer.step import take_step

TOLERANCE = 1e-4
"""The largest relative difference of the last loss: sums in another order, a hundred steps long."""

_TIMED = 200
_PATIENCE_S = 120.0  # with a rank that failed, which will never come


@dataclass(frozen=True, slots=True)
class Outcome:
    """`losses` float (steps,), `step_us` of the recorded step, `tensors` after the steps."""

    losses: np.ndarray
    step_us: float
    tensors: dict[str, np.ndarray]


def steps(recipe: Fit, gpus: int, count: int, trace: Path | None) -> list[Outcome]:
    """Train for `count` steps at a constant rate on `gpus` GPUs; every rank's outcome in order."""
    training, _ = load(recipe.data).hold_out(recipe.validation_images)
    # A step beyond the last would have no rate.
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
        progress = ops.start(run)
        repeat = ops.record(lambda: take_step(network, optimizer, progress))
        ops.meet()  # a rank that is still recording takes memory, which waits for others' sums
        for _ in range(count):
            repeat()
        losses, _ = ops.losses(progress, 0, count)
        after = network.tensors
        times = []
        for _ in range(5):
            together.wait()
            start = time.perf_counter()
            for _ in range(_TIMED):
                repeat()
            ops.losses(progress, 0, 1)
            times.append(1e6 * (time.perf_counter() - start) / _TIMED)
        outcomes[rank] = Outcome(losses, statistics.median(times), after)
        together.wait()
        with _traced(trace if rank == 0 else None):
            # A profiler that starts may wait for all GPUs: none may wait for this rank meanwhile.
            together.wait()
            for _ in range(5):
                repeat()
            ops.losses(progress, 0, 1)
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
    """Of NCCL's kernels on a GPU: how many, their time in us, and the share beside other kernels.

    Spinning until the other ranks arrive counts as time, too.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    asked = _parser().parse_args(arguments)
    result: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "gpus": asked.gpus}
    code = 0
    try:
        for precision in asked.precisions:
            recipe = Fit(
                precision=precision, data=asked.data, batch=asked.batch, rate=asked.rate
            ).resolved("cuda")
            (alone,) = steps(recipe, 1, asked.steps, None)
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json" if asked.trace else None
                several = steps(recipe, asked.gpus, asked.steps, trace)
                found = {"trace": overlap(trace)} if trace else {}
            last, wanted = float(several[0].losses[-1]), float(alone.losses[-1])
            difference = abs(last - wanted) / abs(wanted)
            mean, wanted_mean = float(several[0].losses.mean()), float(alone.losses.mean())
            same = all(
                (one.tensors[name] == several[0].tensors[name]).all()
                for one in several[1:]
                for name in one.tensors
            )
            result[precision] = {
                "steps": asked.steps,
                "batch": asked.batch,
                "rate": asked.rate,
                "loss_one_gpu": wanted,
                "loss_several": last,
                "relative_difference": difference,
                "relative_difference_of_mean": abs(mean - wanted_mean) / wanted_mean,
                "same_weights_on_every_rank": same,
                "step_us_one_gpu": alone.step_us,
                "step_us_several": several[0].step_us,
                **found,
            }
            print(json.dumps({precision: result[precision]}, indent=1), flush=True)
            if precision == "fp32" and not (difference <= TOLERANCE and same):
                code = 1
    except (ImportError, LeNetError, TrainerError) as exc:
        print(exc, file=sys.stderr)
        return 2
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.several_gpus", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--gpus", type=positive_int, default=2)
    parser.add_argument("--steps", type=positive_int, default=100)
    parser.add_argument("--batch", type=positive_int, default=256, help="over all GPUs")
    parser.add_argument("--rate", type=float, default=5e-4, help="the learning rate of every step")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "tf32", "mixed"])
    parser.add_argument("--data", type=Path, default=Path("data/mnist"), help="the MNIST files")
    parser.add_argument("--trace", action="store_true", help="with PyTorch's profiler")
    parser.add_argument("--json", type=Path, help="write everything measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
