"""Checks that an experiment left the service as it was."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.clients import RAW, ask, request
from tests.service_process import PATIENCE_S

LIVE_WITHIN_S = 1.0
"""Maximum CPU time that an event loop takes before it answers. On an idle machine it is the time
that a client waits, and it stays the same when other programs take the cores."""

NO_TRACE = re.compile(r'Traceback|^\s+File "|Exception ignored|never retrieved')


def resident_bytes(service):
    """RSS of the processes that serve, without the supervisor."""
    return sum(_status(pid)["VmRSS"] << 10 for pid in serving(service))


def serving(service):
    """Process ids."""
    workers = [pid for pid in service.started_workers() if Path(f"/proc/{pid}").exists()]
    return workers or [service.process.pid]


def loop_s(service):
    """CPU seconds that the event loops of the service have taken."""
    files = (Path(f"/proc/{pid}/schedstat") for pid in serving(service))  # of the main thread
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def cpu_s(*pids):
    """CPU seconds that these processes have taken, and their children that have ended."""
    files = (Path(f"/proc/{pid}/stat") for pid in pids)
    fields = (file.read_text().rpartition(")")[2].split()[11:15] for file in files)
    return sum(int(ticks) for own in fields for ticks in own) / os.sysconf("SC_CLK_TCK")


def until(condition):
    """Wait for what has no event."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def decoding(service):
    """Process ids of the decoding processes."""
    children = (Path(f"/proc/{pid}/task/{pid}/children") for pid in serving(service))
    found = (pid for file in children for pid in file.read_text().split())
    return [int(pid) for pid in found if b"decoding_process" in _command(pid)]


def _command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def descriptors(service):
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in serving(service))


def _status(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(text.split()[0]) for name, text in pairs if name in ("VmRSS", "VmHWM")}


def samples(service):
    """{(name, frozenset of labels): value} of all series."""
    answer = ask(service.port, request(method=b"GET", path=b"/metrics"))
    assert answer.status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


def total(found, name, **labels):
    """The sum of the series of `name` with these labels."""
    wanted = labels.items()
    return sum(value for (series, own), value in found.items() if series == name and wanted <= own)


def outcomes(found):
    """{"http ok": 3, ...} of `lenet_requests_total`."""
    counts = {}
    for (name, labels), value in found.items():
        if name == "lenet_requests_total":
            by = dict(labels)
            key = f"{by['protocol']} {by['outcome']}"
            counts[key] = counts.get(key, 0) + int(value)
    return counts


class Watch:
    """State of a service before an experiment; `check` compares."""

    def __init__(self, service, digit):
        self.service = service
        self.message = request(digit.images[:1].tobytes(), b"Accept: " + RAW)
        service.catch_up()
        self.lines = len(service.lines)
        self.answer = self._classify()
        label = int(np.frombuffer(self.answer, "<f4").argmax())
        assert label == digit.labels[0], "the known digit is classified wrong before the experiment"
        self.samples = samples(service)
        self.resident_bytes = resident_bytes(service)
        self.descriptors = descriptors(service)

    def _classify(self):
        answer = ask(self.service.port, self.message)
        assert answer.status == 200, answer
        return answer.body

    def check(self, moved, rss_bytes, extra_descriptors, log):
        service = self.service
        began_s = loop_s(service)
        assert ask(service.port, request(method=b"GET", path=b"/healthz")).status == 200
        took_s = loop_s(service) - began_s
        assert took_s < LIVE_WITHIN_S, f"/healthz took {took_s:.2f} s after the experiment"
        assert ask(service.port, request(method=b"GET", path=b"/readyz")).status == 200
        assert self._classify() == self.answer, "the known digit is classified otherwise"
        end_s = time.monotonic() + PATIENCE_S
        while True:
            found = samples(service)
            self._assert_no_excess(found, moved)
            problems = list(self._differences(found, moved, extra_descriptors))
            if not problems:
                break
            assert time.monotonic() < end_s, "\n".join(problems)
            time.sleep(0.05)
        grown = resident_bytes(service) - self.resident_bytes
        assert grown <= rss_bytes, f"RSS grew by {grown >> 10} KiB, expected {rss_bytes >> 10}"
        if log is not None:
            self.check_log(log)

    def check_log(self, allowed):
        for line in self.service.lines[self.lines :]:
            assert not NO_TRACE.search(line), self.service.log[-4000:]
            assert any(re.search(pattern, line) for pattern in allowed), f"in the log: {line}"

    def _differences(self, found, moved, extra_descriptors):
        for name in ("lenet_queue_rows", "lenet_contexts_busy"):
            if value := total(found, name):
                yield f"{name} is {value:g}, expected 0"
        if (count := descriptors(self.service)) > self.descriptors + extra_descriptors:
            yield f"{count} descriptors are open, before {self.descriptors}"
        counts = self._counts(found)
        for key, expected in (moved or {}).items():
            least, _ = _range(expected)
            if (count := counts.get(key, 0)) < least:
                yield f"{key} was counted {count} times, expected {least} or more: {counts}"

    def _assert_no_excess(self, found, moved):
        lost = "lenet_device_losses_total"
        assert total(found, lost) == total(self.samples, lost), "a device was lost"
        counts = self._counts(found)
        if moved is None:
            failed = [key for key in counts if key.split()[1] in ("internal", "inference_failed")]
            assert not failed, f"requests failed: {counts}"
            return
        for key, count in counts.items():
            _, most = _range(moved.get(key, 0))
            assert count <= most, f"{key} was counted {count} times, expected {most}: {counts}"

    def _counts(self, found):
        """How often each outcome was counted since the beginning."""
        before, after = outcomes(self.samples), outcomes(found)
        counts = {key: after[key] - before.get(key, 0) for key in after}
        counts["http ok"] = counts.get("http ok", 0) - 1  # the known digit
        return {key: count for key, count in counts.items() if count}


def _range(expected):
    return expected if isinstance(expected, tuple) else (expected, expected)


@contextlib.contextmanager
def unharmed(service, digit, *, moved=None, rss_bytes=24 << 20, extra_descriptors=0, log=()):
    """Inside, an experiment; after it the service must be what it was.

    It is live within a second of its CPU time and ready; the known digit is classified as before;
    no descriptor more is open; no row waits and no context is busy; RSS has grown by at most
    `rss_bytes`; no line was logged that matches none of the patterns `log`, and no traceback at
    all; and `lenet_requests_total` moved exactly as `moved` says.

    Args:
        digit: images and labels of which the first is known to be classified right.
        moved: {"http ok": 3, "grpc overloaded": (1, 5)}: how often each outcome was counted, or the
            least and the most; None: any, but no request failed inside the service.
        rss_bytes: 24 MiB unless an experiment says otherwise: what an allocator keeps of buffers
            that were in use at the same time.
        extra_descriptors: for what the service opens once and keeps.
        log: regular expressions of the lines that are expected; None: the log is not looked at.
    """
    watch = Watch(service, digit)
    yield watch
    watch.check(moved, rss_bytes, extra_descriptors, log)
