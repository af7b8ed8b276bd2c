"""The page in a Chromium of the system, in front of a service with the committed weights."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field

import pytest

from tests.conftest import ROOT
from tests.service_process import PATIENCE_S, Service

CHROMIUM = os.environ.get("LENET_TEST_CHROMIUM") or shutil.which("chromium")
_FLAGS = (
    "--no-sandbox",  # CI is root in a container
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH; LENET_TEST_CHROMIUM may name one")
    # Imported here: its driver is a process, and the other tests need none.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """`serve("--explain", "off")` starts the service on the committed weights."""
    services = []

    def start(*flags):
        flags = ("--device", "cpu", "--weights", str(ROOT / "weights"), *flags)
        if "--port" not in flags:
            flags = ("--port", "0", "--grpc-port", "0", *flags)
        services.append(Service(flags, tmp_path_factory.mktemp("service")))
        return services[-1].ready()

    yield start
    for service in services:
        service.end()


@pytest.fixture(scope="module")
def service(serve):
    return serve()


@dataclass
class Visit:
    """An open page, and what went wrong in it."""

    page: object
    origin: str
    wrong: list = field(default_factory=list)
    expected: list = field(default_factory=list)
    """Parts of console errors that the test provokes."""

    def at(self, points):
        """The positions on the screen of points of the surface, in CSS pixels."""
        box = self.page.locator("#paper").bounding_box()
        return [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]

    def draw(self, strokes):
        """Draw with the mouse."""
        mouse = self.page.mouse
        for stroke in strokes:
            start, *rest = self.at(stroke)
            mouse.move(*start)
            mouse.down()
            for point in rest:
                mouse.move(*point)
            mouse.up()

    def until(self, name, condition):
        """Wait until the text of an element is so; `condition` is JavaScript that follows it."""
        script = f"() => document.getElementById({name!r}).textContent{condition}"
        self.page.wait_for_function(script)

    def reads(self, text):
        """Wait until the answer is `text` for all that was drawn."""
        self.until("live", f".startsWith({text!r})")
        assert self.page.inner_text("#digit") == text.rstrip(",")

    def __getattr__(self, name):
        return getattr(self.page, name)


@pytest.fixture
def visit(browser):
    """`visit(service, color_scheme="dark")` opens the page; nothing may go wrong in it."""
    visits, contexts = [], []

    def open_(service, path="/", **options):
        options = {"viewport": {"width": 1240, "height": 900}, **options}
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(1e3 * PATIENCE_S)
        page = context.new_page()
        origin = f"http://127.0.0.1:{service.port}"
        visit = Visit(page, origin)
        visits.append(visit)

        def on_console(message):
            # The browser says so of each answer over 399, which a test may provoke.
            if message.type in ("error", "warning"):
                visit.wrong.append(message.text)

        def on_request(request):
            if not request.url.startswith((origin, f"blob:{origin}")):
                visit.wrong.append(f"a request to {request.url}")

        page.on("console", on_console)
        page.on("pageerror", lambda error: visit.wrong.append(str(error)))
        page.on("request", on_request)
        page.goto(origin + path)
        return visit

    yield open_
    for context in contexts:
        context.close()
    for visit in visits:
        unexpected = [
            text for text in visit.wrong if not any(part in text for part in visit.expected)
        ]
        assert unexpected == []
