"""Fixtures of all tests of the service."""

from __future__ import annotations

import pytest


@pytest.fixture
def ranges(monkeypatch):
    """The ranges that a profiler sees: what began, and the places in it of what ended."""
    began, ended = [], []

    def begin(name):
        began.append(name)
        return len(began)

    monkeypatch.setattr("lenet.nvtx.active", True)
    monkeypatch.setattr("lenet.nvtx.begin", begin)
    monkeypatch.setattr("lenet.nvtx.end", lambda place: place and ended.append(place))
    return began, ended
