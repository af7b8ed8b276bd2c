import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lenet.model import ARCHITECTURES, named
from lenet.weightfile import WeightFile
from trainer import __main__ as program
from trainer import commands, export, loop
from trainer.commands import run
from trainer.errors import (
    DatasetUnavailable,
    DeviceUnavailable,
    ExportRefused,
    TrainingDiverged,
)
from trainer.ops_cpu import CpuOps

ROOT = Path(__file__).parents[2]


def main(line):
    return run(line, {})


@pytest.fixture
def arguments(tiny, write_idx, tmp_path):
    """A run of seconds over files that the test made, on the CPU."""
    return [
        *("--device", "cpu"),
        *("--model", "mlp", "--epochs", "2", "--batch", "20", "--rate", "0.02"),
        *("--validation-images", "100", "--data", str(write_idx(tiny))),
        *("--out", str(tmp_path / "out"), "--checkpoints", str(tmp_path / "checkpoints")),
    ]


def test_fit_trains_and_writes_a_weight_file_that_says_how(arguments, tmp_path, capsys):
    assert main(["fit", *arguments]) == 0
    path = tmp_path / "out/mlp/1.safetensors"
    weights = WeightFile.read(path)
    training = weights.training
    assert weights.model == named("mlp").folded
    assert training.command.startswith("python -m trainer fit --model mlp --seed 1 --epochs 2 ")
    assert str(tmp_path) not in training.command
    assert training.command.endswith(" --device cpu --precision fp32")
    assert (training.seed, training.epochs, training.labels[9]) == (1, 2, "9")
    assert training.accuracy > 0.8
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{path}: 397510 parameters, validation accuracy ")
    assert f"sha256 {weights.digest()}" in last
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_fit_without_a_gpu_says_so_and_records_the_device(arguments, tmp_path, capsys, no_gpu):
    assert main(["fit", *arguments, "--device", "auto"]) == 0
    command = WeightFile.read(tmp_path / "out/mlp/1.safetensors").training.command
    assert command.endswith(" --device cpu --precision fp32")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("training on the CPU: no usable GPU was found")
    assert lines[1] == command
    assert not [line for line in lines if "of memory" in line]


def test_fit_is_refused_in_one_sentence_where_there_is_no_gpu_for_it(
    arguments, tmp_path, capsys, no_gpu
):
    assert main(["fit", *arguments, "--device", "cuda"]) == 2
    assert capsys.readouterr() == ("", f"--device is cuda: {no_gpu}\n")
    assert not (tmp_path / "out").exists()


def test_fit_trains_on_the_gpu_that_is_there_and_verifies_its_result_on_the_cpu(
    arguments, tmp_path, capsys, monkeypatch, fake_gpus
):
    gpus, verified = fake_gpus(1), []

    def export_weights(network, *rest):
        assert gpus.closed == gpus.opened
        verified.append(network)
        return export.export_weights(network, *rest)

    monkeypatch.setattr(commands, "export_weights", export_weights)
    assert main(["fit", *arguments, "--device", "auto"]) == 0
    (network,), (gpu,) = verified, gpus.opened
    assert type(network.ops) is CpuOps
    assert {tensor.dtype.name for tensor in network.tensors.values()} == {"float32"}
    assert gpu.precision == "mixed"
    command = WeightFile.read(tmp_path / "out/mlp/1.safetensors").training.command
    assert command.endswith(" --device cuda --precision mixed")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == command
    assert "GPU 0: 12 MB of memory" in lines


def test_fit_on_several_gpus_reports_each_epoch_once_and_writes_what_rank_0_has(
    arguments, tmp_path, capsys, fake_gpus
):
    gpus = fake_gpus(2)
    for number in ("1", "2"):
        assert main(["fit", *arguments, "--device", "cuda", "--gpus", number]) == 0
    assert len(gpus.opened) == 1 + 2
    lines = capsys.readouterr().out.splitlines()
    second = lines[next(n for n, line in enumerate(lines) if line.endswith(" --gpus 2")) :]
    assert len([line for line in second if line.startswith("epoch ")]) == 2
    assert {line for line in second if line.startswith("GPU ")} == {
        "GPU 0: 12 MB of memory",
        "GPU 1: 12 MB of memory",
    }
    # These GPUs have all of a batch each, so that every rank must end where one alone does.
    one, two = (WeightFile.read(tmp_path / f"out/mlp/{version}.safetensors") for version in (1, 2))
    assert two.training.command == f"{one.training.command} --gpus 2"
    for name, tensor in one.tensors.items():
        assert (two.tensors[name] == tensor).all()


def test_fit_stops_at_its_target_and_records_its_epochs(arguments, tmp_path):
    assert main(["fit", *arguments, "--target", "1"]) == 0
    training = WeightFile.read(tmp_path / "out/mlp/1.safetensors").training
    assert training.epochs == 1
    assert training.command.endswith(" --target 1.0")


def test_fit_drops_units_when_asked_to(arguments, tmp_path):
    for rate in ("0", "0.5"):
        assert main(["fit", *arguments, "--epochs", "1", "--dropout", rate]) == 0
    first, second = (WeightFile.read(tmp_path / f"out/mlp/{n}.safetensors") for n in (1, 2))
    assert (first.tensors["dense1.weight"] != second.tensors["dense1.weight"]).any()


def test_a_profiled_fit_captures_no_step(arguments, monkeypatch):
    monkeypatch.setattr(CpuOps, "capture", None)
    assert main(["fit", *arguments, "--profile"]) == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fit_trains_and_verifies_every_named_architecture(arguments, tmp_path, name):
    assert main([*arguments, "--model", name, "--epochs", "1"]) == 0
    assert WeightFile.read(tmp_path / f"out/{name}/1.safetensors").model == named(name).folded


def test_the_same_seed_gives_the_same_bytes_whatever_the_number_of_blas_threads(
    arguments, tmp_path
):
    for threads in ("1", "2"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-m", "trainer", "fit", *arguments, "--model", "lenet"],
            env=environment,
            check=True,
            capture_output=True,
        )
    first, second = ((tmp_path / f"out/lenet/{version}.safetensors") for version in (1, 2))
    assert first.read_bytes() == second.read_bytes()


def test_export_writes_an_onnx_model(arguments, tmp_path, capsys):
    main(arguments)
    weights, out = tmp_path / "out/mlp/1.safetensors", tmp_path / "model.onnx"
    assert main(["export", "--weights", str(weights), "--out", str(out)]) == 0
    assert out.stat().st_size > 397_510 * 4
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{out}: written")


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        (["--epochs", "-1"], 2, "--epochs is '-1', expected a whole number >= 0 and <= 10000"),
        (
            ["fit", "--batch", "1"],
            2,
            "--batch is '1', expected 0 or at least 2: batch norm needs a variance",
        ),
        (["--target", "99", "--gpus", "2"], 2, "--gpus is '2', expected 1 with --target 99"),
        (["--nesterov"], 2, "--nesterov: expected one argument"),
        (["--profile", "true"], 2, "true is unknown"),
        (["inspect", "--precision", "bf16"], 2, "--precision is 'bf16', expected one of fp32, tf"),
        (["--epoch", "3"], 2, "--epoch is unknown; did you mean --epochs?"),
        (["retrain"], 2, "the command is retrain, expected fit, export or inspect"),
        (["--model", "alexnet"], 2, "'alexnet' is unknown, expected one of lenet"),
        (["inspect", "--model", "alexnet"], 2, "'alexnet' is unknown, expected one of lenet"),
        (["inspect", "--device", "cuda"], 2, "--device is cuda: there is no NVIDIA GPU here"),
        (["export"], 2, "--weights is missing"),
        (["export", "--weights", "nowhere.safetensors"], 6, "nowhere.safetensors: cannot be read"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(no_gpu, capsys, line, code, sentence):
    assert main(line) == code
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_every_wrong_value_is_reported_with_its_source(monkeypatch, capsys):
    monkeypatch.setenv("LENET_TRAINER_EPOCHS", "-1")
    assert run(["fit", "--rate", "x"], os.environ) == 2
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "LENET_TRAINER_EPOCHS is '-1'",
        "--rate is 'x'",
    ]


def test_an_unknown_variable_is_reported(capsys):
    environment = ["EPOCH", "SEED", "EXPORT_OUT", "INSPECT_MODEL"]
    assert run(["export"], {f"LENET_TRAINER_{name}": "3" for name in environment}) == 2
    assert capsys.readouterr().err.splitlines() == [
        "LENET_TRAINER_EPOCH is ignored: no such setting; did you mean LENET_TRAINER_EPOCHS?",
        "--weights is missing",
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeviceUnavailable("no GPU"), 2),
        (DatasetUnavailable("no digits"), 3),
        (TrainingDiverged("nan"), 4),
        (ExportRefused("differs"), 5),
        (PermissionError(13, "Permission denied", "weights"), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code_and_is_one_line(monkeypatch, capsys, error, code):
    def failing(settings):
        raise error

    monkeypatch.setattr(commands, "fit", failing)
    assert main([]) == code
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("epochs", "message"),
    [
        (0, "interrupted before the first epoch was completed; nothing was kept"),
        (1, "interrupted; the same command resumes after the last completed epoch"),
    ],
)
def test_an_interruption_says_whether_the_run_can_be_resumed(
    arguments, monkeypatch, capsys, epochs, message
):
    evaluate, calls = loop.accuracy, []

    def interrupted(network, digits):
        calls.append(1)
        if len(calls) == 2 + epochs:  # the first is before the first epoch
            raise KeyboardInterrupt
        return evaluate(network, digits)

    monkeypatch.setattr(loop, "accuracy", interrupted)
    assert main(arguments) == 130
    assert capsys.readouterr().err.splitlines()[-1] == message


def test_broken_digits_end_with_their_exit_code(arguments, tmp_path, capsys):
    (tmp_path / "digits/t10k-labels-idx1-ubyte").write_bytes(b"broken")
    assert main(arguments) == 3
    assert "t10k-labels-idx1-ubyte: " in capsys.readouterr().err


def test_a_broken_checkpoint_ends_with_its_exit_code(arguments, tmp_path, monkeypatch, capsys):
    def refused(*_):
        raise ExportRefused("differs")

    with monkeypatch.context() as patch:
        patch.setattr(commands, "export_weights", refused)
        assert main(arguments) == 5
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    checkpoint.write_bytes(b"broken")
    capsys.readouterr()
    assert main(arguments) == 6
    assert capsys.readouterr().err.startswith(str(checkpoint))


def test_help_is_the_documentation_and_the_version_is_the_distributions(capsys):
    assert program.main(["--help"]) == 0
    assert capsys.readouterr().out.strip() == program.__doc__.strip()
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help"])
    assert "--weight-decay" in capsys.readouterr().out
    assert program.main(["--version"]) == 0
    assert re.fullmatch(r"lenet-train \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_folder_that_cannot_be_created_is_reported_before_the_training(
    arguments, tmp_path, capsys
):
    (tmp_path / "out").write_bytes(b"")
    assert main(["fit", *arguments]) == 6
    error = capsys.readouterr().err
    assert error.startswith(
        f"--out is {tmp_path / 'out'}: {tmp_path / 'out/mlp'} cannot be created"
    )
    assert error.endswith("; name a folder that you can write\n")


def test_a_missing_extra_is_one_sentence(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'tqdm' else find(name, *rest)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    outcome = subprocess.run(
        [sys.executable, "-m", "trainer", "fit", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 1
    for cure in ("make train", "python -m pip install tqdm httpx", "--build-arg EXTRAS=[train]"):
        assert cure in outcome.stderr
    assert outcome.stderr.count("\n") == 1
