from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from lenet.context import Target, architectures, buckets, compile_ahead
from lenet.cuda import ahead, programs
from lenet.cuda.nvrtc import Nvrtc
from lenet.cuda.programs import Program
from lenet.errors import BackendUnavailable
from lenet.weightfile import WeightFile

WEIGHTS = Path(__file__).parents[3] / "weights"
COUNTS = (10, 58, 84, 108, 142, 170)
"""Multiprocessors of GPUs and of parts of them."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of compiled forms."""
    monkeypatch.setattr(programs, "COMPILED", tmp_path / "compiled")
    return programs.COMPILED


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["lenet/2", "cnn-32-64/1"])
def test_a_gpu_with_any_number_of_multiprocessors_needs_nothing_else(name, precision, monkeypatch):
    file = WeightFile.read(WEIGHTS / f"{name}.safetensors")
    for capability in architectures():
        arguments = file, precision, "auto", buckets(1024), capability
        found = ahead.programs(*arguments)
        with monkeypatch.context() as patched:
            patched.setattr(ahead, "_MULTIPROCESSORS", COUNTS)
            assert ahead.programs(*arguments) <= found


def test_all_strategies_have_their_programs():
    file = WeightFile.read(WEIGHTS / "lenet/2.safetensors")

    def of(precision, convolutions, capability=90):
        return ahead.programs(file, precision, convolutions, buckets(1024), capability)

    assert of("fp16", "measured") == of("fp16", "auto") | of("fp16", "cudnn")
    fused = [*of("fp16", "auto"), *of("fp32", "auto"), *of("fp16", "auto", 80)]
    assert [one.source.name for one in fused].count("fused_network.cu") == 1


def test_a_program_is_found_by_source_headers_macros_and_gpu(tmp_path, folder, monkeypatch):
    (tmp_path / "serving").mkdir()
    monkeypatch.setattr(programs, "FOLDER", tmp_path / "serving")
    source, header = tmp_path / "kernel.cu", tmp_path / "part.cuh"
    other = tmp_path / "serving" / "ptx.cuh"
    for file in (source, header, other):
        file.write_text(file.stem)
    program = Program.of(source, {"A": 1, "B": 2.0})
    program.write(90, b"code")
    assert program.find(90).read_bytes() == b"code"
    same = Program.of(source, {"B": 2.0, "A": 1})
    assert same.find(90) == program.find(90)
    assert program.find(80) is None
    assert Program.of(source, {"A": 1, "B": 3.0}).find(90) is None
    for file in (source, header, other):
        before = file.read_text()
        file.write_text("changed")
        assert program.find(90) is None
        file.write_text(before)
    assert program.find(90) is not None
    program.write(90, b"other code")
    assert program.find(90).read_bytes() == b"other code"
    assert len(list(folder.rglob("*.cubin"))) == 1


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.write_bytes(b"cod"), "it is damaged"),
        (lambda path: (path.unlink(), path.mkdir()), "it cannot be read (Is a directory)"),
    ],
)
def test_a_damaged_program_is_not_found_which_is_logged(tmp_path, folder, caplog, damage, problem):
    (tmp_path / "kernel.cu").write_text("source")
    program = Program.of(tmp_path / "kernel.cu", {})
    program.write(90, b"code")
    path = program.find(90)
    damage(path)
    assert program.find(90) is None
    assert caplog.messages == [f"{path} is compiled again: {problem}"]


@pytest.mark.process
def test_every_architecture_has_its_code_and_what_does_not_compile_is_named(
    folder, caplog, monkeypatch
):
    pytest.importorskip("nvidia.cu13", reason="the wheel nvidia-cuda-nvrtc is missing")
    file = WeightFile.read(WEIGHTS / "mlp/1.safetensors")
    target, found = Target("cuda"), architectures()
    broken = Program.of(programs.FOLDER / "unpack.cu", {"SCALAR": "word"})
    monkeypatch.setattr(
        ahead, "programs", lambda *_, programs=ahead.programs: {broken, *programs(*_)}
    )
    count, failed = compile_ahead([file], target, 1, found)
    files = list(folder.rglob("*.cubin"))
    assert (len(files), failed) == (count, len(found))
    assert {path.parent.name for path in files} == {f"sm_{one}" for one in found}
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in files)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "unpack.cu does not compile for sm_90: " in caplog.text
    written = {path: path.stat().st_mtime_ns for path in files}
    assert compile_ahead([file], target, 1, found) == (count, failed)
    assert written == {path: path.stat().st_mtime_ns for path in folder.rglob("*.cubin")}
    monkeypatch.setattr(ahead, "_compile", _killed)
    with pytest.raises(BackendUnavailable, match="a compiling process was killed"):
        compile_ahead([file], target, 1, found)


def _killed(_wanted):
    os._exit(1)


def test_a_machine_without_the_compiler_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr("lenet.cuda.nvrtc.find_spec", lambda _: None)
    with pytest.raises(BackendUnavailable, match=r"NVRTC is not installed; .*\[cuda13\]"):
        Nvrtc()
