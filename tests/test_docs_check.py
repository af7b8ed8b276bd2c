"""The documents that `make docs-check` runs."""

from __future__ import annotations

from pathlib import Path

from tests.docs_check import SKIPS, commands, documents

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_every_document_is_checked_when_none_is_named(tmp_path):
    (tmp_path / "docs" / "tutorial").mkdir(parents=True)
    for name in ("README.md", "docs/http.md", "docs/tutorial/one.md"):
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in documents(tmp_path, [])]
    assert found == ["README.md", "docs/http.md", "docs/tutorial/one.md"]


def test_only_the_named_documents_are_checked_when_there_are_names(tmp_path):
    assert documents(tmp_path, ["docs/http.md"]) == [tmp_path / "docs/http.md"]


def test_each_skipped_command_has_a_known_reason_when_documents_are_read():
    found = [one for path in documents(ROOT, []) for one in commands(path.read_text())]
    known = set(SKIPS.values())
    assert found
    assert all(set(filter(None, one.skip.split(", "))) <= known for one in found)
