from __future__ import annotations

import pytest

from website.links import problems

GOOD = '<p id="here"><a href="#here">a</a> <a href="b.html#there">b</a> <img src="c.png"></p>'


@pytest.fixture
def site(tmp_path):
    """A site of two pages, an image and a style sheet, without a problem."""
    (tmp_path / "index.html").write_text(GOOD)
    (tmp_path / "b.html").write_text('<h2 id="there">b</h2><a href="https://example.org/">c</a>')
    (tmp_path / "c.png").touch()
    (tmp_path / "d.css").write_text("p { background: url(c.png) }")
    return tmp_path


def test_a_site_whose_links_lead_somewhere_has_no_problem(site):
    assert problems(site) == []


@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ('<a href="missing.html">', "missing.html leads to no file"),
        ('<a href="../outside.html">', "../outside.html leads to no file"),
        ('<a href="#nowhere">', "#nowhere leads to no such place on its page"),
        ('<a href="b.html#nowhere">', "b.html#nowhere leads to no such place on its page"),
        ('<a href="https:///path">', "https:///path is no address"),
        ('<a href="http://host:x/">', "http://host:x/ is no address"),
        ('<a href="htp://host/">', "htp://host/ is no address"),
        ('<img src="missing.png">', "missing.png leads to no file"),
        ('<script src="https://cdn.example/a.js">', "https://cdn.example/a.js is loaded from else"),
        ('<script src="//cdn.example/a.js">', "//cdn.example/a.js is loaded from elsewhere"),
        ('<link rel="stylesheet" href="https://fonts.example/a">', "is loaded from elsewhere"),
        ('<link rel="preconnect" href="https://fonts.example">', "is loaded from elsewhere"),
        ('<img src="https://example.org/a.png">', "is loaded from elsewhere"),
        ("<style>@import 'https://fonts.example/a.css';</style>", "is loaded from elsewhere"),
        ('<p style="background: url(//example.org/a.png)">', "is loaded from elsewhere"),
    ],
)
def test_a_dead_link_or_an_outside_resource_is_reported_with_its_line(site, tag, problem):
    (site / "index.html").write_text(f"{GOOD}\n{tag}")
    (found,) = problems(site)
    assert found.startswith("index.html:2: ")
    assert problem in found


@pytest.mark.parametrize("css", ["@import 'https://x.example/a.css';", "a{b:url(https://x.y/z)}"])
def test_a_style_sheet_that_loads_from_elsewhere_is_reported(site, css):
    (site / "d.css").write_text(css)
    (found,) = problems(site)
    assert "is loaded from elsewhere" in found
