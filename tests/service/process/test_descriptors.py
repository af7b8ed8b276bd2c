from __future__ import annotations

import resource

import pytest

from service.process import descriptors
from service.process.descriptors import LEAST, LEAST_PER_WORKER, connections, raise_limit, too_few

INFINITE = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch):
    """`limits(soft, hard)` are those of the process; a change is noted in the list it returns."""

    def limits(soft, hard, refused=False):
        changed = []

        def change(_, pair):
            if refused:
                raise ValueError("not allowed")
            changed.append(pair)

        monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(descriptors.resource, "setrlimit", change)
        return changed

    return limits


@pytest.mark.states(
    "times and counts in operations.md",
    "open files: the hard limit, 65,536 at most",
    found="limits that the system is asked for",
)
@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (256, 4096, 4096),
        (1024, 1 << 20, 65_536),
        (1024, INFINITE, 65_536),
        (100_000, INFINITE, 100_000),
        (4096, 4096, 4096),
    ],
)
def test_the_limit_is_raised_but_never_lowered(limits, soft, hard, limit):
    changed = limits(soft, hard)
    assert raise_limit() == limit
    assert changed == ([] if limit == soft else [(limit, hard)])


def test_the_limit_stays_when_it_cannot_be_raised(limits):
    limits(256, 4096, refused=True)
    assert raise_limit() == 256


def test_a_supervisor_needs_some_for_each_worker():
    assert too_few(LEAST) == ""
    assert f"got a limit of {LEAST}, expected at least" in too_few(LEAST, 1)
    assert too_few(LEAST + 8 * LEAST_PER_WORKER, 8) == ""


@pytest.mark.states(
    "limits", "connections of a worker", found="7/8 of limits of open files, by hand"
)
@pytest.mark.parametrize(("limit", "most"), [(LEAST, 16), (1024, 896), (65_536, 57_344)])
def test_connections_leave_descriptors_to_the_service(limits, limit, most):
    limits(limit, limit)
    assert connections() == most
