import shlex

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from lenet.model import ARCHITECTURES
from trainer.settings import Export, Fit, Recipe


def test_the_canonical_command_gives_the_recipe_that_it_came_from():
    recipe = Recipe(seed=7, rate=3e-5, nesterov=False, weight_decay=1e-7, schedule="step")
    python, dash_m, package, command, *arguments = shlex.split(recipe.command())
    assert [python, dash_m, package, command] == ["python", "-m", "trainer", "fit"]
    assert CliApp.run(Recipe, cli_args=arguments) == recipe


def test_the_canonical_command_names_every_field_and_no_path():
    command = Fit(data="/somewhere", out="/elsewhere", checkpoints="/there").command()
    for name in Recipe.model_fields:
        assert f"--{name.replace('_', '-')} " in command
    assert "/" not in command
    assert command == Recipe().command()


def test_the_command_of_a_fit_tells_its_target_and_its_gpus_where_they_are_set():
    fit = Fit(target=99.3, gpus=4, profile=True)
    assert fit.command() == f"{Recipe().command()} --target 99.3 --gpus 4"
    assert CliApp.run(Fit, cli_args=shlex.split(fit.command())[4:]) == Fit(target=99.3, gpus=4)


def test_the_command_line_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("LENET_TRAINER_EPOCHS", "4")
    monkeypatch.setenv("LENET_TRAINER_SEED", "9")
    fit = CliApp.run(Fit, cli_args=["--epochs", "5"])
    assert (fit.epochs, fit.seed) == (5, 9)


def test_the_two_commands_have_variables_of_their_own(monkeypatch):
    monkeypatch.setenv("LENET_TRAINER_OUT", "folder")
    monkeypatch.setenv("LENET_TRAINER_EXPORT_WEIGHTS", "1.safetensors")
    assert str(Export().out) == "model.onnx"
    assert str(Export().weights) == "1.safetensors"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--epochs", "0"),
        ("--epochs", "three"),
        ("--batch", "1"),
        ("--seed", "-1"),
        ("--rate", "nan"),
        ("--rate", "0"),
        ("--dropout", "1"),
        ("--momentum", "1.5"),
        ("--rotation", "180"),
        ("--schedule", "cosine"),
        ("--elastic", "-1"),
        ("--device", "tpu"),
        ("--precision", "fp8"),
        ("--target", "101"),
        ("--target", "0"),
        ("--gpus", "0"),
        ("--validation-images", "0"),
    ],
)
def test_what_cannot_be_is_refused(flag, value):
    with pytest.raises((ValidationError, SettingsError)):
        CliApp.run(Fit, cli_args=[f"{flag}={value}"])


def test_settings_cannot_be_changed_once_they_are_read():
    with pytest.raises(ValidationError, match="frozen"):
        Fit().epochs = 3


def test_every_setting_explains_itself():
    for settings in (Fit, Export):
        assert all(field.description for field in settings.model_fields.values())


def test_the_default_model_has_a_name_that_exists():
    assert Fit().model in ARCHITECTURES
