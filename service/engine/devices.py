"""Resolves the settings to the devices that the service computes on; opens none of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from lenet.context import Target, choose, gpus
from lenet.errors import BackendUnavailable
from service.settings import Settings

_log = logging.getLogger(__name__)

CONTEXTS = {"cpu": 1, "cuda": 2}
"""Default contexts a device; on a GPU the copies of one overlap the kernels of another."""

MAX_BATCH_ROWS = {"cpu": 64, "cuda": 1024}
BUSY_POLL_US = {"cpu": 0, "cuda": 200}
OVERLAP_ROWS = 64
"""Rows: the default `overlap_rows` of a single GPU, see `Batcher`. An H200 takes about as long for
several dozen rows as for one, but each batch costs the host's time. With 512, four connections that
send 64 images each waited for each other, and got 0.8 of the throughput (2026-11-22); with 128, in
pairs, they got as much as with 64: half the launches, but the device waits for the second of a pair
(H100, 2026-11-27)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of each model, with their defaults filled in."""

    targets: tuple[Target, ...]
    """GPUs, or the CPU alone."""
    contexts: int
    """Contexts on each target."""
    max_batch_rows: int
    busy_poll_s: float = 0.0
    overlap_rows: int = 0

    @property
    def precision(self) -> str:
        """The precision that the devices compute in."""
        target = self.targets[0]
        return "fp32" if target.device == "cpu" else target.precision

    @property
    def name(self) -> str:
        """The devices as logged: cpu, or cuda:0,1."""
        if self.targets[0].device == "cpu":
            return "cpu"
        return "cuda:" + ",".join(str(target.index) for target in self.targets)


def on_gpu(device: Literal["auto", "cpu", "cuda"]) -> bool:
    """Whether `device` is a GPU here; cuda is not checked."""
    return device == "cuda" or choose(device)[0] == "cuda"


def place(settings: Settings) -> Placement:
    """The devices of `settings` on this machine, which are logged.

    Raises:
        BackendUnavailable: there is no such GPU, or it cannot be used; the message says why.
    """
    device, no_gpu = choose(settings.device)
    contexts = settings.contexts or CONTEXTS[device]
    max_batch_rows = settings.max_batch_rows or MAX_BATCH_ROWS[device]
    wanted_us = settings.busy_poll_us
    busy_poll_s = 1e-6 * (BUSY_POLL_US[device] if wanted_us is None else wanted_us)
    if device == "cpu":
        if no_gpu is not None:
            _log.info("computing on the CPU: %s", no_gpu)
        if settings.unused_on_cpu:
            _log.warning("the CPU has no use for these settings: %s", settings.unused_on_cpu)
        target = Target("cpu", cpu_threads=settings.cpu_threads)
        return Placement((target,), contexts, max_batch_rows, busy_poll_s)
    targets = tuple(
        Target(
            "cuda",
            index,
            settings.precision,
            profile=settings.profile,
            convolutions=settings.convolutions,
        )
        for index in _indices(settings.devices, gpus())
    )
    # A small batch on one GPU does not keep another GPU from starting one.
    overlap_rows = OVERLAP_ROWS if len(targets) == 1 else 1
    placement = Placement(targets, contexts, max_batch_rows, busy_poll_s, overlap_rows)
    _log.info(
        "computing on %s in %s: %d contexts for each model on each GPU",
        placement.name,
        settings.precision,
        contexts,
    )
    return placement


def _indices(wanted: tuple[int, ...], usable: tuple[int, ...]) -> tuple[int, ...]:
    if not set(wanted) <= set(usable):
        raise BackendUnavailable(
            f"devices is {','.join(map(str, wanted))}, expected numbers of GPUs that are here and "
            f"can be used: {', '.join(map(str, usable))}"
        )
    return wanted or usable
