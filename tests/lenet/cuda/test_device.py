from __future__ import annotations

import re
import sys

import pytest

from lenet.cuda.device import devices, translated
from lenet.errors import BackendUnavailable, DeviceError, OutOfDeviceMemory

INSTALL = (
    "install it in a checkout with .venv/bin/python -m pip install --constraint constraints.txt "
    "-e '.[cuda12]', in Docker with --build-arg 'EXTRAS=[cuda12]'"
)


def refusal():
    """The message of `devices`, which is one line."""
    with pytest.raises(BackendUnavailable) as caught:
        devices()
    message = str(caught.value)
    assert "\n" not in message
    return message


def install_broken(monkeypatch, tmp_path, name, source):
    """A package whose import runs `source`."""
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_gpus_are_counted_when_everything_is_in_place(machine):
    machine.count = 4
    assert devices() == 4


def test_what_to_install_is_said_when_there_is_no_cupy(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert refusal() == f"CuPy is not installed; {INSTALL}"


def test_the_cause_is_one_line_when_cupy_explains_itself_on_a_page(machine, monkeypatch, tmp_path):
    page = """
try:
    import cupy_is_here_but_its_library_is_not
except ImportError as exc:
    raise ImportError(f'''
======================
Failed to import CuPy.

Check the Installation Guide for details: https://docs.cupy.dev/en/latest/install.html
======================
''') from exc
"""
    install_broken(monkeypatch, tmp_path, "cupy", page)
    message = refusal()
    cause = "No module named 'cupy_is_here_but_its_library_is_not'"
    assert message.startswith(f"CuPy cannot be loaded ({cause}); ")


def test_what_to_install_is_said_when_cupy_finds_no_cublas(machine):
    del sys.modules["cupy"].cuda.cublas
    message = refusal()
    assert message.startswith("CuPy cannot be loaded (cannot import name 'cublas' ")
    assert message.endswith(INSTALL)


@pytest.mark.parametrize(
    "source",
    [
        "import cudnn_is_not_installed",
        "raise OSError('libcudnn.so.9: file too short')",
        "raise RuntimeError('libcudnn.so.9: not\\n  for this machine')",
        "assert False, 'Found 2 libcudnn.so.x in nvidia-cudnn-cuXX.'",
    ],
)
def test_what_to_install_is_said_when_the_cudnn_package_cannot_be_loaded(
    machine, monkeypatch, tmp_path, source
):
    install_broken(monkeypatch, tmp_path, "cudnn", source)
    said = r"cuDNN's Python package nvidia-cudnn-frontend cannot be loaded \(.*cudnn.*\); "
    assert re.fullmatch(said + re.escape(INSTALL), refusal())


def test_the_lack_of_a_driver_is_said_when_there_is_none(machine, errors):
    machine.count, machine.driver = errors.runtime(35), 0
    assert refusal().startswith(
        "there is no NVIDIA driver, and CuPy needs one for CUDA 13; install it"
    )


@pytest.mark.parametrize(
    ("driver", "found", "advice"),
    [
        (
            12_040,
            "12.4",
            f"install a newer driver, or CuPy for this one: {INSTALL}",
        ),
        (11_080, "11.8", "install a newer driver"),  # there is no such extra
        (13_000, "13.0", "install a newer driver"),  # its CuPy is the one that is installed
    ],
)
def test_both_versions_are_named_when_the_driver_is_too_old(machine, errors, driver, found, advice):
    machine.count, machine.driver = errors.runtime(35), driver
    assert refusal() == (
        f"the NVIDIA driver is for CUDA {found}, and CuPy needs one for CUDA 13; {advice}"
    )


@pytest.mark.parametrize("status", [None, 100])
def test_the_cpu_is_recommended_when_there_is_no_gpu(machine, errors, status):
    machine.count = 0 if status is None else errors.runtime(status)
    message = refusal()
    assert message.startswith("there is no NVIDIA GPU; nvidia-smi must list one")
    assert message.endswith("use the cpu device")


def test_the_reason_is_said_when_the_gpus_cannot_be_counted(machine, errors):
    machine.count = errors.runtime(805, "cudaErrorMpsConnectionFailed: no connection to MPS")
    message = refusal()
    assert "(cudaErrorMpsConnectionFailed: no connection to MPS)" in message
    assert "nvidia-smi" in message
    assert "there is no" not in message


@pytest.mark.parametrize("problem", [OSError, RuntimeError])
def test_a_folder_is_asked_for_when_libcudnn_is_missing(machine, problem):
    machine.version = problem("Unable to find symbol cudnnGetVersion")
    assert refusal() == (
        "libcudnn.so.9 cannot be loaded (Unable to find symbol cudnnGetVersion); "
        f"{INSTALL}, or add its folder to LD_LIBRARY_PATH"
    )


@pytest.mark.parametrize(("number", "text"), [(8_907, "8.9.7"), (100_100, "10.1.0")])
def test_both_versions_are_named_when_cudnn_is_another_major(machine, number, text):
    machine.version, machine.version_text = number, text
    assert refusal() == f"found cuDNN {text}, expected major version 9; {INSTALL}"


@pytest.mark.parametrize("status", [214, 700, 719, 999])  # ECC, address, launch, unknown
@pytest.mark.parametrize("api", ["runtime", "driver"])
def test_the_process_is_lost_when_the_context_is(machine, errors, api, status):
    problem = getattr(errors, api)(status, "cudaErrorIllegalAddress: an illegal access")
    with pytest.raises(DeviceError) as raised, translated("running conv1"):
        raise problem
    assert raised.value.sticky
    assert str(raised.value) == "running conv1: cudaErrorIllegalAddress: an illegal access"
    assert raised.value.__cause__ is problem


@pytest.mark.parametrize("status", [1, 9, 209, 701, 720, 801, 900])
def test_the_process_lives_on_when_a_call_merely_failed(machine, errors, status):
    with pytest.raises(DeviceError) as raised, translated("launching"):
        raise errors.runtime(status)
    assert str(raised.value) == "launching: cudaError: something happened"
    assert not raised.value.sticky
    assert not isinstance(raised.value, OutOfDeviceMemory)


class NcclError(RuntimeError):
    """As CuPy's: its statuses are not CUDA's."""

    def __init__(self, status):
        super().__init__(f"NCCL_ERROR: {status}")
        self.status = status


@pytest.mark.parametrize(
    "problem",
    [
        lambda errors: errors.graph("no engine"),
        lambda errors: errors.compiler("epilogue.cu(7): error: no"),
        lambda errors: RuntimeError("CUDNN_STATUS_BAD_PARAM"),
        lambda errors: NcclError(2),
        lambda errors: NcclError(700),
    ],
    ids=["graph", "compiler", "cudnn", "nccl", "nccl-beyond"],
)
def test_a_foreign_error_is_one_of_the_device_when_no_cuda_status_says_more(
    machine, errors, problem
):
    foreign = problem(errors)
    with pytest.raises(DeviceError) as raised, translated("planning"):
        raise foreign
    assert type(raised.value) is DeviceError
    assert str(raised.value) == f"planning: {foreign}"
    assert not raised.value.sticky


@pytest.mark.parametrize(
    "problem",
    [
        lambda errors: errors.memory("Out of memory allocating 512 bytes"),
        lambda errors: errors.runtime(2, "Out of memory allocating 512 bytes"),
        lambda errors: errors.driver(2, "Out of memory allocating 512 bytes"),
    ],
    ids=["cupy", "runtime", "driver"],
)
def test_the_numbers_are_said_when_memory_runs_out(machine, errors, problem):
    machine.memory = (1_500_000, 80_400_000)
    with pytest.raises(OutOfDeviceMemory) as raised, translated("loading the digits"):
        raise problem(errors)
    assert not raised.value.sticky
    assert str(raised.value) == (
        "loading the digits: the GPU has 2 of 80 MB of memory free, which is not enough "
        "(Out of memory allocating 512 bytes); use a smaller batch or another GPU"
    )


def test_a_sentence_is_made_without_numbers_when_not_even_a_context_fits(machine, errors):
    machine.memory = errors.runtime(2, "out of memory")
    with pytest.raises(OutOfDeviceMemory) as raised, translated("opening GPU 0"):
        raise errors.runtime(2, "out of memory")
    assert str(raised.value) == (
        "opening GPU 0: the GPU has too little memory free even for a CUDA context "
        "(out of memory); use a smaller batch or another GPU"
    )


@pytest.mark.parametrize("problem", [ValueError, AssertionError, KeyboardInterrupt])
def test_what_is_not_the_devices_passes_when_it_is_raised_inside(machine, problem):
    with pytest.raises(problem, match=r"^ours$"), translated("running"):
        raise problem("ours")


def test_a_translated_error_is_not_translated_again(machine, errors):
    inner = pytest.raises(DeviceError, match=r"^inner: ")
    with inner as raised, translated("outer"), translated("inner"):
        raise errors.runtime(700)
    assert raised.value.sticky
