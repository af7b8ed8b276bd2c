from __future__ import annotations

import os
import sys

import pytest
from pydantic import ValidationError

from service.settings import Settings


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("LENET_")]:
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("text", "devices"), [("0", (0,)), ("1, 0", (1, 0)), ("3,1,2", (3, 1, 2)), ("all", ())]
)
def test_gpus_are_given_by_number_or_all_of_them(monkeypatch, text, devices):
    monkeypatch.setenv("LENET_DEVICES", text)
    assert Settings().devices == devices


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"precision": "tf32"}, "--precision"),
        ({"convolutions": "measured"}, "--convolutions"),
        ({"devices": "all", "profile": True}, "--devices, --profile"),
        (
            {"devices": (1,), "precision": "fp32", "profile": True},
            "--devices, --precision, --profile",
        ),
    ],
)
def test_settings_without_an_effect_on_the_cpu_are_refused_there(changes, names):
    with pytest.raises(ValidationError, match=f"where {names} would have no effect"):
        Settings(device="cpu", **changes)
    for device in ("auto", "cuda"):
        assert Settings(device=device, **changes).unused_on_cpu == names
    common = Settings(device="cpu", precision="fp16", devices="0", contexts=3, max_batch_rows=7)
    assert common.unused_on_cpu == ""


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("port", 65536),
        ("grpc_port", "x"),
        ("devices", (-1,)),
        ("devices", "1,"),
        ("hang_timeout_s", float("nan")),
        ("fault_injection", "perhaps"),
        ("busy_poll_us", -1),
        ("device", "tpu"),
        ("prot", 1),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(name, wrong):
    with pytest.raises(ValidationError) as caught:
        Settings(**{name: wrong})
    (error,) = caught.value.errors()
    assert error["loc"][0] == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_images": 11, "max_queue_rows": 10}, "--max-images is 11, expected at most --max-q"),
        (
            {"max_body_bytes": 2000, "max_in_flight_bytes": 1999},
            "--max-body-bytes is 2000, expected",
        ),
        (
            {"models": "mlp,lenet", "default_model": "cnn"},
            "--default-model is cnn, expected one of --models: mlp, lenet",
        ),
        ({"grpc_port": "on"}, "grpc_port is 'on'|whole number >= 0 and <= 65535, or off"),
        (
            {"http_server": "uvicorn", "port": 8001},
            "--grpc-port is 8001, that of HTTP, where uvicorn speaks no gRPC: expected another, or",
        ),
        ({"devices": "1,0,1"}, "--devices is 1,0,1, expected each GPU once"),
        ({"api_keys": ""}, "--api-keys: got an empty list"),
        ({"admin_keys": "short"}, "--admin-keys: key 1 of 1 has 5 characters"),
        ({"api_keys": "k" * 16 + "\n" + "l" * 16}, "key 1 of 1 has a tab or line break within"),
        ({"api_keys": "\tk" * 16 + "\r\n"}, "key 1 of 1 has a tab or line break within"),
        ({"models": "lenet:"}, "--models: got 'lenet:', expected NAME or NAME:VERSION"),
        ({"models": "lenet:01"}, "--models: got 'lenet:01', expected NAME or NAME:VERSION"),
        ({"models": ":1"}, "--models: got ':1', expected NAME or NAME:VERSION"),
        ({"models": "mlp:1", "default_model": "lenet"}, "expected one of --models: mlp:1"),
        (
            {"models": "lenet mlp"},
            "--models: got 'lenet mlp', expected .*; commas separate several",
        ),
        ({"models": "lenet@2"}, "--models: got 'lenet@2', expected NAME or NAME:VERSION"),
        ({"devices": "cpu"}, "--devices is cpu, expected GPUs by number, or all; the backend is"),
        ({"model_alias": "a/b"}, "--model-alias is 'a/b', expected a name without /"),
        ({"versions": "latest:0"}, "versions"),
        ({"api_keys": " , "}, "--api-keys: got an empty list"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        Settings(**changes)


@pytest.mark.parametrize("name", ["PORT", "GRPC_PORT"])
def test_a_port_that_a_service_of_kubernetes_sets_is_explained(monkeypatch, name):
    monkeypatch.setenv(f"LENET_{name}", "tcp://10.96.0.7:80")
    with pytest.raises(ValidationError, match=r"expected a port; .* enableServiceLinks: false"):
        Settings()


def test_traces_need_their_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter.otlp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp", None)  # as if not installed
    command = "python -m pip install opentelemetry-exporter-otlp-proto-http"
    with pytest.raises(ValidationError, match=command):
        Settings(traces_endpoint="http://collector:4318/v1/traces")
