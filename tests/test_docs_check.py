"""The documents that `make docs-check` runs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.docs_check import commands, documents, taken

ROOT = Path(__file__).parents[1]


def test_every_document_is_checked_when_none_is_named(tmp_path):
    (tmp_path / "docs" / "tutorial").mkdir(parents=True)
    for name in ("README.md", "docs/http.md", "docs/tutorial/one.md"):
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in documents(tmp_path, [])]
    assert found == ["README.md", "docs/http.md", "docs/tutorial/one.md"]


def test_only_the_named_documents_are_checked_when_there_are_names(tmp_path):
    assert documents(tmp_path, ["docs/http.md"]) == [tmp_path / "docs/http.md"]


@pytest.mark.parametrize("path", documents(ROOT, []), ids=lambda path: path.name)
def test_the_words_behind_each_fence_are_known_when_a_document_is_read(path):
    list(commands(path.read_text()))  # KeyError for a word without a reason


def test_a_block_needs_mnist_when_it_says_so_or_names_the_folder():
    document = """
```sh
echo 1
make train ARGS="fit --data data/mnist"
```
```sh mnist
echo 2
```
"""
    found = {one.text: one.mnist for one in commands(document)}
    assert found == {
        "echo 1": False,
        'make train ARGS="fit --data data/mnist"': True,
        "echo 2": True,
    }


def test_a_port_that_another_program_has_is_named_before_a_command_needs_it():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        serve = f'make serve ARGS="--port {port}"'
        assert taken(["make check", serve]) == (
            f"port {port} is taken by another program: stop that first"
        )
        assert taken([f"{serve} --help", f"echo --port {port}"]) == ""
    assert taken([serve]) == ""
