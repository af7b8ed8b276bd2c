"""How soon the page is painted, and how soon its bars follow the pen, in the system's Chromium.

    python -m benchmarks.page --url http://127.0.0.1:8000

First paint is from the navigation to the first contentful paint, with an empty cache. Pen to bar is
from a pointermove, as the browser stamps it, to the first change of the bars after it; the pen
rests until then, so that no change belongs to another move.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.command import commit, explained, positive_int, provenance, url

_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
_WATCH = """() => {
    let moved;
    window.delays = [];
    addEventListener("pointermove", (event) => { moved = event.timeStamp; }, true);
    new MutationObserver(() => {
        if (moved !== undefined) window.delays.push(performance.now() - moved);
        moved = undefined;
    }).observe(document.getElementById("bars"), {attributes: true, childList: true, subtree: true});
}"""
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


@explained
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the two distributions as JSON."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument(
        "--url", type=url, default="http://127.0.0.1:8000", help="a running service"
    )
    parser.add_argument("--visits", type=positive_int, default=11, help="of which paints are timed")
    parser.add_argument("--moves", type=positive_int, default=300, help="of the pen")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="its executable")
    options = parser.parse_args(arguments)
    if options.chromium is None:
        parser.error("no chromium on PATH: apt install chromium, or name it with --chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=_FLAGS)
        paints = []
        for _ in range(options.visits):
            context = browser.new_context(viewport={"width": 1240, "height": 900})
            page = context.new_page()
            page.goto(options.url, wait_until="networkidle")
            page.wait_for_function(_PAINT)
            paints.append(page.evaluate(_PAINT))
            context.close()
        page = browser.new_page(viewport={"width": 1240, "height": 900})
        page.goto(options.url, wait_until="networkidle")
        page.evaluate(_WATCH)
        box = page.locator("#paper").bounding_box()
        for i in range(options.moves):
            angle, ring = 2 * math.pi * i / 60, 0.2 + 0.1 * (i // 60) / 5
            x = box["x"] + box["width"] * (0.5 + ring * math.cos(angle))
            y = box["y"] + box["height"] * (0.5 + ring * math.sin(angle))
            page.mouse.move(x, y)
            if i % 60 == 0:
                page.mouse.up()
                page.click("#clear")
                page.mouse.move(x, y)
                page.mouse.down()
            page.wait_for_timeout(40)
        delays = page.evaluate("() => window.delays")
        browser.close()
    report = {
        **provenance(("lenet-serve", "playwright")),
        "commit": commit(),
        "first_paint_ms": _summary(paints),
        "pen_to_bar_ms": _summary(delays),
    }
    print(json.dumps(report, indent=1))
    return 0


def _summary(values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    percentile = {
        f"p{part}": round(ordered[math.ceil(part / 100 * len(ordered)) - 1], 1) for part in (95, 99)
    }
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 1),
        **percentile,
        "max": round(ordered[-1], 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
