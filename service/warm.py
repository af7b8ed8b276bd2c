"""`lenet-serve warm`: compiles the kernels of models for GPUs, as when an image is built.

It needs no GPU. The service takes what is compiled here and compiles only the rest.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

from pydantic import NonNegativeInt, field_validator
from pydantic_settings import NoDecode

from lenet import DISTRIBUTION
from lenet.command_line import parse
from lenet.context import Target, architectures, compile_ahead
from lenet.errors import InvalidSettings
from service import logs
from service.engine.devices import MAX_BATCH_ROWS
from service.engine.versions import WeightsFolder
from service.errors import STARTUP_ERRORS, ExitCode, exit_code
from service.settings import CLOUDS, Settings

_log = logging.getLogger(__name__)


class Warm(Settings):
    """Compile the kernels that a service with these settings needs, without a GPU."""

    architectures: Annotated[tuple[NonNegativeInt, ...], NoDecode] = ()
    """Compute capabilities without their point, separated by commas, as 80,90. Without it all that
    are known."""

    @field_validator("architectures", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("architectures")
    @classmethod
    def _check(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not set(value) <= set(architectures()):
            raise ValueError(f"expected some of {','.join(map(str, architectures()))}")
        return value or architectures()


def warm(arguments: Sequence[str]) -> int:
    """Compile what the settings in `arguments` and the environment need; the exit code."""
    try:
        settings = parse(Warm, arguments, f"{DISTRIBUTION} warm", variables=CLOUDS)
    except InvalidSettings as exc:
        for message in str(exc).splitlines():
            print(f"settings: {message}", file=sys.stderr)
        return ExitCode.SETTINGS
    logs.configure(settings.log_level, settings.log_format)
    target = Target("cuda", precision=settings.precision, convolutions=settings.convolutions)
    rows = settings.max_batch_rows or MAX_BATCH_ROWS["cuda"]
    try:
        folder = WeightsFolder(settings.weights, settings.latest_versions)
        versions = folder.read_all(settings.models, settings.default_model)
        files = [version.weights for version in versions]
        count, failed = compile_ahead(files, target, rows, settings.architectures)
    except STARTUP_ERRORS as exc:
        _log.error("%s", exc)
        return exit_code(exc)
    except OSError as exc:
        _log.error("compiled kernels cannot be kept: %s", exc)
        return ExitCode.BACKEND
    names = ", ".join(f"{version.name}/{version.version}" for version in versions)
    _log.info("%d compiled programs for %s in %s", count, names, settings.precision)
    if failed:
        _log.error("%d programs do not compile: at its start, the service tries again", failed)
    return ExitCode.BACKEND if failed and not count else ExitCode.STOPPED
