import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSuppress, NoDecode, SettingsConfigDict

from lenet.command_line import parse, unknown_variables
from lenet.errors import InvalidSettings


class Oven(BaseSettings):
    """Bake bread."""

    model_config = SettingsConfigDict(env_prefix="OVEN_", use_attribute_docstrings=True)

    recipe: Path
    """The file of the recipe."""
    heat: int = Field(200, ge=50, lt=300)
    """Degrees; 100 % is 300."""
    max_wait_s: float | None = Field(None, gt=0, le=60)
    """How long to wait. By default for ever."""
    mode: Literal["fan", "grill"] = "fan"
    """Source of the heat."""
    steam: bool = True
    """Add water."""
    dry_run: bool = False
    """Heat nothing."""
    trays: Annotated[tuple[int, ...], NoDecode] = (1, 2)
    """Trays by number,
    separated by commas."""
    rack: Path = Field(default_factory=lambda: Path("middle"))
    """The folder of the trays."""
    secret: CliSuppress[bool] = False
    """Only for tests."""

    @field_validator("trays", mode="before")
    @classmethod
    def _split(cls, trays: object) -> object:
        return trays.split(",") if isinstance(trays, str) else trays

    @field_validator("mode")
    @classmethod
    def _grill_is_hot(cls, mode: str, others: ValidationInfo) -> str:
        if mode == "grill" and others.data.get("heat", 0) < 100:
            raise ValueError("expected fan below 100 degrees")
        return mode

    @model_validator(mode="after")
    def _steam_needs_heat(self) -> "Oven":
        if self.steam and self.heat == 50:
            raise ValueError("--steam is true, where --heat 50 makes none")
        return self


class Fridge(BaseSettings):
    """Cool."""

    model_config = SettingsConfigDict(env_prefix="OVEN_FRIDGE_")
    level: int = 3


def oven(*arguments):
    return parse(Oven, ["--recipe", "rye", *arguments], "oven", "1.2")


def test_a_flag_wins_over_its_variable(monkeypatch):
    for name, value in {"RECIPE": "oat", "HEAT": "80", "DRY_RUN": "true", "TRAYS": "5"}.items():
        monkeypatch.setenv(f"OVEN_{name}", value)
    assert parse(Oven, [], "oven") == Oven(recipe="oat", heat=80, dry_run=True, trays=(5,))
    assert oven("--heat=90", "--no-dry-run", "--trays=6") == Oven(
        recipe="rye", heat=90, dry_run=False, trays=(6,)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heat", "300"], "--heat is '300', expected a whole number >= 50 and < 300"),
        (["--heat=7.5"], "--heat is '7.5', expected a whole number >= 50 and < 300"),
        (["--max-wait-s", "nan"], "--max-wait-s is 'nan', expected a number > 0 and <= 60"),
        (["--mode", "gas"], "--mode is 'gas', expected one of fan, grill"),
        (["--steam", "maybe"], "--steam is 'maybe', expected true or false"),
        (["--trays", "1,x"], "--trays is 'x', expected a whole number"),
        (["--mode=grill", "--heat=60"], "--mode is 'grill', expected fan below 100 degrees"),
        (["--heat", "50"], "--steam is true, where --heat 50 makes none"),
        (["--heat"], "--heat is without a value, expected a whole number >= 50 and < 300 (--help"),
        (["--mode", "--steam"], "--mode is without a value, expected one of fan, grill (--help l"),
        (["--recipe"], "--recipe is without a value, expected one (--help lists every setting)"),
        (["--max-wait", "1"], "--max-wait is unknown; did you mean --max-wait-s? (--help lists e"),
        (["--wait", "1"], "--wait is unknown; did you mean --max-wait-s? (--help lists every set"),
        (["--xyzzy"], "--xyzzy is unknown (--help lists every setting)"),
        (["--dry-run", "true"], "true is unknown; settings begin with -- (--help lists"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_flag_value_and_expectation(arguments, message):
    with pytest.raises(InvalidSettings) as caught:
        oven(*arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_field_may_have_a_second_flag():
    def heated(*arguments):
        return parse(Oven, ["--recipe=rye", *arguments], "oven", synonyms={"heat": "--warmth"})

    assert heated("--warmth", "90").heat == heated("--warmth=90").heat == 90
    assert heated("--heat", "80", "--warmth", "90").heat == 90
    with pytest.raises(InvalidSettings, match=r"^--heat is without a value, expected a whole nu"):
        heated("--warmth")
    with pytest.raises(InvalidSettings, match=r"^--heat is '7', expected a whole number >= 50"):
        heated("--warmth", "7")


@pytest.mark.parametrize(
    ("line", "recipe"),
    [("rye", "rye"), ("--heat 90 rye", "rye"), ("--dry-run rye --heat 90", "rye")],
)
def test_a_word_stands_for_its_flag_wherever_it_is(line, recipe):
    found = parse(Oven, line.split(), "oven", words={"recipe": "FILE"})
    assert found.recipe == Path(recipe)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--heat 90", "FILE is missing: oven FILE"),
        (
            "rye oat",
            "got oat behind RECIPE, expected 1 argument; settings begin with -- "
            "(--help lists every setting)",
        ),
        ("rye --haet 90", "--haet is unknown; did you mean --heat? (--help lists every setting)"),
    ],
)
def test_a_word_that_is_missing_or_too_much_is_called_what_the_usage_calls_it(line, message):
    with pytest.raises(InvalidSettings, match=f"^{re.escape(message)}$"):
        parse(Oven, line.split(), "oven", words={"recipe": "FILE"})


def test_an_unknown_variable_is_reported_with_the_nearest_known_one():
    names = ["OVEN_HAET", "OVEN_HEAT", "OVEN_FRIDGE_LEVLE", "OVEN_FRIDGE_LEVEL", "OVEN_XYZZY"]
    assert unknown_variables([Oven, Fridge], [*names, "OVEN_TEST_X", "HEAT"], ("OVEN_TEST_",)) == [
        "OVEN_FRIDGE_LEVLE is ignored: no such setting; did you mean OVEN_FRIDGE_LEVEL?",
        "OVEN_HAET is ignored: no such setting; did you mean OVEN_HEAT?",
        "OVEN_XYZZY is ignored: no such setting",
    ]
    assert unknown_variables([Oven], ["OVEN_HAET", "OVEN_HEAT"])


def test_help_describes_every_flag_in_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    with pytest.raises(SystemExit) as caught:
        oven("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: oven [--SETTING VALUE ...] Bake bread. options:")
    for entry in (
        "--recipe RECIPE The file of the recipe. --heat",
        "--heat HEAT Degrees; 100 % is 300. Default: 200.",
        "How long to wait. By default for ever. --mode fan|grill",
        "--steam true|false Add water. Default: True.",
        "--dry-run, --no-dry-run Heat nothing. --trays",
        "Trays by number, separated by commas. Default: 1, 2.",
        "--rack RACK The folder of the trays. Default: middle.",
        "The variable OVEN_SETTING does what --setting does; a flag wins.",
    ):
        assert entry in text
    assert "secret" not in text
    assert not re.search(r"\bint\b|\btuple\b|None|==|Undefined", text)
