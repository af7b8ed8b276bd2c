from __future__ import annotations

import re

import pytest

from tests.documented import limits
from website.reference import PAGES, ROOT, marked

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name):
    assert (DOCS / name).read_text() == PAGES[name](), "run `make reference`"


def test_the_reference_holds_no_page_that_nothing_generates():
    found = {str(path.relative_to(DOCS)) for path in DOCS.glob("reference/*")}
    assert found == {name for name in PAGES if name.startswith("reference/")}


def test_every_test_of_statements_has_its_row():
    rows = {(row.path, row.test) for row in marked()}
    for path in (ROOT / "tests").rglob("test_statements.py"):
        for test in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
            assert (str(path.relative_to(ROOT)), test) in rows, "mark it with pytest.mark.states"


def test_every_metric_has_a_row():
    said = " ".join(row.text for row in marked() if row.subject == "metrics")
    for name in re.findall(r"`((?:lenet|process)_\w+)`", PAGES["reference/metrics.md"]()):
        assert f"`{name}`" in said, "find its value otherwise, in a test"


def test_every_documented_limit_has_a_row():
    said = {row.text for row in marked() if row.subject == "limits"}
    for limit in limits():
        assert any(limit.startswith(text) for text in said), f"no test has the row {limit!r}"
    for text in said:
        assert any(limit.startswith(text) for limit in limits()), f"no row begins with {text!r}"
