"""Every input of the corpus, as a plain test: one for each branch, and what fuzzing once found."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from tests.fuzz.target import (
    CORPUS,
    LARGEST_INPUT_BYTES,
    MODULES,
    Finding,
    Target,
    load,
    run_bounded,
    run_traced,
)


@pytest.fixture
def target(request):
    with closing(load(request.param)) as target:
        yield target


@pytest.mark.parametrize(
    ("target", "name"), [(name, name) for name in MODULES], indirect=["target"], ids=list(MODULES)
)
def test_every_input_of_the_corpus_is_read_as_expected_within_its_bounds(target, name):
    paths = sorted((CORPUS / name).iterdir())
    assert paths
    failed = {}
    for path in paths:
        data = path.read_bytes()
        assert len(data) <= LARGEST_INPUT_BYTES, path
        try:
            run_traced(target, data)
        except Exception as exc:  # noqa: BLE001 - all of them are reported together
            failed[path.name] = repr(exc)
    assert not failed


@pytest.mark.parametrize("target", ["octets"], indirect=True)
def test_a_target_fails_when_its_parser_accepts_too_much(target, monkeypatch):
    many = (CORPUS / "octets" / "too-many-images").read_bytes()
    target.run(many)
    monkeypatch.setattr("service.forms.pixels.check_count", lambda *_: None)
    with pytest.raises(Finding):
        target.run(many)


class Wasteful(Target):
    """Takes `size` bytes, and some milliseconds."""

    def __init__(self, size):
        self.size = size

    def run(self, data):
        self.kept = bytes(self.size)
        end_s = time.process_time() + 0.02
        while time.process_time() < end_s:
            pass


def test_a_case_fails_when_it_takes_too_much_memory():
    run_traced(Wasteful(1000), b"")
    with pytest.raises(Finding, match="bytes of Python's memory"):
        run_traced(Wasteful(2 << 20), b"")


def test_a_case_fails_when_it_takes_too_much_time(monkeypatch):
    monkeypatch.setattr("tests.fuzz.target.CASE_CPU_S", 0.01)
    with pytest.raises(Finding, match="expected at most"):
        run_bounded(Wasteful(0), b"")
