"""Logging to standard error: one line a life-cycle event. What happens per request is a metric."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal, TypeAlias

Format: TypeAlias = Literal["text", "json"]

_LIBRARIES = {
    "uvicorn.error": "ERROR",  # a warning for each malformed request
    "python_multipart": "ERROR",  # a warning for each malformed body: a bad client fills the log
    "PIL": "INFO",  # two lines a picture at debug
    "hpack": "INFO",  # every header at debug, keys included
}


_IDS = ("request_id", "trace_id", "span_id")

_OF_CLIENTS = (
    # A client that is gone in the middle of the TLS handshake.
    "unable to perform operation on <TCPTransport closed=True",
)


def configure(level: str, form: Format = "text") -> None:
    """Write every log line of at least `level`, with UTC time and process id."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, least in _LIBRARIES.items():
        logging.getLogger(name).setLevel(least)
    logging.getLogger("asyncio").addFilter(_is_a_fault)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03dZ [%(process)d] %(levelname)s %(name)s: %(message)s",
            "%Y-%m-%dT%H:%M:%S",
        )
        self.converter = time.gmtime


class _Json(_Text):
    """An object a line; a trace is in `exception`. Names as in the access log."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        given = vars(record)  # `extra` of the call that logs
        fields |= {name: given[name] for name in _IDS if name in given}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Drop what libraries write about their clients."""
    text = f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
    return not any(part in text for part in _OF_CLIENTS)
