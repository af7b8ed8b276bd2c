"""The page as people use it."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from tests.browser.strokes import STROKES, row
from tests.service_process import PATIENCE_S

KEY = "a-key-that-nobody-knows"


def photograph(digits, size=(1200, 800), crosses=()):
    """A JPEG of dark ink on unevenly lit, noisy paper; `crosses` are points in pixels."""
    width, height = size
    paper = np.add.outer(np.linspace(0, -40, height), np.linspace(225, 190, width))
    sheet = Image.fromarray(paper.astype(np.uint8))
    pen = ImageDraw.Draw(sheet)
    for points in row(digits):
        line = [(x * width, height * (0.5 + (y - 0.5) * width / height)) for x, y in points]
        pen.line(line, fill=50, width=26, joint="curve")
    for x, y in crosses:
        pen.line([(x - 40, y), (x + 40, y)], fill=50, width=16)
        pen.line([(x, y - 40), (x, y + 40)], fill=50, width=16)
    pixels = np.asarray(sheet.filter(ImageFilter.GaussianBlur(2)), np.float32)
    noisy = pixels + np.random.default_rng(0).normal(0, 4, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG")
    return {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": file.getvalue()}


def test_each_digit_that_is_drawn_is_read(service, visit):
    page = visit(service)
    for digit, strokes in STROKES.items():
        page.click("#clear")
        page.draw(strokes)
        page.reads(f"{digit},")


def test_several_digits_are_read_as_a_number_and_undone_stroke_by_stroke(service, visit):
    page = visit(service)
    page.draw(row([4, 0, 7, 1]))
    page.reads("4071,")
    assert page.locator("#seen button").count() == 4
    page.click("#undo")
    page.reads("407,")
    page.keyboard.press("Control+z")
    page.reads("40,")
    page.click("#clear")
    page.draw(row([9, 0, 5, 6, 7]))
    page.reads("90567,")


def test_what_is_probably_no_digit_is_said(service, visit):
    page = visit(service)
    page.draw([[(0.5, 0.5), (0.505, 0.5)]])
    page.until("warnings", ".includes('unlike any digit')")
    assert page.is_hidden("#means")
    page.click("#clear")
    page.draw([[(0.5, 0.2), (0.5, 0.8)], [(0.2, 0.5), (0.8, 0.5)]])  # a plus
    page.until("agree", ".startsWith('The models disagree')")
    page.click("#clear")
    page.draw(STROKES[3])
    page.reads("3,")
    assert page.inner_text("#warnings") == page.inner_text("#agree") == ""
    assert page.inner_text("#means").startswith("That is among the ten digits: ")


DOTS = [[(0.3, 0.5), (0.305, 0.5)], [(0.7, 0.5), (0.705, 0.5)]]
WARNED = "warnings", ".includes('unlike any digit')"
NOT_WARNED = "warnings", " === ''"
AS_A_PICTURE = "**/predict?*digits=several*"


def test_a_warning_about_digits_is_not_shown_for_a_model_of_other_classes(service, visit):
    page = visit(service)
    answer = page.request.get(f"{page.origin}/info").json()
    for model in answer["models"]:
        if model["name"] == "mlp":
            model["labels"] = [f"class {label}" for label in range(10)]
    page.route("**/info", lambda route: route.fulfill(json=answer))
    page.reload()
    page.wait_for_selector("#models tr")
    page.draw(DOTS)
    page.until(*WARNED)
    page.click("#model-mlp button")
    page.until(*NOT_WARNED)
    page.click("#model-lenet button")
    page.until(*WARNED)


def test_a_warning_goes_with_its_drawing_before_the_next_one_arrives_or_is_refused(service, visit):
    page = visit(service)
    page.expected.append("503")
    page.draw(DOTS)
    page.until(*WARNED)
    page.route(AS_A_PICTURE, lambda route: route.fulfill(status=503))
    with page.expect_response(AS_A_PICTURE) as refused:
        page.fill("#width", "2")
    refused.value.finished()
    page.until(*NOT_WARNED)
    page.evaluate("fetch('/readyz').then((response) => response.text())")
    assert page.is_hidden("#status")
    page.unroute(AS_A_PICTURE)
    page.fill("#width", "2.2")
    page.until(*WARNED)
    page.route(AS_A_PICTURE, lambda route: None)  # never answered
    page.click("#undo")
    page.until(*NOT_WARNED)


def test_the_picture_that_is_sent_for_warnings_has_the_line_width_of_the_answer(service, visit):
    page = visit(service)
    page.draw(STROKES[3])
    page.reads("3,")
    page.evaluate(
        """() => {
            const send = window.fetch;
            window.fetch = (path, options) => {
                if (path.includes("digits=several")) window.sent = options.body;
                return send(path, options);
            };
        }"""
    )
    page.fill("#width", "2")
    page.wait_for_function("() => window.sent")
    # Of 255, for the rounding of halves; the canvas shows the last answer, which may be to come.
    page.wait_for_function(
        """async () => {
            const response = await fetch("/explain", {
                method: "POST", body: window.sent, headers: { "Content-Type": "image/png" } });
            const [text] = (await response.json()).images;
            const theirs = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
            const canvas = document.querySelector("#seen canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, 28, 28);
            return theirs.every((value, i) => Math.abs(value - data[4 * i]) <= 1);
        }"""
    )


def test_the_picture_that_is_sent_for_warnings_has_at_most_64_digits(service, visit):
    page = visit(service)
    places = [((i % 10 + 0.5) / 10, (i // 10 + 0.5) / 10) for i in range(65)]
    page.draw([[(x, y - 0.02), (x, y + 0.02)] for x, y in places])
    page.until("live", ".length > 64")
    with page.expect_response(AS_A_PICTURE) as answered:
        page.fill("#width", "1.1")
    assert answered.value.status == 200
    assert page.locator("#seen button").count() == 64


@pytest.mark.parametrize("earlier", [[], STROKES[1]], ids=["empty", "stroke"])
def test_a_stroke_that_is_undone_while_it_is_drawn_is_not_continued(service, visit, earlier):
    page = visit(service)
    page.draw(earlier)
    image = "document.getElementById('paper').toDataURL()"
    before = page.evaluate(image)
    mouse = page.mouse
    start, then, last = page.at([(0.2, 0.2), (0.3, 0.3), (0.8, 0.3)])
    mouse.move(*start)
    mouse.down()
    mouse.move(*then)
    assert page.evaluate(image) != before
    page.keyboard.press("Control+z")
    mouse.move(*last)
    mouse.up()
    assert page.evaluate(image) == before


def test_all_models_read_the_stroke_and_the_one_that_is_chosen_is_shown_with_its_times(
    service, visit
):
    page = visit(service)
    page.click("#samples button:nth-child(6)")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#models tr')]"
        ".filter(row => row.innerText.includes('%')).length === 5"
    )
    rows = [text.split() for text in page.locator("#models tr").all_inner_texts()]
    assert [name for name, *_ in rows] == [
        "lenet",
        "cnn-32-64",
        "lenet-6-16",
        "lenet-classic",
        "mlp",
    ]
    assert {digit for _, digit, *_ in rows} == {"5"}
    page.click("#model-mlp button")
    page.until("snippet", ".includes('model=mlp')")
    page.wait_for_function("() => document.getElementById('stages').children.length === 5")
    words = page.inner_text("#stages").split()
    assert words[::3] == ["outside", "decode", "queue", "compute", "encode"]
    assert "Its batch had 1 image of at most 64." in page.inner_text("#batch")


def test_the_copied_requests_get_the_answer_that_is_shown(service, visit):
    page = visit(service)
    page.draw(row([2, 6]))
    page.reads("26,")
    for tab in page.locator("#tabs button").all():
        tab.click()
        text = page.inner_text("#snippet")
        if tab.inner_text() == "curl":
            command = ["bash", "-c", text]
            wanted = ('"label":2', '"label":6')
        else:
            command = [sys.executable, "-c", text]
            wanted = ("[2, 6]",)
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert all(part in done.stdout for part in wanted), (tab.inner_text(), done)


def test_every_layer_is_shown_and_explained(service, visit):
    page = visit(service)
    page.click("#samples button:nth-child(8)")
    page.wait_for_selector(".layer canvas")
    titles = page.locator(".layer h3").all_inner_texts()
    assert titles[0] == "conv1: filters, 20 x 1 x 5 x 5"
    assert titles[-1].endswith("logits, 10")
    for text in page.locator(".layer p").all_inner_texts():
        assert len(text) > 40
    painted = """[...document.querySelectorAll('.layer canvas')].map(canvas => {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    })"""
    assert min(page.evaluate(painted)) >= 5


def test_a_damaged_network_or_image_gives_another_answer_until_it_is_mended(service, visit):
    page = visit(service)
    page.click("#samples button:nth-child(7)")
    page.reads("6,")
    page.fill("#turn", "180")
    page.reads("9,")
    page.click("#mend")
    page.reads("6,")
    assert page.inner_text("#damaged") == ""
    page.check("#biases")
    page.until("damaged", ".includes('reads')")
    page.until("instead", " === document.getElementById('damaged').textContent")
    before = page.inner_text("#damaged")  # the answer may change at once
    page.select_option("#noisy", "conv1")
    page.fill("#weights", "3")
    page.until("damaged", f" !== {before!r}")


def test_a_photograph_is_prepared_shown_and_read(service, visit):
    page = visit(service)
    page.set_input_files("#photo", photograph([3]))
    page.reads("3,")
    page.set_input_files("#photo", photograph([1, 9, 5]))
    page.reads("195,")
    assert page.locator("#seen button").count() == 3
    page.draw(STROKES[0])  # which begins afresh
    page.reads("0,")


def test_what_was_considered_in_a_photograph_is_shown_with_what_the_judge_says(service, visit):
    page = visit(service)
    assert page.is_hidden("#considered")
    page.set_input_files("#photo", photograph([9, 5], crosses=[(100, 100), (1100, 700)]))
    page.reads("95,")
    told = page.locator("#candidates li").all_inner_texts()
    words = [" ".join(one.split()[:-2]) for one in told]
    assert words[:4] == ["a digit"] * 2 + ["another mark"] * 2
    assert set(words[4:]) <= {"neither"}  # parts of the strokes and of the paper
    assert all(33 < float(one.split()[-2]) <= 100 for one in told)
    squares = page.locator("#candidates canvas")
    named = squares.evaluate_all("all => all.map((one) => one.ariaLabel.split(', ')[1])")
    assert named == ["read:"] * 2 + ["left out:"] * (len(told) - 2)
    frames = "all => all.map((one) => getComputedStyle(one).outlineStyle)"
    assert squares.evaluate_all(frames) == ["solid"] * 2 + ["none"] * (len(told) - 2)
    page.click("#clear")
    assert page.is_hidden("#considered")


@pytest.mark.parametrize(
    ("kind", "size", "sent"),
    [
        ("jpeg", (8000, 6000), ["image/jpeg"]),
        ("webp", (3200, 3000), ["image/webp", "image/png"]),  # too many pixels for the service
        ("bmp", (4000, 3000), ["image/png"]),  # too many bytes for it
    ],
)
def test_a_large_picture_is_sent_as_it_is_unless_the_service_takes_no_such(
    serve, visit, kind, size, sent
):
    page = visit(serve("--max-body-bytes", "10000000"))
    page.expected.append("413")
    page.wait_for_selector("#models tr")  # its limits are known
    types = []
    page.on("request", lambda asked: types.append(asked.headers.get("content-type")))
    file = io.BytesIO()
    small = Image.open(io.BytesIO(photograph([4, 7])["buffer"]))
    small.resize(size).save(file, kind)
    name = {"name": "large", "mimeType": f"image/{kind}"}
    page.set_input_files("#photo", {**name, "buffer": file.getvalue()})
    page.reads("47,")
    assert [one for one in types if one and one.startswith("image/")] == sent


def tiny(strokes):
    return [[(0.4 + 0.04 * x, 0.4 + 0.04 * y) for x, y in points] for points in strokes]


def test_the_page_prepares_a_drawing_as_the_service_prepares_its_picture(service, visit):
    page = visit(service)
    differences = page.evaluate(
        """async (all) => {
            const { draw, imageOf, SURFACE } = await import("/page/prepare.js");
            const found = [];
            for (const [strokes, pen] of all) {
                const canvas = document.createElement("canvas");
                canvas.width = canvas.height = SURFACE;
                const context = canvas.getContext("2d");
                context.fillRect(0, 0, SURFACE, SURFACE);
                draw(context, strokes, SURFACE, "#fff", pen);
                const body = await new Promise((done) => canvas.toBlob(done, "image/png"));
                const response = await fetch("/explain", {
                    method: "POST", body, headers: { "Content-Type": "image/png" } });
                const [text] = (await response.json()).images;
                const theirs = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
                found.push(imageOf(strokes, pen).reduce(
                    (most, value, i) => Math.max(most, Math.abs(value - theirs[i])), 0));
            }
            return found;
        }""",
        [[strokes, 1] for strokes in STROKES.values()]
        + [[tiny(STROKES[digit]), 0.3] for digit in (3, 4, 7, 8)],  # which are enlarged
    )
    assert max(differences) <= 1  # of 255: halves are rounded up here, to even there


def test_a_finger_draws_and_does_not_scroll(service, visit):
    page = visit(service, viewport={"width": 400, "height": 700}, has_touch=True, is_mobile=True)
    session = page.context.new_cdp_session(page.page)

    def touch(kind, *points):
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(points)})

    page.locator("#paper").scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    for stroke in STROKES[4]:
        start, *rest = (dict(zip("xy", point, strict=True)) for point in page.at(stroke))
        touch("touchStart", start)
        for point in rest:
            touch("touchMove", point)
        touch("touchEnd")
    page.reads("4,")
    assert page.evaluate("scrollY") == before
    assert page.is_hidden("#keys")


def test_the_keyboard_alone_draws_and_clears(service, visit):
    page = visit(service)
    keyboard = page.keyboard
    for _ in range(20):
        if page.evaluate("document.activeElement.id") == "paper":
            break
        keyboard.press("Tab")
    for key in ["ArrowUp"] * 8 + ["ArrowLeft"] * 5 + [" "] + ["ArrowRight"] * 10:
        keyboard.press(key)
    for key in ["ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft"] * 5 + [" "]:
        keyboard.press(key)
    page.reads("7,")
    keyboard.press("Backspace")
    page.until("digit", " === ''")


def test_a_key_is_asked_for_and_kept_in_memory_alone(serve, visit):
    page = visit(serve("--api-keys", KEY))
    page.expected.append("401")
    page.wait_for_selector("#door:not([hidden])")
    assert page.is_hidden("#status")
    page.fill("#key", "wrong")
    page.click("#door button")
    page.wait_for_selector("#status.bad")
    assert page.inner_text("#status") == "This key is not one of the service's."
    assert page.is_visible("#door")
    page.fill("#key", KEY)
    page.click("#door button")
    page.wait_for_selector("#models tr")
    assert page.is_hidden("#door")
    page.draw(STROKES[8])
    page.reads("8,")
    assert KEY not in page.inner_text("body")
    kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    assert page.evaluate(kept) == '[{"lenet-serve hints gone":"1"},{},""]'


BLANK = io.BytesIO()
Image.new("L", (200, 200), 255).save(BLANK, "PNG")


@pytest.mark.parametrize(
    ("name", "media_type", "content", "said"),
    [
        ("a.heic", "image/heic", b"heic", "a.heic has a format that is not read here; expected"),
        ("a.png", "image/png", BLANK.getvalue(), "No digit was found in a.png: it is blank"),
        ("a.png", "image/png", b"no picture", "a.png is damaged, or no picture of the format"),
        ("a.txt", "text/plain", b"text", "a.txt is no picture; expected PNG"),
    ],
    ids=["heic", "blank", "damaged", "text"],
)
def test_a_refused_picture_leaves_no_earlier_answer_and_is_explained_beside_its_button(
    service, visit, name, media_type, content, said
):
    page = visit(service, viewport={"width": 360, "height": 740})
    page.expected += ["400", "415"]
    page.set_input_files("#photo", photograph([3]))
    page.reads("3,")
    page.locator("label[for=photo]").scroll_into_view_if_needed()
    page.set_input_files("#photo", {"name": name, "mimeType": media_type, "buffer": content})
    page.until("photo-note", f".startsWith({said!r})")
    note = page.locator("#photo-note").bounding_box()
    assert 0 <= note["y"] <= note["y"] + note["height"] <= 740
    assert page.is_hidden("#status")
    assert nothing_is_shown(page.page)
    page.click("#samples button")
    page.reads("0,")
    assert page.is_hidden("#photo-note")


def nothing_is_shown(page):
    """Whether no part of the page speaks of an earlier drawing."""
    told = ["digit", "brief", "warnings", "seen", "stages", "stack", "agree", "damaged", "layers"]
    cells = page.locator("#models td + td").all_inner_texts()
    return (
        not any(page.text_content(f"#{name}") for name in told)
        and set(cells) == {""}
        and page.text_content("#snippet") == "Draw something first."
        and page.text_content("#inside-note").startswith("Draw something")
        and page.text_content("#batch").startswith("From the")
    )


def test_an_empty_surface_is_not_guessed_and_clear_leaves_nothing_of_a_drawing(service, visit):
    page = visit(service)
    assert page.inner_text("#sure") == "Draw a digit."
    page.click("#samples button:nth-child(6)")
    page.reads("5,")
    page.wait_for_selector(".layer canvas")
    cell = "document.querySelector('#model-mlp td:nth-child(2)')"
    page.wait_for_function(f"() => {cell}.textContent === '5'")
    page.click("#clear")
    page.until("digit", " === ''")
    assert nothing_is_shown(page)
    assert page.inner_text("#sure") == "Draw a digit."
    assert page.locator("#bars li").first.inner_text().split() == ["0", "\N{EN DASH}"]


def test_an_answer_that_fails_leaves_none_of_an_earlier_drawing(service, visit):
    page = visit(service)
    page.expected.append("503")
    page.draw(STROKES[3])
    page.reads("3,")
    refusal = {"error": {"code": "overloaded", "field": "", "message": "64 images wait"}}
    page.route("**/predict?**", lambda route: route.fulfill(status=503, json=refusal))
    page.draw([[(0.2, 0.9), (0.8, 0.9)]])
    page.wait_for_selector("#status.bad")
    assert page.inner_text("#status") == "64 images wait"
    assert page.inner_text("#sure") == "No answer."
    assert nothing_is_shown(page.page)


def test_a_failure_is_shown_until_a_prediction_succeeds(service, visit):
    page = visit(service)
    page.expected.append("429")
    refusal = {"error": {"code": "overloaded", "field": "", "message": "64 images wait"}}
    page.route("**/predict?model=mlp", lambda route: route.fulfill(status=429, json=refusal))
    page.draw(STROKES[3])
    page.reads("3,")
    page.wait_for_selector("#status.bad")
    page.wait_for_selector(".layer canvas")  # another request, which succeeds
    assert page.inner_text("#status") == "64 images wait"
    page.click("#clear")
    page.wait_for_selector("#status", state="hidden")


def test_the_answer_and_the_drawing_are_on_a_telephones_screen_together(service, visit):
    page = visit(service, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.draw(STROKES[6])
    page.reads("6,")
    brief, paper, undo = (page.locator(f"#{one}") for one in ("brief", "paper", "undo"))
    assert brief.inner_text().startswith("6, ")
    boxes = [one.bounding_box() for one in (brief, paper, undo)]
    assert page.evaluate("scrollY") == 0
    assert all(box["y"] >= 0 and box["y"] + box["height"] <= 740 for box in boxes)
    page.click("#clear")
    page.draw(DOTS)
    page.until("caution", ".includes('unlike any digit')")
    caution = page.locator("#caution").bounding_box()
    assert boxes[0]["y"] < caution["y"] < caution["y"] + caution["height"] <= boxes[1]["y"]
    assert paper.bounding_box() == boxes[1]  # nothing moves under the pen


def test_a_telephones_page_is_short_until_its_parts_are_opened(service, visit):
    page = visit(service, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.draw(STROKES[6])
    page.until("agree", " === ''")
    page.until("why-text", ".includes('decided')")
    assert page.evaluate("document.documentElement.scrollHeight") < 3000
    for summary in page.locator("#draw summary").all():
        summary.click()
    page.wait_for_selector(".layer canvas")
    page.until("flip-text", ".includes(' 6 into ')")
    assert page.locator("#draw details:not([open])").count() == 0


def test_a_model_of_other_classes_is_not_said_to_read_digits(service, visit):
    page = visit(service)
    answer = page.request.get(f"{page.origin}/info").json()
    for model in answer["models"]:
        model["labels"] = ["zero", "one", "a name that is long", *"3456789"]
    page.route("**/info", lambda route: route.fulfill(json=answer))
    page.reload()
    page.wait_for_selector("#models tr")
    assert page.inner_text("h1").startswith("Draw one of 10 classes.")
    assert page.is_hidden("#samples")
    assert page.is_hidden("#several")
    page.draw(STROKES[1])
    page.reads("1,")
    lefts = {box["x"] for box in (track.bounding_box() for track in page.locator(".track").all())}
    assert len(lefts) == 1  # all bars begin at the same place
    page.wait_for_selector(".layer canvas")
    sums = page.locator(".layer p").last.inner_text()
    assert all(f" {name}: " in sums for name in answer["models"][0]["labels"])


def test_the_page_says_that_the_service_is_away_and_that_it_is_back(serve, visit):
    service = serve()
    page = visit(service)
    page.expected.append("ERR_CONNECTION_REFUSED")
    page.wait_for_selector("#models tr")
    service.signal()
    service.wait()
    page.draw(STROKES[2])
    page.until("status", ".startsWith('The service does not')")
    serve("--port", str(service.port), "--grpc-port", "0")
    page.reads("2,")


def test_without_explanations_the_page_does_without(serve, visit):
    page = visit(serve("--explain", "off"))
    page.wait_for_selector("#models tr")
    assert page.is_hidden("#inside")
    assert page.is_hidden("#damage")
    page.set_input_files("#photo", photograph([3]))
    page.until("digit", " === '3'")


def test_the_view_of_the_service_shows_live_figures(service, visit):
    page = visit(service, "/#service")
    page.wait_for_selector("#loaded tr")
    assert page.is_hidden("#draw")
    assert page.locator("#loaded tr").count() == 5
    for _ in range(20):
        page.evaluate("fetch('/predict', {method: 'POST', body: new Uint8Array(784), "
                      "headers: {'Content-Type': 'application/octet-stream'}})")  # fmt: skip
    page.wait_for_function("() => /batches? in the last minute/.test(document.body.innerText)")
    page.wait_for_function(
        "() => document.querySelector('#percentiles tr:nth-child(3)').innerText.includes('s')"
    )
    page.click("nav a[href='#draw']")
    page.wait_for_selector("#paper")


@pytest.mark.parametrize("view", ["draw", "photograph", "service"])
@pytest.mark.parametrize(
    "options",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark", "reduced_motion": "reduce"},
        {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True},
    ],
    ids=["light", "dark", "phone"],
)
def test_everybody_can_read_the_page(service, visit, view, options):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(service, f"/#{view}", **options)
    if view == "draw":
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        page.draw(STROKES[4])
        page.locator("#classes button").nth(4).click()
        page.wait_for_selector(".layer canvas")
        page.until("flip-text", ".includes(' 4 into ')")
    elif view == "photograph":
        page.set_input_files("#photo", photograph([9, 5], crosses=[(100, 100), (1100, 700)]))
        page.reads("95,")
        assert page.locator("#candidates li").count() >= 4
    else:
        page.wait_for_selector("#loaded tr")
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(width) == 0
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
