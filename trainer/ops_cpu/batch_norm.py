"""Batch norm of each channel or unit, the first axis of an array, with its gradient, on NumPy.

The caller keeps the running mean and variance.

Source: Ioffe & Szegedy 2015, "Batch Normalization", alg. 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lenet.reference import Array
from trainer.ops import EPSILON


class Standardized(NamedTuple):
    """Saved for the gradient."""

    normal: Array  # mean 0, variance 1: (k, m)
    scale: Array  # gamma / standard deviation, (k,)


class Normalized(NamedTuple):
    """y, and the batch's mean and variance (k,).

    `variance` is the unbiased estimate, a sum divided by m - 1; y was computed with the biased one,
    a sum divided by m.
    """

    y: Array
    mean: Array
    variance: Array
    saved: Standardized


def batch_norm(x: Array, gamma: Array, beta: Array) -> Normalized:
    """Normalize over all axes of x but the first; gamma and beta (k,)."""
    flat = x.reshape(len(x), -1)
    mean = flat.mean(axis=1)
    normal = flat - mean[:, np.newaxis]
    m = flat.shape[1]
    variance = np.vecdot(normal, normal) / m
    inverse = 1 / np.sqrt(variance + EPSILON)
    normal *= inverse[:, np.newaxis]
    y = normal * gamma[:, np.newaxis]
    y += beta[:, np.newaxis]
    saved = Standardized(normal, gamma * inverse)
    return Normalized(y.reshape(x.shape), mean, variance * (m / max(m - 1, 1)), saved)


def batch_norm_backward(dy: Array, saved: Standardized) -> tuple[Array, Array, Array]:
    """(dx, dgamma, dbeta), through the batch's mean and variance, m values in each.

    dx = gamma / sigma (dy - sum(dy) / m - normal sum(dy normal) / m).
    """
    normal, scale = saved
    flat = dy.reshape(len(dy), -1)
    m = flat.shape[1]
    dbeta = flat.sum(axis=1)
    dgamma = np.vecdot(flat, normal)
    dx = normal * (-dgamma / m)[:, np.newaxis]
    dx += flat
    dx -= (dbeta / m)[:, np.newaxis]
    dx *= scale[:, np.newaxis]
    return dx.reshape(dy.shape), dgamma, dbeta


def affine(x: Array, scale: Array, shift: Array) -> Array:
    """Scale and shift each channel, the first axis: batch norm outside training."""
    y = x.reshape(len(x), -1) * scale[:, np.newaxis]
    y += shift[:, np.newaxis]
    return y.reshape(x.shape)


def scale_and_shift(gamma: Array, beta: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """The s and beta - s m of `trainer.export`, in float64; all of shape (k,)."""
    wide = [np.asarray(value, np.float64) for value in (gamma, beta, mean, variance)]
    scale = wide[0] / np.sqrt(wide[3] + EPSILON)
    return scale, wide[1] - scale * wide[2]
