"""Augmentation: each image is randomly rotated, scaled, sheared, shifted and deformed a little.

Bilinear, uint8 in and out, so that the network trains on the kind of image that it serves. There
are no flips and no large rotations: they would turn a 6 into a 9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, WIDTH, Images
from trainer.random import Purpose, philox, symmetric

AFFINE_DRAWS = 6
"""The numbers of an affine map: angle, shear, two scales, two shifts."""

CONTROLS = 7
"""Control points of the elastic displacement along an axis; the spline has 4 by 4 intervals."""


@dataclass(frozen=True, slots=True)
class WarpLimits:
    """The limits of a warp; each image draws uniformly between minus and plus each limit.

    `rotation` and `shear`, the slant of upright strokes, in degrees, `scale` as a share (0.1: from
    0.9 to 1.1, each axis by itself), `shift` in pixels, `elastic`, how far each control point of
    the spline is displaced along either axis, in pixels.
    """

    rotation: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    elastic: float = 0.0


def warp(images: Images, limits: WarpLimits, seed: int, step: int, first_row: int = 0) -> Images:
    """A new (n, 28, 28) with a random warp for each image; the outside of an image is 0.

    `first_row` is the row of images[0] in the whole batch of `step`. A warp depends only on seed,
    step and row.
    """
    draw = _draw(len(images), limits, seed, step, first_row)
    angle = math.radians(limits.rotation) * draw[0]
    shear = np.tan(math.radians(limits.shear) * draw[1])
    wide, high = 1 / (1 + limits.scale * draw[2:4])
    cos, sin = np.cos(angle), np.sin(angle)
    # Maps a pixel (y, x) of the result to its source: scale, rotation, shear.
    back = np.array([[cos * high, -sin * wide], [sin * high, cos * wide]])
    back[:, 0] += shear * back[:, 1]
    moved = (limits.shift * draw[4:AFFINE_DRAWS].T)[:, :, np.newaxis]
    if limits.elastic:
        moved = moved + _displacement(limits.elastic * draw[AFFINE_DRAWS:].T)
    return _sample(images, back.transpose(2, 0, 1), moved)


def _draw(n: int, limits: WarpLimits, seed: int, step: int, first_row: int) -> NDArray[np.float32]:
    """Numbers (draws, n) from -1 to 1: word i of counter (row, step, purpose, q) is 4 q + i."""
    count = AFFINE_DRAWS + (2 * CONTROLS**2 if limits.elastic else 0)
    rows = np.arange(first_row, first_row + n)[:, np.newaxis]
    words = philox(seed, rows, step, Purpose.AUGMENTATION, np.arange(-(-count // 4)))
    return symmetric(words).reshape(n, -1)[:, :count].T


def spline_basis(size: int) -> NDArray[np.float32]:
    """The weight of each control point at each of `size` pixels: (size, 7), rows sum to 1.

    Uniform cubic B-splines: a pixel lies in one interval and depends on four control points.
    """
    basis = np.zeros((size, CONTROLS), np.float32)
    for pixel in range(size):
        interval, rest = divmod(pixel * (CONTROLS - 3), size)
        f = rest / size
        basis[pixel, interval : interval + 4] = (
            (1 - f) ** 3 / 6,
            (3 * f**3 - 6 * f**2 + 4) / 6,
            (-3 * f**3 + 3 * f**2 + 3 * f + 1) / 6,
            f**3 / 6,
        )
    return basis


_ROWS, _COLUMNS = spline_basis(HEIGHT), spline_basis(WIDTH)


def _displacement(controls: NDArray[np.float32]) -> NDArray[np.float32]:
    """Displacements (n, 2, 784), y and x, of pixels from those of the control points (n, 98).

    Source: Rueckert et al. 1999, "Nonrigid Registration Using Free-Form Deformations".
    """
    n = len(controls)
    grid = controls.reshape(n, 2, CONTROLS, CONTROLS)
    displacement: NDArray[np.float32] = np.matmul(np.matmul(_ROWS, grid), _COLUMNS.T)
    return displacement.reshape(n, 2, -1)


def _sample(images: Images, back: NDArray[np.float32], moved: NDArray[np.float32]) -> Images:
    """Bilinear values at `back` (n, 2, 2) applied to each pixel, about the centre, plus `moved`.

    moved: (n, 2, 1) or (n, 2, 784). Images get a border of 0: one row above, two below, so that
    every clipped position has four neighbours.
    """
    n = len(images)
    centre = np.array([[HEIGHT - 1], [WIDTH - 1]], np.float32) / 2
    grid = np.indices((HEIGHT, WIDTH), np.float32).reshape(2, -1) - centre
    positions = back @ grid
    positions += centre + 1 + moved
    np.clip(positions, 0, np.array([[HEIGHT + 1], [WIDTH + 1]], np.float32), out=positions)
    corner = positions.astype(np.int32)
    y, x = (positions - corner.astype(np.float32)).transpose(1, 0, 2)
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2)))
    width = padded.shape[2]
    index = corner[:, 0] * width
    index += corner[:, 1]
    index += np.arange(n, dtype=np.int32)[:, np.newaxis] * padded[0].size
    pixels = padded.reshape(-1)
    above = _interpolate(pixels[index], pixels[index + 1], x)
    below = _interpolate(pixels[index + width], pixels[index + width + 1], x)
    values = _interpolate(above, below, y)
    values += 0.5
    return values.astype(np.uint8).reshape(n, HEIGHT, WIDTH)


def _interpolate(
    low: NDArray[np.generic], high: NDArray[np.generic], fraction: NDArray[np.float32]
) -> NDArray[np.float32]:
    value = low.astype(np.float32)
    return value + (high.astype(np.float32) - value) * fraction
