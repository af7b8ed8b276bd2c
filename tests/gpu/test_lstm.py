"""The LSTM of the benchmark, on cuDNN and made of products, against NumPy's in float64."""

import pytest

from benchmarks.lstm import PRECISIONS, allowed, differences
from lenet.cuda.device import Handle


@pytest.mark.parametrize("precision", PRECISIONS)
def test_outputs_states_and_gradients_agree_with_float64(precision):
    handle = Handle()
    try:
        found = differences(handle, precision)
    finally:
        handle.close()
    for version, by_result in found.items():
        for what, difference in by_result.items():
            assert difference <= allowed(what, precision), f"{version}: {what}"
