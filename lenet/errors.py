"""Every error that `lenet` raises on purpose.

    LeNetError
    ├── InvalidModel            a network that cannot exist, or a name nobody knows
    ├── InvalidWeightFile       a weight file that must not be served: which file, which tensor, why
    ├── BackendUnavailable      the asked-for backend cannot run on this machine
    ├── GoldenMismatch          the backend computes other logits than the trainer saw
    ├── DeviceError             CUDA, cuDNN, cuBLAS or NCCL failed; `sticky` if the process is lost
    │   └── OutOfDeviceMemory   the device has too little memory left
    └── WrongThread             an execution context used outside the thread that made it

A message says what happened, what was found, what was expected and what to do next.
"""


class LeNetError(Exception):
    """The root of the tree; catching it catches what `lenet` foresaw and nothing else."""


class InvalidModel(LeNetError):
    """The described network cannot be built."""


class InvalidWeightFile(LeNetError):
    """The weight file is refused; the message starts with its path."""


class BackendUnavailable(LeNetError):
    """The backend cannot run here."""


class GoldenMismatch(LeNetError):
    """The weights on this backend do not reproduce the trainer's golden logits."""


class DeviceError(LeNetError):
    """A call to the device failed.

    After a sticky one (a fault inside a kernel, a hardware error) every later call of the process
    fails too: only a new process helps. After any other the device is as it was.
    """

    def __init__(self, message: str, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky


class OutOfDeviceMemory(DeviceError):
    """The device has too little memory left; not sticky."""


class WrongThread(LeNetError):
    """A thread-bound object was used from another thread."""
