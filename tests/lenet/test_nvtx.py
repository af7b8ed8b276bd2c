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


@pytest.mark.parametrize(
    ("nvtx", "tool"),
    [(None, "/opt/tool.so"), (SimpleNamespace(), None)],
    ids=["without nvtx", "without a profiler"],
)
def test_ranges_are_nothing_at_all_where_nobody_listens(monkeypatch, nvtx, tool):
    module = load(monkeypatch, nvtx, tool)

    def work():
        return 7

    assert module.span("run")(work) is work
    assert module.span("run") is module.span("batch")
    with pytest.raises(ZeroDivisionError), module.span("run"):
        raise ZeroDivisionError
    module.end(module.begin("request"))


def test_ranges_are_opened_and_closed_once_in_the_domain_of_lenet(monkeypatch):
    events = []

    def start_range(message, domain):
        events.append(("began", domain, message))
        return len(events)

    fake = SimpleNamespace(start_range=start_range, end_range=events.append)
    fake.annotate = lambda message, domain: (domain, message)
    nvtx = load(monkeypatch, fake)
    first, second = nvtx.begin("request"), nvtx.begin("queue")
    nvtx.end(first)
    nvtx.end(second)
    assert events == [("began", "lenet", "request"), ("began", "lenet", "queue"), 1, 2]
    assert nvtx.span("run") == ("lenet", "run")
