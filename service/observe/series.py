"""Every series of the service, its unit and its buckets; numbers of several workers, added up."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import orjson

Labels: TypeAlias = tuple[str, ...]

Series: TypeAlias = dict[Labels, list[float]]
"""By the values of the labels: the number; of a histogram the events between each two bounds, then
the sum of their values."""

Numbers: TypeAlias = dict[str, Series]
"""By the name of the metric."""

_UNIT = 2.0**-24


@dataclass(frozen=True, slots=True)
class Family:
    """A metric. `merged`: how the numbers of several workers become one."""

    kind: str
    """counter, gauge or histogram."""
    name: str
    help_text: str
    labels: Labels
    bounds: tuple[float, ...]
    merged: Callable[[float, float], float]
    lasts: bool
    """Whether it stays when its worker has ended."""

    @property
    def zero(self) -> list[float]:
        """Its numbers before the first event."""
        return [0] * (len(self.bounds) + 2 if self.bounds else 1)


REQUEST_BOUNDS_S = tuple(
    round(mantissa * 10.0**exponent, 9)
    for exponent in (-5, -4, -3, -2, -1, 0)
    for mantissa in (1, 1.5, 2, 3, 5, 7)
    if 5e-5 <= mantissa * 10.0**exponent <= 5
)
BELOW_S = (1e-5, 2e-5, 3e-5)
STAGE_BOUNDS_S = (*BELOW_S, *REQUEST_BOUNDS_S)
_BOUNDS = {
    "request": REQUEST_BOUNDS_S,
    "stage": STAGE_BOUNDS_S,
    "rows": tuple(float(1 << exponent) for exponent in range(11)),
}

DEATHS = "lenet_worker_deaths"

_TABLE = """
gauge process_resident_memory_bytes
    Resident memory of all workers.
counter process_cpu_seconds
    User and system CPU time of all workers.
gauge process_open_fds
    Open file descriptors of all workers.
gauge:max lenet_build_info version
    1, with the version as a label.
counter lenet_requests model version protocol outcome
    Requests answered, by outcome: ok, except for explanations, or the code of the error. The
    model is none, and the version empty, if the request failed before its model was found.
    Outcomes with alerts are there from the start, others from their first.
histogram:request lenet_request_duration_seconds protocol
    From the headers of a request read to its answer made; predictions only.
histogram:request lenet_explanation_duration_seconds
    From the headers of a request for an explanation read to its answer made.
histogram:stage lenet_stage_duration_seconds stage
    Time of a predicted request in each stage.
histogram:rows lenet_batch_rows
    Images in a batch.
histogram:stage lenet_batch_duration_seconds
    From the cut of a batch to its result.
histogram:stage lenet_device_duration_seconds
    Time of one batch by the device's clock, where it is read.
counter lenet_batches model version reason
    Batches, by the reason for which they were cut.
counter lenet_images model version
    Images in batches that were computed, also those whose requests failed afterwards.
counter lenet_padding_rows model version
    Rows computed only to fill a batch up.
counter lenet_stage_seconds model version stage
    Time of all predicted requests in each stage, and in all.
counter lenet_sized_batches model version rows
    Batches by the next power of two of their rows.
counter lenet_sized_batch_seconds model version rows
    From the cut of these batches to their results.
gauge:last lenet_last_prediction_timestamp_seconds model version
    When a request was last predicted, to a second; 0 before the first.
counter lenet_graph_replays model version result
    Batches; hit if a captured graph computed it. The CPU captures none.
counter lenet_device_losses reason
    Processes that ended because their device was lost: a sticky error, or a hang.
gauge lenet_in_flight_bytes
    Bodies being received or decoded, and answers waiting to be sent: what is in use of
    --max-in-flight-bytes.
counter lenet_decoder_ends reason
    Decoding processes that ended: idle, killed for work that was cancelled, or died.
counter lenet_connections_refused
    Connections that were closed at once because as many as are allowed were open.
counter lenet_rows_dropped reason
    Images that left the queue without a batch: cancelled, or too late.
gauge lenet_queue_rows model version
    Images waiting in the queue.
gauge lenet_queue_limit_rows model version
    Most images that may wait: --max-queue-rows of all workers.
gauge lenet_contexts model version
    Execution contexts.
gauge lenet_contexts_busy model version
    Execution contexts with a batch.
gauge lenet_device_bytes model version
    Device memory of all contexts.
gauge lenet_workspace_bytes model version
    The part of lenet_device_bytes that is scratch.
gauge:max lenet_golden_error model version
    Largest golden logit difference at the self-test, relative to the largest logit.
gauge:max lenet_golden_tolerance model version
    The lenet_golden_error beyond which a version is not served.
gauge lenet_workers
    Processes that serve or start.
counter lenet_worker_deaths
    Workers that ended, for whatever reason, while others go on.
gauge:max lenet_start_phase_seconds phase
    Time of each phase of the start; contexts holds most of device and all of warm_up. Of
    several workers the longest.
gauge:max lenet_model_info model version sha256
    1 for each loaded version of a model.
counter lenet_reloads model outcome
    Loads and reloads of a model: ok if the newest file is served afterwards.
gauge:min lenet_certificate_end_timestamp_seconds
    When the served certificate, or one of its chain, expires; absent without TLS.
"""
"""A line with the kind, the name and the labels, then the help.

Kinds: a histogram has its bounds. A gauge is added up over workers unless it says max or min; of
the last prediction the newest is shown, also after its worker has ended. The series of the process
are those of several workers; one alone shows prometheus_client's.
"""


def _families() -> Iterator[Family]:
    for row in re.split(r"\n(?! )", _TABLE.strip()):
        head, *text = row.splitlines()
        kind, name, *labels = head.split()
        kind, _, option = kind.partition(":")
        yield Family(
            kind,
            name,
            " ".join(map(str.strip, text)),
            tuple(labels),
            _BOUNDS.get(option, ()),
            merged={"max": max, "last": max, "min": min}.get(option, operator.add),
            lasts=kind != "gauge" or option == "last",
        )


FAMILIES = {family.name: family for family in _families()}
"""By name, in the order of `/metrics`. A counter's samples end in `_total`."""


def added(before: Series, more: Series, sums: dict[Labels, float]) -> Series:
    """Counters or histograms of a family, with what happened since: `before` stays as it is.

    Sums become multiples of 2^-24, which up to 2^29 add up exactly in any order: a total that is
    smaller by its last bit is a reset for Prometheus. `sums` keeps what rounding would lose.
    """
    found = {**before}
    for labels, values in more.items():
        *counts, _ = map(operator.add, before.get(labels, repeat(0)), values)
        sums[labels] = sums.get(labels, 0) + values[-1]
        found[labels] = [*counts, round(sums[labels] / _UNIT) * _UNIT]
    return found


def merged(several: Iterable[Numbers]) -> Numbers:
    """The numbers of several workers as one."""
    total: Numbers = {}
    for numbers in several:
        for name, series in numbers.items():
            merge, into = FAMILIES[name].merged, total.setdefault(name, {})
            for labels, values in series.items():
                before = into.get(labels)
                into[labels] = list(map(merge, before, values)) if before else values
    return total


def encoded(numbers: Numbers) -> bytes:
    """The numbers as JSON."""
    return orjson.dumps({name: list(series.items()) for name, series in numbers.items()})


def decoded(data: bytes) -> Numbers:
    """The opposite of `encoded`, without metrics that this program does not have.

    Raises:
        ValueError: it is not JSON.
        TypeError: something is not a number. NaN, which JSON does not have, is null.
    """
    read = orjson.loads(data)
    found = {name: {tuple(labels): one for labels, one in read[name]} for name in read}
    for series in found.values():
        for values in series.values():
            sum(values)  # raises TypeError
    return {name: series for name, series in found.items() if name in FAMILIES}
