"""The files of installed packages that the images leave out, because the service never loads them.

    left_out.py remove SITE_PACKAGES       deletes them, in the Dockerfile
    left_out.py try [--also PATTERN] [--root FOLDER] COMMAND ...

`try` hides them from this interpreter's packages, runs COMMAND, brings them back, and exits with
COMMAND's code. It lists which of NVIDIA's libraries any process had loaded meanwhile, and which
not. `--also` hides further ones, `--root` searches another folder, `--keep` hides nothing. As on a
machine with a GPU:

    left_out.py try python -m pytest tests/gpu/test_backend.py tests/gpu/test_service_faults.py
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

LEFT_OUT = (
    # Nothing imports them.
    "numpy/tests",
    "numpy/*/tests",
    "onnxruntime/quantization",
    "onnxruntime/tools",
    "onnxruntime/transformers",
    # CuPy loads these when their functions are used: sparse matrices, solvers, FFT, random numbers.
    "libcusparse.so.*",
    "libcusolver.so.*",
    "libcusolverMg.so.*",
    "libcufft.so.*",
    "libcufftw.so.*",
    "libcurand.so.*",
    "libnvJitLink.so.*",  # cuSPARSE and cuSOLVER need it
    # Training on several GPUs.
    "libnccl.so.*",
    "libnccl_device.ltoir",
    # For older drivers, and BLAS calls of other programs.
    "libnvrtc.alt.so.*",
    "libnvrtc-builtins.alt.so.*",
    "libnvblas.so.*",
    # cuDNN's functions from before its Graph API; libcudnn.so loads them when they are called.
    "libcudnn_adv.so.*",
    "libcudnn_cnn.so.*",
    "libcudnn_ops.so.*",
)
"""Patterns of the end of a path. The service's GPU tests pass with these libraries hidden: backend,
device, engines, repository (H200, wheels of CUDA 13, 2026-11-24)."""

_HIDDEN = ".left-out"


def matches(folder: Path, patterns: Iterable[str] = LEFT_OUT) -> Iterator[Path]:
    """Files and folders below `folder` that a pattern names."""
    for pattern in patterns:
        yield from (path for path in folder.rglob(pattern) if not path.is_symlink())


def remove(folder: Path) -> None:
    """Delete what is left out of `folder`."""
    for path in list(matches(folder)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def loaded_libraries() -> set[str]:
    """Names of the shared libraries that processes of this machine have loaded at this moment."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it has ended, or is another user's
            continue
        names |= {line.rpartition("/")[2] for line in lines if ".so" in line}
    return names


@contextlib.contextmanager
def hidden(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """Rename `paths` inside the block; yields those that were there."""
    found: list[Path] = []
    try:
        for path in paths:
            path.rename(path.with_name(path.name + _HIDDEN))
            found.append(path)
        yield found
    finally:
        for path in found:
            path.with_name(path.name + _HIDDEN).rename(path)


def try_without(roots: list[Path], patterns: Sequence[str], command: list[str]) -> int:
    """Run `command` while the files of `patterns` are hidden; return its exit code."""
    libraries = {
        path.name: path.stat().st_size
        for root in roots
        for path in root.rglob("lib*.so*")
        if path.name.startswith(("libcu", "libnv", "libnccl")) and not path.is_symlink()
    }
    loaded: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            loaded.update(loaded_libraries())

    watcher = threading.Thread(target=watch)
    with hidden([path for root in roots for path in matches(root, patterns)]) as paths:
        watcher.start()
        try:
            code = subprocess.run(command, check=False).returncode
        finally:
            ended.set()
            watcher.join()
    print(f"hidden: {', '.join(sorted(path.name for path in paths)) or 'nothing'}")
    for kind, names in (
        ("loaded", loaded & libraries.keys()),
        ("not loaded", libraries.keys() - loaded),
    ):
        print(f"{kind}:")
        for name in sorted(names, key=libraries.__getitem__, reverse=True):
            print(f"  {libraries[name] / 1e6:8.1f} MB  {name}")
    return code


def main() -> int:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="action", required=True)
    commands.add_parser("remove").add_argument("folder", type=Path)
    attempt = commands.add_parser("try")
    attempt.add_argument("--also", action="append", default=[], metavar="PATTERN")
    attempt.add_argument("--root", action="append", default=[], type=Path, metavar="FOLDER")
    attempt.add_argument("--keep", action="store_true")
    attempt.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.action == "remove":
        remove(arguments.folder)
        return 0
    roots = arguments.root or [Path(sysconfig.get_path("purelib"))]
    patterns = [] if arguments.keep else [*LEFT_OUT, *arguments.also]
    return try_without(roots, patterns, arguments.command)


if __name__ == "__main__":
    sys.exit(main())
