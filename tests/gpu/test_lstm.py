"""The LSTM of the benchmark, on cuDNN and made of products, against NumPy's in float64."""

import pytest

from benchmarks.lstm import ALGORITHMS, PRECISIONS, allowed, differences
from lenet.cuda.device import Handle


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_outputs_states_and_gradients_agree_with_float64(precision, algorithm):
    handle = Handle()
    try:
        found = differences(handle, precision, algorithm)
    finally:
        handle.close()
    for version, by_result in found.items():
        for what, difference in by_result.items():
            assert difference <= allowed(what, precision), f"{version}: {what}"
