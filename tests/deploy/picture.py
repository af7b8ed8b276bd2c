"""Draw every panel of the dashboard from its queries: `python -m tests.deploy.picture FILE.png`.

A service with the committed weights gets a minute and a half of traffic, with every kind of outcome
and two lost devices in it, and a real Prometheus scrapes it. It looks like Grafana's as far as it
needs to show whether a panel says something: layout, units, legends, stacking.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from PIL import Image

from tests.deploy import live
from tests.service_process import PROJECT, Service

SECONDS, STEP_S = 90.0, 1.0
_COLUMNS, _WIDTH, _HEIGHT = 24, 0.62, 0.36  # of a cell of the grid, in inches
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u"))


def shown(value: float, unit: str) -> str:
    """A value as an axis or a number shows it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "dtdurations":
        return f"{value / 86400:.1f} days"
    if unit in ("reqps", "ops", "short"):
        return f"{value:.3g}" if unit == "short" else f"{value:.3g} /s"
    name = {"s": "s", "bytes": "B"}[unit]
    if value == 0:
        return f"0 {name}"
    scale, prefix = next((one for one in _PREFIXES if abs(value) >= one[0]), _PREFIXES[-1])
    return f"{value / scale:.3g} {prefix}{name}"


def traffic(service: Service, folder: Path, end_s: float) -> None:
    """Good requests all the time, bad ones every few seconds, and once the loss of both devices."""
    losing = end_s - SECONDS / 2
    rounds = 0
    while time.time() < end_s:
        rounds += 1
        live.good_requests(service, folder)
        if rounds % 20 == 0:
            live.bad_requests(service)
        if time.time() > losing:
            losing = math.inf
            live.lose_devices(service)


def main(path: str) -> None:
    """Draw the dashboard into `path`."""
    panels = json.loads(live.DASHBOARD.read_text())["panels"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ports = ("--port", "0", "--grpc-port", "0", "--device", "cpu")
        weights = ("--weights", str(PROJECT / "weights"))
        service = Service([*ports, *weights, *live.STARTS, *live.certificate(folder)], folder)
        try:
            service.ready(workers=2)
            with live.prometheus(folder, service.port) as prometheus:
                if prometheus is None:
                    sys.exit("prometheus is not installed (on Debian: apt install prometheus)")
                prometheus.wait_for('up{job="lenet-serve"} == 1')
                end_s = time.time() + SECONDS
                traffic(service, folder, end_s)
                draw(panels, prometheus, end_s, path)
        finally:
            service.end()


def draw(panels: list[Any], prometheus: live.Prometheus, end_s: float, path: str) -> None:
    """Draw all panels in their places."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    size = _COLUMNS * _WIDTH, rows * _HEIGHT
    plt.rcParams |= {"font.size": 7, "axes.titlesize": 8, "axes.titleweight": "bold"}
    figure = plt.figure(figsize=size)
    for panel in panels:
        at = panel["gridPos"]
        left, bottom = at["x"] / _COLUMNS, 1 - (at["y"] + at["h"]) / rows
        # Room for the numbers of the axes, the title above and the legend below.
        before, below = 0.5 / size[0], min(0.55, 0.3 * at["h"] * _HEIGHT) / size[1]
        width = at["w"] / _COLUMNS - before - 0.15 / size[0]
        height = at["h"] / rows - below - 0.3 / size[1]
        if panel["type"] in ("row", "text"):
            before, below, width, height = 0.1 / size[0], 0.0, at["w"] / _COLUMNS, at["h"] / rows
        axes = figure.add_axes((left + before, bottom + below, width, height))
        axes.set_title(panel["title"] if panel["type"] != "row" else "", loc="left")
        if panel["type"] == "row":
            axes.axis("off")
            axes.text(0, 0.3, panel["title"], weight="bold", size=11)
        elif panel["type"] == "text":
            axes.axis("off")
            text = re.sub(r"[*`]", "", panel["options"]["content"])
            axes.text(0, 0.95, textwrap.fill(text, 260), va="top")
        elif panel["type"] == "table":
            _table(axes, prometheus.query(live.query(panel["targets"][0])))
        elif panel["type"] == "stat":
            _number(axes, panel, prometheus)
        else:
            _over_time(axes, panel, prometheus, end_s)
    figure.savefig(path, dpi=80)
    drawn = Image.open(path).convert("RGB")
    few = drawn.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)  # a third of the bytes


def _legend(target: dict[str, str], labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), target["legendFormat"])


def _table(axes: Axes, found: list[dict[str, Any]]) -> None:
    axes.axis("off")
    columns = ["model", "version", "sha256"]
    cells = [[*(one["metric"][name] for name in columns), one["value"][1]] for one in found]
    cells = [[*row[:2], row[2][:16], row[3]] for row in cells]
    table = axes.table(cells or [[""] * 4], colLabels=[*columns, "instances"], loc="upper left")
    table.auto_set_font_size(False)


def _number(axes: Axes, panel: dict[str, Any], prometheus: live.Prometheus) -> None:
    axes.axis("off")
    (target,) = panel["targets"]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for one in prometheus.query(live.query(target)):
        text = f"{shown(float(one['value'][1]), unit)}\n"
        axes.text(0.5, 0.5, text, ha="center", va="center", size=18)
        axes.text(0.5, 0.3, _legend(target, one["metric"]), ha="center")


def _over_time(
    axes: Axes, panel: dict[str, Any], prometheus: live.Prometheus, end_s: float
) -> None:
    start_s = end_s - SECONDS
    found = [
        (_legend(target, one["metric"]), one)
        for target in panel["targets"]
        for one in prometheus.query_range(live.query(target), start_s, end_s, STEP_S)
    ]
    times_s = np.arange(0, SECONDS + STEP_S, STEP_S)
    lines = {name: np.full(len(times_s), np.nan) for name, _ in found}
    for name, one in found:
        for at_s, value in one["values"]:
            lines[name][round((at_s - start_s) / STEP_S)] = float(value)
    lines = {name: line for name, line in lines.items() if np.isfinite(line).any()}
    axes.tick_params(length=2)
    ticks = range(0, int(SECONDS) + 1, 30)
    axes.set_xticks(ticks, [f"{tick} s" for tick in ticks])
    if not lines:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center")
        return
    if panel["type"] == "heatmap":
        _heatmap(axes, times_s, lines)
        return
    axes.set_xlim(0, SECONDS)
    defaults = panel["fieldConfig"]["defaults"]
    fixed = {
        one["matcher"]["options"]: one["properties"][0]["value"]["fixedColor"]
        for one in panel["fieldConfig"]["overrides"]
    }
    others = iter((*plt.cm.tab10.colors[:2], *plt.cm.tab10.colors[3:], *plt.cm.Dark2.colors))
    colors = [f"tab:{fixed[name]}" if name in fixed else next(others) for name in lines]
    values = np.nan_to_num([*lines.values()])
    if defaults["custom"]["stacking"]["mode"] == "normal":
        axes.stackplot(times_s, values, labels=lines, colors=colors, alpha=0.8)
        values = values.sum(axis=0)
    else:
        for color, (name, line) in zip(colors, lines.items(), strict=True):
            axes.plot(times_s, line, lw=1.2, label=name, color=color)
    top = 1.05 * (defaults.get("max") or values.max() or 1)
    axes.set_ylim(-0.02 * top, top)  # lines at 0 and 100 % are seen
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, defaults["unit"]))
    axes.grid(alpha=0.3, lw=0.5)
    columns = max(1, panel["gridPos"]["w"] // 2)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, -0.12),
        ncols=columns,
        fontsize=5.5,
        frameon=False,
        handlelength=1,
        columnspacing=0.8,
    )


def _heatmap(axes: Axes, times_s: np.ndarray, lines: dict[str, np.ndarray]) -> None:
    bounds = sorted(lines, key=float)
    counts = np.diff([np.nan_to_num(lines[bound]) for bound in bounds], axis=0, prepend=0)
    used = np.flatnonzero(counts.any(axis=1))
    low, high = used[0], used[-1] + 1
    axes.pcolormesh(
        *(times_s, np.arange(low, high), counts[low:high]),
        cmap="Oranges",
        norm=PowerNorm(0.5),
        shading="nearest",
    )
    ticks = range(low, high, 2)
    axes.set_yticks(ticks, [shown(float(bounds[tick]), "s") for tick in ticks])


if __name__ == "__main__":
    main(sys.argv[1])
