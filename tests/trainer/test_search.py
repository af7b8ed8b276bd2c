"""`python -m trainer search`: trials, a journal that is gone on with, and no look at the test."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lenet.command_line import parse
from lenet.errors import InvalidSettings
from lenet.model import named
from tests.service_process import PATIENCE_S
from trainer.mnist import Dataset
from trainer.search import search
from trainer.settings import Fit, Search


@pytest.fixture
def without_test_images(digits):
    return Dataset(digits(200, 0), None, "0" * 64)


def settings(tmp_path, **fields):
    given = {"trials": 3, "seeds": 2, "over": ("rate", "smoothing", "schedule"), "epochs": 1}
    return Search(
        **{"model": "mlp", "batch": 64, "validation_images": 50} | given | fields,
        journal=tmp_path / "new" / "journal",
    ).resolved("cpu")


def trials(lines):
    return [line for line in lines if line.startswith("trial ")]


def test_the_first_trial_is_the_recipe_and_the_same_command_goes_on(tmp_path, without_test_images):
    lines = []
    search(settings(tmp_path), named("mlp"), without_test_images, lines.append)
    assert len(trials(lines)) == 3
    assert re.fullmatch(
        r"trial 1 of 3: +[\d.]+ \(sd [\d.]+\), n 2: --rate 0.2 --smoothing 0.1 --schedule [a-z-]+",
        trials(lines)[0],
    )
    *listed, command = lines[lines.index("the best:") + 1 :]
    best = [float(line.split()[0]) for line in listed]
    assert len(best) == 3
    words = shlex.split(command.removeprefix("train it: python -m trainer fit "))
    winner = parse(Fit, words, "trainer").model_dump()
    for flag, value in zip(listed[0].split()[-6::2], listed[0].split()[-5::2], strict=True):
        found = winner[flag.removeprefix("--")]
        assert str(found if isinstance(found, str) else float(f"{found:.3g}")) == value
    assert (winner["model"], winner["epochs"], winner["batch"]) == ("mlp", 1, 64)
    assert best == sorted(best)

    lines.clear()
    search(settings(tmp_path, trials=4), named("mlp"), without_test_images, lines.append)
    assert [line.split(":")[0] for line in trials(lines)] == ["trial 4 of 4"]

    lines.clear()
    search(settings(tmp_path, seeds=1), named("mlp"), without_test_images, lines.append)
    assert len(trials(lines)) == 3, "another search took the trials of the first"


def test_the_printed_command_names_the_files_with_their_folders(
    tmp_path, without_test_images, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    files = {"model": "own/net.json", "data": "own/data", "labels": "own/labels.txt"}
    lines = []
    search(
        settings(tmp_path, trials=1, seeds=1, **files),
        named("mlp"),
        without_test_images,
        lines.append,
    )
    words = shlex.split(lines[-1].removeprefix("train it: python -m trainer fit "))
    winner = parse(Fit, words, "trainer").model_dump(mode="json")
    assert {name: winner[name] for name in files} == {
        name: str(tmp_path / path) for name, path in files.items()
    }


def test_a_recipe_that_diverges_is_a_trial_without_a_result(tmp_path, without_test_images):
    lines = []
    chosen = settings(
        tmp_path, trials=1, rate=100.0, weight_decay=0.99, over=("smoothing",), epochs=30
    )
    search(chosen, named("mlp"), without_test_images, lines.append)
    assert trials(lines) == ["trial 1 of 1: diverged                  --smoothing 0.1"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"over": ()}, "--over names none of rate,momentum,"),
        ({"over": ("epochs",)}, "--over names epochs, expected some of rate,"),
        ({"over": ("rate", "scale", "rate")}, "--over names rate more than once"),
        ({"rate": 5.0}, "--rate is 5.0, expected 0.01 to 2, the range of the search"),
        ({"over": ("batch",), "batch": 99}, "--batch is 99, expected one of 64, 128, 256, "),
    ],
)
def test_a_setting_that_cannot_be_varied_is_refused(tmp_path, without_test_images, fields, message):
    with pytest.raises(InvalidSettings, match=message):
        search(settings(tmp_path, **fields), named("mlp"), without_test_images, [].append)


@pytest.mark.parametrize("content", [b"{\n", b"\xff\n", b"[]\n", b"1\n", b'{"a": 1}\n'])
def test_a_journal_that_search_did_not_write_is_refused(content, tmp_path, without_test_images):
    chosen = settings(tmp_path)
    chosen.journal.parent.mkdir()
    chosen.journal.write_bytes(content)
    with pytest.raises(InvalidSettings, match=r"^--journal is .*: it is damaged or another file"):
        search(chosen, named("mlp"), without_test_images, [].append)


PROGRAM = """
import sys
from trainer import search
from trainer.__main__ import main
search.SIDE_BY_SIDE["cpu"] = 3
sys.exit(main())
"""


@pytest.mark.process
def test_an_interrupted_search_ends_and_the_same_command_goes_on(digits, write_idx, tmp_path):
    data = write_idx(Dataset(digits(6_000, 0), digits(60, 1), ""))
    line = ["search", "--device", "cpu", "--model", "mlp", "--epochs", "1", "--batch", "64"]
    line += ["--validation-images", "50", "--data", data, "--journal", tmp_path / "journal"]

    def start(count):
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, line), "--trials", str(count)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    ended = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        run = start(1_000)
        while not (said := run.stdout.readline()).startswith("trial "):
            assert said, run.communicate()[1]
        assert said.startswith(f"trial {ended + 1} of 1000: ")
        run.send_signal(number)
        said, errors = run.communicate(timeout=PATIENCE_S)
        assert errors == "interrupted; the same command goes on with the search\n"
        assert run.returncode == 130
        ended += 1 + len(trials(said.splitlines()))
    said, errors = start(ended + 1).communicate(timeout=PATIENCE_S)
    (last,) = trials(said.splitlines())
    assert last.startswith(f"trial {ended + 1} of {ended + 1}: "), errors
