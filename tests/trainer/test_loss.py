import numpy as np
import pytest

from trainer.loss import SoftmaxCrossEntropy
from trainer.ops_cpu import CpuOps


def test_the_loss_of_equal_logits_is_the_logarithm_of_the_classes(digits, run_of):
    ops = CpuOps(np.float64)
    progress = ops.start(run_of(digits(2, 0), 2, [0.1]))
    loss = SoftmaxCrossEntropy(ops)
    loss.forward(np.zeros((10, 2)), np.array([0, 9], np.uint8), progress)
    losses, hits = ops.losses(progress, 0, 1)
    assert losses.item() == pytest.approx(np.log(10))
    assert hits.item() == 1
    dlogits = loss.backward()
    expected = np.full((10, 2), 0.05)
    expected[[0, 9], [0, 1]] -= 0.5
    np.testing.assert_allclose(dlogits, expected)
