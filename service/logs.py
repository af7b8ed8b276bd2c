"""Logging to standard error: one line a life-cycle event. What happens per request is a metric."""

from __future__ import annotations

import logging
import time

_LIBRARIES = {
    "uvicorn.error": "WARNING",  # its start and stop repeat ours
    "python_multipart": "ERROR",  # a warning for each malformed body: a bad client fills the log
    "PIL": "INFO",  # two lines a picture at debug
    "hpack": "INFO",  # every header at debug, keys included
}


_OF_CLIENTS = (
    # A client that is gone in the middle of the TLS handshake.
    "unable to perform operation on <TCPTransport closed=True",
)


def configure(level: str) -> None:
    """Write every log line of at least `level`, with UTC time and process id."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ [%(process)d] %(levelname)s %(name)s: %(message)s",
        "%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, least in _LIBRARIES.items():
        logging.getLogger(name).setLevel(least)
    logging.getLogger("asyncio").addFilter(_is_a_fault)


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Drop what libraries write about their clients."""
    text = f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
    return not any(part in text for part in _OF_CLIENTS)
