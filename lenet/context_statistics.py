"""What an execution context tells of itself. It refuses to know what it computes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ContextStatistics:
    """What a context has done since it was made; written by who runs batches, read by any."""

    device: str = ""
    batches: int = 0
    rows: int = 0
    padding_rows: int = 0
    graph_hits: int = 0
    """Batches that replayed a captured graph."""
    graph_misses: int = 0
    golden_error: float = 0.0
    device_s: float | None = None
    """Seconds that the device took for the last batch, where it was asked."""
    device_bytes: int = 0
    """Device memory of all plans."""
    workspace_bytes: int = 0
    """The part of it that is scratch."""
