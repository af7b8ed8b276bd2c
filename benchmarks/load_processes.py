"""A load sent from several processes: one Python process is soon the limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from benchmarks.digits import PreparedRequest
from benchmarks.load import Load, Results, send_load

_START_TIMEOUT_S = 60.0


def share(load: Load, processes: int) -> list[Load]:
    """`load` split into equal parts with different seeds."""
    connections, rest = divmod(load.connections, processes)
    return [
        replace(
            load,
            connections=connections + (index < rest),
            rate=load.rate / processes,
            seed=load.seed + index,
        )
        for index in range(processes)
    ]


def send_from_processes(load: Load, requests: Sequence[PreparedRequest], processes: int) -> Results:
    """Send `load` from `processes` processes that start together; SIGINT ends all early.

    Raises:
        EOFError: one of them died.
    """
    if processes == 1:
        return send_load(load, requests)
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(processes)
    receivers, workers = [], []
    # Workers inherit this, and survive a signal that comes before their own loop handles it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for index, part in enumerate(share(load, processes)):
            receiver, sender = spawn.Pipe(duplex=False)
            # Each starts at another digit, so that no two send the same one at a time.
            first = index * len(requests) // processes
            rotated = [*requests[first:], *requests[:first]]
            worker = spawn.Process(target=_work, args=(part, rotated, start, sender), daemon=True)
            worker.start()
            sender.close()
            receivers.append(receiver)
            workers.append(worker)

        def pass_on(number: int, frame: object) -> None:
            for worker in workers:
                if worker.pid is not None and worker.is_alive():
                    os.kill(worker.pid, signal.SIGINT)

        signal.signal(signal.SIGINT, pass_on)
        results = Results.merge(receiver.recv() for receiver in receivers)
        for worker in workers:
            worker.join()
    finally:
        signal.signal(signal.SIGINT, before)
    return results


def _work(
    load: Load, requests: Sequence[PreparedRequest], start: Barrier, sender: Connection
) -> None:
    sender.send(send_load(load, requests, ready=lambda: start.wait(_START_TIMEOUT_S)))
