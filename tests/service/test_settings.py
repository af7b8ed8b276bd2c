from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from service.settings import Settings


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("LENET_")]:
        monkeypatch.delenv(variable)


def parsed(*arguments):
    return CliApp.run(Settings, cli_args=list(arguments))


def test_the_defaults_are_those_of_a_laptop():
    settings = Settings()
    assert (settings.host, settings.port, settings.grpc_port) == ("127.0.0.1", 8000, 8001)
    assert settings.weights == Path("weights")
    assert settings.default_model == ""
    assert settings.max_wait_us == 0


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_is_described_and_is_both_flag_and_variable(name, monkeypatch):
    field = Settings.model_fields[name]
    assert re.fullmatch(r"[A-Zg].*\.", field.description, re.DOTALL)
    texts = {"models": "lenet,mlp", "device": "cpu", "log_level": "debug", "weights": "elsewhere"}
    texts["mps"] = "off"
    texts |= {"devices": "1,0", "precision": "tf32", "profile": "True", "fault_injection": "True"}
    text = texts.get(name) or ("lenet" if field.annotation is str else "785")
    if name in ("max_images", "max_queue_rows"):
        monkeypatch.setenv("LENET_MAX_IMAGES", "700")
    if name == "max_bodies_bytes":
        monkeypatch.setenv("LENET_MAX_BODY_BYTES", "784")
    arguments = [] if text == "True" else [text]
    flag = getattr(parsed(f"--{name.replace('_', '-')}", *arguments), name)
    monkeypatch.setenv(f"LENET_{name.upper()}", text)
    assert getattr(Settings(), name) == flag
    shown = ",".join(map(str, flag)) if isinstance(flag, tuple) else str(flag)
    assert shown.removesuffix(".0") == text


def test_a_flag_wins_over_a_variable(monkeypatch):
    monkeypatch.setenv("LENET_PORT", "1")
    assert Settings().port == 1
    assert parsed("--port", "2").port == 2


@pytest.mark.parametrize(
    ("text", "models"),
    [("lenet", ("lenet",)), ("mlp, lenet", ("mlp", "lenet")), (" , ", ()), ("", ())],
)
def test_models_are_separated_by_commas(monkeypatch, text, models):
    assert parsed("--models", text).models == models
    monkeypatch.setenv("LENET_MODELS", text)
    assert Settings().models == models


def test_models_stay_as_they_are_when_they_are_given_as_values():
    assert Settings(models=("mlp", "lenet")).models == ("mlp", "lenet")


@pytest.mark.parametrize(
    ("text", "devices"), [("0", (0,)), ("1, 0", (1, 0)), ("3,1,2", (3, 1, 2)), ("all", ())]
)
def test_gpus_are_given_by_number_or_all_of_them(monkeypatch, text, devices):
    assert parsed("--devices", text).devices == devices
    monkeypatch.setenv("LENET_DEVICES", text)
    assert Settings().devices == devices


def test_the_same_gpu_twice_is_refused():
    with pytest.raises(ValidationError, match="devices is 1,0,1, expected each GPU once"):
        Settings(devices="1,0,1")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"precision": "tf32"}, "precision"),
        ({"devices": "all", "profile": True}, "devices, profile"),
        ({"devices": (1,), "precision": "fp32", "profile": True}, "devices, precision, profile"),
    ],
)
def test_the_cpu_is_refused_what_only_a_gpu_has_a_use_for(changes, names):
    with pytest.raises(ValidationError, match=f"'cpu', which has no use for {names}: leave that"):
        Settings(device="cpu", **changes)
    for device in ("auto", "cuda"):
        assert Settings(device=device, **changes).unused_on_cpu == names


def test_the_cpu_takes_what_every_device_has_a_use_for():
    settings = Settings(device="cpu", precision="fp16", devices="0", contexts=3, max_batch_rows=7)
    assert settings.unused_on_cpu == ""


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("port", -1),
        ("port", 65536),
        ("grpc_port", "x"),
        ("workers", 0),
        ("contexts", -1),
        ("devices", (-1,)),
        ("devices", "one"),
        ("devices", "1,"),
        ("precision", "mixed"),
        ("hang_timeout_s", 0),
        ("hang_timeout_s", float("nan")),
        ("fault_injection", "perhaps"),
        ("cpu_threads", -1),
        ("max_batch_rows", -1),
        ("max_batch_rows", 65537),
        ("max_queue_rows", 0),
        ("max_wait_us", -1),
        ("max_wait_us", 1_000_001),
        ("busy_poll_us", -1),
        ("busy_poll_us", 100_001),
        ("max_images", 0),
        ("max_body_bytes", 783),
        ("max_body_bytes", 2**31),
        ("request_timeout_ms", 0),
        ("request_timeout_ms", 3_600_001),
        ("drain_timeout_s", -0.1),
        ("grace_s", float("nan")),
        ("device", "tpu"),
        ("mps", "on"),
        ("log_level", "loud"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(name, wrong):
    with pytest.raises(ValidationError) as caught:
        Settings(**{name: wrong})
    (error,) = caught.value.errors()
    assert error["loc"][0] == name


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValidationError, match="prot"):
        Settings(prot=1)


def test_bounds_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match="max_images is 11, expected at most max_queue_rows"):
        Settings(max_images=11, max_queue_rows=10)
    with pytest.raises(ValidationError, match="max_body_bytes is 2000, expected at most"):
        Settings(max_body_bytes=2000, max_bodies_bytes=1999)
    assert Settings(models="mlp,lenet", max_images=10, max_queue_rows=10)


def test_the_default_model_is_among_the_models():
    assert Settings(models="mlp,cnn-32-64").default_model == "", "the weights folder decides"
    with pytest.raises(ValidationError, match="default_model is 'lenet', expected one of models"):
        Settings(models="mlp", default_model="lenet")


def test_http_and_grpc_cannot_share_a_port_unless_it_is_any():
    with pytest.raises(ValidationError, match="grpc_port is 8001, expected another than port"):
        Settings(port=8001)
    assert Settings(port=0, grpc_port=0)


def test_settings_cannot_be_changed_once_they_are_read():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1
