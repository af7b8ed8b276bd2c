"""Logging: one line a life event, to standard error. What happens per request is a metric."""

from __future__ import annotations

import logging


def configure(level: str) -> None:
    """Send every log line of at least `level` to standard error."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    # uvicorn's own story of its start and stop would tell ours twice.
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    # It warns of each malformed body: a bad client could fill the log.
    logging.getLogger("python_multipart").setLevel("ERROR")
