import shlex

import pytest

from lenet.command_line import parse
from lenet.errors import InvalidSettings
from trainer.settings import Fit, Recipe


def test_the_canonical_command_gives_the_recipe_that_it_came_from():
    recipe = Recipe(
        seed=7,
        rate=3e-5,
        nesterov=False,
        weight_decay=1e-7,
        schedule="step",
        transposed=True,
        class_weights="balanced",
        freeze=("conv1", "conv2"),
    )
    python, dash_m, package, command, *arguments = shlex.split(recipe.command())
    assert [python, dash_m, package, command] == ["python", "-m", "trainer", "fit"]
    assert parse(Recipe, arguments, "trainer") == recipe


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", (20, 128, "fp32")), ("cuda", (120, 256, "mixed"))]
)
def test_a_resolved_recipe_has_what_its_device_needs(device, expected):
    resolved = Recipe().resolved(device)
    assert resolved.device == device
    assert (resolved.epochs, resolved.batch, resolved.precision) == expected


@pytest.mark.parametrize(
    ("words", "images", "batch", "rate"),
    [
        ([], 2048, 256, 0.2),
        ([], 2047, 128, 0.2),
        ([], 300, 32, 0.05),
        ([], 40, 8, 0.0125),
        (["--rate", "0.1"], 40, 8, 0.1),
        (["--batch", "100"], 300, 100, 0.2),
    ],
)
def test_a_run_on_few_images_takes_small_batches_and_a_low_rate(words, images, batch, rate):
    resolved = parse(Fit, words, "trainer").resolved("cuda", images)
    assert (resolved.batch, resolved.rate) == (batch, rate)


def test_a_learning_rate_is_asked_for_by_the_name_of_the_flag():
    with pytest.raises(InvalidSettings, match=r"--learning-rate is unknown; did you mean --rate\?"):
        parse(Fit, ["--learning-rate", "0.1"], "trainer")


def test_a_run_from_a_file_has_a_rate_that_does_not_lose_the_file_unless_it_is_set():
    for words, rate in (
        ([], 0.2),
        (["--from", "2.safetensors"], 0.01),
        (["--from", "2.safetensors", "--rate", "0.2"], 0.2),
    ):
        assert parse(Fit, words, "trainer").resolved("cpu").rate == rate


def test_the_command_of_a_fit_has_what_the_result_depends_on_beside_the_recipe():
    assert Fit(profile=True, data="data/mnist").command() == Recipe().command()
    for fit, words in (
        (Fit(target=99.3), "--target 99.3"),
        (Fit(patience=3), "--patience 3"),
        (Fit(gpus=4), "--gpus 4"),
        (Fit(data="my fashion", labels="names.txt"), "--data 'my fashion' --labels names.txt"),
        (Fit(from_="2.safetensors"), "--from 2.safetensors"),
    ):
        assert fit.command() == f"{Recipe().command()} {words}"
        assert parse(Fit, shlex.split(fit.command())[4:], "trainer") == fit


@pytest.mark.parametrize(
    "flag",
    [
        "--epochs=three",
        "--seed=-1",
        "--dropout=1",
        "--rotation=180",
        "--elastic=-1",
        "--schedule=cosine",
        "--precision=fp8",
        "--target=0",
        "--target=101",
        "--gpus=0",
        "--validation-images=-1",
        "--patience=0",
        "--class-weights=equal",
    ],
)
def test_a_value_out_of_range_is_refused(flag):
    with pytest.raises(InvalidSettings):
        parse(Fit, [flag], "trainer")
