"""The matrices of Winograd's convolution, which needs fewer multiplications than the direct one.

F(m, r) computes m neighbouring outputs of a filter with r taps from m + r - 1 inputs:

    y = A^T ((G g) * (B^T d))        d: m + r - 1 inputs, g: r taps, y: m outputs

The product in the middle is elementwise: m + r - 1 multiplications instead of m r. In two
dimensions each matrix is applied to columns and rows: a tile of 4 x 8 outputs of a 5 x 5 filter
needs 8 x 12 = 96 multiplications instead of 800. G g is computed once, and the sum over the input
channels is taken between the transformations, where each of the 96 positions is a matrix product.

Source: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", 2015, section 4;
the matrices are made by the method of Toom and Cook.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FEW_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)
_MANY_POINTS = (0.0, 1.0, -1.0, 1.5, -1.5, 2 / 3, -2 / 3, 3.0, -3.0, 1 / 3, -1 / 3)
"""Points of evaluation, besides infinity. Rounding errors depend on them: among 6,188 sets of 11
points these were within 0.1 % of the best. With the first 7 of them, errors are more
than twice those with the few."""

MAX_INPUTS = len(_MANY_POINTS) + 1
"""The largest m + r - 1."""


class Matrices(NamedTuple):
    """The matrices of F(m, r), float64."""

    a_t: NDArray[np.float64]
    """A^T (m, m + r - 1)."""
    g: NDArray[np.float64]
    """G (m + r - 1, r)."""
    b_t: NDArray[np.float64]
    """B^T (m + r - 1, m + r - 1)."""


def matrices(m: int, r: int) -> Matrices:
    """The matrices of F(m, r), m + r - 1 <= `MAX_INPUTS`.

    Two polynomials with m and r coefficients are multiplied by evaluating both, multiplying the
    values and interpolating. A filter is the transpose of that product.
    """
    inputs = m + r - 1
    a, g, interpolated = (_evaluation(inputs, coefficients) for coefficients in (m, r, inputs))
    b = np.linalg.inv(interpolated).astype(np.float64, copy=False)
    # A factor of one matrix may be moved to another. Numbers near 1 round best, and a power of two
    # rounds nothing.
    for matrix in (a, b.T):
        factors = np.exp2(np.round(np.log2(np.abs(matrix).max(axis=1, keepdims=True))))
        matrix /= factors
        g *= factors
    return Matrices(a.T, g, b.T)


def _evaluation(points: int, coefficients: int) -> NDArray[np.float64]:
    """(points, coefficients): a polynomial's values from its coefficients, lowest power first.

    Its value at infinity is its highest coefficient.
    """
    finite_points = _FEW_POINTS if points <= len(_FEW_POINTS) + 1 else _MANY_POINTS
    finite = np.vander(finite_points[: points - 1], coefficients, increasing=True)
    return np.vstack([finite, np.eye(coefficients)[-1]])
