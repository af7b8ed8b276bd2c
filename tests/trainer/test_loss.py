import numpy as np
import pytest

from trainer.loss import SoftmaxCrossEntropy
from trainer.ops_cpu import CpuOps


def test_the_loss_of_equal_logits_is_the_logarithm_of_the_classes():
    loss = SoftmaxCrossEntropy(CpuOps())
    labels = np.array([0, 9], np.uint8)
    assert loss.forward(np.zeros((10, 2)), labels) == pytest.approx(np.log(10))
    dlogits = loss.backward()
    expected = np.full((10, 2), 0.05)
    expected[[0, 9], [0, 1]] -= 0.5
    np.testing.assert_allclose(dlogits, expected)
