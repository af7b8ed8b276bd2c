"""The entry point of `python -m trainer` and `lenet-train`; `trainer.commands` does the work."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

_EXTRA = (
    "training needs the packages tqdm and httpx, which serving does not: run `make train` in a "
    "checkout, `python -m pip install tqdm httpx` beside an installed wheel, or build the Docker "
    "image with --build-arg EXTRAS=[train]"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, by default those of the process; return the exit code."""
    if importlib.util.find_spec("tqdm") is None:
        print(_EXTRA, file=sys.stderr)
        return 1
    # A BLAS reads its number of threads when NumPy is loaded, and its order of summation depends
    # on it. With one thread the result does not depend on the machine's cores. A second thread
    # saves little: a step of lenet takes 23 ms instead of 30 on two cores of an AMD EPYC
    # (2026-11-20), and several times as long when another program uses a core.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ[variable] = "1"
    from trainer.commands import run

    return run(sys.argv[1:] if arguments is None else arguments, os.environ)


if __name__ == "__main__":
    sys.exit(main())
