"""Read a settings class from flags and variables; report errors in plain words.

The field `max_wait_us` is the flag --max-wait-us and the variable PREFIX_MAX_WAIT_US; the flag
wins. A boolean that is False by default is a pair of bare flags, --profile and --no-profile; any
other takes a value. `CliSuppress` hides a field from --help. The ValueError of a field's validator
says what is expected ("expected an even number"); that of a model's is the whole message.
"""

from __future__ import annotations

import os
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import CLI_SUPPRESS, BaseSettings

from lenet.errors import InvalidSettings

_KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

_SHORTEST_PART = 3

Settings = TypeVar("Settings", bound=BaseSettings)


class _Parser(ArgumentParser):
    expected: Mapping[str, str] = {}
    """Description of a valid value, by flag."""

    def error(self, message: str) -> NoReturn:
        flags, _, reason = message.removeprefix("argument ").partition(": ")
        flag = flags.partition("/")[0]  # the first of several
        if reason == "expected one argument":
            message = f"{flag} is without a value, expected {self.expected.get(flag, 'one')}"
        raise InvalidSettings(f"{message.removeprefix('argument ')} (--help lists every setting)")


def parse(
    kind: type[Settings],
    arguments: Sequence[str],
    program: str,
    version: str | None = None,
    words: Mapping[str, str] = MappingProxyType({}),
    synonyms: Mapping[str, str] = MappingProxyType({}),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Settings:
    """The settings in `arguments` and the environment; --version prints `version`.

    `words` are fields that may also be given without their flags, in this order, and what usage and
    messages call them: {"weights": "FILE"}, or "[FILE]" where it may be left out. `synonyms` are
    second flags of fields: {"rate": "--lr"}. `variables` are those of other programs from which
    `kind` takes fields, so that messages name them: {"AIP_HTTP_PORT": "port"}.

    Raises:
        InvalidSettings: flags or variables are unknown, missing or invalid; a line for each.
        SystemExit: --help or --version was given.
    """
    usage = " ".join((program, *words.values()))
    parser = _Parser(
        prog=program,
        usage=f"{usage} [--SETTING VALUE ...]",
        description=kind.__doc__,
        epilog=f"The variable {_variable(kind, 'setting')} does what --setting does; a flag wins.",
        allow_abbrev=False,
        argument_default=SUPPRESS,
    )
    if version is not None:
        parser.add_argument("--version", action="version", version=f"{program} {version}")
    schemas: dict[str, dict[str, Any]] = kind.model_json_schema()["properties"]
    for name, field in kind.model_fields.items():
        text = " ".join(schemas[name]["description"].split()).replace("%", "%%")
        default = str(field.get_default(call_default_factory=True)).strip("(,)")
        if not field.is_required() and default not in ("", "None", "False"):
            text += f" Default: {default}."
        values = schemas[name].get("enum", ())
        if schemas[name].get("type") == "boolean":
            values = ("true", "false")
        options: dict[str, Any] = {"metavar": "|".join(values) or None}
        if field.default is False:
            options = {"action": BooleanOptionalAction}
        hidden = CLI_SUPPRESS in field.metadata
        flags = [_flag(name), *filter(None, [synonyms.get(name)])]
        parser.add_argument(*flags, dest=name, help=SUPPRESS if hidden else text, **options)
    parser.expected = {_flag(name): _expected(schema) for name, schema in schemas.items()}
    known, unknown = parser.parse_known_args(arguments)
    given = vars(known)
    for name in words:
        if name not in given and unknown and not unknown[0].startswith("-"):
            given[name] = unknown.pop(0)
    if unknown:
        word = unknown[0].partition("=")[0]
        hint = "; settings begin with --"
        if words and not word.startswith("-"):
            parser.error(
                f"got {word} behind {' '.join(words).upper()}, expected {len(words)} "
                f"argument{'s' * (len(words) > 1)}{hint}"
            )
        if word.startswith("--"):
            hint = _did_you_mean(word, map(_flag, schemas), "--")
        parser.error(f"{word} is unknown{hint}")
    try:
        return kind(**given)
    except ValidationError as exc:
        messages = []
        for error in exc.errors():
            message = error["msg"].removeprefix("Value error, ")
            if error["type"] == "missing":
                name = str(error["loc"][0])
                message = f"{_flag(name)} is missing"
                if name in words:
                    message = f"{words[name]} is missing: {usage}"
            elif error["loc"]:
                name = str(error["loc"][0])
                source = _flag(name) if name in given else _source(kind, name, variables)
                if error["type"] != "value_error":
                    message = f"expected {_expected(schemas[name])}"
                message = f"{source} is {error['input']!r}, {message}"
            messages.append(message)
        raise InvalidSettings("\n".join(messages)) from exc


def unknown_variables(
    kinds: Sequence[type[BaseSettings]], environment: Iterable[str], others: tuple[str, ...] = ()
) -> list[str]:
    """A message for each variable that has the prefix of `kinds[0]`, but is no field of `kinds`.

    Variables that start with one of `others` belong to another program.
    """
    prefix = _variable(kinds[0], "")
    known = [_variable(kind, name) for kind in kinds for name in kind.model_fields]
    return [
        f"{name} is ignored: no such setting{_did_you_mean(name, known, prefix)}"
        for name in sorted(environment)
        if name.startswith(prefix) and name not in known and not name.startswith(others)
    ]


def _flag(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"  # a field cannot be called `from`


def _variable(kind: type[BaseSettings], name: str) -> str:
    return f"{kind.model_config['env_prefix']}{name}".upper()


def _source(kind: type[BaseSettings], name: str, variables: Mapping[str, str]) -> str:
    """The variable that a field was read from."""
    own = _variable(kind, name)
    others = [other for other, field in variables.items() if field == name]
    return next((one for one in (own, *others) if os.environ.get(one)), own)


def _expected(schema: dict[str, Any]) -> str:
    schema = schema.get("anyOf", [schema])[0]  # the second one is None
    schema = schema.get("items", schema)
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    bounds = [f"{words} {schema[key]}" for key, words in _BOUNDS.items() if key in schema]
    return f"{_KINDS.get(schema.get('type', ''), 'one')} {' and '.join(bounds)}".rstrip()


def _did_you_mean(word: str, known: Iterable[str], prefix: str) -> str:
    """A question for the most similar of `known`, or one that has the word in it.

    What counts is beyond the common prefix.
    """
    names, own = [name.removeprefix(prefix) for name in known], word.removeprefix(prefix)
    matches = get_close_matches(own, names, n=1)
    if not matches and len(own) >= _SHORTEST_PART:
        matches = [name for name in names if own in name or f"-{name}" in own]
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""
