"""Checks of a built site: every link leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_OUTSIDE = re.compile(r"(?:https?:)?//[^/]")
_CSS_URL = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
_LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "srcset"}
_NOT_LOADED = {"canonical", "next", "prev", "alternate"}


class _Page(HTMLParser):
    """The anchors of a page, its links, and what it loads, with the line of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[int, str]] = []
        self.loaded: list[tuple[int, str]] = []
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag names or refers to."""
        found = dict(attrs)
        line = self.getpos()[0]
        self.anchors |= {found.get("id") or "", found.get("name") or ""}
        if tag == "a" and (href := found.get("href")):
            self.links.append((line, href))
        reference = found.get(_LOADED.get(tag, "")) or ""
        if reference and (tag != "link" or found.get("rel") not in _NOT_LOADED):
            self.loaded.append((line, reference))
        self._in_style = tag == "style"
        self._add_urls(found.get("style") or "")

    def handle_data(self, data: str) -> None:
        """Note what a style sheet within the page loads."""
        if self._in_style:
            self._add_urls(data)

    def _add_urls(self, css: str) -> None:
        self.loaded += [(self.getpos()[0], url) for url in _urls(css) if _OUTSIDE.match(url)]


def problems(site: Path) -> list[str]:
    """A line for each dead link, and for each file that would be loaded from elsewhere."""
    pages = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # for servers alone: its links begin at their root
            continue
        place = path.relative_to(site)
        for line, link in page.links + page.loaded:
            if (line, link) in page.loaded and _OUTSIDE.match(link):
                found.append(f"{place}:{line}: {link} is loaded from elsewhere")
            elif problem := _dead(site, path, link, pages):
                found.append(f"{place}:{line}: {link} {problem}")
    for path in site.rglob("*.css"):
        found += [
            f"{path.relative_to(site)}: {url} is loaded from elsewhere"
            for url in _urls(path.read_text())
            if _OUTSIDE.match(url)
        ]
    return sorted(found)


def _urls(css: str) -> Iterator[str]:
    for match in _CSS_URL.finditer(css):
        yield match[1] or match[2]


def _dead(site: Path, path: Path, link: str, pages: dict[Path, _Page]) -> str:
    try:
        parts = urlsplit(link)
        port = parts.port  # ValueError if it is no number
    except ValueError as exc:
        return f"is no address ({exc})"
    if parts.scheme or parts.netloc:
        good = parts.scheme in ("http", "https") and parts.hostname and port != 0
        return "" if good or parts.scheme in ("mailto", "data") else "is no address"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file() or not target.is_relative_to(site.resolve()):
        return "leads to no file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "leads to no such place on its page"
    return ""
