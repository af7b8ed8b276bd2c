"""What a benchmark takes on its command line."""

from __future__ import annotations

import argparse
from pathlib import Path


def url(text: str) -> str:
    """http://HOST:PORT without a slash at its end."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r}, expected http://HOST:PORT")
    return text.rstrip("/")


def positive_int(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from 1")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a finite number above 0")
    return value


def latest_weights(folder: Path) -> Path:
    """The weight file with the highest version in `folder`.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [path for path in folder.glob("*.safetensors") if path.stem.isdecimal()]
    if not found:
        raise FileNotFoundError(f"no VERSION.safetensors in {folder}: name a file with --weights")
    return max(found, key=lambda path: int(path.stem))
