from __future__ import annotations

import pytest

from website.reference import PAGES, ROOT

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name):
    assert (DOCS / name).read_text() == PAGES[name](), "run `make reference`"


def test_the_reference_holds_no_page_that_nothing_generates():
    found = {str(path.relative_to(DOCS)) for path in DOCS.glob("reference/*")}
    assert found == {name for name in PAGES if name.startswith("reference/")}
