from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from lenet.context import Target
from lenet.errors import BackendUnavailable
from service.engine import devices
from service.engine.devices import OVERLAP_ROWS, Placement, on_gpu, place
from service.settings import Settings


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(2)`: so many GPUs are here; 0 is none, and the reason for it."""

    def install(count):
        def choose(device):
            if device == "cpu":
                return "cpu", None
            if count:
                return "cuda", None
            if device == "cuda":
                raise BackendUnavailable("no GPU here")
            return "cpu", "no GPU here"

        monkeypatch.setattr(devices, "choose", choose)
        monkeypatch.setattr(devices, "gpus", lambda: tuple(range(count)))

    return install


def gpus_of(*indices, **options):
    return tuple(Target("cuda", index, **options) for index in indices)


FINE = {"precision": "tf32", "profile": True, "convolutions": "cudnn"}
OWN = {"contexts": 3, "max_batch_rows": 7}


@pytest.mark.parametrize(
    ("count", "options", "expected", "name"),
    [
        (0, {"cpu_threads": 3}, Placement((Target("cpu", cpu_threads=3),), 1, 64), "cpu"),
        (
            1,
            {"device": "cpu", "busy_poll_us": 50, **OWN},
            Placement((Target("cpu"),), 3, 7, 50e-6),
            "cpu",
        ),
        (1, {"busy_poll_us": 0}, Placement(gpus_of(0), 2, 1024, 0.0, OVERLAP_ROWS), "cuda:0"),
        (3, {"devices": "all"}, Placement(gpus_of(0, 1, 2), 2, 1024, 200e-6, 1), "cuda:0,1,2"),
        (
            3,
            {"device": "cuda", "devices": "2,0", **FINE, **OWN},
            Placement(gpus_of(2, 0, **FINE), 3, 7, 200e-6, 1),
            "cuda:2,0",
        ),
    ],
)
def test_settings_and_what_is_here_say_where_models_are_placed(
    gpus, count, options, expected, name
):
    gpus(count)
    placement = place(Settings(**options))
    found = replace(placement, busy_poll_s=round(placement.busy_poll_s, 9))
    assert (found, placement.name) == (expected, name)


def test_auto_says_why_it_is_the_cpu_and_which_settings_that_does_not_use(gpus, caplog):
    gpus(0)
    caplog.set_level(logging.INFO)
    place(Settings(precision="tf32", devices="all"))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "computing on the CPU: no GPU here"),
        ("WARNING", "the CPU has no use for these settings: --devices, --precision"),
    ]


@pytest.mark.parametrize(
    ("wanted", "count", "there"),
    [("0,3", 3, "0, 1, 2"), ("1", 1, "0")],
)
def test_a_gpu_that_is_not_there_is_refused_with_those_there_are(gpus, wanted, count, there):
    gpus(count)
    with pytest.raises(BackendUnavailable) as caught:
        place(Settings(device="cuda", devices=wanted))
    assert str(caught.value) == (
        f"devices is {wanted}, expected numbers of GPUs that are here and can be used: {there}"
    )


@pytest.mark.parametrize(
    ("device", "count", "expected"),
    [("auto", 0, False), ("auto", 1, True), ("cpu", 1, False), ("cuda", 0, True)],
)
def test_a_gpu_is_used_where_it_is_asked_for_or_found(gpus, device, count, expected):
    gpus(count)
    assert on_gpu(device) is expected
