"""Results of the engine benchmark: the JSON file, the printed lines and the figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks.baselines.torch_serving import Precision
from benchmarks.baselines.torch_step import MODES
from benchmarks.command import missing_library, save_picture
from lenet.files import write_atomically

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class Document:
    """The results, in memory and in the JSON file at `path`, which other benchmarks may share."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.content: dict[str, Any] = {}
        self.add({})

    def add(self, found: dict[str, Any]) -> None:
        """Add `found` and write the file: the next part may take minutes."""
        if self._path is not None and self._path.exists():
            self.content = json.loads(self._path.read_text())
        self.content = merged(self.content, found)
        if self._path is not None and found:
            write_atomically(self._path, (json.dumps(self.content, indent=1) + "\n").encode())


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """`before` updated with `found`; "buckets" are replaced one by one, other keys as a whole."""
    entries = [*before.get("buckets", []), *found.get("buckets", [])]
    order = {(PRECISIONS.index(entry["precision"]), entry["rows"]): entry for entry in entries}
    buckets = {"buckets": [order[key] for key in sorted(order)]} if order else {}
    return {**before, **found, **buckets}


def head(precision: Precision) -> str:
    """The header above the lines of a precision."""
    return (
        f"\n{precision}; PyTorch's times are on the device, JAX's of queued calls on the host; "
        "speedup: their best over ours\n"
        f"{'rows':>5}{'device us':>10} {'(min..max)':<16}{'host us':>8}{'p99':>8}"
        f"{'M images/s':>11}{'eager':>8}{'graph':>8}{'compile':>8}{'JAX':>8}{'speedup':>8}"
        f"{'error':>8}  strategy"
    )


def line(bucket: dict[str, Any]) -> str:
    """A bucket in one line."""
    low, high = bucket["device_spread_us"]
    others_us = [bucket["torch"][f"{mode}_us"] for mode in MODES]
    others_us.append(bucket.get("jax", {}).get("jit_us"))
    measured_us = [time_us for time_us in others_us if time_us is not None]
    cells = "".join(f"{'-' if time_us is None else f'{time_us:.1f}':>8}" for time_us in others_us)
    speedup = f"{min(measured_us) / bucket['device_us']:.1f}" if measured_us else "-"
    return (
        f"{bucket['rows']:>5}{bucket['device_us']:>10.1f} {f'({low:.1f}..{high:.1f})':<16}"
        f"{bucket['host_us']:>8.1f}{bucket['host_p99_us']:>8.1f}"
        f"{bucket['images_per_s'] / 1e6:>11.2f}{cells}{speedup:>8}{bucket['max_error']:>8.0e}  "
        f"{bucket['way']}"
    )


def pool_line(found: dict[str, Any], limits: dict[str, float]) -> str:
    """The throughput of some contexts at one batch size; `limits` may be empty."""
    share = ""
    if limits:
        share = f", {found['images_per_s'] / limits['copy_images_per_s']:.2f} of the copy limit"
    return (
        f"pool, {found['contexts']} contexts, {found['rows']:>4} rows: "
        f"{found['images_per_s'] / 1e6:6.2f} M images/s{share}"
    )


def gpus_line(found: dict[str, Any], kind: str) -> str:
    """Several GPUs compared with one; `kind`: "threads" or "processes"."""
    rates = found[kind]
    return (
        f"{found['n']} GPUs, {found['contexts']} contexts each, {found['rows']} rows, {kind}: "
        f"{rates['images_per_s'] / 1e6:.2f} M images/s, {rates['ratio']:.2f} times one GPU's "
        f"{rates['one_gpu_images_per_s'] / 1e6:.2f} M"
    )


def limits_line(limits: dict[str, float]) -> str:
    """The limits of the GPU, also as images per second."""
    return (
        f"limits: pinned copy {limits['copy_gb_s']:.1f} GB/s "
        f"({limits['copy_images_per_s'] / 1e6:.0f} M images/s), fp16 product "
        f"{limits['matmul_tflops']:.0f} TFLOP/s ({limits['matmul_images_per_s'] / 1e6:.0f} M)"
    )


class FigureUnavailable(Exception):
    """No figure can be drawn, for lack of matplotlib or of buckets; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line in a panel; `time_us` reads its time from a bucket, None where there is none."""

    label: str
    color: str
    style: str
    marker: str
    time_us: Callable[[dict[str, Any]], float | None]


# Colours that colour-blind readers can tell apart. Source: Okabe & Ito 2008.
SERIES = (
    Series("PyTorch, eager", "#999999", "-", "v", lambda found: found["torch"]["eager_us"]),
    Series("PyTorch, CUDA graph", "#E69F00", "-", "s", lambda found: found["torch"]["graph_us"]),
    Series("PyTorch, compiled", "#D55E00", "-", "D", lambda found: found["torch"]["compile_us"]),
    Series("JAX, jit", "#009E73", "-", "^", lambda found: found.get("jax", {}).get("jit_us")),
    Series("lenet-serve, host to host", "#0072B2", "--", "o", lambda found: found["host_us"]),
    Series("lenet-serve, on the device", "#0072B2", "-", "o", lambda found: found["device_us"]),
)

LIMITS = (
    ("copy_images_per_s", "pinned copy", PRECISIONS),
    ("matmul_images_per_s", "fp16 matrix rate", ("fp16",)),
)
"""Measured limits: JSON key, label, and the precisions that they apply to."""


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw latency and throughput of the buckets in `content`, a row of panels per precision.

    Raises:
        FigureUnavailable: matplotlib or buckets are missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator
    except ImportError as exc:
        raise FigureUnavailable(missing_library(exc)) from exc
    buckets = content.get("buckets", [])
    precisions = [name for name in PRECISIONS if any(b["precision"] == name for b in buckets)]
    if not precisions:
        raise FigureUnavailable("there are no buckets to draw: measure them with --only buckets")
    figure = Figure(figsize=(11, 1.2 + 4 * len(precisions)), layout="constrained", dpi=120)
    panels = figure.subplots(len(precisions), 2, squeeze=False, sharex=True, sharey="col")
    for (latency, throughput), precision in zip(panels, precisions, strict=True):
        _lines(latency, throughput, [b for b in buckets if b["precision"] == precision])
        _limits(throughput, content.get("limits", {}), precision)
        latency.set(title=f"{precision}: time of a batch", ylabel="time (µs)")
        throughput.set(title=f"{precision}: throughput", ylabel="million images per second")
    rows = sorted({bucket["rows"] for bucket in buckets})
    for panel in panels.flat:
        panel.set(xscale="log", yscale="log")
        panel.grid(color="#DDDDDD", linewidth=0.6)
        panel.xaxis.set_major_locator(FixedLocator(rows))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.xaxis.set_minor_locator(FixedLocator([]))
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.tick_params(axis="x", labelrotation=45, labelbottom=True)
        panel.set_xlabel("images in a batch")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    # The last series is drawn on top, so it comes first in the legend.
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside upper center",
        ncols=len(SERIES),
        frameon=False,
    )
    about = [content.get("device"), str(content.get("date", ""))[:10], content.get("commit")]
    figure.supxlabel(
        f"{', '.join(part for part in about if part)}. From pixels in uint8 to probabilities. "
        "PyTorch's times are on the device, JAX's of queued calls on the host.",
        fontsize="small",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_picture(figure, path)


def _lines(latency: Any, throughput: Any, buckets: list[dict[str, Any]]) -> None:
    for series in SERIES:
        points = [(bucket["rows"], series.time_us(bucket)) for bucket in buckets]
        known = [(rows, time_us) for rows, time_us in points if time_us is not None]
        if not known:
            continue
        rows, times_us = zip(*known, strict=True)
        look = {
            "label": series.label,
            "color": series.color,
            "linestyle": series.style,
            "marker": series.marker,
            "markersize": 4,
        }
        latency.plot(rows, times_us, **look)
        rates = [count / time_us for count, time_us in known]  # images per us: million images/s
        throughput.plot(rows, rates, **look)


def _limits(panel: Any, limits: dict[str, float], precision: str) -> None:
    for key, name, precisions in LIMITS:
        if key in limits and precision in precisions:
            rate = limits[key] / 1e6
            panel.axhline(rate, color="#333333", linewidth=0.8, linestyle=":")
            panel.annotate(
                f"{name}: {rate:,.0f}",
                (0.02, rate),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                fontsize="small",
            )
