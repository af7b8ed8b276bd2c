"""Reads a dataset, and downloads MNIST's missing files to its own folder from public mirrors.

An interrupted transfer is resumed. A file gets its name only when its uncompressed bytes have the
SHA-256 of the original. httpx is imported only if files are missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.datasets import load
from trainer.errors import DatasetUnavailable, InvalidDataset
from trainer.mnist import (
    FILES,
    MAX_FILE_BYTES,
    Dataset,
    IdxFile,
    missing_files_message,
    uncompressed,
)
from trainer.settings import MNIST_FOLDER

if TYPE_CHECKING:
    import httpx

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
"""Each has the files as NAME.gz; tried in order."""

_TIMEOUT_S = 20.0


def obtain(
    folder: Path,
    report: Callable[[str], None],
    names: Sequence[str] | None = None,
    *,
    transposed: bool = False,
) -> Dataset:
    """`load` the dataset in `folder`, or the file; MNIST's own folder is completed before.

    Nothing is downloaded to another folder, where a misspelt name would give MNIST instead of the
    requested dataset, nor to one that holds files of another dataset. `report` is called with
    a line for each download, and for pictures that are prepared.

    Raises:
        DatasetUnavailable: files are missing, or no mirror has them; the message says what to put
            where.
        InvalidDataset: as `load`.
    """
    if folder != MNIST_FOLDER:
        try:
            return load(folder, names, transposed=transposed, report=report)
        except DatasetUnavailable as exc:
            raise DatasetUnavailable(
                f"{exc}; without --data MNIST is downloaded to {MNIST_FOLDER}"
            ) from exc
    paths = {file: file.find(folder) for file in FILES}
    missing = [file for file, path in paths.items() if path is None]
    if missing:
        for file, path in paths.items():
            if path is not None and hashlib.sha256(uncompressed(path)).hexdigest() != file.sha256:
                reason = f", not downloaded, since {path.name} there is not MNIST's"
                names = [one.name for one in missing]
                raise DatasetUnavailable(missing_files_message(folder, names, reason))
        try:
            import httpx
        except ImportError as exc:
            names = [file.name for file in missing]
            reason = ", and downloading needs httpx: python -m pip install httpx"
            raise DatasetUnavailable(missing_files_message(folder, names, reason)) from exc
        with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as client:
            download(folder, missing, client, report)
    return load(folder, names, transposed=transposed, report=report)


def download(
    folder: Path,
    files: Sequence[IdxFile],
    client: httpx.Client,
    report: Callable[[str], None],
    mirrors: Sequence[str] = MIRRORS,
) -> None:
    """Fetch each of `files` from the first mirror that has it, resuming an earlier call.

    Raises:
        DatasetUnavailable: no mirror has one of the files, or `folder` cannot be written.
    """
    for number, file in enumerate(files):
        failures: list[str] = []
        for mirror in mirrors:
            report(f"downloading {mirror}{file.name}.gz")
            failure = _download_one(folder, file, f"{mirror}{file.name}.gz", client)
            if failure is None:
                break
            failures.append(f"{mirror}: {failure}")
        else:
            reason = f", not downloaded ({'; '.join(failures)})"
            raise DatasetUnavailable(
                missing_files_message(folder, [rest.name for rest in files[number:]], reason)
            )


def _download_one(folder: Path, file: IdxFile, url: str, client: httpx.Client) -> str | None:
    """None, or in a few words what failed."""
    import httpx

    part = folder / f"{file.name}.gz.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        resumed = part.exists()
        _transfer(part, url, client)
        failure = _verify(part, file)
        if failure and resumed:
            # The partial file may have been of another file: download it again from the start.
            part.unlink()
            _transfer(part, url, client)
            failure = _verify(part, file)
        if failure:
            part.unlink()
            return failure
        part.replace(folder / f"{file.name}.gz")
    except httpx.HTTPStatusError as exc:
        return f"HTTP {exc.response.status_code}"
    except (httpx.HTTPError, OSError) as exc:
        return str(exc) or type(exc).__name__
    return None


def _transfer(part: Path, url: str, client: httpx.Client) -> None:
    start = part.stat().st_size if part.exists() else 0
    # Otherwise a server may compress the file once more, and ranges would not match.
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == 416:  # the file ends at `start`; `_verify` decides
            return
        response.raise_for_status()
        span = response.headers.get("Content-Range", "")
        resumes = response.status_code == 206 and span.startswith(f"bytes {start}-")
        with part.open("ab" if resumes else "wb") as file:
            # No chunk size: it would buffer, and lose, the last bytes before an interruption.
            for chunk in response.iter_raw():
                file.write(chunk)
                if file.tell() > MAX_FILE_BYTES:
                    return  # too large to be the file; `_verify` rejects it


def _verify(part: Path, file: IdxFile) -> str | None:
    try:
        found = hashlib.sha256(uncompressed(part)).hexdigest()
    except InvalidDataset:
        return "the file is not a whole gzip file"
    if found != file.sha256:
        return f"its content has SHA-256 {found[:12]}..., expected {file.sha256[:12]}..."
    return None
