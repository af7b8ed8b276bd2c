"""Several GPUs of one host training one network: sums over all of them, by NCCL.

One rank is one thread with its own GPU. The sums run on a stream of their own, one after another
in the same order on every rank, so that the rest of the backward pass runs meanwhile. It refuses
to span hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy

from lenet.cuda.handle import translated
from lenet.errors import BackendUnavailable
from lenet.nvtx import span


class Ranks:
    """This rank, number `rank` of `size`, among those that were given the same `identity`.

    Every rank must make its own, and all at once: NCCL waits for the last of them.

    Raises:
        DeviceError: NCCL cannot be set up.
    """

    def __init__(self, identity: bytes, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._nccl = nccl = _nccl()
        with translated(f"joining {size} GPUs"):
            self._communicator = nccl.NcclCommunicator(size, identity, rank)
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pending = False
        # NCCL connects the GPUs at the first sum, which must not be one in a capture.
        self.sum(cupy.zeros(1, cupy.float32))
        cupy.cuda.get_current_stream().synchronize()

    def start_sum(self, arrays: Sequence[Any], *after: Any) -> None:
        """Add the float arrays up over all ranks, in place, behind what those streams hold."""
        for stream in after:
            self._stream.wait_event(stream.record())
        types = {"float32": self._nccl.NCCL_FLOAT32, "float16": self._nccl.NCCL_FLOAT16}
        with span("all-reduce"), translated("summing over the GPUs"):
            self._nccl.groupStart()
            for array in arrays:
                address = array.data.ptr
                kind = types[array.dtype.name]
                self._communicator.allReduce(
                    address, address, array.size, kind, self._nccl.NCCL_SUM, self._stream.ptr
                )
            self._nccl.groupEnd()
        self._pending = True

    def finish(self, before: Any) -> None:
        """Whatever is queued on `before` from now on sees the sums."""
        if self._pending:
            before.wait_event(self._stream.record())
            self._pending = False

    def sum(self, array: Any) -> Any:
        """The float array added up over all ranks, as another one."""
        total = array.copy()
        stream = cupy.cuda.get_current_stream()
        self.start_sum([total], stream)
        self.finish(stream)
        return total

    def abort(self) -> None:
        """Let the other ranks go on to their error instead of waiting for this one."""
        self._communicator.abort()

    def close(self) -> None:
        """Leave; every rank must."""
        self._communicator.destroy()


def new_identity() -> bytes:
    """What one rank makes and all are given.

    Raises:
        BackendUnavailable: NCCL is not installed.
    """
    identity: bytes = _nccl().get_unique_id()
    return identity


def _nccl() -> Any:
    """CuPy's door to NCCL, which is there and locked where the library is missing."""
    try:
        from cupy.cuda import nccl
    except (ImportError, AttributeError):
        nccl = None
    if nccl is None or not nccl.available:
        raise BackendUnavailable(
            "libnccl.so.2 cannot be loaded, and several GPUs need it: pip install nvidia-nccl-cu12 "
            "(or -cu13), or put its folder into LD_LIBRARY_PATH"
        )
    return nccl
