import json
import socket
from array import array
from collections import Counter

import pytest

from benchmarks.load import Results, summarise
from benchmarks.load_test import main, table


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
            short = ["--duration", "0.1", "--connections", "2"]
            return main(["--url", url, "--weights", str(weight_file), *short, *arguments])

    return run


def test_a_correct_service_ends_with_0_a_table_and_json(load_test, tmp_path, capsys):
    path = tmp_path / "results.json"
    assert load_test("--mode", "open", "--rate", "100", "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "lenet version 1 on cpu" in out
    assert "open loop, 100 requests/s on up to 2 connections, 0.1 s; 1 x json per request" in out
    assert "10 digits: golden images of the weight file" in out
    assert "The client was busy" in out
    document = json.loads(path.read_text())
    assert document["arguments"]["rate"] == 100
    assert document["versions"].keys() >= {"python", "httpx", "lenet-serve"}
    assert document["service"]["model"] == "lenet"
    results = document["results"]
    assert results["passed"]
    assert results["latency_ms"].keys() == {"mean", "p50", "p90", "p99", "p99.9", "max"}


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
    return summarise(Results(latencies_s=latencies_s, images=2000, **fields))


def test_the_table_has_every_number_and_fits_a_screen():
    summary = measured(
        errors=Counter({"429 overloaded": 3}),
        wrong_labels=2,
        mistakes=12,
        own_mistakes=10,
        busy=0.5,
    )
    text = table(summary, "title\nsecond line")
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    for expected in (
        *("title", "2,003", "99.400%", "p99.9", "1,998.00", "2,000.00"),
        *("12 of 2,000 predictions differ", "own predictions 10 do", "busy 50% of a core"),
        "error: 3 x 429 overloaded",
    ):
        assert expected in text
    assert "the limit" not in text


def test_a_client_that_is_the_limit_says_so():
    assert "The client is the limit" in table(measured(busy=0.5, starved=0.45), "")
    assert "sent too late" in table(measured(lateness_s=array("d", [0.5])), "")
