"""What the engine's benchmark writes and prints: one JSON file, one line a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from benchmarks.peers.torch_serving import Precision
from benchmarks.peers.torch_step import WAYS
from lenet.files import write_atomically

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class Document:
    """What was measured, in memory and in the JSON file at `path`, which others may write, too."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.content: dict[str, Any] = {}
        self.keep({})

    def keep(self, found: dict[str, Any]) -> None:
        """Add `found` at once: what comes next may take minutes."""
        if self._path is not None and self._path.exists():
            self.content = json.loads(self._path.read_text())
        self.content = merged(self.content, found)
        if self._path is not None and found:
            write_atomically(self._path, (json.dumps(self.content, indent=1) + "\n").encode())


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """`found` in the place of what `before` has of the same; of buckets, row by row."""
    entries = [*before.get("buckets", []), *found.get("buckets", [])]
    order = {(PRECISIONS.index(entry["precision"]), entry["rows"]): entry for entry in entries}
    buckets = {"buckets": [order[key] for key in sorted(order)]} if order else {}
    return {**before, **found, **buckets}


def head(precision: Precision) -> str:
    """Over the lines of a precision."""
    return (
        f"\n{precision}; PyTorch's are times of the device, and its best is `times` ours\n"
        f"{'rows':>5}{'device us':>10} {'(least..most)':<16}{'host us':>8}{'p99':>8}"
        f"{'M images/s':>11}{'eager':>8}{'graph':>8}{'compile':>8}{'times':>6}{'error':>8}  way"
    )


def line(bucket: dict[str, Any]) -> str:
    """A bucket in one line; `times` is PyTorch's best over ours."""
    least, most = bucket["device_spread_us"]
    peers = [bucket["torch"][f"{way}_us"] for way in WAYS]
    known = [time_us for time_us in peers if time_us is not None]
    cells = "".join(f"{'-' if time_us is None else f'{time_us:.1f}':>8}" for time_us in peers)
    times = f"{min(known) / bucket['device_us']:.1f}" if known else "-"
    return (
        f"{bucket['rows']:>5}{bucket['device_us']:>10.1f} {f'({least:.1f}..{most:.1f})':<16}"
        f"{bucket['host_us']:>8.1f}{bucket['host_p99_us']:>8.1f}"
        f"{bucket['images_per_s'] / 1e6:>11.2f}{cells}{times:>6}{bucket['max_error']:>8.0e}  "
        f"{bucket['way']}"
    )


def pool_line(found: dict[str, Any], limits: dict[str, float]) -> str:
    """Of a number of contexts and a batch size; `limits` may be empty."""
    share = ""
    if limits:
        share = f", {found['images_per_s'] / limits['copy_images_per_s']:.2f} of the copy limit"
    return (
        f"pool, {found['contexts']} contexts, {found['rows']:>4} rows: "
        f"{found['images_per_s'] / 1e6:6.2f} M images/s{share}"
    )


def gpus_line(found: dict[str, Any], kind: str) -> str:
    """Of `kind`, threads or processes."""
    rates = found[kind]
    return (
        f"{found['n']} GPUs, {found['contexts']} contexts each, {found['rows']} rows, {kind}: "
        f"{rates['images_per_s'] / 1e6:.2f} M images/s, {rates['ratio']:.2f} of one GPU's "
        f"{rates['one_gpu_images_per_s'] / 1e6:.2f} M"
    )


def limits_line(limits: dict[str, float]) -> str:
    """Rates, and what they are in images."""
    return (
        f"limits: pinned copy {limits['copy_gb_s']:.1f} GB/s "
        f"({limits['copy_images_per_s'] / 1e6:.0f} M images/s), fp16 product "
        f"{limits['matmul_tflops']:.0f} TFLOP/s ({limits['matmul_images_per_s'] / 1e6:.0f} M)"
    )
