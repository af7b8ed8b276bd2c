"""`python -m service`: flags and variables in, exit code out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_settings import CliApp

from service import logs
from service.errors import ExitCode
from service.settings import Settings


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Run the service with `arguments`, those of the command line if None."""
    try:
        settings = CliApp.run(
            Settings, cli_args=list(sys.argv[1:] if arguments is None else arguments)
        )
    except ValidationError as exc:
        for error in exc.errors():
            name = ".".join(str(part) for part in error["loc"])
            message = error["msg"].removeprefix("Value error, ")
            found = f"{name} is {error['input']!r}: " if name else ""
            print(f"settings: {found}{message}", file=sys.stderr)
        return ExitCode.SETTINGS
    logs.configure(settings.log_level)
    # Imported late: --help and a wrong flag should not wait for the runtime to load.
    from service.engine.devices import on_gpu

    # A GPU's context cannot be mended, only replaced with its process, so somebody must watch.
    if settings.workers > 1 or on_gpu(settings.device):
        from service.supervisor import supervise

        return supervise(settings)
    from service.server import run

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
