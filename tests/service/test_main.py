from __future__ import annotations

import json
import re
import socket

import pytest

from service import __main__, server, supervisor
from service.__main__ import main
from service.engine import devices
from service.errors import ExitCode


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in ("LENET_PORT", "LENET_WORKERS", "LENET_WEIGHTS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def started(monkeypatch):
    """What would have been started, with which settings; auto is the CPU."""
    found = []
    monkeypatch.setattr(devices, "on_gpu", lambda device: device == "cuda")
    monkeypatch.setattr(__main__.logs, "configure", lambda level: None)
    for module, name in ((server, "run"), (supervisor, "supervise")):
        monkeypatch.setattr(
            module, name, lambda s, name=name: found.append((name, s)) or ExitCode.STOPPED
        )
    return found


def test_one_process_serves_when_no_workers_are_asked_for(started):
    assert main(["--port", "0"]) is ExitCode.STOPPED
    ((name, settings),) = started
    assert name == "run"
    assert settings.port == 0


def test_a_supervisor_serves_when_workers_are_asked_for(started, monkeypatch):
    monkeypatch.setenv("LENET_WORKERS", "2")
    assert main([]) == 0
    assert started[0][0] == "supervise"


def test_a_supervisor_watches_over_one_process_where_a_gpu_is_meant(started):
    main(["--device", "cuda"])
    assert started[0][0] == "supervise"


def test_the_flags_are_those_of_the_command_line_when_none_are_given(started, monkeypatch):
    monkeypatch.setattr("sys.argv", ["service", "--port", "7"])
    main()
    assert started[0][1].port == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "port is '70000': Input should be less than or equal to 65535"),
        (["--port", "http"], "port is 'http': Input should be a valid integer"),
        (["--workers", "0"], "workers is '0': Input should be greater than 0"),
        (["--device", "tpu"], "device is 'tpu': Input should be 'auto', 'cpu' or 'cuda'"),
        (["--devices", "0,x"], "devices.1 is 'x': Input should be a valid integer"),
        (["--devices", "1,1"], "devices is 1,1, expected each GPU once"),
        (
            ["--device", "cpu", "--precision", "tf32"],
            "device is 'cpu', which has no use for precision: leave that out",
        ),
        (["--grace-s", "-1"], "grace_s is '-1': Input should be greater than or equal to 0"),
        (
            ["--max-images", "9", "--max-queue-rows", "8"],
            "max_images is 9, expected at most max_queue_rows, 8: a larger request could never",
        ),
        (
            ["--models", "mlp", "--default-model", "lenet"],
            "default_model is 'lenet', expected one of models, mlp",
        ),
        (
            ["--port", "9000", "--grpc-port", "9000"],
            "grpc_port is 9000, expected another than port, 9000: HTTP and gRPC cannot share one",
        ),
    ],
)
def test_a_wrong_value_is_one_line_that_names_setting_value_and_expectation(
    started, capsys, arguments, sentence
):
    assert main(arguments) is ExitCode.SETTINGS
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"settings: {sentence}")
    assert not started


def test_every_wrong_value_is_told_at_once(started, monkeypatch, capsys):
    monkeypatch.setenv("LENET_PORT", "http")
    assert main(["--workers", "none"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_an_unknown_flag_is_named(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--wrokers", "2"])
    assert caught.value.code == ExitCode.SETTINGS
    assert "unrecognized arguments: --wrokers 2" in capsys.readouterr().err


def test_help_describes_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    entries = re.split(r"\n  (?=--)", text)[1:]
    assert len(entries) == len(__main__.Settings.model_fields)
    for entry in entries:
        assert entry.partition("(default")[0].rstrip().endswith("."), entry


# As a process


def test_the_service_answers_and_stops_with_0_when_it_is_told_to(start):
    service = start().ready()
    assert service.get("/readyz")[0] == 200
    answer = json.loads(service.predict()[1])
    assert len(answer["predictions"][0]["probabilities"]) == 10
    assert json.loads(service.get("/info")[1])["default_model"] == "lenet"
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert service.lines[-1].endswith("stopped")
    assert "WARNING" not in service.log
    assert "ERROR" not in service.log


def test_a_wrong_setting_ends_the_process_with_2(start):
    service = start("--max-body-bytes", "5")
    assert service.wait() == ExitCode.SETTINGS
    assert service.log == (
        "settings: max_body_bytes is '5': Input should be greater than or equal to 784"
    )


def test_a_gpu_that_is_not_there_ends_the_process_with_4_and_one_sentence(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    service = start("--device", "cuda")
    assert service.wait() == ExitCode.BACKEND
    (error,) = [line for line in service.lines if "ERROR" in line]
    assert "CuPy is not installed" in error or "GPU" in error
    assert "Traceback" not in service.log
    assert "ready" not in service.log


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_broken_weight_file_ends_the_process_with_3_and_names_the_tensor(
    start, tiny_weights, workers
):
    path = tiny_weights / "lenet" / "1.safetensors"
    content = path.read_bytes()
    name = re.search(rb'"([\w.]+\.weight)"', content)[1]
    path.write_bytes(content.replace(name, name.swapcase()))
    service = start("--workers", workers)
    assert service.wait() == ExitCode.WEIGHTS
    (line,) = service.lines
    assert "ERROR" in line
    assert "weights/lenet/1.safetensors: tensor" in line
    assert name.decode().lower() in line.lower()


@pytest.mark.parametrize(
    ("which", "workers"), [("port", "1"), ("grpc_port", "1"), ("port", "2"), ("grpc_port", "2")]
)
def test_a_taken_port_ends_the_process_with_5_and_is_named(start, which, workers):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        service = start("--workers", workers, **{which: port})
        assert service.wait() == ExitCode.ADDRESS
    errors = [line for line in service.lines if "ERROR" in line]
    assert len(errors) == 1
    assert f"127.0.0.1:{port}" in errors[0]
    assert "in use" in errors[0]
    assert "Traceback" not in service.log
