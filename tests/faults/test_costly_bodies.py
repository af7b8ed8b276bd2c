"""Clients whose bodies take long to decode, or much memory."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.documented import documented
from tests.faults.checks import cpu_s, decoding, has_ended, samples, total, until
from tests.faults.clients import opened, request
from tests.pictures import FORM, PNG, long_form, seven
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


def peak_bytes(pid):
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


def large(width, height, kind="L"):
    """Light ink on a dark picture of this size, nearly opaque if `kind` is RGBA."""
    picture = Image.new(kind, (width, height), (0, 0, 0, 254) if kind == "RGBA" else 0)
    at = width // 2 - 100, height // 2 - 900, width // 2 + 100, height // 2 + 900
    picture.paste((255,) * len(picture.getbands()), at)
    return picture


def file_of(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.states(
    "limits", "memory of such a process", found="the limits in /proc of a decoding process"
)
@pytest.mark.states(
    "limits",
    "pixels of all pictures in a request; of a WebP or AVIF",
    found="pictures of as many pixels, and of a line more",
)
@pytest.mark.states(
    "limits",
    "memory of a decoded picture",
    found="the largest PNG, TIFF and progressive JPEG",
)
def test_the_largest_pictures_fit_into_the_memory_of_a_decoder(start):
    most, webp_most = documented("pixels of all pictures in a request")
    decoded_bytes = documented("memory of a decoded picture")[-1]
    service = start("--max-body-bytes", "2000000").ready()

    def answer(picture, kind, **options):
        return post(service, file_of(picture, kind, **options), f"image/{kind.lower()}")

    assert answer(large(8064, 6048), "JPEG")[0] == 200, "a telephone's 48 megapixels"
    (pid,) = decoding(service)
    assert peak_bytes(pid) < 150e6
    status, text = answer(large(10_000, 10_000), "JPEG")
    assert (status, b"expected at most 67108864" in text) == (413, True)
    assert peak_bytes(pid) < 150e6
    limits = Path(f"/proc/{pid}/limits").read_text()
    size = re.search(r"^Max data size +(\d+)", limits, re.MULTILINE)[1]
    assert int(size) == documented("memory of such a process")[0] + 4_000_000

    assert answer(large(8192, most // 8192), "PNG")[0] == 200
    assert answer(large(8192, most // 8192 + 1), "PNG")[0] == 413
    rows = decoded_bytes // 4 // 4096
    assert answer(large(4096, rows, "RGBA"), "PNG")[0] == 200, "the largest PNG in colour"
    status, text = answer(large(4096, rows + 1, "RGBA"), "PNG")
    assert (status, b"bytes to decode, expected at most 150994944" in text) == (413, True)
    one_strip = {"compression": "tiff_lzw", "tiffinfo": {278: rows}}
    assert answer(large(4096, rows // 2, "RGB"), "TIFF", **one_strip)[0] == 200
    scans = {"progressive": True, "subsampling": 0}
    assert answer(large(4096, 6000, "RGB"), "JPEG", **scans)[0] == 200

    rows = webp_most // 4096
    webp = {"lossless": True, "quality": 0}
    assert answer(large(4096, rows, "RGBA"), "WEBP", **webp)[0] == 200, "the largest WebP fits"
    status, text = answer(large(4096, rows + 1, "RGBA"), "WEBP", quality=0)
    assert (status, b"expected at most 8388608" in text) == (413, True)
    assert decoding(service) == [pid]
