from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

import lenet.nvtx


def load(monkeypatch, nvtx: ModuleType | None, tool: str | None = "/opt/tool.so"):
    """A second copy of `lenet.nvtx`, which found `nvtx`; None where the package is absent.

    `tool` is the library that a profiler lets NVTX load.
    """
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    if tool is not None:
        monkeypatch.setenv("NVTX_INJECTION64_PATH", tool)
    spec = importlib.util.spec_from_file_location("lenet_nvtx_again", lenet.nvtx.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_span_is_nothing_at_all_when_nvtx_is_absent(monkeypatch):
    span = load(monkeypatch, None).span

    def work():
        return 7

    assert span("run")(work) is work
    assert span("run") is span("batch")
    with pytest.raises(ZeroDivisionError), span("run"):
        raise ZeroDivisionError


def test_a_span_is_nothing_at_all_when_no_tool_listens(monkeypatch):
    nvtx = load(monkeypatch, SimpleNamespace(), tool=None)
    assert nvtx.span("run") is nvtx.span("batch")
    assert nvtx.begin("request") is None


def test_a_range_is_nothing_to_begin_and_to_end_when_nvtx_is_absent(monkeypatch):
    nvtx = load(monkeypatch, None)
    assert nvtx.begin("request") is None
    nvtx.end(None)


def test_ranges_that_cross_are_each_closed_once_when_nvtx_is_there(monkeypatch):
    events = []

    def start_range(message, domain):
        events.append(("began", domain, message))
        return len(events)

    fake = SimpleNamespace(start_range=start_range, end_range=lambda opened: events.append(opened))
    nvtx = load(monkeypatch, fake)
    first, second = nvtx.begin("request"), nvtx.begin("queue")
    nvtx.end(first)
    nvtx.end(second)
    assert events == [("began", "lenet", "request"), ("began", "lenet", "queue"), 1, 2]


def test_a_span_opens_a_range_in_the_domain_of_lenet_when_nvtx_is_there(monkeypatch):
    opened = []

    class Annotate:
        def __init__(self, message, domain):
            self.range = (domain, message)

        def __enter__(self):
            opened.append(self.range)

        def __exit__(self, *_):
            opened.append("closed")

        def __call__(self, function):
            def wrapped():
                with self:
                    return function()

            return wrapped

    span = load(monkeypatch, SimpleNamespace(annotate=Annotate)).span
    with span("queue"):
        assert opened == [("lenet", "queue")]
    assert span("run")(lambda: 7)() == 7
    assert opened == [("lenet", "queue"), "closed", ("lenet", "run"), "closed"]
