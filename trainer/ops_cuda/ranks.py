"""Several GPUs of one host that train one network: all-reduce through NCCL.

A rank is a thread with its own GPU. All-reduces run on a stream of their own, in the same order on
every rank, beside the rest of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier, Event
from typing import Any

import cupy

from lenet.cuda.device import translated
from lenet.errors import BackendUnavailable, DeviceError
from lenet.nvtx import span


class Ranks:
    """Rank `rank` among the `size` ranks with the same `identity`.

    All ranks' threads must construct theirs at the same time: NCCL waits for the last one.
    `barrier` is shared by these threads; once `stopping` is set, all ranks stop at the same step.

    Raises:
        DeviceError: NCCL cannot be set up.
    """

    def __init__(
        self, identity: bytes, rank: int, size: int, barrier: Barrier, stopping: Event
    ) -> None:
        self.rank, self.size = rank, size
        self.barrier = barrier.wait
        self._stopping, self._aborted = stopping, Event()
        self._nccl = nccl = _nccl()
        with translated(f"joining {size} GPUs"):
            self._communicator = nccl.NcclCommunicator(size, identity, rank)
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pending = False
        # NCCL connects the GPUs at the first all-reduce, which must not happen in a capture.
        self.all_reduce(cupy.zeros(1, cupy.float32))
        cupy.cuda.get_current_stream().synchronize()

    def start_all_reduce(self, arrays: Sequence[Any], *after: Any) -> None:
        """Sum the arrays over all ranks, in place, after the work queued on the streams `after`.

        arrays: float32, float16 or int32, contiguous.

        Raises:
            DeviceError: NCCL failed, or this rank was aborted.
        """
        self.check_abort()
        for stream in after:
            self._stream.wait_event(stream.record())
        nccl = self._nccl
        types = {
            "float32": nccl.NCCL_FLOAT32,
            "float16": nccl.NCCL_FLOAT16,
            "int32": nccl.NCCL_INT32,
        }
        with span("all-reduce"), translated("summing over the GPUs"):
            nccl.groupStart()
            for array in arrays:
                address = array.data.ptr
                kind = types[array.dtype.name]
                self._communicator.allReduce(
                    address, address, array.size, kind, nccl.NCCL_SUM, self._stream.ptr
                )
            nccl.groupEnd()
        self._pending = True

    def finish_all_reduce(self, stream: Any) -> None:
        """Let the work queued on `stream` from now on wait for the sums."""
        if self._pending:
            stream.wait_event(self._stream.record())
            self._pending = False

    def all_reduce(self, array: Any) -> Any:
        """A new array: the sum of `array` over all ranks, on the current stream."""
        total = array.copy()
        stream = cupy.cuda.get_current_stream()
        self.start_all_reduce([total], stream)
        self.finish_all_reduce(stream)
        return total

    def check_stop(self) -> None:
        """Stop if any rank sees `stopping` set; each rank must call it at the same step. Waits.

        An abort would do, too, but NCCL takes seconds to abort what is queued.

        Raises:
            DeviceError: `stopping` is set.
        """
        if int(self.all_reduce(cupy.full(1, self._stopping.is_set(), cupy.int32))[0]):
            raise DeviceError(f"rank {self.rank} of {self.size} was asked to stop")

    def check_abort(self) -> None:
        """Reject sums that may have been aborted: they hold arbitrary numbers.

        Raises:
            DeviceError: `mark_aborted` was called.
        """
        if self._aborted.is_set():
            raise DeviceError(f"rank {self.rank} of {self.size} was aborted")

    def mark_aborted(self) -> None:
        """Make this rank fail at its next check; any thread may call it.

        All ranks must be marked before the first is aborted: an aborted all-reduce returns without
        an error, so an unmarked rank would go on alone.
        """
        self._aborted.set()

    def abort(self) -> None:
        """Abort this rank's all-reduces, which then wait for no other rank; any thread may call it.

        Returns once the graphs that hold its all-reduces are gone.
        """
        self._communicator.abort()

    def close(self) -> None:
        """Leave NCCL; every rank must, after its captured graphs are gone."""
        if not self._aborted.is_set():
            self._communicator.destroy()


def new_identity() -> bytes:
    """An identity for one group of ranks.

    Raises:
        BackendUnavailable: NCCL is not installed.
    """
    identity: bytes = _nccl().get_unique_id()
    return identity


def _nccl() -> Any:
    """CuPy's NCCL module; without the library it is missing, or present but not `available`."""
    try:
        from cupy.cuda import nccl
    except (ImportError, AttributeError):
        nccl = None
    if nccl is None or not nccl.available:
        raise BackendUnavailable(
            "libnccl.so.2 cannot be loaded, and several GPUs need it: python -m pip install "
            "nvidia-nccl-cu12 (or -cu13), or add its folder to LD_LIBRARY_PATH"
        )
    return nccl
