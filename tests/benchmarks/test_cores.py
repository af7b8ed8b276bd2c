import os
import subprocess

import pytest

from benchmarks.cores import Cores, on, spans, split


@pytest.mark.parametrize(
    ("available", "load", "service", "rest"),
    [
        (range(16), 4, tuple(range(12)), (12, 13, 14, 15)),
        ((3, 7), 1, (3,), (7,)),
        ((3, 7, 9), 8, (3,), (7, 9)),
    ],
)
def test_the_last_cores_are_the_loads_and_one_is_always_left(available, load, service, rest):
    assert split(available, load) == Cores(service, rest)


def test_a_core_that_is_alone_is_shared_and_that_is_told():
    cores = split((5,), 1)
    assert cores == Cores((5,), (5,))
    assert "core 5 for service and load" in str(cores)


@pytest.mark.parametrize(
    ("numbers", "text"), [((0, 1, 2, 3, 8), "0-3,8"), ((4,), "4"), ((1, 3), "1,3"), ((), "")]
)
def test_cores_are_told_as_taskset_takes_them(numbers, text):
    assert spans(numbers) == text


def test_the_share_of_each_is_told():
    assert str(split(range(16), 4)) == "cores 0-11 for the service, 12-15 for the load"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone binds to cores")
def test_what_is_started_inside_stays_on_its_cores_and_we_do_not():
    before = os.sched_getaffinity(0)
    core = max(before)
    with on((core,)):
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with child:
        assert os.sched_getaffinity(child.pid) == {core}
        assert os.sched_getaffinity(0) == before
        child.stdin.close()
