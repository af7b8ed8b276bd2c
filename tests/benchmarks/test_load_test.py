import json
import re

import pytest

from benchmarks.load_test import main
from benchmarks.servers import lenet_serve
from lenet.weightfile import WeightFile


@pytest.fixture
def load_test(weights, service, tmp_path):
    """`load_test(*arguments)`: the exit code and the JSON of a test of the scripted service."""
    weights.write(tmp_path / "1.safetensors")
    path = tmp_path / "results.json"
    fixed = [f"--weights={tmp_path / '1.safetensors'}", "--warm-up=0", f"--json={path}"]

    def run(*arguments):
        with service.listening() as url:
            code = main([f"--url={url}", *fixed, "--connections=2", "--processes=1", *arguments])
        return code, json.loads(path.read_text())

    return run


def test_two_processes_send_each_request_of_the_stages_once(load_test, service, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "load.png"
    stages = ["--stages", "100:0.3", "20-200:1", "--arrivals=constant"]
    code, found = load_test(*stages, "--connections=4", "--processes=2", f"--figure={figure}")
    assert code == 0
    assert found["passed"]
    assert len(service.scopes) == found["results"]["requests"] == 140
    assert len({scope["client"] for scope in service.scopes}) <= 4
    assert [one["requests"] for one in found["stages"]] == [30, *range(2, 22, 2)]
    assert [one["load"] for one in found["stages"]][:2] == ["100 per second", "20 per second"]
    results = found["results"]
    assert results["latency_ms"].keys() == {"mean", "p50", "p90", "p99", "p99.9", "max"}
    assert [ms["p50"] for ms in results["server_ms"].values()] == [0.25, 0.5, 1.0, 1.75]
    assert results["accuracy"] == 1
    assert results["client_busy"] > 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "lenet version 1 on cpu" in capsys.readouterr().out


def test_requests_that_were_due_while_the_service_stalled_are_late(load_test, service, say):
    service.behave = lambda number, labels: (200, say(labels), 0.0 if number else 0.5)
    load = ["--rate=20", "--arrivals=constant", "--duration=1", "--connections=1"]
    _, found = load_test(*load)
    assert found["results"]["requests"] == 20
    assert found["results"]["latency_ms"]["p90"] > 390  # the third was due 0.4 s before the end


@pytest.mark.parametrize(
    ("status", "shift", "arguments", "code"),
    [
        (503, 0, ["--errors=1"], 0),
        (503, 0, [], 1),
        (200, 1, ["--errors=100%"], 1),
        (200, 0, ["--p99.9=1us"], 1),
    ],
)
def test_errors_wrong_labels_and_targets_decide_the_exit_code(
    load_test, service, say, capsys, status, shift, arguments, code
):
    def behave(number, labels):
        if number:
            return 200, say(labels), 0.0
        return status, say([(label + shift) % 10 for label in labels]), 0.0

    service.behave = behave
    found_code, found = load_test("--duration=0.2", *arguments)
    assert found_code == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)
    kinds = {503: {"503": 1}}.get(status, {"wrong label": 1} if shift else {})
    assert found["results"]["errors"] == kinds


def test_a_service_is_loaded_over_grpc(tiny_file, capsys):
    name = WeightFile.read(tiny_file).model.name
    with lenet_serve(tiny_file, name, ["--device=cpu"]) as server:
        address = re.search(r"gRPC on (\S+),", server.logged())[1]
        target = [f"--url={server.url}", f"--grpc={address}", "--format=grpc"]
        short = ["--warm-up=0", "--duration=1", "--connections=2", "--processes=1"]
        assert main([*target, f"--weights={tiny_file}", *short]) == 0
    assert "service: compute" in capsys.readouterr().out
