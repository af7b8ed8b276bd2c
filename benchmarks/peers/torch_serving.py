"""A forward pass in PyTorch, in the variants that its documentation lets hope are fastest.

Pixels are uint8 (n, 28, 28) and already on the device, the answer is float32 probabilities that
stay there: what a bucket of ours does between its two copies. As in ours, the 1/255 is folded into
the first layer. It refuses to time a variant whose probabilities are not the reference's.

torch is no dependency of this project: each function imports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import torch_step
from benchmarks.peers.torch_step import WAYS, Layout, captured, network
from benchmarks.peers.torch_training import summarise, torch_on_gpu
from benchmarks.stopwatch import rounds_us, torch_timer
from lenet.pixels import SCALE, Images
from lenet.weightfile import WeightFile

Precision: TypeAlias = Literal["fp16", "tf32", "fp32"]
"""Weights and values in float16, or in float32 with or without TF32."""

TOLERANCES: dict[Precision, float] = {"fp16": 2e-2, "tf32": 2e-2, "fp32": 1e-4}
"""The largest difference of a probability that a precision explains; one near 1 is a mistake."""

Forward: TypeAlias = Callable[[], Any]
"""One pass; returns the probabilities, a tensor on the device."""


class WrongAnswer(RuntimeError):
    """A variant computes something else: what it takes means nothing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to write the same pass: `mode` is torch.compile's, "" without it."""

    layout: Layout
    mode: str = ""
    captured: bool = False

    def __str__(self) -> str:
        parts = [self.mode, "one CUDA graph" if self.captured else "", self.layout]
        return ", ".join(part for part in parts if part)


VARIANTS: dict[str, tuple[Variant, ...]] = {
    "eager": (Variant("contiguous"), Variant("channels_last")),
    "graph": (Variant("contiguous", captured=True), Variant("channels_last", captured=True)),
    # The compiler chooses layouts by itself. "max-autotune" captures by itself, too, and copies its
    # input first; without that, and captured by hand, nothing is launched beside the graph.
    "compile": (
        Variant("contiguous", "max-autotune"),
        Variant("contiguous", "max-autotune-no-cudagraphs", captured=True),
    ),
}
"""What is tried of each of `WAYS`."""


@contextmanager
def settings(precision: Precision) -> Iterator[None]:
    """PyTorch's process-wide switches for `precision`; nothing inside is recorded for gradients."""
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
    """The network of `weights` for `images`, uint8 (n, 28, 28), which it lays on the device.

    `variant.captured` needs a CUDA device. Call it, and what it returns, inside
    `settings(precision)`.
    """
    import torch

    model = weights.model
    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    dtype = torch.float16 if precision == "fp16" else torch.float32
    first = next(iter(weights.tensors))
    # Tensors made in inference mode have no version, and the compiler asks for it.
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

    if variant.mode:
        probabilities = torch.compile(probabilities, mode=variant.mode, dynamic=False)

    def forward() -> Any:
        return probabilities(pixels)

    return captured(forward) if variant.captured else forward


def measure(
    weights: WeightFile,
    images: Images,
    expected: NDArray[np.float64],
    precision: Precision,
    ways: Sequence[str] = WAYS,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time the variants of a pass over `images`, uint8 (n, 28, 28).

    `expected`: probabilities (n, classes) of the images. `ways`: those of `WAYS` to time;
    "compile" takes up to a minute. `report` gets a line a variant, as soon as it is done.

    Returns: for each way of `WAYS` `<way>_us`, the median of the rounds of the fastest variant,
    `<way>_spread_us`, its [least, most], and `<way>_variant`, its name; all None where none was
    tried or worked. `medians_us` has the median of each variant that worked, `failed` the reason of
    each that did not.

    Raises:
        PeerMissing: no PyTorch or no GPU.
    """
    torch = torch_on_gpu()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in WAYS}
    failed: dict[str, str] = {}
    tried = [(way, variant) for way in ways for variant in VARIANTS[way]]
    for way, variant in tried:
        name, begun_s = str(variant), time.monotonic()
        torch.compiler.reset()
        try:
            with settings(precision):
                forward = forward_pass(weights, images, precision, variant)
                check(forward, expected, precision)
                found[way][name] = rounds_us(forward, torch_timer())
        except RuntimeError as exc:  # what compilation and capture raise
            failed[f"{way}: {name}"] = f"{type(exc).__name__}: {exc}"[:500]
        took_s = time.monotonic() - begun_s
        told = "failed" if name not in found[way] else f"{min(found[way][name]):.1f} us at least"
        report(f"PyTorch, {precision}, {len(images)} rows, {way}: {name}: {told}, {took_s:.0f} s")
    torch.cuda.empty_cache()
    return {**summarise(found), "failed": failed}


def check(forward: Forward, expected: NDArray[np.float64], precision: Precision) -> None:
    """Run it three times: a compiled pass warms up, records, and only then replays.

    Raises:
        WrongAnswer: a probability differs by more than the precision explains.
    """
    for _ in range(3):
        probabilities = forward().cpu().numpy()
        error = float(np.abs(probabilities - expected).max())
        if not error <= TOLERANCES[precision]:
            raise WrongAnswer(
                f"probabilities differ by {error:.1e} from the reference, expected at most "
                f"{TOLERANCES[precision]:.0e}"
            )
