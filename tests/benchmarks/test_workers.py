from __future__ import annotations

import contextlib
import json
import os
import time

import httpx
import pytest

from benchmarks import workers as module
from benchmarks.servers import Server, ServerFailed
from benchmarks.workers import Row, generator, main, merge_into, table
from benchmarks.wrk import WrkResult

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="Linux alone binds to cores"
)


@pytest.fixture
def one(requests):
    return requests[0]


@pytest.fixture
def arguments(tmp_path, random_weights, tiny):
    path = tmp_path / "1.safetensors"
    random_weights(tiny).write(path)
    return [f"--weights={path}", "--device=cpu", "--rounds=2", f"--json={tmp_path / 'told.json'}"]


@pytest.fixture
def sent(monkeypatch):
    """The rounds of load that would have been sent: server, connections, seconds."""
    rounds = []

    def send(server, connections, duration_s):
        assert httpx.get(f"{server.url}/readyz", trust_env=False).status_code == 200
        rounds.append((server, connections, duration_s))
        number = len(rounds)
        return 100.0 * number, 10.0 * number, 20.0 * number

    monkeypatch.setattr(module, "_ours", lambda requests, cores: send)
    monkeypatch.setenv("PATH", "")  # without wrk
    return rounds


def test_one_worker_and_several_are_measured_beside_a_bare_server(
    arguments, sent, tmp_path, capsys
):
    (tmp_path / "told.json").write_text('{"buckets": [7], "workers": ["older"]}')
    assert main([*arguments, "--workers", "2", "--connections=3", "--duration=9"]) == 0
    names = ["lenet-serve", "bare uvicorn"] * 3 + ["lenet-serve"] * 3
    assert [server.name for server, *_ in sent] == names
    assert [connections for _, connections, _ in sent] == [1] * 6 + [6] * 3
    assert [duration_s for *_, duration_s in sent] == [1, 1, 9, 9, 9, 9, 1, 9, 9]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["buckets"] == [7]
    assert told["single"] == {
        # Rounds 3 and 5, and 4 and 6; the first two were short.
        "ours_p50_us": 40.0,
        "ours_p50_us_rounds": [30.0, 50.0],
        "bare_p50_us": 50.0,
        "bare_p50_us_rounds": [40.0, 60.0],
    }
    (row,) = told["workers"]
    assert row == {
        "n": 2,
        "mps": False,
        "requests_per_s": 850.0,
        "p50_us": 85.0,
        "p99_us": 170.0,
        "requests_per_s_rounds": [800.0, 900.0],
    }
    assert told["workers_how"]["connections_per_worker"] == 3
    assert told["workers_how"]["machine"]["cpu_count"] >= 1
    assert " for the load" in capsys.readouterr().out


class Services:
    """In the place of `lenet_serve`: what its log says, and how each was started."""

    def __init__(self, folder, log):
        self.log = folder / "log"
        self.log.write_text(log)
        self.started = []

    def __call__(self, weights, model, arguments, environment):
        self.started.append((arguments, dict(environment)))
        return self

    def __enter__(self):
        return Server("lenet-serve", "http://nowhere", {}, 0, self.log)

    def __exit__(self, *_):
        return None


@pytest.fixture
def measured(monkeypatch, tmp_path, one):
    """`measured(log, *arguments)`: rows of a service on a GPU that logs `log`, and its starts."""

    def run(log, *arguments):
        services = Services(tmp_path, log)
        monkeypatch.setattr(module, "lenet_serve", services)
        monkeypatch.setattr(module, "check_answer", lambda *_: None)
        options = module._parser().parse_args(["--device=cuda", "--rounds=1", *arguments])
        cores = module.split(sorted(os.sched_getaffinity(0)), 1)
        bench = module.Bench(tmp_path, "lenet", one, cores, options)
        rows = bench.rows(lambda server, connections, duration_s: (1.0, 2.0, 3.0))
        return [(row.n, row.mps) for row in rows], services.started

    return run


READY = "ready: HTTP on http://127.0.0.1:1, gRPC\n" * 2


@pytest.mark.parametrize("where", ["found", "started"])
def test_several_workers_are_measured_with_mps_and_without(measured, where):
    rows, started = measured(f"{READY}MPS: {where} at /here", "--workers", "1", "2")
    ways = [
        ("--mps=off" in arguments, module.PIPE in variables) for arguments, variables in started
    ]
    # Without MPS no daemon may be found either: the folder named is empty.
    assert ways == [(True, True), (False, False), (True, True)]
    assert [n for n, _ in rows] == [1, 2, 2]
    assert rows[1] == (2, True)


def test_no_row_claims_mps_that_was_not_there(measured, capsys):
    rows, started = measured(f"{READY}WARNING no MPS: not installed", "--workers", "2")
    assert rows == [(2, False)]
    assert len(started) == 2
    assert "no MPS: not installed" in capsys.readouterr().err


def test_mps_is_left_out_when_that_is_asked_for(measured):
    rows, started = measured(READY, "--workers", "2", "--no-mps")
    assert rows == [(2, False)]
    assert len(started) == 1


def test_a_service_with_too_few_workers_is_not_measured(measured, monkeypatch):
    monkeypatch.setattr(module, "_START_S", 0.0)
    with pytest.raises(ServerFailed, match="not all of 4 workers are ready"):
        measured(READY, "--workers", "4")


def test_wrk_gets_a_thread_a_core_and_its_times_become_microseconds(
    requests, monkeypatch, tmp_path
):
    called = []

    def run_wrk(wrk, script, url, connections, duration_s, threads):
        called.append((wrk, script.exists(), url, connections, duration_s, threads))
        return WrkResult(10, 5.0, 1.5, 2.5, 9.0)

    monkeypatch.setattr(module, "find_wrk", lambda: "/bin/wrk")
    monkeypatch.setattr(module, "run_wrk", run_wrk)
    server = Server("lenet-serve", "http://here", {}, 0, tmp_path)
    with generator(requests, 4) as (name, send):
        assert send(server, 64, 7) == (5.0, 1500.0, 2500.0)
        assert send(server, 1, 7) == (5.0, 1500.0, 2500.0)
    assert name == "wrk on 4 threads"
    assert called == [
        ("/bin/wrk", True, "http://here", 64, 7, 4),
        ("/bin/wrk", True, "http://here", 1, 7, 1),
    ]


def wait_until_it_listens(url):
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.ConnectError):
            httpx.get(f"{url}/readyz", trust_env=False)
            return
    raise AssertionError


def test_python_sends_the_load_where_wrk_is_missing_and_an_error_spoils_it(
    requests, service, serve, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", "")
    with serve(service) as url, generator(requests, 1) as (name, send):
        wait_until_it_listens(url)
        server = Server("lenet-serve", url, {}, 0, tmp_path)
        requests_per_s, p50_us, p99_us = send(server, 2, 0.1)
        assert requests_per_s > 0
        assert 0 < p50_us <= p99_us < 10e6
        service.behave = lambda number, labels: (503, b"{}", 0.0)
        with pytest.raises(ServerFailed, match="lenet-serve failed"):
            send(server, 2, 0.1)
    assert name.startswith("1 Python process")


def test_the_ratio_is_that_to_one_worker():
    rows = [Row(1, False, 4000.0, 900, 2000, ()), Row(8, True, 26000.0, 1100, 3000, ())]
    lines = table(rows).splitlines()
    assert lines[1].split() == ["1", "no", "4,000", "900", "2,000", "1.00"]
    assert lines[2].split() == ["8", "yes", "26,000", "1,100", "3,000", "6.50"]
    assert table(rows[1:]).splitlines()[1].split()[-1] == "-"


def test_nothing_is_written_when_no_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    merge_into(None, {"workers": []})
    assert list(tmp_path.iterdir()) == []
    merge_into(tmp_path / "new.json", {"workers": []})
    assert json.loads((tmp_path / "new.json").read_text()) == {"workers": []}


@pytest.mark.parametrize(
    "wrong", [["--workers", "0"], ["--workers"], ["--device", "tpu"], ["--load-cores", "0"]]
)
def test_a_wrong_argument_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_missing_weight_file_is_told(tmp_path, capsys):
    assert main([f"--weights={tmp_path / 'none'}"]) == 2
    assert "none: cannot be read" in capsys.readouterr().err
