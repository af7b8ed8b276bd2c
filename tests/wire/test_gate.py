"""Access rules apart from those that `tests/service/test_every_route.py` tests."""

from __future__ import annotations

import logging

import pytest

from wire.gate import Gate


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
        f"a page of {shown} asked; browsers let pages of other origins read answers only with "
        "--cors-origins (said once)"
    )
    assert caplog.messages == [expected] * (shown is not None)


def test_nothing_is_logged_where_pages_of_some_origins_may_read_answers(caplog):
    caplog.set_level(logging.INFO)
    Gate(origins=["https://a.example"]).cors_lines({"origin": "null", "host": "a"})
    assert caplog.messages == []
