from __future__ import annotations

import sys

import pytest

from lenet.cuda import programs
from service import logs
from service.__main__ import main
from service.errors import ExitCode


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """Runs `lenet-serve warm` for one image a batch; compiled forms go to an empty folder."""
    monkeypatch.setattr(programs, "COMPILED", tmp_path / "compiled")
    monkeypatch.setattr(logs, "configure", lambda *_: None)

    def run(*arguments):
        line = ["lenet-serve", "warm", "--weights", "weights", "--max-batch-rows", "1", *arguments]
        monkeypatch.setattr(sys, "argv", line)
        return main()

    return run


@pytest.mark.process
def test_warm_compiles_the_models_of_the_settings_for_the_architectures(warm, caplog):
    pytest.importorskip("nvidia.cu13", reason="the wheel nvidia-cuda-nvrtc is missing")
    with caplog.at_level("INFO"):
        assert warm("--models", "mlp", "--architectures", "75,90") is ExitCode.STOPPED
    files = list(programs.COMPILED.rglob("*.cubin"))
    assert {path.parent.name for path in files} == {"sm_75", "sm_90"}
    assert caplog.messages == [f"{len(files)} compiled programs for mlp/1 in fp16"]
    (programs.COMPILED / "sm_80").write_text("no folder")
    assert warm("--models", "mlp", "--architectures", "80") is ExitCode.BACKEND
    assert "compiled kernels cannot be kept: " in caplog.text


def test_the_settings_say_what_is_compiled(warm, monkeypatch, caplog):
    def compiled(files, target, rows, architectures):
        seen.append((len(files), target.precision, target.convolutions, rows, architectures))
        return 0, 3

    seen = []
    monkeypatch.setattr("service.warm.compile_ahead", compiled)
    settings = "--models", "mlp", "--precision", "tf32", "--convolutions", "cudnn"
    assert warm(*settings, "--architectures", "90") is ExitCode.BACKEND
    assert seen == [(1, "tf32", "cudnn", 1, (90,))]
    assert "3 programs do not compile" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--architectures", "80,70"), ExitCode.SETTINGS, "is '80,70', expected some of 75,80,"),
        (("--models", "unknown"), ExitCode.WEIGHTS, "unknown"),
    ],
)
def test_what_warm_cannot_use_is_one_line_and_an_exit_code(
    warm, capsys, caplog, arguments, code, message
):
    assert warm(*arguments) is code
    (line,) = [*capsys.readouterr().err.splitlines(), *caplog.messages]
    assert message in line
