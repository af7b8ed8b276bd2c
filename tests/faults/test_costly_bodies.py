"""Clients whose bodies take long to decode, or much memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.documented import documented
from tests.faults.checks import cpu_s, decoding, has_ended, samples, total, until
from tests.faults.clients import opened, request
from tests.pictures import FORM, PNG, encoded, long_form, seven
from tests.service_process import PATIENCE_S

LONG = long_form()
"""About 4 s of decoding."""


def post(service, body, kind="application/octet-stream", **headers):
    """Status and body of the answer."""
    url = f"http://127.0.0.1:{service.port}/predict"
    headers = {"Content-Type": kind, **headers}
    answer = httpx.post(url, content=body, headers=headers, timeout=PATIENCE_S)
    return answer.status_code, answer.content


def begin(service, body=LONG, kind=FORM):
    """A connection on which `body` was sent."""
    return opened(service.port, request(body, kind=kind.encode()))


def test_forms_whose_clients_have_left_are_decoded_no_further(start):
    def held_bytes():
        return total(samples(service), "lenet_in_flight_bytes")

    service = start().ready()
    assert post(service, seven(), PNG)[0] == 200
    before_s = cpu_s(service.process.pid, *decoding(service))
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(begin(service))
        until(lambda: held_bytes() == 6 * len(LONG))
    until(lambda: held_bytes() == 0)
    assert post(service, seven(), PNG)[0] == 200
    took_s = cpu_s(service.process.pid, *decoding(service)) - before_s
    assert took_s < 6, "the six forms take 24 s to decode"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_decoders_end_in_time_when_the_service_stops_or_is_killed(start, number):
    service = start("--drain-timeout-s", "1").ready()

    def have_ended():
        """Stopped, they end only by a kill; the kernel continues them when their parent ends."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return all(map(has_ended, pids))

    with contextlib.ExitStack() as stack:
        assert post(service, seven(), PNG)[0] == 200
        pids = decoding(service)  # which have told the kernel that they end with the service
        for _ in range(3):
            stack.enter_context(begin(service))
        assert not have_ended()
        if number == signal.SIGKILL:
            service.signal(number)
        else:
            service.signal_all(number)  # the decoders get it, too
        until(have_ended)
        assert service.wait() == (-number if number == signal.SIGKILL else 0)
    assert "Traceback" not in service.log


@pytest.mark.states(
    "limits", "memory of such a process", found="the limits in /proc of a decoding process"
)
@pytest.mark.states(
    "limits",
    "pixels of all pictures in a request; of a WebP or AVIF",
    found="pictures of as many pixels, and of a line more",
)
def test_the_largest_picture_fits_into_the_memory_of_a_decoder(start):
    rows, webp_rows = (int(n) // 4096 for n in documented("pixels of all pictures in a request"))
    service = start("--max-body-bytes", "1000000").ready()
    broad = np.zeros((rows, 4096, 4), np.uint8)
    broad[..., 3] = 254
    broad[1000:3000, 1900:2100] = 255
    assert post(service, encoded(broad), PNG)[0] == 200, "the largest picture fits"
    (pid,) = decoding(service)
    limits = Path(f"/proc/{pid}/limits").read_text()
    size = re.search(r"^Max data size +(\d+)", limits, re.MULTILINE)[1]
    assert int(size) == documented("memory of such a process")[0] + 2_000_000
    assert post(service, encoded(np.zeros((rows + 1, 4096), np.uint8)), PNG)[0] == 413
    webp = encoded(broad[:webp_rows], "WEBP", lossless=True, quality=0)
    assert post(service, webp, "image/webp")[0] == 200, "the largest WebP fits"
    webp = encoded(broad[: webp_rows + 1], "WEBP", quality=0)
    status, text = post(service, webp, "image/webp")
    assert (status, b"expected at most 8388608" in text) == (413, True)
    assert decoding(service) == [pid]
