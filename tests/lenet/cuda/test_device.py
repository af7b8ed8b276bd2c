from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lenet.cuda.device import Handle, check, devices, load_cudnn, translated, usable
from lenet.errors import BackendUnavailable, DeviceError, OutOfDeviceMemory

INSTALL = (
    "install it in a checkout with .venv/bin/python -m pip install --constraint constraints.txt "
    "-e '.[cuda{0}]', with a wheel as python -m pip install "
    "'lenet_serve-VERSION-py3-none-any.whl[cuda{0}]', in Docker with --target service-cuda{0}"
)
INSTALL_12 = INSTALL.format(12)
INSTALL_ANY = f"{INSTALL.format(13)}; where nvidia-smi says CUDA 12, take cuda12"


class CudaError(RuntimeError):
    """Stands in for CuPy's errors of the runtime and the driver."""

    def __init__(self, status, message="cudaError: something happened"):
        super().__init__(message)
        self.status = status


class OutOfMemory(MemoryError):
    pass


class NotSupported(Exception):
    pass


def found(value):
    if isinstance(value, Exception):
        raise value
    return value


@pytest.fixture
def machine(monkeypatch):
    """A machine with one GPU, a driver, CuPy 14 and cuDNN 9; an error is raised when asked for."""
    machine = SimpleNamespace(count=1, driver=13_000, version=91_900, text="9.19.0")
    machine.memory = 1_500_000, 80_400_000
    machine.capabilities = [(9, 0)]
    cupy, cudnn = ModuleType("cupy"), ModuleType("cudnn")
    cupy.cuda = ModuleType("cupy.cuda")
    cupy.cuda.cublas = object()
    cupy.cuda.runtime = SimpleNamespace(
        CUDARuntimeError=CudaError,
        getDeviceCount=lambda: found(machine.count),
        runtimeGetVersion=lambda: 13_020,
        driverGetVersion=lambda: machine.driver,
        memGetInfo=lambda: found(machine.memory),
        deviceGetAttribute=lambda which, one: found(machine.capabilities[one])[which - 75],
        getDeviceProperties=lambda one: {"name": b"Tesla V100"},
    )
    cupy.cuda.driver = SimpleNamespace(CUDADriverError=CudaError)
    cupy.cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemory)
    cupy.cuda.compiler = SimpleNamespace(CompileException=NotSupported)
    cudnn.cudnnGraphNotSupportedError = NotSupported
    cudnn.backend_version = lambda: found(machine.version)
    cudnn.backend_version_string = lambda: machine.text
    for name, module in {"cupy": cupy, "cupy.cuda": cupy.cuda, "cudnn": cudnn}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return machine


def message(load=devices):
    """The message of `load`, without line ends."""
    with pytest.raises(BackendUnavailable) as caught:
        load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"count": CudaError(35), "driver": 0},
            "there is no NVIDIA driver, and CuPy needs one for CUDA 13; install it (nvidia-smi "
            "must list the GPU), or use the cpu device",
        ),
        (
            {"count": CudaError(35), "driver": 12_040},
            "the NVIDIA driver is for CUDA 12.4, and CuPy needs one for CUDA 13; install a newer "
            f"driver, or CuPy for this one: {INSTALL_12}",
        ),
        (  # there is no extra for it
            {"count": CudaError(35), "driver": 11_080},
            "the NVIDIA driver is for CUDA 11.8, and CuPy needs one for CUDA 13; install a newer "
            "driver",
        ),
        (  # its extra is installed
            {"count": CudaError(35), "driver": 13_000},
            "the NVIDIA driver is for CUDA 13.0, and CuPy needs one for CUDA 13; install a newer "
            "driver",
        ),
        *(
            (
                {"count": count},
                "there is no NVIDIA GPU; nvidia-smi must list one, or use the cpu device",
            )
            for count in (0, CudaError(100))
        ),
        (
            {"count": CudaError(805, "cudaErrorMpsConnectionFailed: no\n  connection")},
            "the GPUs cannot be counted (cudaErrorMpsConnectionFailed: no connection); see "
            "nvidia-smi, or use the cpu device",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(machine, changes, expected):
    vars(machine).update(changes)
    assert message() == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        *(
            (
                {"version": error("Unable to find symbol cudnnGetVersion")},
                "libcudnn.so.9 cannot be loaded (Unable to find symbol cudnnGetVersion); "
                f"add its folder to LD_LIBRARY_PATH, or {INSTALL_ANY}",
            )
            for error in (OSError, RuntimeError)
        ),
        (
            {"version": 8_907, "text": "8.9.7"},
            f"found cuDNN 8.9.7, expected major version 9; {INSTALL_ANY}",
        ),
        (
            {"version": 100_100, "text": "10.1.0"},
            f"found cuDNN 10.1.0, expected major version 9; {INSTALL_ANY}",
        ),
    ],
)
def test_a_cudnn_that_is_missing_or_too_old_is_named_when_it_is_needed(machine, changes, expected):
    assert load_cudnn() is sys.modules["cudnn"]
    vars(machine).update(changes)
    assert message(load_cudnn) == expected
    assert devices() == 1


@pytest.mark.parametrize(
    ("status", "sticky"),  # ECC, illegal address, launch failure, unknown; invalid value, ...
    [(214, True), (700, True), (719, True), (999, True), (1, False), (701, False), (900, False)],
)
def test_a_fault_of_the_context_is_sticky_and_a_failed_call_is_not(machine, status, sticky):
    problem = CudaError(status, "cudaErrorIllegalAddress: an illegal access")
    expected = pytest.raises(DeviceError, match=r"^running conv1: cudaErrorIllegal")
    with expected as raised, translated("running conv1"):
        raise problem
    assert raised.value.sticky == sticky
    assert raised.value.__cause__ is problem
    assert not isinstance(raised.value, OutOfDeviceMemory)


class NcclError(RuntimeError):
    status = 700  # not one of CUDA's


@pytest.mark.parametrize("problem", [NotSupported("no engine"), NcclError("NCCL_ERROR")], ids=repr)
def test_errors_of_other_libraries_are_translated_and_not_sticky(machine, problem):
    with pytest.raises(DeviceError) as raised, translated("preparing"):
        raise problem
    assert type(raised.value) is DeviceError
    assert str(raised.value) == f"preparing: {problem}"
    assert not raised.value.sticky


OLD = "GPU {} is a Tesla V100 of compute capability 7.0, expected 7.5 or above; use the cpu device"
LOST = CudaError(999, "cudaErrorUnknown: unknown error")
NO_ANSWER = f"GPU 0 does not answer ({LOST}); see nvidia-smi, or use the cpu device"


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [
        ([(8, 9), (7, 0), (7, 5)], (0, 2)),
        ([LOST, (9, 0)], (1,)),
        ([(7, 0), (6, 1)], OLD.format(0)),
        ([LOST, (7, 0)], NO_ANSWER),
    ],
)
def test_gpus_that_are_too_old_or_lost_are_left_out_and_named_where_there_is_no_other(
    machine, capabilities, found
):
    machine.count, machine.capabilities = len(capabilities), capabilities
    if isinstance(found, str):
        assert message(usable) == found
    else:
        assert usable() == found


def test_a_gpu_that_is_too_old_or_absent_cannot_be_opened(machine):
    machine.count, machine.capabilities = 2, [(8, 9), (7, 0)]
    check(0)
    for use in (check, Handle):
        assert message(lambda use=use: use(1)) == OLD.format(1)
        assert "there is no GPU 2, expected 0 to 1" in message(lambda use=use: use(2))
