"""What is written in drawn scenes: digits of MNIST, letters, words, signs, doodles, scribbles.

Each is drawn as a glyph, levels of ink, and then placed in a picture, with its class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from lenet.pixels import Images
from trainer.mnist import Digits

Random: TypeAlias = np.random.Generator
Field: TypeAlias = NDArray[np.floating[Any]]
"""Shares, 0 to 1, or light, (height, width) or (height, width, 3)."""

MARK, NONE = 10, 11
CLASSES = (*map(str, range(10)), "mark", "none")
"""A digit's, that of another character or sign that is whole, and of anything else."""

_LETTERS = "AEFHKMNPRTVWXYadefhkmnprtvwxy?!&%#@*+=<>$"
"""Characters that no digit looks like."""

_TICK = [(0.1, 0.55), (0.35, 0.9), (0.95, 0.1)]
_ARROW = [(0, 0.35), (0.55, 0.35), (0.55, 0.1), (1, 0.5), (0.55, 0.9), (0.55, 0.65), (0, 0.65)]
_DIAMOND = [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)]
"""Corners, in shares of a square."""


def alone(digits: Digits, random: Random) -> tuple[Field, int]:
    """A sign, doodle, scribble or two digits in one: shares of ink, and the class."""
    makes = _sign, _sign, _doodle, _doodle, _scribble, _word, partial(_pair, digits)
    glyph, label = makes[random.integers(len(makes))](random)
    return _placed(random, glyph, (140, 140), 80, (70, 70), random.uniform(0.15, 0.65)), label


def bar(random: Random) -> Field:
    """A straight stroke, which is a 1 though MNIST has few that are quite straight."""
    picture = Image.new("L", (96, 96))
    half = random.uniform(2, 14)
    box = (48 - half, random.uniform(5, 25), 48 + half, random.uniform(70, 92))
    ImageDraw.Draw(picture).rounded_rectangle(box, half * random.uniform(0, 1), 255)
    turned = picture.rotate(random.normal(0, 7), Image.Resampling.BILINEAR)
    return np.asarray(turned, np.float32) / 255


def marks(digits: Digits, random: Random, height: int, width: int) -> list[tuple[Field, int]]:
    """The shares of ink of each mark, and its class."""
    what = random.choice(
        ["digit", "number", "sign", "doodle", "scribble", "word", "nothing"],
        p=[0.38, 0.21, 0.12, 0.11, 0.05, 0.06, 0.07],
    )
    shape = height, width
    if what == "nothing":
        return []
    if what == "number":
        count = int(random.integers(2, 9))
        thick, step = random.uniform(0.15, 0.65), width / (count + 0.5)
        size = min(step * random.uniform(0.75, 1.3), height * 0.7)
        row = random.uniform(size * 0.6, max(height - size * 0.6, size * 0.6 + 1))
        marks = []
        for place in range(count):
            glyph, label = _digit(digits, random) if random.random() < 0.93 else _sign(random)
            near = row + random.normal(0, size * 0.05), step * (place + 0.75)
            own = size * random.uniform(0.9, 1.1)
            marks.append((_placed(random, glyph, shape, own, near, thick), label))
        return marks
    share = random.uniform(0.12, 0.8) if random.random() < 0.7 else random.uniform(0.3, 0.95)
    size = max(12, min(shape) * share)
    half = size * 0.55
    row, column = (
        random.uniform(min(half, side / 2), max(side - half, side / 2)) for side in shape
    )
    draws: dict[str, Callable[[Random], tuple[Images, int]]] = {
        "digit": partial(_digit, digits),
        "sign": _sign,
        "doodle": _doodle,
        "scribble": _scribble,
        "word": _word,
    }
    glyph, label = draws[what](random)
    return [(_placed(random, glyph, shape, size, (row, column), random.uniform(0.12, 0.7)), label)]


def _digit(digits: Digits, random: Random) -> tuple[Images, int]:
    one = int(random.integers(len(digits)))
    return digits.images[one], int(digits.labels[one])


def _pair(digits: Digits, random: Random) -> tuple[Images, int]:
    """Two digits side by side, uint8 (56, 56)."""
    both = np.concatenate([_digit(digits, random)[0][:, 2:-2] for _ in range(2)], 1)
    return np.pad(both, ((14, 14), (4, 4))), NONE


@cache
def font(size: int) -> Any:
    """Pillow's own font in pixels."""
    return ImageFont.load_default(size)


def _word(random: Random) -> tuple[Images, int]:
    """Letters side by side, of which some alone would look like digits, uint8 (192, 192)."""
    picture = Image.new("L", (192, 192))
    draw = ImageDraw.Draw(picture)
    letters = "".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), random.integers(2, 8)))
    if random.random() < 0.3:
        letters = letters.upper() if random.random() < 0.5 else letters.capitalize()
    of_size = font(int(min(110, 300 / len(letters))))
    draw.text((96, 96), letters, 255, of_size, anchor="mm", stroke_width=int(random.integers(0, 3)))
    return np.asarray(picture), MARK


def _sign(random: Random) -> tuple[Images, int]:
    """A letter or sign, bent as a hand would bend it, uint8 (96, 96)."""
    picture = Image.new("L", (96, 96))
    draw = ImageDraw.Draw(picture)
    width = int(random.integers(4, 12))
    kind = random.integers(0, 29)
    if kind == 25:
        draw.line(_moved(random, _TICK), 255, width, "curve")
    elif kind >= 27:
        corners = _moved(random, _ARROW if kind == 27 else _DIAMOND)
        draw.polygon(corners, 255 if random.random() < 0.5 else None, 255, width // 2 + 1)
        picture = picture.rotate(90 * random.integers(0, 4) + random.normal(0, 10))
    elif kind == 26:
        _heart(random, picture, width)
    elif kind == 0:
        draw.line((15, 50, 80, 50), fill=255, width=width)
        draw.line((55, 30, 80, 50, 55, 70), fill=255, width=width)
    elif kind == 1:
        turns = np.arange(5) * 4 * np.pi / 5
        star = np.stack([48 + 36 * np.sin(turns), 48 - 36 * np.cos(turns)], 1)
        draw.polygon(star.ravel().tolist(), outline=255, width=width // 2 + 1)
    elif kind == 2:
        draw.line((15, 15, 80, 80), fill=255, width=width)
        draw.line((15, 80, 80, 15), fill=255, width=width)
        draw.line((48, 8, 48, 88), fill=255, width=width)
    elif kind == 3:
        draw.rectangle((15, 20, 80, 75), outline=255, width=width)
    elif kind == 4:
        draw.polygon((48, 12, 85, 80, 11, 80), outline=255, width=width)
    else:
        draw.text(
            (48, 48),
            str(random.choice(list(_LETTERS))),
            fill=255,
            font=font(int(random.integers(50, 80))),
            anchor="mm",
            stroke_width=int(random.integers(0, 5)),
        )
    return _bent(random, picture), MARK


def _moved(random: Random, corners: Sequence[tuple[float, float]]) -> list[float]:
    """Corners as a hand places them in 96 x 96 pixels."""
    moved = np.array(corners) + random.normal(0, 0.04, (len(corners), 2))
    return (48 + 80 * (moved - 0.5)).ravel().tolist()


def _heart(random: Random, picture: Image.Image, width: int) -> None:
    """A heart, whole or its outline."""
    draw = ImageDraw.Draw(picture)
    is_full = random.random() < 0.5
    for left in (12, 44):
        draw.ellipse((left, 15, left + 40, 55), 255)
    draw.polygon((15, 46, 81, 46, 48, 86), 255)
    if not is_full:
        inner = picture.resize((96 - 3 * width,) * 2)
        picture.paste(0, (48 - inner.width // 2, 48 - inner.width // 2), inner)


def _doodle(random: Random) -> tuple[Images, int]:
    """Strokes and outlines: some at random, a pair and its mirror image, or some in an outline."""
    picture = Image.new("L", (96, 96))
    draw = ImageDraw.Draw(picture)
    kind, width = random.integers(0, 3), int(random.integers(4, 9))
    if kind == 0:
        _strokes(random, draw, int(random.integers(3, 7)), width, (8, 88))
    elif kind == 1:
        _strokes(random, draw, int(random.integers(2, 4)), width, (8, 88))
        half = picture.crop((0, 0, 50, 96)) if random.random() < 0.5 else picture
        picture = Image.new("L", (96, 96))
        picture.paste(half)
        mirrored = ImageOps.mirror(picture)
        picture.paste(mirrored, mask=mirrored)
    else:
        low, high = random.uniform(4, 20, 2), random.uniform(70, 92, 2)
        box, radius = (*low, *high), int(random.integers(0, 30))
        if random.random() < 0.5:
            draw.ellipse(box, None, 255, width)
        else:
            draw.rounded_rectangle(box, radius, None, 255, width)
        inner = (24, 72) if random.random() < 0.7 else (2, 94)
        _strokes(random, draw, int(random.integers(2, 5)), max(3, width - 1), inner)
    return _bent(random, picture), MARK


def _strokes(
    random: Random, draw: ImageDraw.ImageDraw, count: int, width: int, within: tuple[int, int]
) -> None:
    for _ in range(count):
        low, high = np.sort(random.uniform(*within, (2, 2)), 0)
        box = (*low, *np.maximum(high, low + 6))
        kind = random.integers(0, 7)
        if kind <= 1:
            draw.line(random.uniform(*within, 4).tolist(), 255, width)
        elif kind == 2:
            draw.line(random.uniform(*within, (4, 2)).ravel().tolist(), 255, width, "curve")
        elif kind == 3:
            begin = random.uniform(0, 360)
            draw.arc(box, begin, begin + random.uniform(60, 330), 255, width)
        elif kind == 4:
            draw.ellipse(box, 255 if random.random() < 0.25 else None, 255, width)
        elif kind == 5:
            side = width * random.uniform(1.2, 2.5)
            draw.ellipse((*low, *(low + side)), 255)
        else:
            corners = random.uniform(*within, (int(random.integers(3, 6)), 2)).ravel().tolist()
            draw.polygon(corners, 255 if random.random() < 0.3 else None, 255, width)


def _scribble(random: Random) -> tuple[Images, int]:
    """Strokes without a meaning, a blot, or two signs in one: nothing that the judge takes."""
    picture = Image.new("L", (96, 96))
    draw = ImageDraw.Draw(picture)
    kind = random.integers(0, 5)
    if kind == 4:  # too wide for a 1
        low = random.uniform(8, 25, 2)
        draw.rounded_rectangle(
            (*low, *(low + random.uniform(45, 65, 2))), random.uniform(0, 15), 255
        )
    elif kind == 0:
        middle = random.uniform(20, 76, 2)
        for _ in range(int(random.integers(1, 4))):
            radii = random.uniform(10, 34, 2)
            box = (*(middle - radii), *(middle + radii))
            draw.ellipse(box, fill=255)
            middle = middle + random.normal(0, 12, 2)
    else:
        for _ in range(int(random.integers(1, 4))):
            points = random.uniform(10, 86, (int(random.integers(5, 14)), 2))
            if kind == 1:  # a zigzag
                points[:, 0] = np.linspace(12, 84, len(points))
            draw.line(points.ravel().tolist(), 255, int(random.integers(3, 9)), "curve")
    return _bent(random, picture), NONE


def _bent(random: Random, picture: Image.Image) -> Images:
    levels = np.asarray(picture)
    y, x = np.indices(levels.shape)
    down, right = (
        np.asarray(
            Image.fromarray(random.normal(0, 3, (4, 4)).astype(np.float32)).resize(
                picture.size, Image.Resampling.BICUBIC
            )
        )
        for _ in range(2)
    )
    bent: Images = levels[(y + down).astype(int).clip(0, 95), (x + right).astype(int).clip(0, 95)]
    return bent


def _placed(
    random: Random,
    glyph: Images,
    shape: tuple[int, int],
    size: float,
    middle: tuple[float, float],
    threshold: float,
) -> Field:
    """The ink of a glyph about `size` pixels high; a low threshold is a thick pen."""
    side = max(8, int(size * (1.4 if len(glyph) == 28 else 1.5)))
    slant = random.normal(0, 0.12)
    how = (1 + random.normal(0, 0.06), slant, -slant * side / 2, random.normal(0, 0.06), 1, 0)
    picture = Image.fromarray(glyph).resize((side, side), Image.Resampling.BICUBIC)
    picture = picture.transform(
        picture.size, Image.Transform.AFFINE, how, Image.Resampling.BILINEAR
    ).rotate(random.normal(0, 6), Image.Resampling.BILINEAR)
    levels = np.asarray(picture, np.float32) / 255
    ink = Image.fromarray(((levels - threshold) * max(side / 28, 1) + 0.5).clip(0, 1))
    field = Image.new("F", shape[::-1])
    field.paste(ink, (int(middle[1] - side / 2), int(middle[0] - side / 2)))
    return np.asarray(field, np.float32)
