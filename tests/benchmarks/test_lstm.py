"""The LSTM in NumPy: its gradients against differences, and its arithmetic by hand."""

import numpy as np
import pytest

from benchmarks.recurrent import reference
from benchmarks.recurrent.reference import Layer


def loss(layers, x, h, c, weight):
    return float((reference.forward(layers, x, h, c).y * weight).sum())


def test_the_gradients_are_those_of_differences():
    random = np.random.default_rng(3)
    layers = reference.random_layers(2, 3, 4)
    x, h, c = (random.normal(size=shape) for shape in ((5, 2, 3), (2, 2, 4), (2, 2, 4)))
    weight = random.normal(size=(5, 2, 4))
    done = reference.forward(layers, x, h, c)
    dx, gradients = reference.backward(layers, done, weight)
    arrays = [(x, dx)]
    for layer, gradient in zip(layers, gradients, strict=True):
        arrays += [(getattr(layer, part), getattr(gradient, part)) for part in ("w", "r", "b")]
    for array, gradient in arrays:
        for _ in range(10):
            place = tuple(random.integers(0, size) for size in array.shape)
            kept, values = array[place], []
            for step in (1e-6, -1e-6):
                array[place] = kept + step
                values.append(loss(layers, x, h, c, weight))
            array[place] = kept
            assert gradient[place] == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


def test_a_step_is_what_the_formulas_say():
    layer = Layer(np.zeros((4, 1)), np.zeros((4, 1)), np.array([0.0, np.log(3), np.inf, np.log(3)]))
    done = reference.forward(
        [layer], np.zeros((1, 1, 1)), np.zeros((1, 1, 1)), np.full((1, 1, 1), 2.0)
    )
    # i = 1/2, f = 3/4, g = 1, o = 3/4: c = 3/4 * 2 + 1/2 * 1
    assert done.c.item() == pytest.approx(2.0)
    assert done.y.item() == pytest.approx(0.75 * np.tanh(2.0))


def test_the_operations_are_those_of_the_products():
    assert reference.flop(512, 4, 512, 512, 32) == 512 * 4 * 2 * 2 * 32 * 512 * 2048
