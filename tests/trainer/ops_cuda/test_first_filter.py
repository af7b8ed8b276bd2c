import pytest

from lenet.cuda.graphs import Convolution
from trainer.ops_cuda.first_filter import fits


@pytest.mark.parametrize(
    ("image", "filters", "expected"),
    [
        ((1, 28, 28, 1), (32, 5, 5, 1), True),
        ((1, 28, 28, 8), (32, 5, 5, 8), False),
        ((1, 28, 28, 1), (32, 7, 7, 1), True),
        ((1, 28, 28, 1), (32, 7, 8, 1), False),
        ((1, 200, 200, 1), (32, 5, 5, 1), False),
    ],
)
def test_the_kernel_supports_one_channel_and_small_filters_and_images(image, filters, expected):
    assert fits(Convolution("forward", "fp32", image, filters)) == expected
