"""What the page tells a first-time visitor."""

from __future__ import annotations

import json
import re

import pytest

from tests.browser.strokes import STROKES
from tests.conftest import ROOT


def hints(page):
    return [text.split()[0] for text in page.locator(".hint:visible").all_inner_texts()]


@pytest.mark.parametrize("width", [1240, 360])
def test_three_hints_go_for_good_when_used_or_closed_and_return_by_the_button(
    service, visit, width
):
    page = visit(service, viewport={"width": width, "height": 740})
    assert hints(page) == ["1", "2", "3"]
    boxes = [one.bounding_box() for one in page.locator(".hint").all()]
    assert boxes == sorted(boxes, key=lambda box: box["y"])
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    page.draw(STROKES[3])
    assert hints(page) == ["2", "3"]
    page.click("#why")
    page.click("[aria-label='Close hint 2']")
    assert hints(page) == []
    assert page.get_attribute("#help", "aria-expanded") == "false"
    page.reload()
    page.wait_for_selector("#models tr", state="attached")
    assert hints(page) == []
    page.click("nav a[href='#service']")
    page.wait_for_selector("#service")
    page.focus("#help")
    page.keyboard.press("Enter")
    page.wait_for_selector("#draw")
    assert hints(page) == ["1", "2", "3"]
    assert page.get_attribute("#help", "aria-expanded") == "true"
    page.keyboard.press("Enter")
    assert hints(page) == []


def test_hints_are_shown_where_the_browser_keeps_nothing(service, visit):
    page = visit(service)
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('no'); } });"
    )
    page.reload()
    assert hints(page) == ["1", "2", "3"]
    page.draw(STROKES[3])
    page.reads("3,")
    assert hints(page) == ["2", "3"]


def test_each_chart_of_the_service_has_a_sentence_that_says_what_it_shows(service, visit):
    page = visit(service, "/#service")
    page.wait_for_selector("#loaded tr")
    cards = page.locator("#service .card").all()
    assert len(cards) == 5
    for card in cards:
        assert re.fullmatch(r"[A-Z].{60,}\.", card.locator("h2 + .note").inner_text())


def test_the_time_of_a_gpu_that_the_page_names_is_the_one_that_was_measured():
    page = (ROOT / "service/api/page/index.html").read_text()
    (said,) = re.findall(r"H100, takes ([\d.]+) ms for 1,024 images", page)
    engine = json.loads((ROOT / "docs/benchmarks/engine.json").read_text())
    assert "H100" in engine["device"]
    (measured,) = [
        one["device_us"]
        for one in engine["buckets"]
        if (one["rows"], one["precision"]) == (1024, "fp32")
    ]
    assert said == f"{measured / 1000:.3f}"
