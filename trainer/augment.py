"""Random small affine maps: each image turned, scaled, sheared and shifted a little.

Every training image is met once per epoch, each time as another hand might have written it.
All images of a batch at once, bilinear, uint8 in and out: what the network trains on is exactly
the kind of image that it is served. Flips and large turns are refused: a 6 is no 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, WIDTH, Images


@dataclass(frozen=True, slots=True)
class Limits:
    """The widest map; each image draws uniformly between minus and plus each limit.

    `rotation` and `shear`, the slant of upright strokes, in degrees, `scale` as a share (0.1: from
    0.9 to 1.1, each axis by itself), `shift` in pixels.
    """

    rotation: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    shift: float = 0.0


def random_affine(images: Images, limits: Limits, random: np.random.Generator) -> Images:
    """Another (n, 28, 28) in which each image went through its own random map; paper is 0.

    The same generator state gives the same images.
    """
    draw = random.uniform(-1, 1, (6, len(images))).astype(np.float32)
    angle = np.deg2rad(limits.rotation) * draw[0]
    shear = np.tan(np.deg2rad(limits.shear) * draw[1])
    wide, high = 1 / (1 + limits.scale * draw[2:4])
    cos, sin = np.cos(angle), np.sin(angle)
    # From a pixel of the result back to where it comes from, (y, x): scaled, turned, slanted.
    back = np.array([[cos * high, -sin * wide], [sin * high, cos * wide]])
    back[:, 0] += shear * back[:, 1]
    return _sample(images, back.transpose(2, 0, 1), limits.shift * draw[4:6].T)


def _sample(images: Images, back: NDArray[np.float64], shift: NDArray[np.float32]) -> Images:
    """Bilinear values at back (n, 2, 2) applied to each pixel, about the centre, plus shift (n, 2).

    Images are surrounded by paper: one row above, two below, so that every clipped place has four
    neighbours.
    """
    n = len(images)
    centre = np.array([[HEIGHT - 1], [WIDTH - 1]], np.float32) / 2
    grid = np.indices((HEIGHT, WIDTH), np.float32).reshape(2, -1) - centre
    places = back @ grid
    places += centre + 1 + shift[:, :, np.newaxis]
    np.clip(places, 0, np.array([[HEIGHT + 1], [WIDTH + 1]], np.float32), out=places)
    corner = places.astype(np.int32)
    y, x = (places - corner).transpose(1, 0, 2)
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2)))
    width = padded.shape[2]
    index = corner[:, 0] * width
    index += corner[:, 1]
    index += np.arange(n, dtype=np.int32)[:, np.newaxis] * padded[0].size
    pixels = padded.reshape(-1)
    above = _between(pixels[index], pixels[index + 1], x)
    below = _between(pixels[index + width], pixels[index + width + 1], x)
    values = _between(above, below, y)
    values += 0.5
    return values.astype(np.uint8).reshape(n, HEIGHT, WIDTH)


def _between(
    low: NDArray[np.generic], high: NDArray[np.generic], share: NDArray[np.float32]
) -> NDArray[np.float32]:
    value = low.astype(np.float32)
    return value + (high.astype(np.float32) - value) * share
