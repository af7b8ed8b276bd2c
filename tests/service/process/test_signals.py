"""Delivery without a process; tests/faults/test_signals.py sends real ones."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service.process.signals import Signals
from tests.service_process import PATIENCE_S

ROOT = Path(__file__).parents[3]


def test_signals_are_kept_in_order_until_there_is_a_receiver():
    signals, received = Signals(clock=itertools.count().__next__), []
    signals.take(signal.SIGHUP)
    signals.take(signal.SIGTERM)
    signals.deliver(received.append)
    signals.take(signal.SIGINT)
    assert received == [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]


@pytest.mark.states(
    "times and counts in operations.md",
    "a second signal within 0.25 s is the same one",
    found="signals at 0.24 and 0.25 s of an injected clock",
)
@pytest.mark.parametrize(
    ("times_s", "received"),
    [
        ((0.0, 0.001), 1),  # as coreutils' timeout sends them
        ((0.0, 0.2, 0.24), 1),
        ((0.0, 0.25), 2),
        ((0.0, 0.1, 0.3), 2),
    ],
)
def test_signals_to_stop_that_come_at_the_same_time_are_one(times_s, received):
    now_s = iter(times_s)
    signals, numbers = Signals(clock=lambda: next(now_s)), []
    signals.deliver(numbers.append)
    for number, _ in zip(itertools.cycle((signal.SIGTERM, signal.SIGINT)), times_s):
        signals.take(number)
        signals.take(signal.SIGHUP)
    assert numbers.count(signal.SIGHUP) == len(times_s)
    assert len(numbers) - len(times_s) == received


UNBLOCKED = """
import itertools, os, signal, threading
from service.process.signals import SIGNALS, Signals
signals, arrived = Signals(clock=itertools.count().__next__), threading.Event()
signals.start()
received = []
signals.deliver(lambda number: (received.append(number), arrived.set()))
for number in SIGNALS:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.raise_signal(number)  # to this thread, which would end with it
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    arrived.wait()
    arrived.clear()
    os.kill(os.getpid(), number)
    arrived.wait()
    arrived.clear()
assert received == [number for number in SIGNALS for _ in range(2)], received
"""


def test_a_signal_is_received_when_a_library_unblocks_it_for_a_moment():
    subprocess.run(
        [sys.executable, "-c", UNBLOCKED],
        env={"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=PATIENCE_S,
    )
