from __future__ import annotations

import json
import logging
import os
import re
from datetime import UTC, datetime

import pytest

from service import logs

_QUIETED = ("uvicorn.error", "python_multipart", "PIL", "hpack")


@pytest.fixture(autouse=True)
def restored():
    """Restores the logging settings of pytest and others."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    quieted = [logging.getLogger(name) for name in _QUIETED]
    levels = [logger.level for logger in quieted]
    # `basicConfig` closes the handlers that it finds; pytest's are still needed.
    root.handlers = []
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    for logger, level in zip(quieted, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_lines_from_the_asked_for_level_on_are_written_to_standard_error(capsys, level):
    logs.configure(level)
    for name in ("debug", "info", "warning", "error"):
        logging.getLogger("service.test").log(getattr(logging, name.upper()), "a %s line", name)
    lines = capsys.readouterr().err.splitlines()
    order = ["debug", "info", "warning", "error"]
    assert [line.rpartition("a ")[2].split()[0] for line in lines] == order[order.index(level) :]
    assert re.fullmatch(
        rf"{datetime.now(UTC):%Y-%m-%dT%H:}\S+Z \[{os.getpid()}\] {level.upper()} service.test: "
        f"a {level} line",
        lines[0],
    )


def test_libraries_do_not_fill_the_log(capsys):
    logs.configure("debug")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("python_multipart.multipart").warning("Skipping data after last boundary")
    logging.getLogger("PIL.PngImagePlugin").debug("STREAM b'IHDR' 16 13")
    logging.getLogger("hpack.hpack").debug("Decoded (authorization, Bearer 1234), consumed 9")
    # uvloop's line for a client that leaves in its handshake.
    left = RuntimeError("unable to perform operation on <TCPTransport closed=True>; closed")
    logging.getLogger("asyncio").error("Fatal error on transport", exc_info=left)
    assert capsys.readouterr().err == ""
    logging.getLogger("uvicorn.error").error("Exception in ASGI application")
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2].split()[0] for line in lines] == ["Exception", "Task"]


def test_a_line_in_json_is_an_object_with_the_ids_of_its_request(capsys):
    logs.configure("info", "json")
    logger = logging.getLogger("service.test")
    logger.info("two\nlines: %d", 7)
    ids = {"request_id": "r1", "trace_id": "4b" * 16, "span_id": "00" * 8}
    try:
        raise ValueError("x")
    except ValueError:
        logger.exception("failed", extra=ids)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(rf"{datetime.now(UTC):%Y-%m-%dT%H:}\S+\.\d\d\dZ", first.pop("time"))
    assert first == {
        "level": "INFO",
        "pid": os.getpid(),
        "logger": "service.test",
        "message": "two\nlines: 7",
    }
    assert second["exception"].endswith("ValueError: x")
    assert ids.items() <= second.items()
