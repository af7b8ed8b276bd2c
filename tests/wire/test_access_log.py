from __future__ import annotations

import json
import os
import queue

import pytest

from service.api.paths import PROBES
from wire.access_log import AccessLog
from wire.ids import Ids


@pytest.mark.parametrize(
    ("request_", "status", "has_line"),
    [
        *(
            (f"{method} {path}", 200, False)
            for method in ("GET", "HEAD")
            for path in ("/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready")
        ),
        *((method, "OK", False) for method in ("Check", "ServerLive", "ServerReady")),
        ("Watch", "CANCELLED", False),
        ("GET /readyz", 503, True),
        ("GET /metrics", 401, True),
        ("Check", "UNAVAILABLE", True),
        ("POST /healthz", 405, True),
        ("POST /predict", 200, True),
        ("ModelInfer", "OK", True),
    ],
)
def test_probes_and_scrapes_that_succeed_have_lines_only_where_they_are_wanted(
    request_, status, has_line
):
    for left_out, wanted in (((), True), (PROBES, has_line)):
        lines = queue.Queue()
        AccessLog("json", lines, left_out).add("http", "-", request_, status, 0, 0.1, Ids())
        assert lines.qsize() == wanted


def test_a_line_in_json_has_the_fields_of_a_log_line_and_the_ids_of_its_request():
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    lines = queue.Queue()
    ids = Ids.read({"x-request-id": "r1", "traceparent": f"00-{trace}-{span}-01"})
    AccessLog("json", lines).add("http", "-", "POST /predict", 200, 0, 0.1, ids)
    found = json.loads(lines.get())
    assert (found["level"], found["pid"], found["logger"]) == ("INFO", os.getpid(), "access")
    assert (found["request_id"], found["trace_id"], found["span_id"]) == ("r1", trace, span)
