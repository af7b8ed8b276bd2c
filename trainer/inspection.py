"""How near each call of a training step comes to what the hardware can do.

The calls follow from the network alone (`trainer.calls`); their times are taken on a GPU by
`trainer.ops_cuda.timing`, beside the rates that they are held against: those of a large copy and a
large matrix product, in the same run. It refuses to guess: without a GPU there are no plans and no
times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from lenet.cuda.device import translated
from lenet.cuda.engine_cache import PlanCache
from lenet.model import Model, Shape
from lenet.pixels import HEIGHT, WIDTH
from trainer.augment import Limits
from trainer.calls import Call
from trainer.mnist import CLASSES, Digits
from trainer.network import Network, initial_tensors
from trainer.ops import Run
from trainer.optimizer import Sgd
from trainer.roofline import Times
from trainer.settings import Precision, Recipe
from trainer.step import take_step

_STEPS = 1000  # of the run that is timed; more than are taken
_DIGITS = 50_000  # to draw from; fewer would lie in a cache
_HEADINGS = ("layer", "part", "shape in -> out", "call", "MFLOP", "MB")
_MEASURED = ("workspace B", "us", "roofline %", "plan")
_NUMBERS = frozenset({"MFLOP", "MB", "workspace B", "us", "roofline %"})


def measure(
    model: Model, batch: int, precision: Precision, cache: PlanCache
) -> tuple[Times, float]:
    """Time each call, and the whole captured step in microseconds, on GPU 0.

    Images are warped as by default.

    Raises:
        DeviceError: the GPU cannot do it; too little memory is one reason.
    """
    from trainer.ops_cuda.ops import CudaOps
    from trainer.ops_cuda.timing import replay_us, time_calls

    run = _run(batch)
    times = time_calls(model, precision, run, cache)
    with translated("timing a step"), CudaOps(precision, cache=cache) as ops:
        network = Network(model, initial_tensors(model, np.random.default_rng(0)), ops)
        optimizer = Sgd(model, network.parameters, ops, 0.9, 5e-4)
        step = partial(take_step, network, optimizer, ops.start(run))
        return times, replay_us(ops.record(step))


def _run(batch: int) -> Run:
    random = np.random.default_rng(0)
    size = max(batch, _DIGITS)
    images = random.integers(0, 256, (size, HEIGHT, WIDTH), np.uint8)
    labels = random.integers(0, CLASSES, size).astype(np.uint8)
    usual = Recipe.model_construct()  # the defaults, whatever the environment says
    limits = Limits(usual.rotation, usual.scale, usual.shear, usual.shift, usual.elastic)
    return Run(Digits(images, labels), batch, limits, 1, np.full(_STEPS, 1e-3, np.float32))


def report(calls: Sequence[Call], times: Times, step_us: float) -> str:
    """The table of `calls` with what was measured of each, and below it the sums and the rates."""
    copy, product = times.copy, times.product
    return "\n".join(
        (
            times.device,
            _table(_measured_rows(calls, times)),
            f"sum of the times {times.sum_us:.1f} us, the whole captured step {step_us:.1f} us: a "
            "call alone finds in the L2 cache what it had there the last time, while in the step "
            "gradients of weights run beside the rest on a second stream",
            "workspace: what cuDNN's plan asks for, what cuBLAS is given",
            f"roofline: {copy.per_s / 1e12:.2f} TB/s, read and written, in {copy.found_by}; "
            f"{product.per_s / 1e12:.1f} TFLOP/s in {product.found_by}; what lies in the L2 "
            "cache can exceed 100 %",
        )
    )


def outline(calls: Sequence[Call]) -> str:
    """The table of `calls` as it can be told without a GPU."""
    return _table([_HEADINGS, *map(_cells, calls)])


def _measured_rows(calls: Sequence[Call], times: Times) -> Iterator[tuple[str, ...]]:
    yield (*_HEADINGS, *_MEASURED)
    for call in calls:
        timed = times.calls[call.key]
        share = times.roofline(call.key, call.operations, call.size_bytes)
        workspace = "-" if timed.workspace_bytes is None else str(timed.workspace_bytes)
        numbers = (workspace, f"{timed.time_us:.2f}", f"{100 * share:.1f}")
        yield (*_cells(call), *numbers, timed.plan)


def _cells(call: Call) -> tuple[str, ...]:
    return (
        call.layer,
        call.part,
        f"{_by(call.source)} -> {_by(call.result)}" if call.source else "-",
        call.routine,
        f"{call.operations / 1e6:.1f}" if call.operations else "-",
        f"{call.size_bytes / 1e6:.2f}",
    )


def _by(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Columns two blanks apart, numbers to the right."""
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        right = column[0] in _NUMBERS
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
