import pytest

from lenet.cuda.graphs import Convolution
from trainer.bounds import first_filter_fits


@pytest.mark.parametrize(
    ("image", "filters", "fits"),
    [
        ((1, 28, 28, 1), (32, 5, 5, 1), True),
        ((1, 28, 28, 8), (32, 5, 5, 8), False),
        ((1, 28, 28, 1), (32, 7, 7, 1), True),
        ((1, 28, 28, 1), (32, 7, 8, 1), False),
        ((1, 200, 200, 1), (32, 5, 5, 1), False),
    ],
)
def test_the_first_filters_kernel_takes_one_channel_and_what_is_small(image, filters, fits):
    assert first_filter_fits(Convolution("forward", "fp32", image, filters)) == fits
