"""Digits as a hand draws them: strokes of points in a unit square, x to the right, y down."""

from __future__ import annotations

import math


def _arc(x, y, across, down, start, end):
    """Points on an ellipse around (x, y), from one angle to another, in degrees; 0 is right."""
    count = max(2, round(abs(end - start) / 15))
    angles = [math.radians(start + (end - start) * i / count) for i in range(count + 1)]
    return [(x + across * math.cos(a), y + down * math.sin(a)) for a in angles]


STROKES = {
    0: [_arc(0.5, 0.5, 0.2, 0.32, -90, 275)],
    1: [[(0.54, 0.18), (0.51, 0.5), (0.48, 0.82)]],
    2: [[*_arc(0.5, 0.34, 0.18, 0.16, -170, 45), (0.32, 0.8), (0.72, 0.8)]],
    3: [[*_arc(0.47, 0.34, 0.18, 0.15, -150, 80), *_arc(0.47, 0.65, 0.2, 0.17, -80, 150)]],
    4: [[(0.34, 0.2), (0.32, 0.52), (0.68, 0.52)], [(0.62, 0.2), (0.62, 0.82)]],
    5: [
        [(0.36, 0.22), (0.34, 0.46), *_arc(0.47, 0.62, 0.19, 0.18, -120, 140)],
        [(0.36, 0.21), (0.67, 0.2)],
    ],
    6: [[(0.6, 0.18), (0.42, 0.4), *_arc(0.5, 0.64, 0.16, 0.16, 180, -180)]],
    7: [[(0.3, 0.22), (0.68, 0.22), (0.52, 0.5), (0.44, 0.82)]],
    8: [[*_arc(0.5, 0.34, 0.13, 0.15, 60, -240), *_arc(0.5, 0.66, 0.16, 0.17, -60, 240)]],
    9: [[*_arc(0.48, 0.36, 0.15, 0.16, 0, -360), (0.62, 0.5), (0.57, 0.82)]],
}


def row(digits):
    """The strokes of several digits side by side."""
    share = 1 / len(digits)
    height = min(1.0, 1.7 * share)
    return [
        [((i + 0.5 + 1.25 * (x - 0.5)) * share, 0.5 + (y - 0.5) * height) for x, y in points]
        for i, digit in enumerate(digits)
        for points in STROKES[digit]
    ]
