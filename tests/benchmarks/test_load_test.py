import json
from array import array
from collections import Counter

import pytest

from benchmarks.load import Results
from benchmarks.load_report import (
    ErrorLimit,
    check,
    duration_ms,
    error_limit,
    summarise,
)
from benchmarks.load_test import main


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


def measured(**fields):
    latencies_s = array("d", [0.001 * count for count in range(1, 2001)])
    return Results(elapsed_s=10, received=2000, images=2000, latencies_s=latencies_s, **fields)


def test_a_test_is_compared_with_each_target():
    total = summarise(measured(errors=Counter({"429": 3})))
    limits_ms = {"p50": 1000.0, "p99": 1000.0}
    met = [one.met for one in check(total, limits_ms, ErrorLimit(1, percent=True))]
    assert met == [True, True, True, False]


def test_limits_are_read_with_their_units():
    assert [duration_ms(text) for text in ("800us", "5ms", "0.5s")] == [0.8, 5.0, 500.0]
    assert error_limit("10").allows(10, 10)
    assert not error_limit("10").allows(11, 1000)
    assert error_limit("0.1%").allows(1, 1000)
    assert not error_limit("0.1%").allows(1, 999)
