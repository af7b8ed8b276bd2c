"""The temperature that makes confidence equal to accuracy."""

import numpy as np
import pytest

from lenet.model import named
from trainer.calibration import cooled, limit_reached, temperature
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps
from trainer.runs import evaluate


@pytest.mark.parametrize("expected", [0.5, 3.0])
def test_the_temperature_that_made_the_logits_is_found(expected):
    random = np.random.default_rng(3)
    honest = random.standard_normal((50_000, 5)) * 2
    cumulated = np.exp(honest).cumsum(axis=1)
    drawn = random.random((len(honest), 1)) * cumulated[:, -1:]
    labels = (drawn > cumulated).sum(axis=1).astype(np.uint8)
    logits = honest * expected
    found = temperature(logits, labels)
    assert found == pytest.approx(expected, rel=0.02)
    assert evaluate(logits / found, labels).calibration_error < 0.005


@pytest.mark.parametrize("count", [20, 2000])
def test_right_answers_alone_make_it_as_sure_as_their_number_allows(count):
    labels = np.arange(count, dtype=np.uint8) % 10
    found = temperature(4 * np.eye(10)[labels], labels)
    e = np.exp(4 / found)
    assert e / (e + 9) == pytest.approx((count + 1) / (count + 2), rel=1e-6)


@pytest.mark.parametrize(("right", "limit"), [(True, 0.25), (False, 4.0)])
def test_a_temperature_that_ends_at_its_limit_is_noticed(right, limit):
    logits = (0.5 if right else 5) * np.eye(4)
    labels = (np.arange(4) + (not right)) % 4
    assert limit_reached(temperature(logits, labels.astype(np.uint8))) == limit
    assert limit_reached(1.0) is None


def test_the_last_layer_takes_the_temperature():
    model = named("lenet")
    tensors = initial_tensors(model, np.random.default_rng(1))
    tensors["dense2.bias"] += np.arange(10, dtype=np.float32)
    images = np.random.default_rng(2).integers(0, 256, (20, 28, 28), np.uint8)
    logits, halved = (
        Network(model, one, CpuOps()).logits(images)
        for one in (tensors, cooled(model, tensors, 2.0))
    )
    np.testing.assert_allclose(halved, logits / 2, rtol=1e-6)
