"""Every error that `lenet` raises on purpose.

    LeNetError
    ├── InvalidModel            an impossible network, or an unknown name
    ├── InvalidWeightFile       a weight file that must not be served: which file, which tensor, why
    ├── BackendUnavailable      the requested backend cannot run on this machine
    ├── GoldenMismatch          the backend computes other logits than the trainer did
    ├── DeviceError             CUDA, cuDNN, cuBLAS or NCCL failed; `sticky` if the process is lost
    │   └── OutOfDeviceMemory   the device has too little memory left
    ├── WrongThread             an object bound to a thread was used from another one
    └── InvalidSettings         flags or variables are unknown, missing or invalid

A message says what happened, what was found, what was expected and what to do next.
"""


class LeNetError(Exception):
    """The root of the tree."""


class InvalidModel(LeNetError):
    """The described network cannot be built."""


class InvalidWeightFile(LeNetError):
    """The weight file is rejected; the message starts with its path."""


class BackendUnavailable(LeNetError):
    """The backend cannot run here: `reason`, and in the message also what to do."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self.reason = reason


class GoldenMismatch(LeNetError):
    """The weights on this backend do not reproduce the golden logits of their file."""


class DeviceError(LeNetError):
    """A call to the device failed.

    After a sticky error (a fault inside a kernel, a hardware error) every later call of the process
    fails too, and only a new process helps. After any other the device works as before.
    """

    def __init__(self, message: str, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky


class OutOfDeviceMemory(DeviceError):
    """The device has too little memory left; not sticky."""


class WrongThread(LeNetError):
    """An object bound to a thread was used from another one."""


class InvalidSettings(LeNetError):
    """Flags or variables are unknown, missing or invalid; the message has a line for each."""
