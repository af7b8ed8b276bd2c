import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load_test import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def weight_file(weights, tmp_path):
    path = tmp_path / "1.safetensors"
    weights.write(path)
    return path


@pytest.fixture
def load_test(weight_file, serve, golden_service):
    """`load_test(*arguments)`: the exit code of a short test of the fake service."""

    def run(*arguments):
        with serve(golden_service) as url:
            return main(
                [
                    *("--url", url, "--weights", str(weight_file)),
                    *("--duration", "0.1", "--connections", "2", *arguments),
                ]
            )

    return run


def test_a_service_without_a_fault_ends_with_0_and_a_table(load_test, capsys):
    assert load_test() == 0
    out = capsys.readouterr().out
    assert "lenet version 1 on cpu" in out
    assert "closed loop, 2 connections, 0.1 s; 1 x json a request" in out
    assert "10 digits: golden images of the weight file" in out


def test_the_json_has_the_numbers_and_where_they_come_from(load_test, tmp_path):
    path = tmp_path / "results.json"
    assert load_test("--mode", "open", "--rate", "100", "--json", str(path)) == 0
    document = json.loads(path.read_text())
    assert document["arguments"]["mode"] == "open"
    assert document["arguments"]["rate"] == 100
    assert document["machine"]["cpu_count"] >= 1
    assert document["versions"].keys() >= {"python", "httpx", "lenet-serve"}
    assert document["date"].endswith("+00:00")
    assert document["service"]["model"] == "lenet"
    results = document["results"]
    assert results["passed"]
    assert results["errors"] == {}
    assert results["latency_ms"].keys() == {"mean", "p50", "p90", "p99", "p99.9", "max"}


@pytest.mark.parametrize("fault", ["refusal", "wrong label"])
def test_one_fault_ends_with_1(fault, load_test, golden_service, say):
    def behave(number, labels):
        if number != 1:
            return 200, say(labels), 0.0
        return (503, b"{}", 0.0) if fault == "refusal" else (200, say([(labels[0] + 1) % 10]), 0.0)

    golden_service.behave = behave
    assert load_test() == 1


def test_no_service_is_one_sentence_that_says_what_to_type(weight_file, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--url", url, "--weights", str(weight_file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert url in captured.err
    assert "`make serve`" in captured.err


def test_a_service_that_is_not_ready_is_not_loaded(load_test, golden_service, capsys):
    golden_service.ready = 503
    assert load_test() == 2
    assert "is not ready" in capsys.readouterr().err
    assert golden_service.scopes == []


def test_a_model_that_is_not_served_is_not_asked_for(load_test, capsys):
    assert load_test("--model", "mlp") == 2
    assert "serves lenet, not 'mlp'" in capsys.readouterr().err


def test_another_weight_file_than_the_served_one_proves_nothing(load_test, golden_service, capsys):
    golden_service.info["models"][0]["sha256"] = "0" * 64
    assert load_test() == 2
    assert "name the file that is served with --weights" in capsys.readouterr().err


def test_something_else_on_the_port_is_told_apart(load_test, golden_service, capsys):
    golden_service.info = {"hello": "world"}
    assert load_test() == 2
    assert "is no lenet-serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "0"],
        ["--duration", "nan"],
        ["--images", "0"],
        ["--connections", "5000"],
        ["--connections", "1", "--processes", "2"],
        ["--format", "gif"],
        ["--url", "localhost:8000"],
    ],
    ids=" ".join,
)
def test_impossible_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_run_by_its_path_it_finds_the_standard_library_before_its_neighbours(tmp_path):
    script = ROOT / "benchmarks" / "load_test.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--duration" in done.stdout
