from __future__ import annotations

import os
import re
import socket

import pytest

from service import logs, server, supervisor
from service.__main__ import start as start_service
from service.engine import devices
from service.errors import ExitCode
from service.process.signals import Signals
from service.settings import Settings


def main(arguments):
    return start_service(arguments, Signals())


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("LENET_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def started(monkeypatch):
    """Records what would be started, with its settings; auto is the CPU."""
    found = []
    monkeypatch.setattr(devices, "on_gpu", lambda device: device == "cuda")
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    for module, name in ((server, "run"), (supervisor, "supervise")):
        monkeypatch.setattr(
            module, name, lambda s, _, name=name: found.append((name, s)) or ExitCode.STOPPED
        )
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "0"], "run"),
        (["--workers", "2"], "supervise"),
        (["--device", "cuda"], "supervise"),  # for its restarts
    ],
)
def test_a_supervisor_runs_with_several_workers_or_a_gpu(started, arguments, expected):
    assert main(arguments) is ExitCode.STOPPED
    ((name, _),) = started
    assert name == expected


TEXTS = {
    "models": "lenet,mlp",
    "device": "cpu",
    "log_level": "debug",
    "weights": "elsewhere",
    "mps": "off",
    "devices": "1,0",
    "precision": "tf32",
    "convolutions": "cudnn",
    "profile": "True",
    "fault_injection": "True",
    "host": "::1",
    "predict_route": "/v1/digits:predict",
    "health_route": "/health",
    "default_model": "mlp",
    "max_queue_rows": "40000",
    "max_in_flight_bytes": "67108864",
    "access_log": "json",
    "http_server": "uvicorn",
    "access_log_probes": "off",
    "log_format": "json",
    "cors_origins": "https://a.example,http://localhost:3000",
    "api_keys": "a key of 16 characters or more",
    "admin_keys": "another key of 16 characters",
    "versions": "latest:3",
    "explain": "off",
    "traces_endpoint": "https://collector.example/v1/traces",
}


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_is_both_flag_and_variable_and_the_flag_wins(started, name, monkeypatch):
    text = TEXTS.get(name, "785")
    flag = f"--{name.replace('_', '-')}"
    if name.startswith("tls_"):  # belongs to others
        others = {"tls_certificate", "tls_key"} - {name}
        for other in others:
            monkeypatch.setenv(f"LENET_{other.upper()}", "file")
    main([flag] if text == "True" else [flag, text])
    monkeypatch.setenv(f"LENET_{name.upper()}", text)
    main([])
    values = [getattr(settings, name) for _, settings in started]
    assert values[0] == values[1] != Settings.model_fields[name].default
    monkeypatch.setenv("LENET_PORT", "tcp://10.0.0.1:8000")  # as a Service called lenet sets it
    main(["--port", "2"])
    assert started[-1][1].port == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "--port is '70000', expected a whole number >= 0 and <= 65535"),
        (["--devices", "0,x"], "--devices is 'x', expected a whole number >= 0"),
        (
            ["--api-keys", "long enough by far, secret"],
            "--api-keys: key 2 of 2 has 6 characters, expected at least 16, ASCII alone",
        ),
        (["--tls-key", "key.pem"], "--tls-certificate is missing: --tls-key alone makes no TLS"),
        (["--tls-certificate", "a.pem"], "--tls-key is missing: --tls-certificate alone makes no"),
        (
            ["--tls-client-ca", "ca.pem"],
            "--tls-certificate and --tls-key are missing: --tls-client-ca alone makes no TLS",
        ),
        (
            ["--versions", "2"],
            "--versions is '2', expected latest, latest:N or all; one version by its number is",
        ),
        (
            ["--traces-endpoint", "http://collector:4318"],
            "--traces-endpoint is 'http://collector:4318', expected a URL with a path, as",
        ),
        (
            ["--traces-endpoint", "http://user:word@collector:4318/v1/traces"],
            "--traces-endpoint: got a URL with a user or a query, expected none, as logs show it;",
        ),
        (
            ["--traces-endpoint", "http://collector:4318/v1/traces?key=1"],
            "--traces-endpoint: got a URL with a user or a query, expected none, as logs show it;",
        ),
        (["--host", "http://0.0.0.0"], "--host is 'http://0.0.0.0', expected an address or a host"),
        (["--host", "[::1]"], "--host is '[::1]', expected an address or a host name alone"),
        (
            ["--host", "a:80"],
            "--host is 'a:80', expected an address or a host name alone; the port",
        ),
        (
            ["--predict-route", "predict"],
            "--predict-route is 'predict', expected a path of letters, digits and . _ ~ : @ -, as",
        ),
        (["--host="], "--host is '', expected an address or a host name alone; the port is --port"),
        (
            ["--prot", "9000"],
            "--prot is unknown; did you mean --port? (--help lists every setting)",
        ),
        (
            ["--device", "cpu", "--precision", "tf32"],
            "--device is cpu, where --precision would have no effect: remove --precision",
        ),
    ],
)
def test_a_wrong_flag_is_one_line(started, capsys, arguments, sentence):
    assert main(arguments) is ExitCode.SETTINGS
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"settings: {sentence}")
    assert not started


# In a process of its own


def test_a_gpu_that_is_not_there_ends_the_process_with_4_and_one_sentence(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    service = start("--device", "cuda")
    assert service.wait() == ExitCode.BACKEND
    (error,) = [line for line in service.lines if "ERROR" in line]
    assert "CuPy is not installed" in error or "GPU" in error
    assert "Traceback" not in service.log
    assert "ready" not in service.log


def test_a_broken_weight_file_ends_the_process_with_3_and_names_the_tensor(start, tiny_weights):
    path = tiny_weights / "lenet" / "1.safetensors"
    content = path.read_bytes()
    name = re.search(rb'"([\w.]+\.weight)"', content)[1]
    path.write_bytes(content.replace(name, name.swapcase()))
    service = start()
    assert service.wait() == ExitCode.WEIGHTS
    (line,) = service.lines
    assert "ERROR" in line
    assert "weights/lenet/1.safetensors: tensor" in line
    assert name.decode().lower() in line.lower()


@pytest.mark.parametrize(("which", "workers"), [("port", "1"), ("grpc_port", "2")])
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


def test_clouds_start_the_service_by_their_variables_and_words(started, monkeypatch, capsys):
    for variable in ("SAGEMAKER_BIND_TO_PORT", "AIP_HTTP_PORT"):
        monkeypatch.setenv(variable, "http")
        assert main([]) is ExitCode.SETTINGS
        assert f"settings: {variable} is 'http', expected a whole" in capsys.readouterr().err
        monkeypatch.setenv(variable, "8080")
        main(["serve"])
        main(["--port", "9000"])
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/a:b")
    main(["serve", "--health-route", "/c"])
    assert [settings.port for _, settings in started] == [8080, 9000, 8080, 9000, 8000]
    last = started[-1][1]
    assert (last.predict_route, last.health_route) == ("/a:b", "/c")
