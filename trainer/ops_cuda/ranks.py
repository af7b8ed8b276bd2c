"""Several GPUs of one host training one network: sums over all of them, by NCCL.

One rank is one thread with its own GPU. The sums run on a stream of their own, one after another
in the same order on every rank, so that the rest of the backward pass runs meanwhile. It refuses
to span hosts.
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
    """This rank, number `rank` of `size`, among those that were given the same `identity`.

    Every rank must make its own, and all at once: NCCL waits for the last of them. `meeting` is a
    barrier of all ranks' threads.

    Raises:
        DeviceError: NCCL cannot be set up.
    """

    def __init__(self, identity: bytes, rank: int, size: int, meeting: Barrier) -> None:
        self.rank, self.size = rank, size
        self.meet = meeting.wait
        self._nccl = nccl = _nccl()
        with translated(f"joining {size} GPUs"):
            self._communicator = nccl.NcclCommunicator(size, identity, rank)
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pending = False
        self._asked, self._stopped = Event(), Event()
        # NCCL connects the GPUs at the first sum, which must not be one in a capture.
        self.sum(cupy.zeros(1, cupy.float32))
        cupy.cuda.get_current_stream().synchronize()

    def start_sum(self, arrays: Sequence[Any], *after: Any) -> None:
        """Add the arrays up over all ranks, in place, behind what those streams hold.

        arrays: float32, float16 or int32, contiguous.

        Raises:
            DeviceError: NCCL refused, or the ranks were told to stop.
        """
        self.check()
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

    def finish(self, before: Any) -> None:
        """Whatever is queued on `before` from now on sees the sums."""
        if self._pending:
            before.wait_event(self._stream.record())
            self._pending = False

    def sum(self, array: Any) -> Any:
        """The array added up over all ranks, as another one."""
        total = array.copy()
        stream = cupy.cuda.get_current_stream()
        self.start_sum([total], stream)
        self.finish(stream)
        return total

    def ask(self) -> None:
        """Let all ranks end at the next `agree`; any thread may, of any rank.

        Where every rank is well this is the quick way: what an abort leaves queued, each sum for
        itself, takes seconds to find that it was aborted.
        """
        self._asked.set()

    def agree(self) -> None:
        """Go on if no rank was asked to end; each must call it at the same step. Waits.

        Raises:
            DeviceError: one was.
        """
        if int(self.sum(cupy.full(1, self._asked.is_set(), cupy.int32))[0]):
            raise DeviceError(f"rank {self.rank} of {self.size} was asked to end")

    def check(self) -> None:
        """Refuse what was summed since the ranks were told to stop: an aborted sum is any number.

        Raises:
            DeviceError: they were.
        """
        if self._stopped.is_set():
            raise DeviceError(f"rank {self.rank} of {self.size} was told to stop")

    def stop(self) -> None:
        """Let this rank end in an error; any thread may. Every rank must be told before one aborts.

        Aborted, NCCL waits for nobody any more and says nothing, so that a rank would go on alone.
        """
        self._stopped.set()

    def abort(self) -> None:
        """Let this rank go on to its error instead of waiting for the others; any thread may.

        Returns once the graphs with its sums are gone.
        """
        self._communicator.abort()

    def close(self) -> None:
        """Leave; every rank must, and nothing that was captured may be left."""
        if not self._stopped.is_set():
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
