import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lenet.files import write_atomically
from lenet.model import named
from lenet.weightfile import WeightFile
from trainer import commands, export, loop
from trainer.commands import run
from trainer.network import initial_tensors
from trainer.ops_cpu import CpuOps

ROOT = Path(__file__).parents[2]


def main(line):
    return run(line, {})


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Drawing the report takes longer than these runs; `test_runs.py` reads it."""
    monkeypatch.setattr(commands, "report", lambda *_: "")


@pytest.fixture
def arguments(tiny, write_idx, tmp_path):
    """A run of seconds over files that the test made, on the CPU."""
    return [
        *("--device", "cpu"),
        *("--model", "mlp", "--epochs", "2", "--batch", "20", "--rate", "0.02"),
        *("--validation-images", "100", "--data", str(write_idx(tiny))),
        *("--out", str(tmp_path / "out"), "--checkpoints", str(tmp_path / "checkpoints")),
        *("--runs", str(tmp_path / "runs")),
    ]


@pytest.mark.process
def test_fit_trains_and_writes_a_weight_file_that_says_how(arguments, tmp_path, capsys):
    assert main(["fit", *arguments, "--target", "100"]) == 0
    path = tmp_path / "out/mlp/1.safetensors"
    weights = WeightFile.read(path)
    training = weights.training
    assert weights.model == named("mlp").folded
    assert training.command.startswith("python -m trainer fit --model mlp --seed 1 --epochs 2 ")
    assert str(tmp_path) not in training.command
    assert training.command.endswith(" --device cpu --precision fp32 --data digits --target 100.0")
    assert (training.seed, training.epochs, training.labels[9]) == (1, 1, "9")
    assert training.accuracy > 0.8
    result, hint = capsys.readouterr().out.splitlines()[-2:]
    assert result.startswith(f"{path}: 397510 parameters, validation accuracy ")
    assert f"sha256 {weights.digest()}" in result
    setting = f"--weights {tmp_path / 'out'}"
    assert hint == f"serve it: lenet-serve {setting}, in a checkout: make serve ARGS='{setting}'"
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.process
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
    assert command.endswith(" --device cuda --precision mixed --data digits")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == command
    assert "GPU 0: 12 MB of memory" in lines


@pytest.mark.process
def test_a_gpu_is_chosen_by_its_number_on_which_the_result_does_not_depend(
    arguments, tmp_path, fake_gpus
):
    gpus = fake_gpus(2)
    for device in ("cuda:1", "cuda"):
        assert main([*arguments, "--epochs", "1", "--device", device]) == 0
    assert [ops.device for ops in gpus.opened] == [1, 0]
    (path,) = (tmp_path / "out").rglob("*.safetensors")
    assert " --device cuda " in WeightFile.read(path).training.command


@pytest.mark.process
def test_the_same_seed_gives_the_same_bytes_whatever_the_number_of_blas_threads(
    arguments, tmp_path
):
    for threads in ("1", "2"):
        line = [*arguments, "--out", str(tmp_path / threads), "--model", "lenet", "--epochs", "1"]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "trainer", "fit", *line]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    first, second = ((tmp_path / f"{threads}/lenet/1.safetensors") for threads in ("1", "2"))
    assert first.read_bytes() == second.read_bytes()


def described(tmp_path, **changes):
    block = {"type": "conv", "channels": 4, "kernel": [5, 5], "stride": [2, 2], "pool": "max"}
    norm = {"type": "dense", "units": 30, "batch_norm": True}
    model = {"name": "mine", "blocks": [block, norm, {"type": "dense", "units": 10}]}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**model, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "../up"}, "name is '../up', expected 1 to 64 of a-z"),
        ({"name": "lenet"}, "name is 'lenet', as a named architecture is called"),
        ({"input": [1, 29, 29]}, "input is (1, 29, 29), expected (1, 28, 28)"),
        ({"blocks": [{"type": "dense", "units": 9}]}, "block 1: has 9 units, expected 10, one for"),
        ({"blocks": [{"type": "dense"}]}, "block 1: units is missing"),
    ],
)
def test_a_description_that_cannot_be_trained_is_one_sentence(
    arguments, tmp_path, capsys, changes, sentence
):
    path = described(tmp_path, **changes)
    assert main([*arguments, "--model", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{path}: ")
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.process
def test_a_run_starts_from_the_layers_of_a_file_that_fit(arguments, tmp_path, capsys):
    lenet = [*arguments, "--model", "lenet", "--epochs", "1"]
    assert main(lenet) == 0
    start = tmp_path / "out/lenet/1.safetensors"
    own = described(
        tmp_path,
        blocks=[
            {"type": "conv", "channels": 20, "kernel": [5, 5], "batch_norm": True, "pool": "max"},
            {"type": "conv", "channels": 20, "kernel": [5, 5], "pool": "max"},
            {"type": "dense", "units": 10},
        ],
    )
    capsys.readouterr()
    extra = ["--model", str(own), "--from", str(start), "--freeze", "conv1"]
    assert main([*arguments, *extra]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == [
        "conv1    taken: (20, 1, 5, 5)",
        "conv2    new: (50, 20, 5, 5) in the file, expected (20, 20, 5, 5)",
        "dense1   new: (500, 800) in the file, expected (10, 320)",
        "dense2   not taken: the network has no dense2",
    ]
    before, after = WeightFile.read(start), WeightFile.read(tmp_path / "out/mine/1.safetensors")
    initial = initial_tensors(after.model, np.random.default_rng(1))
    for part in ("weight", "bias"):
        # Exact but for the rounding of sqrt(1 + epsilon), twice.
        np.testing.assert_allclose(
            after.tensors[f"conv1.{part}"], before.tensors[f"conv1.{part}"], rtol=1e-6
        )
    assert not np.array_equal(after.tensors["dense1.weight"], initial["dense1.weight"])


@pytest.mark.process
def test_a_run_from_a_file_answers_with_the_names_of_its_classes(arguments, tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefghij"))
    assert main([*arguments, "--labels", str(names)]) == 0
    start = tmp_path / "out/mlp/1.safetensors"
    assert main([*arguments, "--from", str(start)]) == 0
    assert WeightFile.read(tmp_path / "out/mlp/2.safetensors").training.labels == tuple(
        "abcdefghij"
    )


@pytest.mark.process
def test_the_next_version_of_a_network_has_the_classes_of_the_last(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefghij"))
    capsys.readouterr()
    assert main([*arguments, "--labels", str(names)]) == 2
    out, error = capsys.readouterr()
    assert "epoch" not in out
    assert error == (
        f"--out: {tmp_path}/out/mlp/1.safetensors has the classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, "
        "and the next version would have a, b, c, d, e, f, g, h, i, j; name another folder\n"
    )


@pytest.mark.process
def test_a_run_that_diverges_begins_again_with_half_the_rate_unless_that_is_set(
    arguments, tmp_path, capsys
):
    wide = {"type": "dense", "units": 100, "activation": "identity"}
    own = described(tmp_path, blocks=[wide, wide, {"type": "dense", "units": 10}])
    arguments += ["--model", str(own), "--elastic", "0"]
    assert main([*arguments, "--rate", "0.2"]) == 4
    diverged = capsys.readouterr().err
    assert re.fullmatch(r"the loss is .*; try a --rate lower than 0.2\n", diverged)
    (rate,) = (number for number, word in enumerate(arguments) if word == "--rate")
    assert main([*arguments[:rate], *arguments[rate + 2 :]]) == 0
    assert capsys.readouterr().err == f"{diverged}no --rate is set: it begins again with 0.1\n"
    assert list((tmp_path / "checkpoints").iterdir()) == []
    path = tmp_path / "out/mine/1.safetensors"
    command = WeightFile.read(path).training.command
    assert " --rate 0.1 " in command
    assert main([*arguments, "--rate", "0.1"]) == 0
    assert f"{path}, which was there already" in capsys.readouterr().out


@pytest.mark.parametrize("freeze", ["conv2", "conv1,conv2,dense1,dense2", "conv1,conv1"])
def test_only_the_first_layers_can_be_frozen(arguments, capsys, freeze):
    assert main([*arguments, "--model", "lenet", "--freeze", freeze]) == 2
    assert capsys.readouterr().err.startswith(
        f"--freeze is {freeze}, expected the first of conv1,conv2,dense1,dense2, not all of them: "
    )


def test_export_writes_an_onnx_model(tmp_path, capsys):
    weights, out = max(ROOT.glob("weights/mlp/*")), tmp_path / "model.onnx"
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
        (["--patience", "5", "--gpus", "2"], 2, "--gpus is '2', expected 1 with --patience 5"),
        (
            ["--device", "cuda:1", "--gpus", "2"],
            2,
            "--gpus is '2', expected 1 with --device cuda:1",
        ),
        (["--device", "cuda:"], 2, "--device is 'cuda:', expected auto, cpu, cuda, or cuda:N"),
        (
            ["evaluate", "x", "--data", "y", "--device", "gpu"],
            2,
            "--device is 'gpu', expected auto, cpu, cuda, or cuda:N for GPU number N",
        ),
        (["fit", "--lr", "101"], 2, "--rate is '101', expected a number > 0 and <= 100"),
        (
            ["retrain"],
            2,
            "the command is retrain, expected fit, search, evaluate, compare, import, export",
        ),
        (["--model", "alexnet"], 2, "--model is 'alexnet', expected lenet, lenet-classic, "),
        (["inspect", "--device", "cuda"], 2, "--device is cuda: there is no NVIDIA GPU here"),
        (["export"], 2, "FILE is missing: python -m trainer export FILE"),
        (["compare", "runs/1"], 2, "OTHER is missing: python -m trainer compare RUN OTHER"),
        (["export", "--out", "x.onnx", "nowhere.safetensors"], 6, "nowhere.safetensors: cannot be"),
        (["inspect", "nowhere.safetensors"], 6, "nowhere.safetensors: cannot be"),
        (["--data", "nowhere"], 3, "nowhere: no such folder; expected a folder with pictures"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(no_gpu, capsys, line, code, sentence):
    assert main(line) == code
    out, error = capsys.readouterr()
    assert sentence in error
    assert error.count("\n") == 1
    assert out == ""


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


@pytest.mark.process
def test_a_full_disk_is_named_and_the_same_command_resumes(arguments, monkeypatch, capsys):
    write, written = write_atomically, []
    full = OSError(errno.ENOSPC, "No space left on device", "a.safetensors")

    def writes_once(path, content):
        if written:
            raise full
        written.append(path)
        write(path, content)

    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr("trainer.checkpoint.write_atomically", writes_once)
    assert main(arguments) == 6
    (checkpoint,) = written
    assert capsys.readouterr().err.splitlines()[-1] == (
        "a.safetensors: No space left on device; once it can be written, the same command resumes "
        f"from {checkpoint}"
    )
    monkeypatch.setattr("trainer.checkpoint.write_atomically", write)
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert f"resumed after epoch 1 from {checkpoint}" in said
    assert re.search(r"trained in [\d.]+ s since it was resumed, sha256", said)


def without_extras(tmp_path, *arguments):
    """Run the trainer where nothing of the extras `train` and `search` is installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "import sys\n"
        "extras = dict.fromkeys(('tqdm', 'httpx', 'matplotlib', 'optuna'))\n"
        "sys.modules.update(extras)\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name in extras else find(name, *rest)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_extra_is_one_sentence(tmp_path):
    outcome = without_extras(tmp_path, "fit", "--help")
    assert outcome.returncode == 1
    for cure in ("make train", "python -m pip install tqdm httpx", "--target trainer"):
        assert cure in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_weight_file_is_inspected_without_what_training_needs(tmp_path):
    outcome = without_extras(tmp_path, "inspect", str(ROOT / "weights/lenet/2.safetensors"))
    assert (outcome.returncode, outcome.stderr) == (0, "")
    found = outcome.stdout
    assert found.startswith("model lenet, 431080 parameters, float32, batch norm folded in\n")
    assert "\ntest accuracy 99.67%, 120 epochs, seed 1\nclasses: 0, 1, 2" in found
    assert re.search(
        r"conv2 +conv 5x5, relu, max 2x2 +20x12x12 -> 50x4x4 +50x20x5x5 +25050 +-?0\.", found
    )


def test_a_weight_file_is_exported_and_evaluated_without_what_training_needs(
    tmp_path, tiny, write_idx
):
    file, model = str(ROOT / "weights/mlp/1.safetensors"), tmp_path / "mlp.onnx"
    outcome = without_extras(tmp_path, "export", file, "--out", str(model))
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert model.exists()
    line = ["evaluate", file, "--data", str(write_idx(tiny)), "--out", str(tmp_path / "a.html")]
    outcome = without_extras(tmp_path, *line, "--device", "cpu")
    assert outcome.returncode == 0
    assert "of 60 wrong), 95 % interval" in outcome.stdout
    assert "python -m pip install matplotlib" in outcome.stderr


WEIGHTS = str(Path(__file__).parents[2] / "weights/mlp/1.safetensors")


@pytest.mark.parametrize("line", [["--help"], ["inspect", WEIGHTS, "--device", "cpu"]])
def test_what_only_prints_ends_without_a_message_when_nobody_reads_it(line):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *line], stdout=writer, stderr=subprocess.PIPE
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
