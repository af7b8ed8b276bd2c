"""A forward pass in PyTorch, in the variants that its documentation recommends for speed.

The input is uint8 (n, 28, 28) on the device, the output float32 probabilities on the device: the
work of one of our plans between its two copies. As in ours, the 1/255 is folded into the first
layer. Only a variant whose probabilities agree with the reference is timed.

Each function imports torch, which this project does not depend on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines import torch_step
from benchmarks.baselines.torch_step import MODES, Layout, captured, network
from benchmarks.baselines.torch_training import summarise, torch_on_gpu
from benchmarks.timing import rounds_us, torch_timer
from lenet.pixels import SCALE, Images
from lenet.weightfile import WeightFile

Precision: TypeAlias = Literal["fp16", "tf32", "fp32"]
"""Weights and activations in float16, or in float32 with or without TF32."""

TOLERANCES: dict[Precision, float] = {"fp16": 2e-2, "tf32": 2e-2, "fp32": 1e-4}
"""The largest rounding error of a probability; a wrong network differs by up to 1."""

Forward: TypeAlias = Callable[[], Any]
"""One pass; returns the probabilities, a tensor on the device."""


class WrongAnswer(RuntimeError):
    """A variant computes wrong probabilities, so its time means nothing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One implementation of the pass: `compile_mode` is torch.compile's, "" without it."""

    layout: Layout
    compile_mode: str = ""
    captured: bool = False

    def __str__(self) -> str:
        parts = [self.compile_mode, "one CUDA graph" if self.captured else "", self.layout]
        return ", ".join(part for part in parts if part)


VARIANTS: dict[str, tuple[Variant, ...]] = {
    "eager": (Variant("contiguous"), Variant("channels_last")),
    "graph": (Variant("contiguous", captured=True), Variant("channels_last", captured=True)),
    # The compiler chooses layouts itself. "max-autotune" also captures, and copies its input first.
    # "max-autotune-no-cudagraphs", captured by hand, launches nothing besides the graph.
    "compile": (
        Variant("contiguous", "max-autotune"),
        Variant("contiguous", "max-autotune-no-cudagraphs", captured=True),
    ),
}
"""The variants to measure, by mode."""


@contextmanager
def settings(precision: Precision) -> Iterator[None]:
    """Set PyTorch's process-wide switches for `precision`, without autograd."""
    import torch

    with torch_step.settings("fp32" if precision == "fp32" else "tf32"), torch.inference_mode():
        yield


def forward_pass(
    weights: WeightFile,
    images: Images,
    precision: Precision,
    variant: Variant,
    device: str = "cuda",
) -> Forward:
    """A pass of the network of `weights` over `images`, uint8 (n, 28, 28), copied to the device.

    Call this, and the pass, inside `settings(precision)`. `variant.captured` needs a CUDA device.
    """
    import torch

    model = weights.model
    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    dtype = torch.float16 if precision == "fp16" else torch.float32
    first = next(iter(weights.tensors))
    # Tensors made in inference mode have no version counter, which the compiler reads.
    with torch.inference_mode(False), torch.no_grad():
        net = network(model).eval()
        both = zip(net.parameters(), weights.tensors.items(), strict=True)
        for parameter, (name, tensor) in both:
            parameter.copy_(torch.from_numpy(tensor * np.float32(SCALE if name == first else 1)))
        net.to(device, dtype, memory_format=layouts[variant.layout])
        pixels = torch.from_numpy(np.array(images)).to(device)

    def probabilities(pixels: Any) -> Any:
        logits = net(pixels.to(dtype).view(-1, *model.input))
        return torch.softmax(logits, dim=1, dtype=torch.float32)

    if variant.compile_mode:
        probabilities = torch.compile(probabilities, mode=variant.compile_mode, dynamic=False)

    def forward() -> Any:
        return probabilities(pixels)

    return captured(forward) if variant.captured else forward


def measure(
    weights: WeightFile,
    images: Images,
    expected: NDArray[np.float64],
    precision: Precision,
    modes: Sequence[str] = MODES,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time the variants of a pass over `images`, uint8 (n, 28, 28).

    `expected`: probabilities (n, classes) of the images. `modes`: those of `MODES` to time;
    "compile" takes up to a minute. `report` gets one line per variant, as soon as it is measured.

    Returns: for each of `MODES` `<mode>_us`, the median of the rounds of the fastest variant,
    `<mode>_spread_us`, its [minimum, maximum], and `<mode>_variant`, its name; all None where no
    variant was measured. `medians_us` has the median of each measured variant, `failed` the error
    of each that failed.

    Raises:
        BaselineUnavailable: no PyTorch or no GPU.
    """
    torch = torch_on_gpu()
    found: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    failed: dict[str, str] = {}
    tried = [(mode, variant) for mode in modes for variant in VARIANTS[mode]]
    for mode, variant in tried:
        name, start_s = str(variant), time.monotonic()
        torch.compiler.reset()
        try:
            with settings(precision):
                forward = forward_pass(weights, images, precision, variant)
                check(partial(_on_host, forward), expected, precision)
                found[mode][name] = rounds_us(forward, torch_timer())
        except RuntimeError as exc:  # what compilation and capture raise
            failed[f"{mode}: {name}"] = f"{type(exc).__name__}: {exc}"[:500]
        took_s = time.monotonic() - start_s
        best = f"{min(found[mode][name]):.1f} us at best" if name in found[mode] else "failed"
        report(f"PyTorch, {precision}, {len(images)} rows, {mode}: {name}: {best}, {took_s:.0f} s")
    torch.cuda.empty_cache()
    return {**summarise(found), "failed": failed}


def _on_host(forward: Forward) -> NDArray[np.float32]:
    probabilities: NDArray[np.float32] = forward().cpu().numpy()
    return probabilities


def check(
    forward: Callable[[], NDArray[np.float32]], expected: NDArray[np.float64], precision: Precision
) -> None:
    """Compare three passes with `expected`: a compiled one warms up, records, and then replays.

    Raises:
        WrongAnswer: a probability differs by more than the precision's tolerance.
    """
    for _ in range(3):
        error = float(np.abs(forward() - expected).max())
        if not error <= TOLERANCES[precision]:
            raise WrongAnswer(
                f"probabilities differ by {error:.1e} from the reference, expected at most "
                f"{TOLERANCES[precision]:.0e}"
            )
