"""Train a digit classifier on MNIST, or look at one. `fit` is the default command.

    python -m trainer                                      the same as fit
    python -m trainer fit --model mlp --data FOLDER ...    train, verify, write a weight file
    python -m trainer fit --data FOLDER                    pictures in a folder for each class, or
                                                           another dataset
    python -m trainer fit --from FILE --freeze conv1       from the layers of a weight file
    python -m trainer search --trials 50                   a better recipe, by the mistakes on
                                                           held-out images; needs optuna
    python -m trainer evaluate FILE --data FOLDER          accuracy, confusion, calibration and
                                                           mistakes of a weight file
    python -m trainer compare RUN OTHER                    two runs side by side
    python -m trainer import FILE --model NAME             weights from elsewhere: a state dict, or
                                                           Keras' arrays, as a weight file
    python -m trainer export FILE --out FILE               write a weight file as ONNX
    python -m trainer inspect FILE                         what is in a weight file
    python -m trainer inspect --precision tf32 --batch 512 each call of a training step: shapes,
                                                           time, share of the GPU's limit; without
                                                           a GPU all but the times
    python -m trainer fit --help                           every setting and its default
    python -m trainer --version

Exit codes:
    0    done
    1    the packages that fit and search need are not installed
    2    invalid command line or environment
    3    the digits are missing, cannot be downloaded or are broken
    4    the training diverged: the message says at which step and in which layer first
    5    the result was refused: the served network would differ from the trained one
    6    a file cannot be read or written
    7    the GPU failed, or has too little memory
    130  interrupted, by Ctrl-C or SIGTERM; after a completed epoch the same command resumes

An error is one line on the standard error, one for each invalid setting, never a traceback.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence

from lenet import distribution_version

_EXTRA = (
    "training needs the packages tqdm and httpx, which serving does not: run `make train` in a "
    "checkout, `python -m pip install tqdm httpx` beside an installed wheel, or build the Docker "
    "image with --target trainer"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, by default those of the process; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["-h"], ["--help"]):
        if hasattr(signal, "SIGPIPE"):  # `| head -1` ends it without a traceback
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print(__doc__)
        return 0
    if arguments[:1] == ["--version"]:
        print(f"lenet-train {distribution_version()}")
        return 0
    command = next((word for word in arguments[:1] if not word.startswith("-")), "fit")
    if command in ("fit", "search") and importlib.util.find_spec("tqdm") is None:
        print(_EXTRA, file=sys.stderr)
        return 1
    # A BLAS reads its number of threads when NumPy is loaded, and its order of summation depends
    # on it. With one thread the result does not depend on the machine's cores. A second thread
    # saves little: a step of lenet takes 23 ms instead of 30 on two cores of an AMD EPYC
    # (2026-11-20), and several times as long when another program uses a core.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ[variable] = "1"
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, signal.default_int_handler)}
    only_prints = command not in ("fit", "search")
    if only_prints and hasattr(signal, "SIGPIPE"):  # `| head -1` again
        before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        from trainer.commands import run

        code = run(arguments, os.environ)
        if only_prints:
            sys.stdout.flush()  # not at the interpreter's end, when the signal is ignored again
        return code
    except KeyboardInterrupt:  # loading takes a second
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
