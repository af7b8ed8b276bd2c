"""MNIST from a public mirror, when it is not on disk.

A transfer that was cut short goes on where it stopped, and a file appears under its name only
when its uncompressed bytes have the SHA-256 of the original. httpx is imported when it is needed
and not before. It refuses to overwrite or judge files that already lie there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import DatasetUnavailable, InvalidDataset
from trainer.mnist import FILES, MAX_FILE_BYTES, Dataset, IdxFile, load, uncompressed, what_to_do

if TYPE_CHECKING:
    import httpx

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
"""Where the files lie, as NAME.gz; tried in order."""

_TIMEOUT_S = 20.0


def obtain(folder: Path, tell: Callable[[str], None]) -> Dataset:
    """`load`, after downloading into `folder` what is not there.

    `tell` is given one line for each file that is downloaded.

    Raises:
        DatasetUnavailable: no mirror could be reached; the message says what to put where.
        InvalidDataset: as `load`.
    """
    missing = [file for file in FILES if file.find(folder) is None]
    if missing:
        try:
            import httpx
        except ImportError as exc:
            names = [file.name for file in missing]
            reason = "and downloading needs httpx: pip install 'lenet-serve[train]'"
            raise DatasetUnavailable(what_to_do(folder, names, reason)) from exc
        with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as client:
            download(folder, missing, client, tell)
    return load(folder)


def download(
    folder: Path,
    files: Sequence[IdxFile],
    client: httpx.Client,
    tell: Callable[[str], None],
    mirrors: Sequence[str] = MIRRORS,
) -> None:
    """Fetch `files` from the first mirror that has them, resuming what an earlier call left.

    A file appears under its name only when its content has been verified.

    Raises:
        DatasetUnavailable: no mirror gave one of the files, or `folder` cannot be written.
    """
    for number, file in enumerate(files):
        troubles: list[str] = []
        for mirror in mirrors:
            tell(f"downloading {mirror}{file.name}.gz")
            trouble = _download_one(folder, file, f"{mirror}{file.name}.gz", client)
            if trouble is None:
                break
            troubles.append(f"{mirror}: {trouble}")
        else:
            reason = f"and cannot be downloaded ({'; '.join(troubles)})"
            raise DatasetUnavailable(
                what_to_do(folder, [rest.name for rest in files[number:]], reason)
            )


def _download_one(folder: Path, file: IdxFile, url: str, client: httpx.Client) -> str | None:
    """None, or in a few words what went wrong."""
    import httpx

    part = folder / f"{file.name}.gz.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        resumed = part.exists()
        _transfer(part, url, client)
        trouble = _trouble(part, file)
        if trouble and resumed:
            # What lay there may have come from elsewhere: once more from the start.
            part.unlink()
            _transfer(part, url, client)
            trouble = _trouble(part, file)
        if trouble:
            part.unlink()
            return trouble
        part.replace(folder / f"{file.name}.gz")
    except httpx.HTTPStatusError as exc:
        return f"HTTP {exc.response.status_code}"
    except (httpx.HTTPError, OSError) as exc:
        return str(exc) or type(exc).__name__
    return None


def _transfer(part: Path, url: str, client: httpx.Client) -> None:
    start = part.stat().st_size if part.exists() else 0
    # Without identity a server may wrap the file in a gzip of its own, and ranges would not fit.
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == 416:  # nothing after `start`: verification decides
            return
        response.raise_for_status()
        span = response.headers.get("Content-Range", "")
        resumes = response.status_code == 206 and span.startswith(f"bytes {start}-")
        with part.open("ab" if resumes else "wb") as file:
            # As they come: a chunk size would hold back, and lose, the last bytes before a break.
            for chunk in response.iter_raw():
                file.write(chunk)
                if file.tell() > MAX_FILE_BYTES:
                    return  # no mirror of ours: verification says so, and the disk is not filled


def _trouble(part: Path, file: IdxFile) -> str | None:
    try:
        found = hashlib.sha256(uncompressed(part)).hexdigest()
    except InvalidDataset:
        return "the file is not a whole gzip file"
    if found != file.sha256:
        return f"its content has SHA-256 {found[:12]}..., expected {file.sha256[:12]}..."
    return None
