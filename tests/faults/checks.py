"""Checks that an experiment left the service as it was."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.service_process import PATIENCE_S

LIVE_WITHIN_S = 1.0
"""Maximum CPU time that an event loop takes before it answers. On an idle machine it is the time
that a client waits, and it stays the same when other programs take the cores."""

NO_TRACE = re.compile(r'Traceback|^\s+File "|Exception ignored|never retrieved')


def program(text=""):
    """The service after `text`, which may change it."""
    return ("-c", f"{text}\nimport sys; from service.__main__ import main; sys.exit(main())")


def workers_program(folder, text):
    """The service with `text` at the beginning of each worker."""
    (folder / "worker.py").write_text(WORKER.format(text=text))
    return program("import worker; worker.install()")


WORKER = """
from service import supervisor
original = supervisor._work
def work(*arguments):
    exec({text!r}, {{}})
    original(*arguments)
def install():
    supervisor._work = work
"""
STUCK_LOOP = """
import os, signal, time
def stay(*_):
    os.write(2, b"stuck\\n")
    time.sleep(600)
signal.signal(signal.SIGUSR1, stay)
"""
"""The main thread, and so the event loop, stands still after SIGUSR1."""


def until(condition):
    """Wait for what has no event."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def serving(service):
    """Process ids."""
    workers = [pid for pid in service.started_workers() if not has_ended(pid)]
    return workers or [service.process.pid]


def _read(*files):
    """What is in these files of /proc, "" where a process has ended."""
    for file in files:
        try:
            yield Path("/proc", file).read_text()
        except OSError:
            yield ""


def resident_bytes(*pids):
    """RSS of these processes; one that has ended has none."""
    found = (re.search(r"VmRSS:\s+(\d+)", text) for text in _read(*(f"{n}/status" for n in pids)))
    return sum(int(one[1]) << 10 for one in found if one)


def loop_s(service):
    """CPU seconds that the event loops of the service have taken."""
    files = (Path(f"/proc/{pid}/schedstat") for pid in serving(service))  # of the main thread
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def cpu_s(*pids):
    """CPU seconds that these processes have taken, and their children that have ended."""
    texts = filter(None, _read(*(f"{pid}/stat" for pid in pids)))
    fields = (text.rpartition(")")[2].split()[11:15] for text in texts)
    return sum(int(ticks) for own in fields for ticks in own) / os.sysconf("SC_CLK_TCK")


def descriptors(*pids):
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


def decoding(service):
    """Process ids of the decoding processes."""
    children = " ".join(_read(*(f"{pid}/task/{pid}/children" for pid in serving(service)))).split()
    commands = _read(*(f"{pid}/cmdline" for pid in children))
    found = zip(children, commands, strict=True)
    return [int(pid) for pid, command in found if "decoding_process" in command]


def has_ended(pid):
    """Whether it has ended, though its parent may not have asked: its command line goes before."""
    (text,) = _read(f"{pid}/stat")
    return not text or text.rpartition(")")[2].split()[0] in "ZX"


def samples(service):
    """{(name, frozenset of labels): value} of all series."""
    status, text = service.get("/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found, name, **labels):
    """The sum of the series of `name` with these labels."""
    wanted = labels.items()
    return sum(value for (series, own), value in found.items() if series == name and wanted <= own)


def outcomes(found):
    """{"http ok": 3, ...} of `lenet_requests_total`."""
    counts = Counter()
    for (name, labels), value in found.items():
        if name == "lenet_requests_total":
            by = dict(labels)
            counts[f"{by['protocol']} {by['outcome']}"] += int(value)
    return +counts


class Watch:
    """State of a service before an experiment; `check` compares."""

    def __init__(self, service, digit):
        self.service = service
        self.digit = digit
        service.catch_up()
        self.lines = len(service.lines)
        self.answer = self._classify()
        label = np.frombuffer(self.answer, "<f4").argmax()
        assert label == digit.labels[0], "the known digit is classified wrong before the experiment"
        self.samples = samples(service)
        self.pids = serving(service)
        self.resident_bytes, self.descriptors = resident_bytes(*self.pids), descriptors(*self.pids)

    def _classify(self):
        kind = "application/octet-stream"
        answer = httpx.post(
            f"http://127.0.0.1:{self.service.port}/predict",
            content=self.digit.images[:1].tobytes(),
            headers={"Content-Type": kind, "Accept": kind},
            timeout=PATIENCE_S,
        )
        return answer.raise_for_status().content

    def grown_bytes(self):
        """How much RSS has grown since then."""
        return resident_bytes(*self.pids) - self.resident_bytes

    def check(self, moved, rss_bytes, extra_descriptors, log):
        service, began_s = self.service, loop_s(self.service)
        assert service.get("/healthz")[0] == 200
        took_s = loop_s(service) - began_s
        assert took_s < LIVE_WITHIN_S, f"/healthz took {took_s:.2f} s after the experiment"
        assert service.get("/readyz")[0] == 200
        assert self._classify() == self.answer, "the known digit is classified otherwise"
        end_s = time.monotonic() + PATIENCE_S
        while problems := list(self._differences(moved, extra_descriptors)):
            assert time.monotonic() < end_s, "\n".join(problems)
            time.sleep(0.05)
        grown = self.grown_bytes()
        assert grown <= rss_bytes, f"RSS grew by {grown >> 10} KiB, expected {rss_bytes >> 10}"
        for line in service.lines[self.lines :] if log is not None else ():
            assert not NO_TRACE.search(line), service.log[-4000:]
            assert any(re.search(pattern, line) for pattern in log), f"in the log: {line}"

    def _differences(self, moved, extra_descriptors):
        """What may still become as it was; fails for what cannot."""
        found = samples(self.service)
        lost = "lenet_device_losses_total"
        assert total(found, lost) == total(self.samples, lost), "a device was lost"
        counts = outcomes(found)
        counts.subtract(outcomes(self.samples) + Counter({"http ok": 1}))  # the known digit
        for key in {*counts, *(moved or {})}:
            if moved is None:
                least, most = 0, 0 if key.split()[1] in ("internal", "inference_failed") else 1e9
            else:
                expected = moved.get(key, 0)
                least, most = expected if isinstance(expected, tuple) else (expected, expected)
            text = f"{key} was counted {counts[key]} times, expected {least} to {most}: {counts}"
            assert counts[key] <= most, text
            if counts[key] < least:
                yield text
        for name in ("lenet_queue_rows", "lenet_contexts_busy"):
            if value := total(found, name):
                yield f"{name} is {value:g}, expected 0"
        if (count := descriptors(*self.pids)) > self.descriptors + extra_descriptors:
            yield f"{count} descriptors are open, before {self.descriptors}"


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
            least and the most, read at the end; None: any, but no request failed inside the
            service.
        rss_bytes: 24 MiB unless an experiment says otherwise: what an allocator keeps of buffers
            that were in use at the same time.
        extra_descriptors: for what the service opens once and keeps.
        log: regular expressions of the lines that are expected; None: the log is not looked at.
    """
    watch = Watch(service, digit)
    yield watch
    watch.check(moved, rss_bytes, extra_descriptors, log)
