from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import cupy
import pytest

from lenet.cuda.device import Handle
from lenet.errors import BackendUnavailable, WrongThread


def enter(manager):
    with manager:
        pass


CALLS = {
    "check": Handle.check,
    "synchronize": Handle.synchronize,
    "cudnn": lambda handle: handle.cudnn,
    "cublas": lambda handle: handle.cublas,
    "cublas_lt": lambda handle: handle.cublas_lt,
    "on": lambda handle: enter(handle.on(handle.stream)),
    "fork": lambda handle: enter(handle.fork(handle)),
    "join": lambda handle: handle.join(handle),
    "close": Handle.close,
}


@pytest.mark.parametrize("call", CALLS)
def test_another_thread_cannot_use_the_handle(call):
    with Handle() as handle, ThreadPoolExecutor(1) as other:
        problem = other.submit(CALLS[call], handle).exception()
        assert isinstance(problem, WrongThread)
        CALLS[call](handle)
    if call != "close":
        with pytest.raises(AssertionError, match="bug: the handle is closed"):
            CALLS[call](handle)


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(BackendUnavailable, match=r"there is no GPU 99, expected 0 to \d"):
        Handle(99)


def test_work_goes_to_another_stream_inside_a_block_and_back():
    with Handle() as handle:
        a, b = (cupy.random.default_rng(1).standard_normal((64, 64), "f4") for _ in range(2))
        handle.synchronize()
        out = cupy.empty((64, 64), cupy.float32)
        other = cupy.cuda.Stream(non_blocking=True)
        with handle.on(other):
            assert cupy.cuda.get_current_stream() == other
            handle.cublas.product(a, b, out, "fp32")  # opened for the stream of the block
            other.synchronize()
            assert abs(out - a @ b).max() < 1e-4
        assert cupy.cuda.get_current_stream() == handle.stream
        with pytest.raises(ZeroDivisionError), handle.on(other):
            raise ZeroDivisionError
        assert cupy.cuda.get_current_stream() == handle.stream


def test_a_forked_handle_waits_for_the_main_one_and_the_main_one_when_they_join():
    with Handle() as side, Handle() as main:
        x = cupy.zeros(1 << 24, cupy.float32)
        for _ in range(50):
            x += 1
        with side.fork(main):
            assert cupy.cuda.get_current_stream() == side.stream
            x *= 2
        main.join(side)
        x += 1
        assert cupy.cuda.get_current_stream() == main.stream
        assert float(x[0]) == float(x[-1]) == 101
