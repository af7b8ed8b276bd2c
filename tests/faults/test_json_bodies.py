"""JSON that is deep, wide, long or no number, at a running service."""

from __future__ import annotations

import json

import pytest

from tests.faults.checks import cpu_s, decoding, serving
from tests.faults.clients import ask, request

JSON = b"application/json"
S_PER_MB = 0.05
START_S = 3.0
"""CPU time; a decoding process may have to be started first, which takes 0.2 s."""

CASES = {
    "nested 100,000 deep": b'{"images":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a million keys": b"{" + b",".join(b'"%d":0' % key for key in range(1_000_000)) + b"}",
    "a string of 30 MB": b'{"images":"' + b"a" * 30_000_000 + b'"}',
    "30 MB of zeros": b'{"images":[' + b"0," * 15_000_000 + b"0]}",
}


TOO_LARGE = ("a string of 30 MB", "30 MB of zeros")
"""Bodies that need more memory than a decoding process may use."""


@pytest.mark.parametrize("name", CASES)
def test_hostile_json_is_a_400_in_time_that_is_linear_in_its_bytes(served, intact, name):
    body = CASES[name]
    status, code = (413, "too_large") if name in TOO_LARGE else (400, "invalid_input")
    # The promise for any burst of refused bodies is 60 MB.
    with intact(moved={f"http {code}": 1}, rss_bytes=60_000_000, extra_descriptors=8):
        began_s = cpu_s(*serving(served), *decoding(served))
        answer = ask(served.port, request(body, kind=JSON))
        took_s = cpu_s(*serving(served), *decoding(served)) - began_s
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) == (status, code)
    assert error["field"]
    assert len(error["message"]) < 300
    assert took_s < START_S + S_PER_MB * len(body) / 1e6
