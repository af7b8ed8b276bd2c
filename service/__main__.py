"""`lenet-serve`, also `python -m service`: settings in, exit code out."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

from lenet import DISTRIBUTION, distribution_version
from lenet.command_line import parse, unknown_variables
from lenet.errors import InvalidSettings
from service import logs
from service.errors import ExitCode
from service.settings import Settings

_log = logging.getLogger(__name__)

_OTHERS = ("LENET_TRAINER_", "LENET_TEST_", "LENET_BIND")
"""Variables of the trainer, the tests and the Compose file."""


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Run the service with `arguments`, those of the command line if None."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        settings = parse(Settings, arguments, DISTRIBUTION, distribution_version())
    except InvalidSettings as exc:
        for message in str(exc).splitlines():
            print(f"settings: {message}", file=sys.stderr)
        return ExitCode.SETTINGS
    logs.configure(settings.log_level)
    for message in unknown_variables([Settings], os.environ, _OTHERS):
        _log.warning("%s", message)
    # The start makes much that lives and little garbage: looking for it took 70 ms. It is turned on
    # again where the start ends.
    gc.disable()
    # The service multiplies no matrices with NumPy: without this, its import starts threads that
    # wait for work in a loop, 45 ms of CPU time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported late: --help and a wrong flag should not wait for the runtime to load.
    from service.engine.devices import on_gpu

    # A lost GPU context is replaced with its process, so a GPU needs a supervisor.
    if settings.workers > 1 or on_gpu(settings.device):
        from service.supervisor import supervise

        gc.enable()
        return supervise(settings)
    from service.server import run

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
