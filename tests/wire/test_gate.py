"""Access rules apart from those that `tests/service/test_every_route.py` tests."""

from __future__ import annotations

import logging

import pytest

import tests.wire.test_http2 as h2
from tests.faults.http2 import call_headers, message
from tests.wire.test_statements import Client, Door
from wire.budget import Budget
from wire.door import HttpService
from wire.gate import Gate
from wire.keys import Keys
from wire.unary import unary


@pytest.mark.parametrize(
    ("origin", "shown"),
    [
        ("http://localhost:3000", "'http://localhost:3000'"),
        ("null", "'null'"),
        ("https://a\x1b[31m\r\n" + 99 * "x", r"'https://a\x1b[31m\r\n" + 24 * "x" + "'..."),
        ("http://127.0.0.1:8000", None),  # the service's own page
        ("", None),
    ],
)
def test_a_page_of_another_origin_is_logged_once_where_none_may_read_answers(caplog, origin, shown):
    caplog.set_level(logging.INFO)
    gate = Gate()
    for _ in range(3):
        assert gate.cors_lines({"origin": origin, "host": "127.0.0.1:8000"}) == b""
    expected = shown and (
        f"a page of {shown} asked; its browser lets it read no answer, as no origin is allowed "
        "(said once)"
    )
    assert caplog.messages == [expected] * (shown is not None)


def test_nothing_is_logged_where_pages_of_some_origins_may_read_answers(caplog):
    caplog.set_level(logging.INFO)
    Gate(origins=["https://a.example"]).cors_lines({"origin": "null", "host": "a"})
    assert caplog.messages == []


@pytest.mark.parametrize(("key", "status"), [("", "16"), ("wrong", "16"), ("a-key", "0")])
def test_calls_need_a_key_where_there_are_keys(key, status):
    door = Door()
    methods = {b"/test.Echo/Call": unary(bytes.upper)}
    door.door = HttpService({}, Budget(1 << 20), gate=Gate(Keys(["a-key"])), methods=methods)
    given = h2.field(b"authorization", b"Bearer " + key.encode()) if key else b""
    head = call_headers(b"/test.Echo/Call", given)
    client = Client(h2.START + h2.headers(head, 4) + h2.data(1, message(b"a"), h2.END), door=door)
    assert client.outcome() == status
