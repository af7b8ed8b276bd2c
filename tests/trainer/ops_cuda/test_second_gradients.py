from dataclasses import replace

import pytest

from lenet.cuda.device import Limits
from lenet.cuda.graphs import Convolution
from trainer.ops_cuda.second_gradients import InputGradient, WeightGradient

HOPPER, TURING = Limits(90, 232_448, 132), Limits(75, 65_536, 40)
LENET = Convolution("forward", "fp16", (256, 12, 12, 32), (64, 5, 5, 32))


def supported(forward, limits=HOPPER, channels=(20, 50)):
    inputs, outputs = channels
    return (
        InputGradient.of(forward, inputs, outputs, limits) is not None,
        WeightGradient.of(forward, inputs, limits) is not None,
    )


def test_the_kernels_support_the_second_convolution_of_lenet_and_fill_the_gpu():
    assert supported(LENET) == (True, True)
    blocks, parts = WeightGradient.of(LENET, 20, HOPPER).grid(HOPPER)
    assert 120 <= blocks * parts <= HOPPER.multiprocessors


@pytest.mark.parametrize(
    "forward",
    [
        replace(LENET, precision="fp32"),
        replace(LENET, precision="tf32"),
        replace(LENET, stride=(2, 1)),
        replace(LENET, dilation=(1, 2)),
        replace(LENET, padding=(5, 0)),
        replace(LENET, image=(256, 28, 28, 1), filters=(32, 5, 5, 1)),
        replace(LENET, image=(256, 100, 100, 64), filters=(64, 5, 5, 64)),
    ],
)
def test_cudnn_computes_what_the_kernels_do_not_support(forward):
    assert supported(forward, channels=(forward.filters[3], forward.filters[0])) == (False, False)


def test_the_kernels_need_an_ampere_gpu_and_its_shared_memory():
    assert supported(LENET, TURING) == (False, False)
    assert supported(LENET, HOPPER._replace(shared_bytes=48 << 10)) == (False, False)


@pytest.mark.parametrize("shared_bytes", range(64 << 10, 233_000, 16 << 10))
def test_the_kernels_stay_within_the_shared_memory(shared_bytes):
    limits = HOPPER._replace(shared_bytes=shared_bytes)
    found = InputGradient.of(LENET, 20, 50, limits), WeightGradient.of(LENET, 20, limits)
    assert all(one is None or one.shared_bytes() <= shared_bytes for one in found)
