"""Delivery without a process; tests/faults/test_signals.py sends real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from service.signals import Signals

ROOT = Path(__file__).parents[2]


def test_signals_are_kept_in_order_until_there_is_a_receiver():
    signals, received = Signals(), []
    signals.take(signal.SIGHUP)
    signals.take(signal.SIGTERM)
    signals.deliver(received.append)
    signals.take(signal.SIGINT)
    assert received == [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]


UNBLOCKED = """
import os, signal, threading
from service.signals import SIGNALS, Signals
signals, arrived = Signals(), threading.Event()
signals.start()
received = []
signals.deliver(lambda number: (received.append(number), arrived.set()))
for number in SIGNALS:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.raise_signal(number)  # to this thread, which would end with it
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    assert arrived.wait(30)
    arrived.clear()
    os.kill(os.getpid(), number)
    assert arrived.wait(30)
    arrived.clear()
assert received == [number for number in SIGNALS for _ in range(2)], received
"""


def test_a_signal_is_received_when_a_library_unblocks_it_for_a_moment():
    subprocess.run(
        [sys.executable, "-c", UNBLOCKED], env={"PYTHONPATH": str(ROOT)}, check=True, timeout=60
    )
