"""The site that `make docs` builds, opened from the file system."""

from __future__ import annotations

import pytest

PAGES = ("index.html", "docs/reference/settings.html", "docs/architecture.html")
SOURCE = "service/request.py.html"
SERIOUS = ("error", "warning")
WIDTHS = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 390, "height": 844}}


@pytest.fixture
def open_page(browser, site):
    """`open_page("index.html", ...)` opens a page; nothing may go wrong or be asked of a server."""
    wrong, contexts = [], []

    def open_page(name, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type in SERIOUS else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if _is_far(request) else None)
        page.goto(f"{site.as_uri()}/{name}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def _is_far(request):
    return not request.url.startswith(("file:", "data:", "blob:", "about:"))


@pytest.mark.parametrize(("scheme", "width"), [("light", "narrow"), ("dark", "wide")])
def test_everybody_can_read_the_site(open_page, site, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(PAGES[0], color_scheme=scheme, viewport=WIDTHS[width])
    for name in (*PAGES, SOURCE):
        page.goto(f"{site.as_uri()}/{name}")
        too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not page.evaluate(too_wide), name
        found = Axe().run(page, options={"preload": False})
        assert found.violations_count == 0, f"{name}\n{found.generate_report()}"


def test_the_search_finds_a_page_without_a_server_when_a_word_is_typed(open_page):
    from playwright.sync_api import expect

    page = open_page(PAGES[0])
    page.click(".md-search__button")
    query = page.get_by_role("combobox", name="Search")
    for count, letter in enumerate("settings", 1):
        page.keyboard.press(letter)
        expect(query).to_have_value("settings"[:count])
    page.get_by_role("option", name="Settings of the service").first.click()
    page.wait_for_url("**/docs/reference/settings.html*")


def test_a_link_to_a_line_of_the_source_shows_that_line(open_page):
    page = open_page(f"{SOURCE}#L40")
    box = page.locator("#L40").bounding_box()
    assert 0 <= box["y"] < page.viewport_size["height"]
