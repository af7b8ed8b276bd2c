"""A picture of the engine's buckets: latency and throughput over batch size, PyTorch's beside it.

It needs matplotlib, which nothing else here does. It refuses to measure anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_report import PRECISIONS


class FigureMissing(Exception):
    """There is no picture: no matplotlib, or nothing to draw; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel; `time_us` finds its time in a bucket, None where there is none."""

    label: str
    color: str
    style: str
    marker: str
    time_us: Callable[[dict[str, Any]], float | None]


# Colours that the colour-blind tell apart. Source: Okabe & Ito 2008.
SERIES = (
    Series("PyTorch, eager", "#999999", "-", "v", lambda found: found["torch"]["eager_us"]),
    Series("PyTorch, CUDA graph", "#E69F00", "-", "s", lambda found: found["torch"]["graph_us"]),
    Series("PyTorch, compiled", "#D55E00", "-", "D", lambda found: found["torch"]["compile_us"]),
    Series("lenet-serve, host to host", "#0072B2", "--", "o", lambda found: found["host_us"]),
    Series("lenet-serve, on the device", "#0072B2", "-", "o", lambda found: found["device_us"]),
)

LIMITS = (
    ("copy_images_per_s", "pinned copy", PRECISIONS),
    ("matmul_images_per_s", "fp16 matrix rate", ("fp16",)),
)
"""Keys of the measured limits, the names they have in the picture, and whom they bind."""


def draw(content: dict[str, Any], path: Path) -> None:
    """Write a PNG of the buckets in `content`, a row of panels a precision, to `path`.

    Raises:
        FigureMissing: matplotlib or buckets are missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise FigureMissing(
            "a figure needs matplotlib: pip install 'lenet-serve[figure]', then --only figure with "
            "the JSON file"
        ) from exc
    buckets = content.get("buckets", [])
    precisions = [name for name in PRECISIONS if any(b["precision"] == name for b in buckets)]
    if not precisions:
        raise FigureMissing("there are no buckets to draw: measure them first, --only buckets")
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
        panel.xaxis.set_major_locator(_at(rows))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.xaxis.set_minor_locator(_at([]))
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.tick_params(axis="x", labelrotation=45, labelbottom=True)
        panel.set_xlabel("images in a batch")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    # What is drawn last, over the others, is named first.
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside upper center",
        ncols=len(SERIES),
        frameon=False,
    )
    about = [content.get("device"), str(content.get("date", ""))[:10], content.get("commit")]
    figure.supxlabel(
        f"{', '.join(part for part in about if part)}. From pixels in uint8 to probabilities; "
        "PyTorch's times are the device's, too.",
        fontsize="small",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _at(places: list[int]) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator(places)


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
        rates = [count / time_us for count, time_us in known]  # per microsecond: millions a second
        throughput.plot(rows, rates, **look)


def _limits(panel: Any, limits: dict[str, float], precision: str) -> None:
    for key, name, bound in LIMITS:
        if key in limits and precision in bound:
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
