"""Files of the page; tests/browser drives the page itself."""

from __future__ import annotations

import re

from tests.conftest import ROOT

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


async def test_a_browser_gets_the_page_and_other_clients_the_index(served):
    answer = await served.client.get("/", headers={"Accept": BROWSER})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text.startswith("<!doctype html>")
    too_many = "text/html" + ", a/b" * 101
    some = ("*/*", "application/json", "application/json, text/html;q=0.9", "text/html;q=0")
    for accept in (*some, too_many):
        index = await served.client.get("/", headers={"Accept": accept})
        assert index.json()["docs"] == "/docs"
        assert {"Accept"} == {
            one.split(", ")[0] for one in (index.headers["vary"], answer.headers["vary"])
        }


async def test_the_page_of_the_api_needs_nothing_from_elsewhere(served):
    page = (await served.client.get("/docs")).text
    needed = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(needed) >= 3
    for path in needed:
        assert path.startswith("docs/static/")
        assert (await served.client.get(f"/{path}")).status_code == 200
    assert "url: 'openapi.json'" in page


async def test_the_page_and_its_files_are_small_and_load_nothing_from_elsewhere(served):
    names, sizes = ["/"], []
    for name in names:  # which grows
        answer = await served.client.get(name, headers={"Accept": BROWSER})
        assert answer.headers["content-encoding"] == "gzip"
        sizes.append(int(answer.headers["content-length"]))
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        if answer.headers["content-type"].startswith("text/"):
            assert "://" not in re.sub(r"\{origin\}|http://www\.w3\.org/2000/svg", "", answer.text)
            found = re.findall(r'(?:src|href)="(page/[^"]+)"|"(page/[^"]+)"', answer.text)
            found = [tuple(f"/{one}" if one else "" for one in pair) for pair in found]
            found += [("", f"/page/{one}") for one in re.findall(r'from "\./([^"]+)"', answer.text)]
            names += [name for name in map("".join, found) if name not in names]
    assert {"/page/page.js", "/page/page.css", "/page/prepare.js", "/page/digits.png"} <= set(names)
    size = f"{round(sum(sizes) / 1000)} kB"
    assert f"{size} compressed" in (ROOT / "README.md").read_text()
    decision = ROOT / "docs/decisions/0022-a-page-without-a-build-step.md"
    assert f"{size} travel for the page" in decision.read_text()


async def test_a_file_that_the_browser_has_is_not_sent_again(served):
    for path in ("/", "/page/page.js"):
        first = await served.client.get(path, headers={"Accept": BROWSER})
        etag = first.headers["etag"]
        for known, status in ((etag, 304), (f'"other", W/{etag}', 304), ("*", 304), ('"x"', 200)):
            headers = {"Accept": BROWSER, "If-None-Match": known}
            again = await served.client.get(path, headers=headers)
            assert (again.status_code, again.headers["etag"]) == (status, etag)
            assert again.content == (first.content if status == 200 else b"")


async def test_a_file_is_compressed_for_clients_that_prefer_it(served):
    for accepted, coding in (
        ("gzip", "gzip"),
        ("br, GZIP;q=0.1", "gzip"),
        ("*", "gzip"),
        ("identity;q=0.5, gzip", "gzip"),
        ("", None),
        ("gzip;q=0", None),
        ("gzip;q=0.000, *", None),
        ("*;q=0", None),
        ("gzipped, x-gzip2", None),
        ("identity, gzip;q=0.5", None),
        ("gzip" + ", a" * 101, None),
    ):

        async def get(accepted, **headers):
            headers["Accept-Encoding"] = accepted
            return await served.client.get("/page/page.js", headers=headers)

        answer = await get(accepted)
        assert answer.headers.get("content-encoding") == coding, accepted
        same = {"If-None-Match": answer.headers["etag"]}
        assert (await get(accepted, **same)).status_code == 304
        again = await get("identity" if coding else "gzip", **same)
        assert again.status_code == 200, "the tag is that of another coding"
        assert again.headers["etag"] != answer.headers["etag"]
        assert again.content == answer.content


async def test_nothing_but_the_files_of_the_page_is_sent(served):
    for name in ("none.js", "__init__.py", "..%2f__init__.py", "%2e%2e/app.py"):
        assert (await served.client.get(f"/page/{name}")).status_code == 404
