from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lenet.cuda.device import Handle, devices, translated
from lenet.errors import BackendUnavailable, DeviceError, OutOfDeviceMemory, WrongThread

INSTALL = r"pip install 'lenet-serve\[cuda12\]' \(or \[cuda13\]\)"


def refusal(function=devices):
    """What is said when there is no GPU to be had: one line."""
    with pytest.raises(BackendUnavailable) as refused:
        function()
    message = str(refused.value)
    assert "\n" not in message
    return message


def install_broken(monkeypatch, tmp_path, name, source):
    """A package whose import runs `source`."""
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_gpus_are_counted_when_everything_is_in_place(gpu):
    gpu.count = 4
    assert devices() == 4


def test_what_to_install_is_said_when_there_is_no_cupy(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    message = refusal()
    assert re.fullmatch(rf"CuPy cannot be loaded \(.*cupy.*\); .* needs it .*: {INSTALL}", message)


def test_the_cause_is_one_line_when_cupy_explains_itself_on_a_page(gpu, monkeypatch, tmp_path):
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


def test_what_to_install_is_said_when_cupy_finds_no_cublas(gpu):
    del sys.modules["cupy"].cuda.cublas
    assert re.search(rf"\(cannot import name 'cublas' .*\); .*libraries: {INSTALL}", refusal())


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
    gpu, monkeypatch, tmp_path, source
):
    install_broken(monkeypatch, tmp_path, "cudnn", source)
    said = r"cuDNN's Python package cannot be loaded \(.*cudnn.*\); the cuda backend needs "
    assert re.fullmatch(rf"{said}nvidia-cudnn-frontend and libcudnn\.so\.9: {INSTALL}", refusal())


def test_the_lack_of_a_driver_is_said_when_there_is_none(gpu, errors):
    gpu.count, gpu.driver = errors.runtime(35), 0
    assert refusal().startswith(
        "there is no NVIDIA driver here, and CuPy needs one for CUDA 13: install it"
    )


@pytest.mark.parametrize(
    ("driver", "found", "advice"),
    [
        (
            12_040,
            "12.4",
            "install a newer driver, or the CuPy for this one: pip install 'lenet-serve[cuda12]'",
        ),
        (11_080, "11.8", "install a newer driver"),  # there is no such extra
        (13_000, "13.0", "install a newer driver"),  # its CuPy is the one that is installed
    ],
)
def test_both_versions_are_named_when_the_driver_is_too_old(gpu, errors, driver, found, advice):
    gpu.count, gpu.driver = errors.runtime(35), driver
    assert refusal() == (
        f"the NVIDIA driver is for CUDA {found}, and CuPy needs one for CUDA 13: {advice}"
    )


@pytest.mark.parametrize("status", [None, 100])
def test_the_cpu_is_recommended_when_there_is_no_gpu(gpu, errors, status):
    gpu.count = 0 if status is None else errors.runtime(status)
    message = refusal()
    assert message.startswith("there is no NVIDIA GPU here (nvidia-smi lists them)")
    assert message.endswith("use the cpu device")


def test_the_reason_is_said_when_the_gpus_cannot_be_counted(gpu, errors):
    gpu.count = errors.runtime(805, "cudaErrorMpsConnectionFailed: no connection to MPS")
    message = refusal()
    assert "(cudaErrorMpsConnectionFailed: no connection to MPS)" in message
    assert "nvidia-smi" in message
    assert "there is no" not in message


@pytest.mark.parametrize("problem", [OSError, RuntimeError])
def test_a_folder_is_asked_for_when_libcudnn_is_missing(gpu, problem):
    gpu.version = problem("Unable to find symbol cudnnGetVersion")
    assert re.fullmatch(
        r"libcudnn\.so\.9 cannot be loaded \(Unable to find symbol cudnnGetVersion\): "
        rf"{INSTALL}, or put its folder into LD_LIBRARY_PATH",
        refusal(),
    )


@pytest.mark.parametrize(("number", "text"), [(8_907, "8.9.7"), (100_100, "10.1.0")])
def test_both_versions_are_named_when_cudnn_is_another_major(gpu, number, text):
    gpu.version, gpu.version_text = number, text
    assert re.fullmatch(rf"cuDNN {text} was found, expected major version 9: {INSTALL}", refusal())


@pytest.mark.parametrize("device", [-1, 2])
def test_the_numbers_there_are_are_said_when_a_gpu_of_another_is_asked_for(gpu, device):
    gpu.count = 2
    message = refusal(lambda: Handle(device))
    assert message.startswith(f"GPU {device} was asked for, expected 0 to 1")
    assert gpu.device == -1  # untouched


# Of driver_types.h: those of which it says that the process must be relaunched, and 214
# (uncorrectable ECC), 220 (uncorrectable NVLink) and 999 (unknown).
STICKY = [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999]


@pytest.mark.parametrize("status", STICKY)
@pytest.mark.parametrize("api", ["runtime", "driver"])
def test_the_process_is_lost_when_the_context_is(gpu, errors, api, status):
    problem = getattr(errors, api)(status, "cudaErrorIllegalAddress: an illegal access")
    with pytest.raises(DeviceError) as raised, translated("running conv1"):
        raise problem
    assert raised.value.sticky
    assert str(raised.value) == "running conv1: cudaErrorIllegalAddress: an illegal access"
    assert raised.value.__cause__ is problem


@pytest.mark.parametrize("status", [1, 9, 209, 701, 720, 801, 900])
def test_the_process_lives_on_when_a_call_was_merely_refused(gpu, errors, status):
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
def test_a_foreign_error_is_one_of_the_device_when_no_cuda_status_says_more(gpu, errors, problem):
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
def test_the_numbers_are_said_when_memory_runs_out(gpu, errors, problem):
    gpu.memory = (1_500_000, 80_400_000)
    with pytest.raises(OutOfDeviceMemory) as raised, translated("loading the digits"):
        raise problem(errors)
    assert not raised.value.sticky
    assert str(raised.value) == (
        "loading the digits: the GPU has 2 of 80 MB of memory free, which is not enough "
        "(Out of memory allocating 512 bytes); use a smaller batch or another GPU"
    )


def test_a_sentence_is_made_without_numbers_when_not_even_a_context_fits(gpu, errors):
    gpu.memory = errors.runtime(2, "out of memory")
    with pytest.raises(OutOfDeviceMemory) as raised, translated("opening GPU 0"):
        raise errors.runtime(2, "out of memory")
    assert str(raised.value) == (
        "opening GPU 0: the GPU has too little memory free even for a CUDA context "
        "(out of memory); use a smaller batch or another GPU"
    )


@pytest.mark.parametrize("problem", [ValueError, AssertionError, KeyboardInterrupt])
def test_what_is_not_the_devices_passes_when_it_is_raised_inside(gpu, problem):
    with pytest.raises(problem, match=r"^ours$"), translated("running"):
        raise problem("ours")


def test_an_error_already_told_stays_as_it_is_when_told_again(gpu, errors):
    told = pytest.raises(DeviceError, match=r"^inner: ")
    with told as raised, translated("outer"), translated("inner"):
        raise errors.runtime(700)
    assert raised.value.sticky


def test_a_handle_binds_both_libraries_to_its_own_stream_when_opened(gpu):
    gpu.count = 2
    with Handle(1) as handle:
        assert gpu.device == 1
        assert gpu.current is handle.stream
        assert gpu.bound == {"cuDNN's handle": handle.stream.ptr, "cuBLAS": handle.stream.ptr}
        assert (handle.name, handle.multiprocessors) == ("NVIDIA H200", 132)
        assert handle.cudnn_version == "9.19.0"


def test_a_handle_gives_back_in_reverse_and_once_when_closed(gpu):
    with Handle() as handle:
        assert gpu.events == []
    assert gpu.events == ["cuBLAS is closed", "cuDNN's handle is destroyed"]
    handle.close()
    assert len(gpu.events) == 2


def test_the_rest_is_given_back_when_closing_one_part_fails(gpu):
    handle = Handle()
    gpu.closing_problem = RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
    with pytest.raises(DeviceError, match="giving the GPU back: CUBLAS_STATUS_NOT_INITIALIZED"):
        handle.close()
    assert gpu.events == ["cuDNN's handle is destroyed"]


def test_the_first_error_is_told_when_closing_after_it_fails_too(gpu):
    gpu.closing_problem = RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
    with pytest.raises(ValueError, match=r"^first$"), Handle():
        raise ValueError("first")
    assert gpu.events == ["cuDNN's handle is destroyed"]
    with pytest.raises(DeviceError, match="giving the GPU back"), Handle():
        pass


def test_what_was_opened_is_given_back_when_the_rest_cannot_be(gpu):
    gpu.cublas_problem = RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
    with pytest.raises(DeviceError, match="opening GPU 0: CUBLAS_STATUS_ALLOC_FAILED"):
        Handle()
    assert gpu.events == ["cuDNN's handle is destroyed"]


def test_everything_goes_to_another_stream_and_back_when_it_is_used_inside(gpu):
    handle, other, third = Handle(), gpu.stream(), gpu.stream()

    def target():
        assert set(gpu.bound.values()) == {gpu.current.ptr}
        return gpu.current

    with handle.on(other):
        assert target() is other
        with handle.on(third):
            assert target() is third
        assert target() is other
    assert target() is handle.stream
    with pytest.raises(ZeroDivisionError), handle.on(other):
        raise ZeroDivisionError
    assert target() is handle.stream


def test_a_forked_stream_waits_for_the_main_one_when_work_goes_aside(gpu):
    aside, main = Handle(), Handle()
    with aside.fork(main):
        assert gpu.current is aside.stream
        assert gpu.events == [f"{aside.stream.ptr} waits for event of {main.stream.ptr}"]
    assert gpu.current is main.stream
    with pytest.raises(ZeroDivisionError), aside.fork(main):
        raise ZeroDivisionError
    assert gpu.current is main.stream


def test_the_main_stream_waits_for_the_other_when_they_join(gpu):
    aside, main = Handle(), Handle()
    main.join(aside)
    assert gpu.events == [f"{main.stream.ptr} waits for event of {aside.stream.ptr}"]


def test_errors_of_earlier_work_appear_when_the_handle_waits(gpu, errors):
    handle = Handle()
    handle.synchronize()
    assert gpu.events == [f"{handle.stream.ptr} is waited for"]
    gpu.problem = errors.runtime(700, "cudaErrorIllegalAddress: an illegal access")
    with pytest.raises(DeviceError, match="waiting for the GPU: cudaErrorIllegalAddress") as raised:
        handle.synchronize()
    assert raised.value.sticky


def enter(manager):
    with manager:
        pass


CALLS = {
    "check": Handle.check,
    "synchronize": Handle.synchronize,
    "on": lambda handle: enter(handle.on(handle.stream)),
    "fork": lambda handle: enter(handle.fork(handle)),
    "join": lambda handle: handle.join(handle),
    "close": Handle.close,
}


@pytest.mark.parametrize("call", CALLS)
def test_another_thread_is_refused_when_it_uses_the_handle(gpu, call):
    handle = Handle()
    with ThreadPoolExecutor(1) as other:
        problem = other.submit(CALLS[call], handle).exception()
    assert isinstance(problem, WrongThread)
    assert gpu.events == []
    CALLS[call](handle)


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"close"}))
def test_a_closed_handle_is_a_bug_when_used(gpu, call):
    handle = Handle()
    handle.close()
    with pytest.raises(AssertionError, match="bug: the handle is closed"):
        CALLS[call](handle)
