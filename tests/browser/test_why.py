"""Which pixels decided, and what would turn the answer: the page beside the service itself."""

from __future__ import annotations

import re
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

from tests.browser.strokes import STROKES
from tests.conftest import ROOT

RAW = "application/octet-stream"
PLACES = 784
REFUSAL = {"error": {"code": "overloaded", "field": "", "message": "64 images wait"}}
TURNED = r".search(/pixels? turns? /) >= 0"
SAMPLES = np.asarray(Image.open(ROOT / "service/api/page/digits.png").convert("L"))


def sample(digit):
    """A digit of MNIST that the page offers, uint8 (28, 28)."""
    return SAMPLES[:, 28 * digit : 28 * (digit + 1)]


def choose(page, digit):
    page.click(f"#samples button:nth-child({digit + 1})")


def probabilities(page, model, images):
    """What the service answers: (n, 10)."""
    answer = page.request.post(
        f"{page.origin}/predict?model={model}",
        data=np.ascontiguousarray(images, np.uint8).tobytes(),
        headers={"Content-Type": RAW, "Accept": RAW},
    )
    assert answer.status == 200
    return np.frombuffer(answer.body(), np.float32).reshape(-1, 10).astype(np.float64)


def is_batch(request):
    """Whether a request is a batch of one of the two views."""
    return "/predict" in request.url and request.headers.get("accept") == RAW


def rows_of(request):
    return len(request.post_data_buffer) // PLACES


def cells(page, name):
    """The colours of the 28 x 28 cells of a view, beside what is drawn in them."""
    found = page.evaluate(
        """(id) => {
            const canvas = document.getElementById(id), copy = canvas.cloneNode();
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(canvas, 0, 0);
            const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
            const size = canvas.width / 28;
            return Array.from({ length: 784 }, (_, i) => {
                const x = size * (i % 28) + 1, y = size * Math.floor(i / 28) + 1;
                const at = 4 * (y * canvas.width + x);
                return [...data.slice(at, at + 4)];
            });
        }""",
        name,
    )
    return np.array(found).reshape(28, 28, 4)


def colour(page, name):
    style = "getComputedStyle(document.documentElement)"
    text = page.evaluate(f"{style}.getPropertyValue('--{name}').trim()")
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)] + [255]


def check_heat(page, model, image):
    """The sentence and the map are those of 784 predictions of the service."""
    (whole,) = probabilities(page, model, image[np.newaxis])
    answer = whole.argmax()
    variants = np.repeat(image[np.newaxis], PLACES, axis=0)
    for place, variant in enumerate(variants):
        y, x = divmod(place, 28)
        variant[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3] = 0
    rows = probabilities(page, model, variants)
    odds = [np.log(row[answer] / np.delete(row, answer).sum()) for row in (whole, *rows)]
    falls = odds[0] - np.array(odds[1:])
    place, strongest = falls.argmax(), abs(falls).argmax()
    before, after = (f"{100 * row[answer]:.1f} %" for row in (whole, rows[place]))
    text = f"{answer} falls from {before} to {after}"
    page.until("why-text", f".includes({text!r})")
    read = rows[place].argmax()
    assert (f"and {read} is read" in page.inner_text("#why-text")) == (read != answer)
    name = "accent" if falls[strongest] > 0 else "focus"
    assert cells(page, "why")[divmod(strongest, 28)].tolist() == colour(page, name)


def check_turn(page, model, image, target=None):
    """The marks make an image that the service reads as `target`, and none of them is needless."""
    (whole,) = probabilities(page, model, image[np.newaxis])
    answer, *others = np.argsort(-whole)
    target = others[0] if target is None else target
    page.until("flip-text", f".includes(' {answer} into {target}, ')")
    marks = cells(page, "flip")
    added, rubbed = ((marks == colour(page, name)).all(axis=2) for name in ("focus", "accent"))
    found = np.where(added, 255, np.where(rubbed, 0, image)).astype(np.uint8)
    (row,) = probabilities(page, model, found[np.newaxis])
    assert row.argmax() == target
    parts = [(added.sum(), "to add"), (rubbed.sum(), "to rub out")]
    said = ", ".join(f"{count} {text}" for count, text in parts if count)
    changed = np.argwhere(added | rubbed)
    assert re.fullmatch(
        rf"{len(changed)} pixels? turns? {answer} into {target}, {100 * row[target]:.1f} % sure: "
        rf"{said}\.",
        page.inner_text("#flip-text"),
    )
    assert (found != image).sum() == len(changed)
    without = np.repeat(found[np.newaxis], len(changed), axis=0)
    for one, (y, x) in zip(without, changed, strict=True):
        one[y, x] = image[y, x]
    assert (probabilities(page, model, without).argmax(axis=1) != target).all()


@pytest.mark.parametrize(
    ("digit", "where", "model"),
    [(3, "top", "mlp"), (6, "left side", "lenet-6-16"), (7, "middle", "cnn-32-64")],
)
def test_both_views_agree_with_the_service_for_each_model_and_target(
    service, visit, digit, where, model
):
    page = visit(service)
    choose(page, digit)
    check_heat(page, "lenet", sample(digit))
    assert page.inner_text("#why-text").startswith(f"The {where} decided most: ")
    check_turn(page, "lenet", sample(digit))
    page.select_option("#target", "2")
    check_turn(page, "lenet", sample(digit), 2)
    page.click(f"#model-{model} button")
    check_heat(page, model, sample(digit))
    check_turn(page, model, sample(digit), 2)
    for view in ("why", "flip"):
        text = page.inner_text(f"#{view}-text")
        page.until(f"{view}-live", f" === {text!r}")
        assert page.get_attribute(f"#{view}", "aria-label") == text
    page.select_option("#target", str(digit - 1))
    choose(page, digit - 1)  # which cannot be turned into itself
    check_turn(page, model, sample(digit - 1))


def test_one_batch_is_in_flight_while_drawing_and_none_for_a_picture_that_is_known(service, visit):
    page = visit(service)
    sent, flying, most = [], set(), 0

    def begin(request):
        nonlocal most
        if is_batch(request):
            sent.append(rows_of(request))
            flying.add(request)
            most = max(most, len(flying))

    page.on("request", begin)
    page.on("requestfinished", lambda request: flying.discard(request))
    page.draw(STROKES[8])
    page.reads("8,")
    page.until("flip-text", TURNED)
    assert most == 1
    assert sent.count(PLACES) >= 1
    choose(page, 3)
    page.until("flip-text", ".includes(' 3 into ')")
    before = len(sent)
    choose(page, 3)
    with page.expect_response("**/explain?**"):  # what is asked when the pen rests
        page.fill("#weights", "1")
    page.evaluate("fetch('/readyz').then((response) => response.text())")
    assert len(sent) == before


@pytest.mark.parametrize("limit", ["--max-images=100", "--max-body-bytes=100000"])
def test_a_service_whose_limits_are_low_gets_several_requests_for_a_batch(serve, visit, limit):
    page = visit(serve(*limit.split("=")))
    choose(page, 3)
    page.until("why-text", ".startsWith('The top decided most: ')")
    page.until("flip-text", TURNED)


def nothing_is_drawn(page):
    return not cells(page, "why").any() and not cells(page, "flip").any()


def test_an_empty_drawing_shows_neither_view_and_says_why(service, visit):
    page = visit(service)
    assert nothing_is_drawn(page)
    choose(page, 5)
    page.until("flip-text", TURNED)
    assert cells(page, "why").any()
    page.click("#clear")
    page.until("digit", " === ''")
    for view in ("why", "flip"):
        assert page.inner_text(f"#{view}-text").startswith("An empty drawing has no answer")
        assert page.text_content(f"#{view}-live") == ""
    assert nothing_is_drawn(page)
    assert page.is_disabled("#target")


LOST = """() => {
    const send = window.fetch;
    window.fetch = async (path, options) => {
        const response = await send(path, options);
        if (!window.whole && options?.headers?.Accept === "application/octet-stream") {
            const body = new ReadableStream({ start: (one) => one.error(new TypeError("lost")) });
            return new Response(body, response);
        }
        return response;
    };
}"""


@pytest.mark.parametrize("rows", [PLACES, 1], ids=["heat map", "search"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_refused_batch_is_shown_and_leaves_nothing_of_a_view(service, visit, status, rows):
    page = visit(service)
    page.expected.append(str(status))

    def refuse(route):
        whole = rows_of(route.request) == PLACES
        if is_batch(route.request) and whole == (rows == PLACES):
            route.fulfill(status=status, json=REFUSAL)
        else:
            route.continue_()

    page.route("**/predict?**", refuse)
    choose(page, 3)
    page.wait_for_selector("#status.bad:not([hidden])")
    assert page.inner_text("#status") == REFUSAL["error"]["message"]
    assert page.inner_text("#why-text") == page.inner_text("#flip-text") == "No answer."
    assert nothing_is_drawn(page)
    page.unroute("**/predict?**")
    choose(page, 3)
    check_heat(page, "lenet", sample(3))
    check_turn(page, "lenet", sample(3))
    assert page.is_hidden("#status")


def test_a_connection_that_is_lost_in_an_answer_is_shown_and_both_views_return(service, visit):
    page = visit(service)
    page.evaluate(LOST)
    choose(page, 3)
    page.until("status", ".startsWith('The service does not answer')")
    page.evaluate("window.whole = true")
    check_heat(page, "lenet", sample(3))
    check_turn(page, "lenet", sample(3))


def test_a_search_that_finds_nothing_says_so(service, visit):
    page = visit(service)

    def constant(route):
        if not is_batch(route.request):
            route.continue_()
            return
        row = np.full(10, 1e-4, np.float32)
        row[3] = 1 - 9e-4
        body = np.tile(row, rows_of(route.request)).tobytes()
        headers = {"X-Model-Version": "2"}
        route.fulfill(body=body, content_type=RAW, headers=headers)

    page.route("**/predict?**", constant)
    choose(page, 3)
    page.until("flip-text", ".startsWith('Not found: ')")
    assert page.inner_text("#why-text").startswith("No place decided alone")
    assert cells(page, "flip").any()


def test_views_start_again_when_the_model_is_reloaded_between_their_batches(serve, visit, tmp_path):
    (tmp_path / "lenet").mkdir()
    shutil.copy(ROOT / "weights/lenet/1.safetensors", tmp_path / "lenet")
    service = serve("--weights", str(tmp_path))
    page = visit(service)
    asked = []

    def reload(route):
        if is_batch(route.request):
            asked.append(rows_of(route.request))
            if len(asked) == 3:
                shutil.copy(ROOT / "weights/lenet/2.safetensors", tmp_path / "lenet")
                service.signal(signal.SIGHUP)
                while '"version":"2"' not in service.get("/info")[1]:
                    pass
        route.continue_()

    page.route("**/predict?**", reload)
    choose(page, 3)
    page.until("inside-note", ".startsWith('lenet, version 2')")
    check_heat(page, "lenet", sample(3))
    check_turn(page, "lenet", sample(3))
    assert asked.count(PLACES) == 2


def test_views_give_up_when_the_version_changes_with_each_answer(service, visit):
    page = visit(service)

    def other(route):
        if is_batch(route.request):
            answer = route.fetch()
            route.fulfill(response=answer, headers={**answer.headers, "x-model-version": "7"})
        else:
            route.continue_()

    page.route("**/predict?**", other)
    choose(page, 3)
    page.until("why-text", ".includes('changes all the time')")
    assert nothing_is_drawn(page)
    assert page.inner_text("#digit") == "3"
