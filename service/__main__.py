"""`lenet-serve`, also `python -m service`: settings in, exit code out. `warm` is a second command.

Signals are blocked by the first line of `main` and then received, so everything else is imported
after it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

TYPE_CHECKING = False  # importing `typing` takes 6 ms, see `main`
if TYPE_CHECKING:
    from service.process.signals import Signals

_OTHERS = ("LENET_TRAINER_", "LENET_TEST_", "LENET_BIND", "LENET_ARCHITECTURES")
"""Variables of the trainer, the tests, the Compose file and `warm`."""


def main() -> int:
    """Run the service with the flags of the command line; the exit code of the process.

    SIGTERM, SIGINT and SIGHUP stay blocked: nothing but the end may follow.
    """
    if sys.argv[1:2] == ["warm"]:
        from service.warm import warm

        return warm(sys.argv[2:])
    # What `Signals` does, too, but its import takes 20 ms, in which one would end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    from service.process import allocator, descriptors
    from service.process.signals import Signals

    allocator.set_up()
    signals = Signals()
    signals.start()
    descriptors.open_standard()
    return start(sys.argv[1:], signals)


def start(arguments: Sequence[str], signals: Signals) -> int:
    """Run the service with `arguments` until `signals` stop it; the exit code."""
    from service.errors import ExitCode
    from service.process import descriptors

    limit = descriptors.raise_limit()
    if problem := descriptors.too_few(limit):  # before libraries are loaded, which crash
        print(problem, file=sys.stderr)
        return ExitCode.DESCRIPTORS
    import gc
    import logging

    from lenet import DISTRIBUTION, distribution_version
    from lenet.command_line import parse, unknown_variables
    from lenet.errors import InvalidSettings
    from service import logs
    from service.settings import CLOUDS, Settings

    if arguments[:1] == ["serve"]:  # so SageMaker runs a container
        arguments = arguments[1:]
    try:
        version = distribution_version()
        settings = parse(Settings, arguments, DISTRIBUTION, version, variables=CLOUDS)
    except InvalidSettings as exc:
        for message in str(exc).splitlines():
            print(f"settings: {message}", file=sys.stderr)
        return ExitCode.SETTINGS
    logs.configure(settings.log_level, settings.log_format)
    log = logging.getLogger(__name__)
    for message in unknown_variables([Settings], os.environ, _OTHERS):
        log.warning("%s", message)
    # The start makes much that lives and little garbage: looking for it took 70 ms. It is turned on
    # again where the start ends.
    gc.disable()
    # The service multiplies only small matrices with NumPy: without this, its import starts threads
    # that wait for work in a loop, 45 ms of CPU time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported late: --help and a wrong flag should not wait for the runtime to load.
    from service.engine.devices import on_gpu

    # A lost GPU context is replaced with its process, so a GPU needs a supervisor.
    if settings.workers > 1 or on_gpu(settings.device):
        if problem := descriptors.too_few(limit, settings.workers):
            log.error("%s", problem)
            return ExitCode.DESCRIPTORS
        from service.supervisor import supervise

        gc.enable()
        return supervise(settings, signals)
    from service.server import run

    return run(settings, signals)


if __name__ == "__main__":
    sys.exit(main())
