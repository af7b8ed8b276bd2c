from __future__ import annotations

import itertools
import json
import os
import platform
import re
import socket
from pathlib import Path

import pytest

from service import logs, server, supervisor
from service.__main__ import start as start_service
from service.engine import devices
from service.errors import ExitCode
from service.process.signals import Signals
from service.settings import Settings

HEAP_BYTES = 64 << 20


def main(arguments):
    return start_service(arguments, Signals())


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("LENET_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def started(monkeypatch):
    """What would have been started, with which settings; auto is the CPU."""
    found = []
    monkeypatch.setattr(devices, "on_gpu", lambda device: device == "cuda")
    monkeypatch.setattr(logs, "configure", lambda level: None)
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
    "profile": "True",
    "fault_injection": "True",
    "host": "::1",
    "default_model": "mlp",
    "max_queue_rows": "40000",
    "max_in_flight_bytes": "67108864",
    "access_log": "json",
    "cors_origins": "https://a.example,http://localhost:3000",
    "api_keys": "a key of 16 characters or more",
    "admin_keys": "another key of 16 characters",
    "versions": "latest:3",
    "explain": "off",
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
    monkeypatch.setenv("LENET_PORT", "1")
    main(["--port", "2"])
    assert started[-1][1].port == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "--port is '70000', expected a whole number >= 0 and <= 65535"),
        (["--devices", "0,x"], "--devices is 'x', expected a whole number >= 0"),
        (["--devices", "1,1"], "--devices is 1,1, expected each GPU once"),
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
        (["--host", "http://0.0.0.0"], "--host is 'http://0.0.0.0', expected an address or a host"),
        (["--host", "[::1]"], "--host is '[::1]', expected an address or a host name alone"),
        (
            ["--host", "a:80"],
            "--host is 'a:80', expected an address or a host name alone; the port",
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


def test_an_unknown_variable_is_a_warning_with_the_nearest_known_one(started, monkeypatch, caplog):
    for name in ("LENET_PROT", "LENET_TEST_MNIST", "LENET_TRAINER_SEED", "LENET_XYZZY"):
        monkeypatch.setenv(name, "9000")
    assert main([]) is ExitCode.STOPPED
    assert [record.message for record in caplog.records] == [
        "LENET_PROT is ignored: no such setting; did you mean LENET_PORT?",
        "LENET_XYZZY is ignored: no such setting",
    ]


def test_help_has_every_setting_but_the_hidden_one(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    flags = set(re.findall(r"^  --([a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    shown = {name.replace("_", "-") for name in Settings.model_fields} - {"fault-injection"}
    assert flags == shown | {"version"}


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"lenet-serve \d+[.\d]*\n", capsys.readouterr().out)


# As a process


def test_the_service_answers_and_stops_with_0_on_a_signal(start):
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


def test_garbage_is_collected_again_once_the_service_is_ready(start):
    # With this flag every collection is a line in the log.
    program = "import gc, service.__main__ as entry; gc.set_debug(gc.DEBUG_STATS); entry.main()"
    service = start(program=("-c", program)).ready()
    youngest = "gc: collecting generation 0"
    before = service.log.count(youngest)
    for _ in range(300):
        service.get("/info")
    service.wait_for(youngest, before + 1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
@pytest.mark.parametrize("workers", [1, 2])
def test_all_threads_of_a_process_share_one_heap(start, workers):
    service = start("--workers", str(workers)).ready(workers)
    service.predict()
    for pid in service.started_workers() or [service.process.pid]:
        lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        mapped = [(*(int(end, 16) for end in line[0].split("-")), line[1]) for line in lines]
        # glibc reserves 64 MiB for each further heap and makes its beginning writable.
        further = [
            (begin, end)
            for (begin, middle, used), (rest, end, reserved) in itertools.pairwise(mapped)
            if begin % HEAP_BYTES == 0 and end == begin + HEAP_BYTES and middle == rest
            if (used, reserved) == ("rw-p", "---p")
        ]
        assert not further


def test_a_wrong_setting_ends_the_process_with_2(start):
    service = start("--max-body-bytes", "5")
    assert service.wait() == ExitCode.SETTINGS
    assert service.log == (
        "settings: --max-body-bytes is '5', expected a whole number >= 784 and <= 2147483647"
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
