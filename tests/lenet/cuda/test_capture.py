from __future__ import annotations

import pytest

from lenet.cuda.capture import captured


class Stream:
    """Counts captures; ending one that failed raises, as CUDA does."""

    def __init__(self):
        self.capturing = self.failed = False

    def begin_capture(self):
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        if self.failed:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("invalidated", [False, True])
def test_a_capture_is_ended_and_the_error_raised_when_what_is_captured_fails(error, invalidated):
    stream = Stream()

    def queue():
        assert stream.capturing
        stream.failed = invalidated
        raise error("ours")

    with pytest.raises(error, match="ours"):
        captured(queue, stream)
    assert not stream.capturing
