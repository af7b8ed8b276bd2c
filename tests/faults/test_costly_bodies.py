"""Clients whose bodies take long to decode, or much memory."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.documented import documented
from tests.faults.checks import cpu_s, loop_s, resident_bytes, until
from tests.pictures import FORM, PNG, encoded, long_form, seven
from tests.service_process import PATIENCE_S

RAW = "application/octet-stream"
LONG = long_form()
"""About 4 s of decoding."""

MIB = 1 << 20


@contextlib.contextmanager
def connection(service):
    with closing(
        http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)
    ) as client:
        yield client


def post(client, body, kind, **headers):
    """Status and body of the answer."""
    client.request("POST", "/predict", body, {"Content-Type": kind, **headers})
    response = client.getresponse()
    return response.status, response.read()


def begin(service, body, kind):
    """A connection on which `body` was sent."""
    client = socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)
    client.sendall(
        b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (kind.encode(), len(body), body)
    )
    return client


def answered(*connections):
    """Those on which something came."""
    return select.select(connections, [], [], 0)[0]


def decoders(service):
    """Process ids of the decoders of a service without a supervisor."""
    pid = service.process.pid
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def ended(service, reason):
    lines = service.get("/metrics")[1].splitlines()
    name = f'lenet_decoder_ends_total{{reason="{reason}"}} '
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_a_form_of_many_pictures_is_answered_at_its_deadline(start):
    service = start().ready()
    with connection(service) as client:
        assert post(client, seven(), PNG)[0] == 200
        (pid,) = decoders(service)
        os.kill(pid, signal.SIGSTOP)  # it never ends
        assert post(client, LONG, FORM, **{"X-Request-Timeout-Ms": "500"})[0] == 504
    assert ended(service, "died") == 0


def test_a_small_picture_is_answered_beside_forms_whose_clients_have_left(start):
    service = start().ready()
    with connection(service) as client:
        assert post(client, seven(), PNG)[0] == 200
        before_s = cpu_s(service.process.pid, *decoders(service))
        for gone in [begin(service, LONG, FORM) for _ in range(6)]:
            gone.close()
        assert post(client, seven(), PNG)[0] == 200
        for _ in range(50):
            assert post(client, bytes(784), RAW)[0] == 200
        took_s = cpu_s(service.process.pid, *decoders(service)) - before_s
        assert took_s < 4, "the six forms take 24 s to decode"


def test_small_work_is_answered_beside_forms_that_are_decoded(start):
    service = start().ready()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connection(service))
        assert post(client, seven(), PNG)[0] == 200
        long = [stack.enter_context(closing(begin(service, LONG, FORM))) for _ in range(3)]
        for body, kind in ((seven(), PNG), (bytes(784), RAW)):
            for _ in range(20):
                assert post(client, body, kind)[0] == 200
        assert not answered(*long)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_in_time_while_forms_are_decoded(start, number):
    service = start("--drain-timeout-s", "1").ready()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.callback(begin(service, LONG, FORM).close)
        until(lambda: decoders(service))
        pids = decoders(service)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # it ends only by a kill
        service.signal_all(number)  # the decoders get it, too
        assert service.wait() == 0
    assert "Traceback" not in service.log
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_decoders_end_when_the_service_is_killed(start):
    service = start().ready()
    with closing(begin(service, LONG, FORM)):
        until(lambda: decoders(service))
        pids = decoders(service)
        service.process.kill()
        service.process.wait()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_the_service_takes_no_memory_for_json_that_does(start):
    service = start().ready()
    body = b'{"images":[' + b"0," * 15_000_000 + b"0]}"
    with connection(service) as client, connection(service) as probe:
        assert post(client, seven(), PNG)[0] == 200
        before, most, health_s = resident_bytes(service), 0, []
        answers = []
        poster = threading.Thread(
            target=lambda: answers.append(post(client, body, "application/json"))
        )
        poster.start()
        while poster.is_alive():
            began_s = loop_s(service)
            probe.request("GET", "/healthz")
            assert probe.getresponse().read() is not None
            health_s.append(loop_s(service) - began_s)
            most = max(most, resident_bytes(service))
            time.sleep(0.01)
        poster.join()
    ((status, message),) = answers
    assert status == 413, message
    assert b"MiB of memory" in message
    # The body itself, and what of it is in buffers.
    assert most - before < 60 * MIB
    assert max(health_s) < 1.0


def test_the_next_picture_is_answered_when_a_decoder_was_killed(start):
    service = start().ready()
    with connection(service) as client:
        for _ in range(3):
            assert post(client, seven(), PNG)[0] == 200
            (pid,) = decoders(service)
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: pid not in decoders(service))
        with closing(begin(service, LONG, FORM)) as broken:
            until(lambda: decoders(service))
            for pid in decoders(service):
                os.kill(pid, signal.SIGKILL)
            broken.settimeout(PATIENCE_S)
            assert broken.recv(1000).startswith(b"HTTP/1.1 500 ")
        assert post(client, seven(), PNG)[0] == 200
    assert ended(service, "died") >= 4
    assert service.log.count("a decoding process died") == 1


@pytest.mark.states(
    "limits", "memory of such a process", found="the limits in /proc of a decoding process"
)
@pytest.mark.states(
    "limits",
    "pixels of all pictures in a request; of a WebP",
    found="pictures of as many pixels, and of a line more",
)
def test_the_largest_picture_fits_into_the_memory_of_a_decoder(start):
    rows, webp_rows = (int(n) // 4096 for n in documented("pixels of all pictures in a request"))
    service = start("--max-body-bytes", "1000000").ready()
    broad = np.zeros((rows, 4096, 4), np.uint8)
    broad[..., 3] = 254
    broad[1000:3000, 1900:2100] = 255
    with connection(service) as client:
        assert post(client, encoded(broad), PNG)[0] == 200, "the largest picture fits"
        (pid,) = decoders(service)
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (data,) = [line.split()[3] for line in limits if line.startswith("Max data size")]
        assert int(data) == documented("memory of such a process")[0] + 2_000_000
        assert post(client, encoded(np.zeros((rows + 1, 4096), np.uint8)), PNG)[0] == 413
        webp = encoded(broad[:webp_rows], "WEBP", lossless=True, quality=0)
        assert post(client, webp, "image/webp")[0] == 200, "the largest WebP fits"
        status, message = post(
            client, encoded(broad[: webp_rows + 1], "WEBP", quality=0), "image/webp"
        )
        assert (status, b"expected at most 8388608" in message) == (413, True)
        assert decoders(service) == [pid]


def test_a_jpeg_that_claims_to_be_larger_than_its_data_is_refused(start):
    service = start().ready()
    body = bytearray(seven(224, "JPEG"))
    at = body.index(b"\xff\xc0") + 5
    body[at : at + 4] = (4096).to_bytes(2, "big") * 2
    with connection(service) as client:
        status, message = post(client, bytes(body), "image/jpeg")
        assert status == 400
        assert b"cannot hold 262144 blocks of 8 x 8" in message
        assert post(client, seven(224, "JPEG"), "image/jpeg")[0] == 200
