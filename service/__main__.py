"""`lenet-serve`, also `python -m service`: settings in, exit code out."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError

from service import DISTRIBUTION, distribution_version, logs
from service.errors import ExitCode
from service.settings import ENV_PREFIX, Settings

_log = logging.getLogger(__name__)

_HIDDEN = ("fault_injection",)
_METAVARS = {
    "host": "ADDRESS",
    "weights": "FOLDER",
    "models": "NAME,NAME",
    "default_model": "NAME",
    "devices": "N,N",
}
_METAVAR_BY_UNIT = {"_s": "SECONDS", "_ms": "MILLISECONDS", "_us": "MICROSECONDS"}
_OTHERS = (f"{ENV_PREFIX}TRAINER_", f"{ENV_PREFIX}TEST_", f"{ENV_PREFIX}BIND")
"""Variables of the trainer, the tests and the Compose file."""


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Run the service with `arguments`, those of the command line if None."""
    try:
        settings = _read_settings(sys.argv[1:] if arguments is None else arguments)
    except _InvalidSettings as exc:
        for message in exc.messages:
            print(f"settings: {message}", file=sys.stderr)
        return ExitCode.SETTINGS
    logs.configure(settings.log_level)
    for message in _unknown_variables(os.environ):
        _log.warning("%s", message)
    # Imported late: --help and a wrong flag should not wait for the runtime to load.
    from service.engine.devices import on_gpu

    # A lost GPU context is replaced with its process, so a GPU needs a supervisor.
    if settings.workers > 1 or on_gpu(settings.device):
        from service.supervisor import supervise

        return supervise(settings)
    from service.server import run

    return run(settings)


class _InvalidSettings(Exception):
    def __init__(self, *messages: str) -> None:
        super().__init__(*messages)
        self.messages = messages


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _InvalidSettings(message)


def _read_settings(arguments: Sequence[str]) -> Settings:
    schemas: dict[str, Any] = Settings.model_json_schema()["properties"]
    flags = {name: f"--{name.replace('_', '-')}" for name in schemas}
    parser = _parser(flags, schemas)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        hint = _nearest(flag, [*flags.values(), "--help", "--version"], "--")
        raise _InvalidSettings(f"unknown flag {flag}{hint} (--help lists all)")
    given = vars(known)
    try:
        return Settings(**given)
    except ValidationError as exc:
        messages = []
        for error in exc.errors():
            if error["loc"]:
                name = str(error["loc"][0])
                source = flags[name] if name in given else f"{ENV_PREFIX}{name.upper()}"
                expected = _expected(name, schemas[name])
                messages.append(f"{source} is {error['input']!r}, expected {expected}")
            else:
                messages.append(error["msg"].removeprefix("Value error, "))
        raise _InvalidSettings(*messages) from exc


def _parser(flags: Mapping[str, str], schemas: Mapping[str, Any]) -> ArgumentParser:
    parser = _Parser(
        prog=DISTRIBUTION,
        usage=f"{DISTRIBUTION} [--SETTING VALUE ...]",
        description=Settings.__doc__,
        epilog=f"Each flag is also a variable: --max-wait-us is {ENV_PREFIX}MAX_WAIT_US. "
        "A flag wins over a variable.",
        allow_abbrev=False,
        argument_default=SUPPRESS,
    )
    version = f"{DISTRIBUTION} {distribution_version()}"
    parser.add_argument("--version", action="version", version=version, help="Print the version.")
    for name, schema in schemas.items():
        text = SUPPRESS if name in _HIDDEN else _help(name, schema)
        options: dict[str, Any] = {"metavar": _metavar(name, schema)}
        if schema.get("type") == "boolean":
            options = {"action": BooleanOptionalAction}
        parser.add_argument(flags[name], dest=name, help=text, **options)
    return parser


def _help(name: str, schema: Mapping[str, Any]) -> str:
    text = " ".join(schema["description"].split())
    default = Settings.model_fields[name].default
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"{text} Default: {shown}." if shown not in ("", "None", "False") else text


def _metavar(name: str, schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(schema["enum"])
    unit = next((metavar for end, metavar in _METAVAR_BY_UNIT.items() if name.endswith(end)), "N")
    return _METAVARS.get(name, unit)


def _expected(name: str, schema: Mapping[str, Any]) -> str:
    """The values that a setting takes, in words."""
    if name == "devices":
        return "numbers of GPUs separated by commas, or all"
    schema = schema["anyOf"][0] if "anyOf" in schema else schema
    if "enum" in schema:
        *others, last = schema["enum"]
        return f"{', '.join(others)} or {last}"
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    kind = kinds.get(schema["type"], "text")
    if "exclusiveMinimum" in schema:
        kind += f" greater than {schema['exclusiveMinimum']:g}"
    elif "minimum" in schema:
        kind += f", at least {schema['minimum']:g}"
    return f"{kind}, at most {schema['maximum']:.15g}" if "maximum" in schema else kind


def _unknown_variables(environment: Iterable[str]) -> list[str]:
    known = [f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields]
    return [
        f"{name} is set, but is not a setting{_nearest(name, known, ENV_PREFIX)} (--help lists all)"
        for name in sorted(environment)
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(_OTHERS)
    ]


def _nearest(word: str, known: Sequence[str], prefix: str) -> str:
    """A question for the one of `known` that is most like `word`, beyond their common prefix."""
    names = [name.removeprefix(prefix) for name in known]
    matches = difflib.get_close_matches(word.removeprefix(prefix), names, 1)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""


if __name__ == "__main__":
    sys.exit(main())
