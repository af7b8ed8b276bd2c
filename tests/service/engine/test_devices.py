from __future__ import annotations

import logging

import pytest

from lenet.context import Target
from lenet.errors import BackendUnavailable
from service.engine import devices
from service.engine.devices import on_gpu, place
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


def test_auto_is_the_cpu_and_says_why_where_there_is_no_gpu(gpus, caplog):
    gpus(0)
    with caplog.at_level(logging.INFO):
        placement = place(Settings(cpu_threads=3))
    assert placement.targets == (Target("cpu", cpu_threads=3),)
    assert (placement.contexts, placement.max_batch_rows) == (1, 64)
    assert placement.name == "cpu"
    (record,) = caplog.records
    assert record.message == "computing on the CPU: no GPU here"


def test_settings_that_auto_cannot_use_on_the_cpu_are_a_warning(gpus, caplog):
    gpus(0)
    place(Settings(precision="tf32", devices="all"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == "the CPU has no use for these settings: --devices, --precision"


@pytest.mark.parametrize(("wanted", "indices"), [("2,0", (2, 0)), ("all", (0, 1, 2))])
def test_gpus_are_taken_in_the_order_given(gpus, wanted, indices):
    gpus(3)
    settings = Settings(
        device="cuda", devices=wanted, precision="tf32", profile=True, convolutions="cudnn"
    )
    placement = place(settings)
    assert placement.targets == tuple(
        Target("cuda", index, "tf32", profile=True, convolutions="cudnn") for index in indices
    )
    assert placement.name == f"cuda:{','.join(map(str, indices))}"


@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cuda", 1)])
def test_contexts_and_rows_are_those_that_are_set_on_every_device(gpus, device, count):
    gpus(count)
    placement = place(Settings(device=device, contexts=3, max_batch_rows=7))
    assert (placement.contexts, placement.max_batch_rows) == (3, 7)


@pytest.mark.parametrize(
    ("device", "wanted_us", "busy_poll_s"),
    [
        *(("cpu", None, 0.0), ("cpu", 50, 50e-6), ("cuda", None, 200e-6)),
        *(("cuda", 0, 0.0), ("cuda", 100_000, 0.1)),
    ],
)
def test_a_worker_polls_as_long_as_is_set_or_as_suits_its_device(
    gpus, device, wanted_us, busy_poll_s
):
    gpus(1)
    placement = place(Settings(device=device, busy_poll_us=wanted_us))
    assert placement.busy_poll_s == pytest.approx(busy_poll_s)


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
