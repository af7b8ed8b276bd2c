"""What a batcher tells of its batches, as it sees it. It refuses to know who listens."""

from __future__ import annotations

from typing import Literal, Protocol

from service.policy import CutReason


class BatchObserver(Protocol):
    """Told of batches, never of single rows; `service.metrics` is the real one."""

    def batch_cut(self, rows: int, reason: CutReason, waiting_rows: int, busy: int) -> None:
        """A batch of `rows` left the queue; `waiting_rows` stay, `busy` contexts work."""
        ...

    def batch_done(
        self,
        rows: int,
        compute_s: float,
        busy: int,
        *,
        device_s: float | None,
        padding_rows: int,
        graph_hit: bool,
    ) -> None:
        """A context finished a batch of `rows` rows; see `service.worker.BatchResult`."""
        ...

    def rows_dropped(self, rows: int, reason: Literal["cancelled", "late"]) -> None:
        """Waiting rows were forgotten."""
        ...
