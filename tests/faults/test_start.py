"""Machines on which the service cannot start, and what it says there."""

from __future__ import annotations

import time

import pytest

from service.errors import ExitCode
from tests.faults.checks import NO_TRACE, program

FAILS_WITHIN_S = 5.0

CUPY = """
class Error(RuntimeError):
    def __init__(self, status):
        super().__init__("cudaError: something is wrong")
        self.status = status

class runtime:
    CUDARuntimeError = Error
    def getDeviceCount(): {count}
    def runtimeGetVersion(): return 13020
    def driverGetVersion(): return {driver}
"""


def machine(count="return 1", driver=13000):
    return {
        "cupy/__init__.py": "from cupy import cuda",
        "cupy/cuda/__init__.py": CUPY.format(count=count, driver=driver),
        "cupy/cuda/cublas.py": "",
    }


MACHINES = {
    "no CuPy": ({}, "CuPy is not installed"),
    "CuPy whose library is missing": (
        {"cupy/__init__.py": "raise ImportError('libcudart.so.13: cannot open')"},
        "libcudart.so.13",
    ),
    "no driver": (machine("raise Error(35)", 0), "there is no NVIDIA driver"),
    "an old driver": (machine("raise Error(35)", 12040), "install a newer driver"),
    "no GPU": (machine("raise Error(100)"), "there is no NVIDIA GPU"),
    "GPUs hidden": (machine("return 0"), "there is no NVIDIA GPU"),
    "MPS out of reach": (machine("raise Error(805)"), "see nvidia-smi"),
}
"""Stand-ins for CuPy and what is said; tests/gpu has the real one, tests/lenet/cuda the rest."""


@pytest.mark.long
@pytest.mark.parametrize("name", MACHINES)
def test_a_start_on_a_gpu_fails_fast_with_one_line_when_something_is_missing(start, tmp_path, name):
    files, expected = MACHINES[name]
    folder = tmp_path / "libraries"
    folder.mkdir()
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    hide = "" if files else "sys.modules['cupy'] = None; "
    changed = f"import sys; {hide}sys.path.insert(0, {str(folder)!r})"
    began_s = time.monotonic()
    service = start("--device", "cuda", program=program(changed))
    assert service.wait() == ExitCode.BACKEND
    assert time.monotonic() - began_s < FAILS_WITHIN_S
    (line,) = [line for line in service.lines if "ERROR" in line]
    assert expected in line
    assert "ready" not in service.log
    assert not NO_TRACE.search(service.log)
