from __future__ import annotations

import tomllib

import pytest

from tests.conftest import ROOT
from website.build import Site, navigation
from website.links import problems

MAX_SITE_BYTES = 6_600_000


@pytest.fixture
def repository(tmp_path):
    """A repository with a page, source files in a folder, and an empty stylesheet."""
    root = tmp_path / "repository"
    for folder in ("docs/more", "code", "website/theme"):
        (root / folder).mkdir(parents=True)
    (root / "docs/more/b.md").write_text("# b\n")
    (root / "docs/a.png").touch()
    (root / "code/c.py").write_text("if a < b:\n    pass\n")
    (root / "code/d.sh").write_text("true\n")
    return root


@pytest.fixture
def collect(repository, tmp_path):
    """`collect("text of README.md")` returns README.md as it is in the site, and its pages."""

    def collect(readme):
        (repository / "README.md").write_text(readme)
        pages = Site(repository, tmp_path / "site").collect()
        return (tmp_path / "site/README.md").read_text(), pages

    return collect


def test_links_between_pages_and_to_images_stay_as_they_are(collect):
    text = "[b](docs/more/b.md#b) ![a](docs/a.png) [out](https://example.org/) [here](#here)\n"
    assert collect(text) == (text, ["README.md", "docs/more/b.md"])


def test_a_linked_source_file_becomes_a_page_with_an_anchor_for_each_line(collect, tmp_path):
    text, _ = collect("[c](code/c.py) [line](code/c.py#L2) [lines](code/c.py#L1-L2)\n")
    assert text == "[c](code/c.py.html) [line](code/c.py.html#L2) [lines](code/c.py.html#L1)\n"
    page = (tmp_path / "site/code/c.py.html").read_text()
    assert "<i id=L1>if a &lt; b:</i>\n<i id=L2>    pass</i>" in page


def test_a_linked_folder_becomes_a_list_of_its_files(collect, tmp_path):
    assert collect("[code](code)\n")[0] == "[code](code/index.html)\n"
    page = (tmp_path / "site/code/index.html").read_text()
    assert '<a href="c.py.html">c.py</a>' in page
    assert (tmp_path / "site/code/d.sh.html").exists()


def test_a_linked_folder_with_a_readme_leads_to_it(collect, repository):
    (repository / "code/README.md").write_text("# code\n")
    text, pages = collect("[code](code/)\n")
    assert text == "[code](code/README.md)\n"
    assert "code/README.md" in pages


def test_words_behind_the_language_of_a_fence_are_left_out(collect):
    text, _ = collect("```sh gpu\n[ -e a ](b)\n```\n\n```json\n{}\n```\n")
    assert text == "```sh\n[ -e a ](b)\n```\n\n```json\n{}\n```\n"


@pytest.mark.parametrize("link", ["docs/missing.md", "../outside.md", "code/missing.py#L1"])
def test_a_link_to_no_file_of_the_repository_ends_the_build(collect, link):
    with pytest.raises(SystemExit, match=r"README\.md: the link .* leads to no file"):
        collect(f"[a]({link})\n")


def test_the_navigation_leaves_out_missing_pages_and_expands_patterns():
    entries = [
        {"Home": "README.md"},
        {"Part": ["docs/b.md", "docs/missing.md", "docs/*.md"]},
        {"Nothing": ["docs/none/*.md"]},
    ]
    pages = ["README.md", "docs/a.md", "docs/b.md"]
    expected = [{"Home": "README.md"}, {"Part": ["docs/b.md", "docs/a.md"]}]
    assert navigation(entries, pages) == expected


def test_every_page_of_docs_is_in_the_navigation_once(tmp_path):
    pages = Site(ROOT, tmp_path).collect()
    config = tomllib.loads((ROOT / "website" / "zensical.toml").read_text())
    found = list(_leaves(navigation(config["project"]["nav"], pages)))
    assert len(found) == len(set(found))
    assert {page for page in pages if page.startswith("docs/")} <= set(found)


def _leaves(entries):
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            (below,) = entry.values()
            yield from _leaves([below] if isinstance(below, str) else below)


def test_the_site_is_small_and_has_no_dead_link_and_loads_nothing_from_elsewhere(site):
    assert problems(site) == []
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < MAX_SITE_BYTES


def test_a_warning_of_zensical_ends_the_build(site, repository, tmp_path):
    from website.build import build

    (repository / "README.md").write_text("# a\n\n[b](docs/more/b.md#missing)\n")
    (repository / "website/zensical.toml").write_text(
        '[project]\nsite_name = "a"\ndocs_dir = "docs"\nsite_dir = "site"\nnav = ["README.md"]\n'
    )
    with pytest.raises(SystemExit, match="anchor does not exist"):
        build(repository, tmp_path / "build")
