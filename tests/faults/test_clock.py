"""A wall clock that jumps by days."""

from __future__ import annotations

import signal
import time

from service.errors import ExitCode
from tests.faults.checks import program, unharmed
from tests.faults.clients import ACCEPT, Known, request

JUMPING = """
import itertools, time
days, wall_s = itertools.cycle((0, 3, -3)), time.time
time.time = lambda: wall_s() + 86400 * next(days)
time.time_ns = lambda: int(1e9 * time.time())
"""


async def test_nothing_changes_when_the_wall_clock_jumps_by_days(start_committed, digits):
    service = start_committed("--request-timeout-ms", "60000", program=program(JUMPING)).ready()
    known = Known(service, digits)
    with unharmed(service, digits.golden):
        async with await known.connect() as connection:
            for _ in range(300):
                rows, images = known.choose(1)
                known.judge(rows, await connection.ask(request(images.tobytes(), ACCEPT)))
            began_s = time.monotonic()
            late = request(bytes(10), b"X-Request-Timeout-Ms: 500", length=784)
            assert (await connection.ask(late)).status == 408
            assert time.monotonic() - began_s > 0.4
    for count in range(1, 10):  # a line each
        service.signal(signal.SIGHUP)
        service.wait_for("reload: ", count)
    assert len({line[:10] for line in service.lines}) > 1, "the clock did not jump"
    service.signal()
    assert service.wait() == ExitCode.STOPPED
