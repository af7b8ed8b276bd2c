"""`python -m benchmarks.lstm`: an LSTM on cuDNN beside one made of matrix products, and PyTorch's.

The network of the book chapter that the trainer follows: 512 steps, 4 layers, 512 hidden units and
inputs, batches of 32 to 256. Three versions, in inference and in a training step without an update:

    cudnn      `cudnnRNNForward` and its two backward passes, with the fastest of its algorithms
    emulated   two cuBLAS products per time step and layer
    torch      `torch.nn.LSTM`, where PyTorch is installed

The first two are timed as CUDA graphs, which no launch from the host slows down, and as they are
called from Python (`*_called_us`).

Before anything is timed, cuDNN's and the emulated network's outputs and final states of a shorter
sequence are compared with NumPy's in float64. Exit code: 0, 1 when they differ by more than their
precision explains, 2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import commit, explained, positive_int, provenance, save_picture
from benchmarks.recurrent import reference

STEPS, LAYERS, HIDDEN = 512, 4, 512
BATCHES = (32, 64, 128, 256)
_CHECKED_STEPS, _CHECKED_BATCH = 40, 32
TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 1e-2}
"""The largest relative norm of the difference from float64: of outputs, and of final states."""

GRADIENT_TOLERANCE = {"fp32": 1e-4, "tf32": 2e-2, "fp16": 3e-2}
"""Tolerances of gradients."""

PRECISIONS = tuple(TOLERANCE)
_MODES = ("inference", "training")
ALGORITHMS = ("standard", "persistent", "persistent-dynamic")
_ROUNDS = 7
_DISTRIBUTIONS = ("lenet-serve", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "torch")


def relative(found: Any, expected: Any) -> float:
    """|found - expected| / |expected|, in float64."""
    expected = np.asarray(expected, np.float64)
    return float(
        np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    )


def inputs(steps: int, batch: int, dtype: Any, layers: int = LAYERS, hidden: int = HIDDEN) -> Any:
    """x, h, c and dy on the GPU, uniform in +- 1."""
    import cupy

    random = np.random.default_rng(1)
    shapes = ((steps, batch, hidden), (layers, batch, hidden), (layers, batch, hidden))
    drawn = (random.uniform(-1, 1, shape) for shape in (*shapes, (steps, batch, hidden)))
    return [cupy.asarray(one.astype(dtype)) for one in drawn]


def differences(
    handle: Any, precision: Any, algorithm: str = "standard"
) -> dict[str, dict[str, float]]:
    """The relative norm of each result's difference from NumPy's, by version."""
    from benchmarks.recurrent.cudnn import CudnnLstm
    from benchmarks.recurrent.emulated import EmulatedLstm

    layers = reference.random_layers(LAYERS, HIDDEN, HIDDEN)
    found: dict[str, dict[str, float]] = {}
    sizes = _CHECKED_STEPS, _CHECKED_BATCH
    for name, lstm in (
        ("cudnn", CudnnLstm(handle, layers, *sizes, precision, algorithm, training=True)),
        ("emulated", EmulatedLstm(handle, layers, *sizes, precision, training=True)),
    ):
        x, h, c, dy = inputs(*sizes, lstm.dtype)
        rounded = [
            reference.Layer(
                *(part.astype(lstm.dtype).astype(np.float64) for part in (one.w, one.r, one.b))
            )
            for one in layers
        ]
        exact = [one.get().astype(np.float64) for one in (x, h, c, dy)]
        done = reference.forward(rounded, *exact[:3])
        dx, gradients = reference.backward(rounded, done, exact[3])
        lstm.forward(x, h, c)
        states = (h, c) if name == "cudnn" else ()
        lstm.backward(x, *states, dy)
        handle.synchronize()
        pairs = {
            "outputs": (lstm.y.get(), done.y),
            "final h": (lstm.h.get(), done.h),
            "final c": (lstm.c.get(), done.c),
            "dx": (lstm.dx.get(), dx),
        }
        for number, (own, expected) in enumerate(zip(lstm.gradients(), gradients, strict=True), 1):
            for part in ("w", "r", "b"):
                pairs[f"d{part}{number}"] = (getattr(own, part), getattr(expected, part))
        found[name] = {what: relative(*pair) for what, pair in pairs.items()}
    return found


def allowed(what: str, precision: str) -> float:
    """The tolerance of a result that `differences` names."""
    return (GRADIENT_TOLERANCE if what.startswith("d") else TOLERANCE)[precision]


def _cudnn_us(
    layers: Any, batch: int, precision: Any, training: bool, algorithms: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """The times of each algorithm that there is for these sizes: as a CUDA graph, and called."""
    from benchmarks.recurrent.cudnn import CudnnLstm, NotSupported
    from lenet.cuda.capture import captured
    from lenet.cuda.device import Handle

    found: dict[str, tuple[float, float]] = {}
    for algorithm in algorithms:
        handle = Handle()
        try:
            lstm = CudnnLstm(handle, layers, STEPS, batch, precision, algorithm, training=training)
            x, h, c, dy = inputs(STEPS, batch, lstm.dtype)

            def run(lstm: Any = lstm, x: Any = x, h: Any = h, c: Any = c, dy: Any = dy) -> None:
                lstm.forward(x, h, c)
                if training:
                    lstm.backward(x, h, c, dy)

            called_us = _timed_us(run)
            found[algorithm] = _timed_us(captured(run, handle.stream)), called_us
        except NotSupported:
            pass
        finally:
            handle.close()
    return found


def _emulated_us(
    handle: Any, layers: Any, batch: int, precision: Any, training: bool
) -> tuple[float, float]:
    from benchmarks.recurrent.emulated import EmulatedLstm
    from lenet.cuda.capture import captured

    lstm = EmulatedLstm(handle, layers, STEPS, batch, precision, training=training)
    x, h, c, dy = inputs(STEPS, batch, lstm.dtype)

    def run() -> None:
        lstm.forward(x, h, c)
        if training:
            lstm.backward(x, dy)

    called_us = _timed_us(run)
    return _timed_us(captured(run, handle.stream)), called_us


def _torch_us(batch: int, precision: str, training: bool) -> float | None:
    try:
        import torch
    except ImportError:
        return None
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    dtype = torch.float16 if precision == "fp16" else torch.float32
    lstm = torch.nn.LSTM(HIDDEN, HIDDEN, LAYERS).cuda().to(dtype).train(training)
    lstm.flatten_parameters()
    x = torch.rand(STEPS, batch, HIDDEN, device="cuda", dtype=dtype, requires_grad=training)
    dy = torch.rand(STEPS, batch, HIDDEN, device="cuda", dtype=dtype)

    def run() -> None:
        if training:
            lstm.zero_grad(set_to_none=True)
            lstm(x)[0].backward(dy)
        else:
            with torch.no_grad():
                lstm(x)

    times = []
    for number in range(_ROUNDS + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if number >= 2:
            times.append(1e3 * start.elapsed_time(stop))
    return float(np.median(times))


def _timed_us(run: Callable[[], None]) -> float:
    from lenet.cuda.capture import time_us

    run()
    return time_us(run, _ROUNDS)


def _rates(precision: Any) -> dict[str, float]:
    """Rates of a large copy and a large product."""
    from trainer.devices import on_gpu
    from trainer.ops_cuda import timed

    return on_gpu(
        "mixed" if precision == "fp16" else precision,
        lambda ops, _: {
            "copy_tb_per_s": timed.copy_bytes_per_s(ops) / 1e12,
            "product_tflops": timed.product_flop_per_s(ops) / 1e12,
        },
    )


def measure(precision: Any, mode: str, batch: int, algorithms: Sequence[str]) -> dict[str, Any]:
    """Times of the three versions in microseconds, and TFLOP/s of two."""
    from lenet.cuda.device import Handle

    training = mode == "training"
    layers = reference.random_layers(LAYERS, HIDDEN, HIDDEN)
    handle = Handle()
    try:
        work = reference.flop(STEPS, LAYERS, HIDDEN, HIDDEN, batch) * (3 if training else 1)
        emulated_us, emulated_called_us = _emulated_us(handle, layers, batch, precision, training)
    finally:
        handle.close()
    by_algorithm = _cudnn_us(layers, batch, precision, training, algorithms)
    algorithm = min(by_algorithm, key=lambda name: by_algorithm[name])
    cudnn_us, cudnn_called_us = by_algorithm[algorithm]
    torch_us = _torch_us(batch, precision, training)
    return {
        "cudnn_us": round(cudnn_us, 1),
        "emulated_us": round(emulated_us, 1),
        "torch_us": None if torch_us is None else round(torch_us, 1),
        "cudnn_tflops": round(work / cudnn_us / 1e6, 3),
        "emulated_tflops": round(work / emulated_us / 1e6, 3),
        "cudnn_called_us": round(cudnn_called_us, 1),
        "emulated_called_us": round(emulated_called_us, 1),
        "cudnn_algorithm": algorithm,
        "cudnn_algorithms_us": {name: round(us, 1) for name, (us, _) in by_algorithm.items()},
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Times by batch, and the roofline of inference."""
    from matplotlib.figure import Figure

    figure = Figure((10, 5), layout="constrained")
    times, roofline = figure.subplots(1, 2)
    colours = dict(zip(PRECISIONS, ("#1f5fa8", "#d9691c", "#3a7d44"), strict=True))
    for precision, by_mode in result["precisions"].items():
        batches = by_mode["inference"]
        sizes = [int(batch) for batch in batches]
        colour = colours[precision]
        for version, style in (("cudnn", "-o"), ("emulated", "--s"), ("torch", ":^")):
            found = [batches[str(size)][f"{version}_us"] for size in sizes]
            if None not in found:
                values = [us / 1e3 for us in found]
                times.plot(sizes, values, style, color=colour, label=f"{version} {precision}")
        rates = result["rates"][precision]
        # Every step reads all weights: once from memory if nothing keeps them nearer.
        size_bytes = 2 if precision == "fp16" else 4
        intensity = np.array([2 * size / size_bytes for size in sizes])
        line = np.geomspace(8, 1024, 50)
        roof = np.minimum(line * rates["copy_tb_per_s"], rates["product_tflops"])
        roofline.plot(line, roof, ":", color=colour, label=f"roof {precision}")
        for version, mark in (("cudnn", "o"), ("emulated", "s")):
            reached = [batches[str(size)][f"{version}_tflops"] for size in sizes]
            roofline.plot(
                intensity, reached, mark, color=colour, fillstyle="full" if mark == "o" else "none"
            )
    times.set(xlabel="batch, sequences", ylabel="time of 512 steps, ms", xscale="log", yscale="log")
    times.set_xticks(BATCHES, [str(batch) for batch in BATCHES], minor=False)
    times.set_yticks((5, 10, 20, 50, 100), ("5", "10", "20", "50", "100"))
    times.minorticks_off()
    roofline.set(
        xlabel="FLOP for a byte of weights read in every step",
        ylabel="TFLOP/s",
        xscale="log",
        yscale="log",
    )
    for axes in (times, roofline):
        axes.grid(alpha=0.3)
    times.set_title("inference, cuDNN and emulated as CUDA graphs", fontsize=10)
    roofline.set_title("roofline: filled cuDNN, hollow emulated", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save_picture(figure, path, dpi=110)


@explained
def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, write; the exit code."""
    options = _parser().parse_args(arguments)
    from lenet.cuda.device import Handle, devices

    devices()
    result: dict[str, Any] = {
        **provenance(_DISTRIBUTIONS),
        "commit": options.commit or commit(),
    }
    wrong = []
    handle = Handle()
    result |= {"device": handle.name, "cudnn": handle.cudnn_version, "differences": {}}
    for precision in options.precisions:
        found = differences(handle, precision)
        result["differences"][precision] = found
        for version, by_result in found.items():
            worst = max(by_result, key=lambda what: by_result[what] / allowed(what, precision))
            print(f"{precision} {version}: {worst} differs most, by {by_result[worst]:.1e}")
            if by_result[worst] > allowed(worst, precision):
                wrong.append(f"{precision} {version} {worst}")
    handle.close()
    if wrong:
        print(f"lstm: differs from float64: {', '.join(wrong)}", file=sys.stderr)
        return 1
    result["rates"] = {precision: _rates(precision) for precision in options.precisions}
    times = result["precisions"] = {
        precision: {mode: {} for mode in options.modes} for precision in options.precisions
    }
    if "fp32" in times and "inference" in options.modes:
        result["batches"] = times["fp32"]["inference"]
    for mode, precision, batch in product(options.modes, options.precisions, options.batches):
        one = measure(precision, mode, batch, options.algorithms)
        times[precision][mode][str(batch)] = one
        print(f"{precision} {mode} {batch:4}: {json.dumps(one)}", flush=True)
        if options.json is not None:  # at once: the rest may take minutes
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.figure is not None:
        draw(result, options.figure)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lstm",
        description="An LSTM on cuDNN beside one made of matrix products, and PyTorch's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    add("--modes", nargs="+", choices=_MODES, default=_MODES)
    add("--batches", nargs="+", type=positive_int, default=BATCHES)
    add("--algorithms", nargs="+", choices=ALGORITHMS, default=("standard",), help="cuDNN's")
    add("--commit", help="commit to record where there is no repository")
    add("--figure", type=Path, help="PNG to draw")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
