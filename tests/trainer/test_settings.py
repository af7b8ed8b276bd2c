import shlex

import pytest
from pydantic import ValidationError

from lenet.command_line import parse
from lenet.errors import InvalidSettings
from trainer.settings import Export, Fit, Inspect, Recipe


def test_the_canonical_command_gives_the_recipe_that_it_came_from():
    recipe = Recipe(
        seed=7,
        rate=3e-5,
        nesterov=False,
        weight_decay=1e-7,
        schedule="step",
        transposed=True,
        freeze=("conv1", "conv2"),
    )
    python, dash_m, package, command, *arguments = shlex.split(recipe.command())
    assert [python, dash_m, package, command] == ["python", "-m", "trainer", "fit"]
    assert parse(Recipe, arguments, "trainer") == recipe


def test_the_canonical_command_names_every_field_and_no_path():
    command = Fit(data="/somewhere", out="/elsewhere", checkpoints="/there").command()
    for name in Recipe.model_fields.keys() - {"transposed", "freeze"}:
        assert f"--{name.replace('_', '-')} " in command
    assert command == f"{Recipe().command()} --data somewhere"


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", (20, 128, "fp32")), ("cuda", (120, 256, "mixed"))]
)
def test_a_resolved_recipe_has_what_its_device_needs(device, expected):
    resolved = Recipe().resolved(device)
    assert resolved.device == device
    assert (resolved.epochs, resolved.batch, resolved.precision) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_was_set_stays_when_a_recipe_is_resolved(device):
    fit = Fit(epochs=3, batch=7, precision="tf32", seed=5, target=99, out="/there")
    assert fit.resolved(device) == fit.model_copy(update={"device": device})
    assert Recipe(batch=7).resolved(device).batch == 7
    assert Recipe(batch=7).resolved(device).epochs == Recipe().resolved(device).epochs
    assert Recipe(dropout=0, elastic=0).resolved(device).dropout == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_command_of_a_resolved_recipe_leaves_nothing_to_the_device(device):
    resolved = Recipe(seed=3).resolved(device)
    arguments = shlex.split(resolved.command())[4:]
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert "auto" not in given.values()
    assert (given["--epochs"], given["--batch"]) == (str(resolved.epochs), str(resolved.batch))
    assert (given["--device"], given["--precision"]) == (device, resolved.precision)
    again = parse(Recipe, arguments, "trainer")
    assert again == resolved == again.resolved(device)


def test_a_batch_of_one_image_is_refused_and_one_of_two_is_not():
    with pytest.raises(ValidationError, match="at least 2") as caught:
        Fit(batch=1)
    assert caught.value.errors()[0]["loc"] == ("batch",)
    assert [Fit(batch=batch).batch for batch in (0, 2)] == [0, 2]


def test_the_command_of_a_fit_has_what_the_result_depends_on_beside_the_recipe():
    assert Fit(profile=True, data="data/mnist").command() == Recipe().command()
    for fit, words in (
        (Fit(target=99.3), "--target 99.3"),
        (Fit(gpus=4), "--gpus 4"),
        (Fit(data="my fashion", labels="names.txt"), "--data 'my fashion' --labels names.txt"),
        (Fit(from_="2.safetensors"), "--from 2.safetensors"),
    ):
        assert fit.command() == f"{Recipe().command()} {words}"
        assert parse(Fit, shlex.split(fit.command())[4:], "trainer") == fit


def test_a_target_for_several_gpus_is_refused():
    with pytest.raises(ValidationError, match=r"expected 1 with --target 99.3"):
        Fit(target=99.3, gpus=2)


def test_the_two_commands_have_variables_of_their_own(monkeypatch):
    monkeypatch.setenv("LENET_TRAINER_OUT", "folder")
    monkeypatch.setenv("LENET_TRAINER_EXPORT_WEIGHTS", "1.safetensors")
    assert str(Export().out) == "model.onnx"
    assert str(Export().weights) == "1.safetensors"


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
        "--validation-images=0",
    ],
)
def test_a_value_out_of_range_is_refused(flag):
    with pytest.raises(InvalidSettings):
        parse(Fit, [flag], "trainer")


def test_every_setting_explains_itself():
    for settings in (Fit, Export, Inspect):
        assert all(field.description for field in settings.model_fields.values())


def test_a_profile_of_several_gpus_is_refused():
    with pytest.raises(ValidationError, match="expected false with --gpus 2"):
        Fit(gpus=2, profile=True)
    assert Fit(gpus=2).gpus == 2
    assert parse(Fit, ["--profile"], "trainer").profile
