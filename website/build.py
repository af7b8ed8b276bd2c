"""`make docs` builds the site: README.md, docs, and what they link to, into build/site.

Pages are copied to build/docs with the paths of the repository, so their links work as they
are. A linked source file becomes a page with numbered lines, a linked folder a list of its files.
Zensical makes HTML of the Markdown; a warning of it, and a dead link, is an error.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from website.links import problems

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
IMAGES = {".png", ".svg", ".gif", ".jpg", ".webp"}
PLAIN = {".json", ".txt", ".log"}
"""Files that a browser shows as they are: pages with numbered lines would be thrice as large."""
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_LINES = re.compile(r"(L\d+)-L\d+")
_ACCESSIBLE = {
    "<th></th>": "<td></td>",  # an empty cell is no heading
    'class="md-path" aria-label="Navigation"': 'class="md-path" aria-label="Breadcrumbs"',
}
"""What is replaced in Zensical's HTML, so that a screen reader says what is there."""

_SOURCE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - lenet-serve</title>
<link rel="stylesheet" href="{up}website/theme/source.css">
<main>
<h1>{title}</h1>
<p><a href="{up}index.html">lenet-serve</a></p>
{body}
</main>
</html>
"""


class Site:
    """The sources of the site in `folder`, copied from the repository at `root`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._found: set[str] = set()
        self._left = ["README.md", *(_paths(root, "docs/**/*.md"))]
        self._left += _paths(root, "website/theme/*")

    def collect(self) -> list[str]:
        """Copy the pages and everything that they link to; the paths of the pages."""
        while self._left:
            path = self._left.pop()
            if path in self._found:
                continue
            self._found.add(path)
            source, target = self._root / path, self._folder / path
            if source.is_dir():
                files = _paths(source, "*")
                links = "\n".join(f'<li><a href="{_page(name)}">{name}</a>' for name in files)
                self._write_page(path, f"{path}/index.html", f"<ul>\n{links}\n</ul>")
                self._left += [f"{path}/{name}" for name in files]
            elif source.suffix == ".md":
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text("".join(self._translated(path)))
            elif source.suffix in IMAGES | PLAIN or path.startswith("website/theme/"):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
            else:
                lines = html.escape(source.read_text()).splitlines()
                spans = "\n".join(f"<i id=L{n}>{line}</i>" for n, line in enumerate(lines, 1))
                self._write_page(path, _page(path), f"<pre tabindex=0>{spans}</pre>")
        return sorted(path for path in self._found if path.endswith(".md"))

    def _write_page(self, title: str, path: str, body: str) -> None:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * path.count("/")
        target.write_text(_SOURCE.format(title=html.escape(title), up=up, body=body))

    def _translated(self, path: str) -> Iterator[str]:
        """The lines of a page, its links followed, and of each fence only the language."""
        inside = False
        for line in (self._root / path).read_text().splitlines(keepends=True):
            if line.startswith("```"):
                inside = not inside
                yield line.split()[0] + "\n"  # the words behind a language are for docs-check
            elif inside:
                yield line
            else:
                yield _LINK.sub(
                    lambda link: link[1] + self._followed(path, link[2]) + link[3], line
                )

    def _followed(self, page: str, link: str) -> str:
        """The link from `page` as it is in the site; what it leads to is collected."""
        place, hash_, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not place:
            return link
        path = os.path.normpath(PurePosixPath(page).parent / place)
        target = self._root / path
        if path.startswith("..") or not target.exists():
            raise SystemExit(f"{page}: the link {link} leads to no file of the repository")
        if target.is_dir():
            if not (target / "README.md").exists():
                self._left.append(path)
                return f"{place.rstrip('/')}/index.html"
            path, place = f"{path}/README.md", f"{place.rstrip('/')}/README.md"
        self._left.append(path)
        if target.suffix in {".md", *IMAGES, *PLAIN} or target.is_dir():
            return place + hash_ + anchor
        return _page(place) + hash_ + _LINES.sub(r"\1", anchor)


def _page(path: str) -> str:
    """The page of a source file."""
    if Path(path).suffix in {".md", *IMAGES, *PLAIN}:
        return path
    return re.sub(r"(^|/)\.(?=\w)", r"\1", path) + ".html"  # Zensical leaves hidden files out


def _paths(folder: Path, pattern: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob(pattern) if path.is_file())


def navigation(entries: list[Any], pages: list[str]) -> list[Any]:
    """`nav` of the configuration, with only `pages`, and patterns replaced by what they match."""
    named = set(re.findall(r'"([^"*]+\.md)"', json.dumps(entries)))

    def expanded(entry: Any) -> list[Any]:
        if isinstance(entry, str):
            if "*" not in entry:
                return [entry] if entry in pages else []
            return [page for page in pages if Path(page).match(entry) and page not in named]
        ((title, below),) = entry.items()
        if isinstance(below, str):
            return [{title: below}] if below in pages else []
        found = [one for each in below for one in expanded(each)]
        return [{title: found}] if found else []

    return [one for entry in entries for one in expanded(entry)]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


def build(root: Path = ROOT, build: Path = BUILD) -> Path:
    """Build the site of the repository at `root`; its folder.

    Raises:
        SystemExit: Zensical has a warning, or a link is dead; the message says which.
    """
    source, site = build / "docs", build / "site"
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
    pages = Site(root, source).collect()
    config = tomllib.loads((root / "website" / "zensical.toml").read_text())
    config["project"]["nav"] = navigation(config["project"]["nav"], pages)
    (build / "zensical.toml").write_text(f"project = {_toml(config['project'])}\n")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    environment = {**os.environ, "NO_COLOR": "1"}
    result = subprocess.run(
        command, cwd=build, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"zensical failed\n{result.stdout}{result.stderr}")
    shutil.rmtree(site / "assets" / "stylesheets" / "classic")  # of the theme's other variant
    for path in site.rglob("*.html"):
        text = path.read_text()
        for theirs, ours in _ACCESSIBLE.items():
            text = text.replace(theirs, ours)
        parts = re.split(r"(<pre.*?</pre>)", text, flags=re.DOTALL)
        parts[::2] = (re.sub(r"\s*\n\s*", "\n", part) for part in parts[::2])  # a quarter of it
        path.write_text("".join(parts))
    if found := problems(site):
        raise SystemExit("\n".join(found))
    return site


if __name__ == "__main__":
    built = build()
    size = sum(path.stat().st_size for path in built.rglob("*") if path.is_file())
    print(f"{built / 'index.html'}: {size / 1e6:.1f} MB")
