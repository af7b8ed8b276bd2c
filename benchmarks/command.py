"""Shared by the benchmark commands: argument types, advice for missing libraries, provenance."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Any

from lenet.errors import LeNetError
from trainer.errors import TrainerError

_PIP = ".venv/bin/python -m pip install"
_EXTRA = f"{_PIP} --constraint constraints.txt --editable"
_INSTALL = {
    "httpx": "make dev",
    "tqdm": "make dev",
    "playwright": "make dev",
    "matplotlib": f"{_EXTRA} '.[bench]'",
    "cupy": f"{_EXTRA} '.[cuda12]', or '.[cuda13]'",
    "torch": f"{_PIP} torch",
}


def missing_library(error: ImportError) -> str:
    """One line that names the library that cannot be imported and says how to install it."""
    name = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name not in _INSTALL:
        return " ".join(str(error).split())
    return f"this benchmark needs {name}, which is not installed: {_INSTALL[name]}"


class CannotStart(Exception):
    """Nothing was measured; the message says why and what to do."""


def explained(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Wrap the main function of a command: what it lacks or refuses is a line and exit code 2."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except ImportError as exc:
            print(missing_library(exc), file=sys.stderr)
        except (CannotStart, LeNetError, TrainerError) as exc:
            print(exc, file=sys.stderr)
        return 2

    return run


def url(text: str) -> str:
    """http://HOST:PORT without a trailing slash."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r}, expected http://HOST:PORT")
    return text.rstrip("/")


def positive_int(text: str) -> int:
    """An integer >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number > 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a finite number above 0")
    return value


def non_negative_float(text: str) -> float:
    """A finite number >= 0."""
    return 0.0 if float(text) == 0 else positive_float(text)


def duration_ms(text: str) -> float:
    """Milliseconds from a duration with its unit: 800us, 5ms or 0.5s."""
    found = re.fullmatch(r"(\d*\.?\d+)(us|ms|s)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected a duration such as 800us, 5ms or 0.5s"
        )
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]


def count_or_percent(text: str) -> tuple[float, str]:
    """The number and the unit, "" or "%", of a count such as 10 or a share such as 0.1%."""
    found = re.fullmatch(r"(\d+)|(\d*\.?\d+)%", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a count such as 10, or 0.1%")
    return float(found[1] or found[2]), "" if found[1] else "%"


def spare_cores(host: str) -> int:
    """The cores that a client here may use: all but one for a service on the same machine."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, cores - (host in ("localhost", "127.0.0.1", "::1")))


def latest_weights(folder: Path = Path("weights/lenet")) -> Path:
    """The weight file with the highest version in `folder`.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [path for path in folder.glob("*.safetensors") if path.stem.isdecimal()]
    if not found:
        raise FileNotFoundError(
            f"no VERSION.safetensors in {folder}: run this in the repository's root, or name a "
            "file with --weights"
        )
    return max(found, key=lambda path: int(path.stem))


def measured(document: dict[str, Any], part: str, at: str) -> None:
    """Note in `document`, which several runs may fill, the day and the commit `at` of a part."""
    date = datetime.now(UTC).date().isoformat()
    document.setdefault("measured", {})[part] = {"date": date, "commit": at}


def provenance(distributions: Iterable[str]) -> dict[str, Any]:
    """Date (ISO 8601, UTC), processor, cores, and the versions of `distributions`.

    A distribution that is not installed has the version None.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpu_count": os.cpu_count(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in distributions},
        },
    }


def save_picture(figure: Any, path: Path, **options: Any) -> None:
    """Write a figure of matplotlib as PNG of 256 colours, a third as large."""
    from PIL import Image

    figure.savefig(path, **options)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def commit(folder: Path = Path()) -> str:
    """The short hash of the commit checked out in `folder`, "unknown" outside a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """The parsed command line, for JSON."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, value in vars(options).items()
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
