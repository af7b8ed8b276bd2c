"""Drawings that are kept by class on the page, and what is downloaded of them."""

from __future__ import annotations

import base64
import io
import json
import zipfile

from PIL import Image

from tests.browser.strokes import STROKES, row
from trainer.datasets import read

LETTERS = [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"]
KEPT = "lenet-serve hand"
# As large as the surface, at all of its edges.
EDGES = [[(2.9 * (x - 0.32), 1.65 * (y - 0.2)) for x, y in points] for points in STROKES[5]]


def class_button(page, name):
    return page.locator(f'#classes button[aria-label^="{name}, "]')


def teach(page, strokes, name):
    """Draw on an empty surface, and keep the drawing as one of the class `name`."""
    page.click("#clear")
    page.until("digit", " === ''")
    page.draw(strokes)
    class_button(page, name).click()
    page.until("hand-note", f".startsWith('It is {name}.')")


def counts(page):
    """How many drawings of each class are shown, of those that have any."""
    rows = page.locator("#classes button:has(small:not(:empty))").all()
    return {
        one.locator("span").inner_text(): int(one.locator("small").inner_text()) for one in rows
    }


def download(page):
    with page.expect_download() as started:
        page.click("#hand-zip")
    assert started.value.suggested_filename == "hand.zip"
    return zipfile.ZipFile(started.value.path())


def kept(page):
    return json.loads(page.evaluate("key => localStorage.getItem(key)", KEPT) or "[]")


def other_classes(page, names):
    """Let the page believe that all models have other classes."""
    info = page.request.get(f"{page.origin}/info").json()
    for model in info["models"]:
        model["labels"] = names
    page.route("**/info", lambda route: route.fulfill(json=info))
    page.reload()
    page.wait_for_selector("#models tr", state="attached")


def test_the_service_and_the_trainer_read_what_was_drawn_in_each_downloaded_picture(
    service, visit, tmp_path, monkeypatch
):
    page = visit(service)
    teach(page, STROKES[4], "4")
    teach(page, EDGES, "5")
    page.click("#clear")
    page.draw(row([6, 0, 2]))
    page.reads("602,")
    page.click("#seen button:nth-child(3)")
    page.wait_for_selector("#seen button:nth-child(3)[aria-pressed=true]")
    class_button(page, "2").click()
    page.until("hand-note", " === 'It is 2. Kept: 3 drawings of 3 classes.'")

    archive = download(page)
    assert archive.testzip() is None
    assert archive.namelist() == [f"hand/{digit}/0001.png" for digit in (4, 5, 2)]
    archive.extractall(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = read(tmp_path / "hand")
    assert found.names == ("2", "4", "5")
    for name, image in zip(found.names, found.parts["train"].images, strict=True):
        picture, headers = archive.read(f"hand/{name}/0001.png"), {"Content-Type": "image/png"}
        drawing = Image.open(io.BytesIO(picture))
        assert min(drawing.size) >= 140
        left, top, right, bottom = drawing.convert("L").getbbox()
        margins = left, top, drawing.width - right, drawing.height - bottom
        assert min(margins) >= drawing.width // 10
        asked = page.request.post(f"{page.origin}/explain", data=picture, headers=headers).json()
        assert base64.b64decode(asked["images"][0]) == image.tobytes()
        assert str(asked["prediction"]["label"]) == name
        assert not asked.get("warnings")


def test_a_drawing_whose_answer_is_late_is_kept_as_it_is_on_the_surface(service, visit):
    page = visit(service)
    first, *others = STROKES[4]
    page.draw([first])
    page.until("digit", " !== ''")
    page.route("**/predict?*", lambda route: None)
    page.draw(others)
    class_button(page, "4").click()
    assert counts(page) == {"4": 1}
    ((_, drawing),) = kept(page)
    assert len(json.loads(drawing)[1]) == len(STROKES[4])
    page.unroute("**/predict?*")  # what was held goes on
    page.until("live", ".startsWith('4,')")
    class_button(page, "9").click()
    assert counts(page) == {"9": 1}


def test_a_drawing_is_kept_once_counted_and_forgotten_by_one_button(service, visit):
    page = visit(service)
    assert page.is_disabled("#hand-zip")
    assert page.is_disabled("#forget")
    teach(page, STROKES[3], "8")
    class_button(page, "3").click()  # it was a mistake
    assert counts(page) == {"3": 1}
    teach(page, STROKES[3], "3")  # the same lines are another drawing
    class_button(page, "3").click()
    page.until("hand-note", " === 'Taken back. Kept: 1 drawing of 1 class.'")
    assert page.locator("#classes [aria-pressed=true]").count() == 0
    class_button(page, "7").click()
    assert counts(page) == {"3": 1, "7": 1}

    page.reload()
    page.until("hand-note", " === 'Kept: 2 drawings of 2 classes.'")
    assert counts(page) == {"3": 1, "7": 1}
    page.click("#forget")
    page.until("hand-note", " === 'Forgotten. No drawing is kept.'")
    assert counts(page) == {}
    assert KEPT not in page.evaluate("Object.keys(localStorage)")


def test_what_was_not_drawn_here_is_not_kept(service, visit):
    page = visit(service)
    page.wait_for_selector("#classes button:disabled")
    page.draw(STROKES[3])
    page.wait_for_selector("#classes button:enabled")
    page.click("#samples button")
    page.wait_for_selector("#classes button:disabled")


def test_drawings_that_the_browser_does_not_store_can_be_downloaded(service, visit):
    page = visit(service)
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    page.draw(STROKES[3])
    class_button(page, "3").click()
    page.until("hand-note", ".includes('stores no more: download')")
    assert len(download(page).namelist()) == 1


def test_a_thousand_drawings_are_kept_and_no_more(service, visit):
    page = visit(service)
    teach(page, STROKES[4], "4")
    (one,) = kept(page)
    page.evaluate("([key, all]) => localStorage.setItem(key, all)", [KEPT, json.dumps([one] * 999)])
    page.reload()
    teach(page, STROKES[4], "4")
    class_button(page, "9").click()  # another class for the last one is none more
    page.until("hand-note", " === 'It is 9. Kept: 1000 drawings of 2 classes.'")
    before = kept(page)
    page.click("#clear")
    page.draw(STROKES[4])
    class_button(page, "4").click()
    page.until("hand-note", ".startsWith('Not kept: the limit is 1000')")
    assert kept(page) == before


def test_another_tab_adds_to_what_is_kept(service, visit):
    page = visit(service)
    teach(page, STROKES[4], "4")
    (one,) = kept(page)
    other = page.context.new_page()
    other.goto(page.origin)
    other.evaluate("([key, all]) => localStorage.setItem(key, all)", [KEPT, json.dumps([one] * 2)])
    page.until("hand-note", ".startsWith('Kept: 2 drawings of 1 class.')")
    class_button(page, "4").click()
    assert counts(page) == {"4": 1}


def test_everybody_can_keep_letters_by_their_names(service, visit):
    from axe_playwright_python.sync_playwright import Axe

    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    page = visit(service, color_scheme="dark", **phone)
    unfold = "summary => summary.click()"
    page.eval_on_selector("#hand summary", unfold)
    teach(page, STROKES[7], "7")
    teach(page, STROKES[8], "8")
    long = "a name that is longer than a telephone is wide, as some are"
    other_classes(page, [*LETTERS[1:], "a/b.", long])
    page.eval_on_selector("#hand summary", unfold)
    page.click("#clear")  # which scrolls there
    page.draw(STROKES[8])
    page.wait_for_selector("#classes button:enabled")
    page.focus("#classes button")
    for _ in range(10):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.until("hand-note", ".startsWith('It is B.')")
    for name in ("a/b.", long, "b"):
        teach(page, STROKES[8], name)
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(width) == 0
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    folders = ["7", "8", "B", "a%2Fb%2E", long, "b"]
    assert download(page).namelist() == [f"hand/{folder}/0001.png" for folder in folders]

    page.unroute("**/info")  # the letters are not of the classes that are shown then
    page.reload()
    page.eval_on_selector("#hand summary", unfold)
    page.until("hand-note", " === 'Kept: 2 drawings of 2 classes.'")
    page.click("#forget")
    other_classes(page, LETTERS)
    page.eval_on_selector("#hand summary", unfold)
    page.until("hand-note", " === 'Kept: 2 drawings of 2 classes.'")
    assert counts(page) == {"B": 1, "b": 1}
