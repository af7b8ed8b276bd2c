"""The LSTM in NumPy, forward and backward, in the precision of its arrays: float64 in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Layer:
    """The parameters of one layer, or their gradients: see the package."""

    w: Floats
    r: Floats
    b: Floats


def random_layers(layers: int, inputs: int, hidden: int, seed: int = 0) -> list[Layer]:
    """Uniform in +- 1 / sqrt(hidden), as PyTorch initializes them: float64."""
    random, most = np.random.default_rng(seed), hidden**-0.5
    return [
        Layer(
            random.uniform(-most, most, (4 * hidden, inputs if number == 0 else hidden)),
            random.uniform(-most, most, (4 * hidden, hidden)),
            random.uniform(-most, most, 4 * hidden),
        )
        for number in range(layers)
    ]


def flop(steps: int, layers: int, inputs: int, hidden: int, batch: int) -> int:
    """Multiplications and additions of the matrix products of a forward pass."""
    sizes = (inputs, *[hidden] * (layers - 1))
    return sum(2 * steps * batch * 4 * hidden * (size + hidden) for size in sizes)


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass's results: `y` (t, n, h) of the last layer, final `h` and `c` (l, n, h)."""

    y: Floats
    h: Floats
    c: Floats
    saved: list[list[tuple[Floats, ...]]]


def forward(layers: Sequence[Layer], x: Floats, h: Floats, c: Floats) -> Forward:
    """The forward pass of x (t, n, inputs) from the states `h` and `c` (l, n, h)."""
    saved: list[list[tuple[Floats, ...]]] = []
    last_h, last_c = h.copy(), c.copy()
    for number, layer in enumerate(layers):
        outputs, steps = [], []
        hidden, cell = h[number], c[number]
        for one in x:
            gates = one @ layer.w.T + hidden @ layer.r.T + layer.b
            i, f, g, o = np.split(gates, 4, axis=1)
            i, f, o = (1 / (1 + np.exp(-gate)) for gate in (i, f, o))
            g = np.tanh(g)
            before_h, before_c = hidden, cell
            cell = f * cell + i * g
            hidden = o * np.tanh(cell)
            steps.append((one, before_h, before_c, i, f, g, o, cell))
            outputs.append(hidden)
        last_h[number], last_c[number] = hidden, cell
        saved.append(steps)
        x = np.stack(outputs)
    return Forward(x, last_h, last_c, saved)


def backward(layers: Sequence[Layer], done: Forward, dy: Floats) -> tuple[Floats, list[Layer]]:
    """The gradients of x and of the parameters, of a loss whose gradient is `dy` (t, n, h)."""
    gradients: list[Layer] = []
    for layer, steps in zip(reversed(layers), reversed(done.saved), strict=True):
        dw, dr, db = (np.zeros_like(one) for one in (layer.w, layer.r, layer.b))
        dx: list[Floats] = []
        dh = np.zeros_like(dy[0])
        dc = np.zeros_like(dy[0])
        for one, given in zip(reversed(steps), dy[::-1], strict=True):
            x, before_h, before_c, i, f, g, o, cell = one
            dh = dh + given
            tanh = np.tanh(cell)
            dc = dc + dh * o * (1 - tanh**2)
            gates = np.concatenate(
                (
                    dc * g * i * (1 - i),
                    dc * before_c * f * (1 - f),
                    dc * i * (1 - g**2),
                    dh * tanh * o * (1 - o),
                ),
                axis=1,
            )
            dw += gates.T @ x
            dr += gates.T @ before_h
            db += gates.sum(axis=0)
            dx.append(gates @ layer.w)
            dh, dc = gates @ layer.r, dc * f
        gradients.append(Layer(dw, dr, db))
        dy = np.stack(dx[::-1])
    return dy, gradients[::-1]
