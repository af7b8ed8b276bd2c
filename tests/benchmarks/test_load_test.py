import io
import json
import os
import shutil
import socket
from array import array
from collections import Counter

import pytest

from benchmarks.load import WRONG_LABEL, Load, Progress, Results, Stage, closed_loop
from benchmarks.load_report import (
    ErrorLimit,
    check,
    duration_ms,
    error_limit,
    summarise,
    summarise_stages,
    table,
)
from benchmarks.load_test import ProgressLine, main, spare_cores


@pytest.fixture
def weight_file(weights, tmp_path):
    path = tmp_path / "1.safetensors"
    weights.write(path)
    return path


@pytest.fixture
def load_test(weight_file, golden_service):
    """`load_test(*arguments)`: the exit code of a short test of the scripted service."""

    def run(*arguments):
        with golden_service.listening() as url:
            short = ["--warm-up", "0", "--processes", "1"]
            if "--stages" not in arguments:
                short += ["--duration", "0.1", "--connections", "2"]
            return main(["--url", url, "--weights", str(weight_file), *short, *arguments])

    return run


def test_a_correct_service_ends_with_0_a_table_and_json(load_test, tmp_path, capsys):
    path = tmp_path / "results.json"
    assert load_test("--mode", "open", "--rate", "100", "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "lenet version 1 on cpu" in out
    loop = "open loop, 100 requests/s (poisson) on up to 2 connections, 0.1 s"
    assert f"{loop}; 1 x json per request" in out
    assert "10 digits: golden images of the weight file" in out
    assert "The client used" in out
    document = json.loads(path.read_text())
    assert document["arguments"]["rate"] == 100
    assert document["versions"].keys() >= {"python", "httpx", "lenet-serve"}
    assert document["service"]["model"] == "lenet"
    assert document["passed"]
    results = document["results"]
    assert results["latency_ms"].keys() == {"mean", "p50", "p90", "p99", "p99.9", "max"}
    assert results["server_ms"]["queue"]["p50"] == 0.5
    assert [stage["load"] for stage in document["stages"]] == ["100/s"]


def test_a_ramp_is_reported_in_ten_parts_and_drawn(load_test, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    assert load_test("--stages", "50:0.1", "50-150:0.5", "--figure", str(path)) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "/s  " in line]
    assert rows[1:4] == ["50/s", "50-60/s", "60-70/s"]  # after the heads
    assert len(rows) == 1 + 1 + 10
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--errors", "1"], 0),
        (["--errors", "0"], 1),
        (["--errors", "1", "--p99", "10s", "--max", "20s"], 0),
        (["--errors", "1", "--p99.9", "1us"], 1),
    ],
)
def test_targets_decide_the_exit_code(arguments, code, load_test, golden_service, say, capsys):
    golden_service.behave = lambda number, labels: (200 if number else 503, say(labels), 0.0)
    assert load_test(*arguments) == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_it_agrees_with_wrk_at_a_rate_that_both_can_hold(load_test, golden_service, say, capsys):
    # Each answer takes 20 ms, of which neither client takes much: about 97 requests/s. One round
    # is enough to find another unit, or a count of other requests.
    golden_service.behave = lambda number, labels: (200, say(labels), 0.02)
    assert load_test("--wrk", "1", "--duration", "1") == 0
    medians = capsys.readouterr().out.splitlines()[-1].split()
    assert medians[0] == "medians"
    assert [float(ratio) for ratio in medians[-2:]] == pytest.approx([1.0, 1.0], abs=0.15)


@pytest.mark.parametrize("fault", ["error", "wrong label"])
def test_one_fault_ends_with_1(fault, load_test, golden_service, say):
    def behave(number, labels):
        if number != 1:
            return 200, say(labels), 0.0
        return (503, b"{}", 0.0) if fault == "error" else (200, say([(labels[0] + 1) % 10]), 0.0)

    golden_service.behave = behave
    assert load_test() == 1


def test_without_a_service_one_line_says_what_to_do(weight_file, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--url", url, "--weights", str(weight_file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert url in captured.err
    assert "`make serve`" in captured.err


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda service: setattr(service, "ready", 503), [], "is not ready"),
        (lambda service: None, ["--model", "mlp"], "serves lenet, not 'mlp'"),
        (
            lambda service: service.info["models"][0].update(sha256="0" * 64),
            [],
            "name the service's file with --weights",
        ),
        (lambda service: service.info.clear(), [], "is not lenet-serve"),
    ],
    ids=["not ready", "other model", "other weights", "other server"],
)
def test_an_unsuitable_service_is_not_loaded(
    change, arguments, message, load_test, golden_service, capsys
):
    change(golden_service)
    assert load_test(*arguments) == 2
    assert message in capsys.readouterr().err
    assert golden_service.scopes == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "0"],
        ["--duration", "nan"],
        ["--images", "0"],
        ["--connections", "5000"],
        ["--connections", "1", "--processes", "2"],
        ["--format", "gif"],
        ["--p99", "5"],
        ["--errors", "0.5"],
        ["--stages", "100"],
        ["--stages", "100:5", "--rate", "3"],
        ["--rate", "3", "--mode", "closed"],
        ["--figure", "one-load.png"],
        ["--wrk", "3", "--rate", "3"],
        ["--wrk", "3", "--format", "grpc"],
        ["--url", "localhost:8000"],
    ],
    ids=" ".join,
)
def test_impossible_arguments_are_named(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def measured(**fields):
    latencies_s = array("d", [0.001 * count for count in range(1, 2001)])
    return Results(elapsed_s=10, received=2000, images=2000, latencies_s=latencies_s, **fields)


def test_the_table_has_every_number_and_fits_a_screen():
    stages = (Stage(100, 100, 10), Stage(100, 300, 10))
    load = Load("http://service", "open", stages, connections=1)
    second = measured(
        errors=Counter({"429 overloaded": 3, WRONG_LABEL: 1}),
        mistakes=12,
        busy=0.5,
        server_ms={"queue": array("d", [0.125])},
    )
    text = table(*summarise_stages(load, [measured(), second]), "title\nsecond line")
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert any(line.split()[:3] == ["100-300/s", "200.0", "4"] for line in lines)
    for expected in (
        *("title", "4,004 requests", "99.700%", "p99.9", "1,998.00", "2,000.00"),
        *("service: queue", "0.12", "ran 50% of the time", "error: 3 x 429 overloaded"),
    ):
        assert expected in text
    assert "the limit" not in text


def test_a_client_that_is_the_limit_says_so_and_where():
    load = Load("http://service", "open", (Stage(1, 1, 10), Stage(9, 9, 10)), connections=1)
    text = table(*summarise_stages(load, [measured(), measured(busy=0.5, starved=0.45)]), "")
    assert "The client is the limit at 9/s" in text
    late = measured(lateness_s=array("d", [0.5]))
    assert "sent too late at 9/s" in table(*summarise_stages(load, [measured(), late]), "")


def test_a_test_is_compared_with_each_target():
    total = summarise(measured(errors=Counter({"429": 3})))
    limits_ms = {"p50": 1000.0, "p99": 1000.0}
    met = [one.met for one in check(total, limits_ms, ErrorLimit(1, percent=True))]
    assert met == [True, True, True, False]


def test_wrong_labels_are_never_allowed():
    total = summarise(measured(errors=Counter({WRONG_LABEL: 1}), wrong_labels=1))
    met = [one.met for one in check(total, {}, ErrorLimit(100, percent=True))]
    assert met == [False, True]


def test_a_test_without_good_answers_fails():
    total = summarise(Results(elapsed_s=1, errors=Counter({"ConnectError": 9})))
    assert not all(one.met for one in check(total, {}, ErrorLimit(9, percent=False)))


def test_limits_are_read_with_their_units():
    assert [duration_ms(text) for text in ("800us", "5ms", "0.5s")] == [0.8, 5.0, 500.0]
    assert error_limit("10").allows(10, 10)
    assert not error_limit("10").allows(11, 1000)
    assert error_limit("0.1%").allows(1, 1000)
    assert not error_limit("0.1%").allows(1, 999)


def test_a_service_on_this_machine_keeps_a_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    assert spare_cores("127.0.0.1") == 3
    assert spare_cores("192.0.2.1") == 4


def test_the_progress_line_is_written_to_a_terminal_alone(monkeypatch):
    file, terminal = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for out in (file, terminal):
        line = ProgressLine(closed_loop("http://service", 2, 10), 2, out)
        for at_s in (0.5, 1.0):
            line.add(Progress(at_s, array("d", [0.002] * 100), errors=1))
            line.add(Progress(at_s, array("d", [0.004] * 50), errors=0))
    assert file.getvalue() == ""
    first, second = terminal.getvalue().split("\r\x1b[K")[1:]
    assert first == "0 of 10 s: 300 requests/s, p50 2.00 ms, p99 4.00 ms; 1 errors"
    assert second == "1 of 10 s: 300 requests/s, p50 2.00 ms, p99 4.00 ms; 2 errors"
