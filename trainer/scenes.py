"""Drawn scenes with digits of MNIST, as people photograph them.

A scene is a surface, its surroundings, ruling, clutter and light, drawn at random, with a digit, a
number, a letter, a doodle, a scribble or nothing on it. `trainer.judge` makes of them what the
judge of pictures learns.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

from lenet.pixels import Images
from trainer.mnist import Digits

Random: TypeAlias = np.random.Generator
Field: TypeAlias = NDArray[np.floating[Any]]
"""Shares, 0 to 1, or light, (height, width) or (height, width, 3)."""

MARK, NONE = 10, 11
CLASSES = (*map(str, range(10)), "mark", "none")
"""A digit's, that of another character or sign that is whole, and of anything else."""

_SIDE = 256
"""Longer side of most scenes, as of the copy that the service searches."""

_LETTERS = "AEFHKMNPRTVWXYadefhkmnprtvwxy?!&%#@*+=<>$"
"""Characters that no digit looks like."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture, and for each mark on it the share of ink of every pixel, and its class."""

    picture: Image.Image
    marks: Sequence[tuple[Field, int]]


def drawn(digits: Digits, random: Random) -> Scene:
    """A scene."""
    is_plain = random.random() < 0.2
    ratio = random.choice([1, 1, 4 / 3, 3 / 4, 1.5, 0.6, 2.2, 0.3], p=[0.15] * 6 + [0.06, 0.04])
    side = _SIDE if random.random() < 0.75 else int(random.integers(60, _SIDE))
    height, width = max(24, int(side / max(ratio, 1))), max(24, int(side * min(ratio, 1)))
    marks = _marks(digits, random, height, width)
    share = np.zeros((height, width), np.float32)
    for mark, _ in marks:
        share = np.maximum(share, mark)
    is_dark = random.random() < 0.7
    low, high = random.uniform(0, 0.4), random.uniform(0.55, 1)
    paper = _colour(random, high if is_dark else low)
    ink = _colour(random, low if is_dark else high)
    if random.random() < 0.12:  # a marker, which only some channels show
        ink = paper.copy()
        some = random.permutation(3)[: int(random.integers(1, 3))]
        ink[some] = ink[some] * random.uniform(0.15, 0.55) if is_dark else random.uniform(0.6, 1)
        if np.abs(ink - paper).max() < 0.25:
            ink = _colour(random, 0.1 if paper.mean() > 0.5 else 0.95)
    scene = np.broadcast_to(paper, (height, width, 3)).copy()
    if not is_plain:
        scene = _surface(random, scene, share)
        if random.random() < 0.25:
            share = share * (1 - random.uniform(0, 0.5) * _cloud(random, share.shape, 4, 4))
        if random.random() < 0.08:  # a dry pen, which leaves gaps
            cell = int(random.integers(3, 10))
            share = share * (_cloud(random, share.shape, cell, cell) > random.uniform(0.1, 0.35))
    scene += (ink - scene) * share[..., np.newaxis]
    if not is_plain:
        scene = _lit(random, scene)
    picture = Image.fromarray((scene * 255).clip(0, 255).astype(np.uint8))
    if not is_plain:
        picture = _photographed(random, picture)
    if random.random() < 0.3:
        picture = picture.convert("L")
    return Scene(picture, [(mark, label) for mark, label in marks if (mark > 0.5).any()])


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


# What is written


def _marks(digits: Digits, random: Random, height: int, width: int) -> list[tuple[Field, int]]:
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
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


_CORNERS: dict[int, Sequence[tuple[float, float]]] = {
    25: [(0.1, 0.55), (0.35, 0.9), (0.95, 0.1)],
    27: [(0, 0.35), (0.55, 0.35), (0.55, 0.1), (1, 0.5), (0.55, 0.9), (0.55, 0.65), (0, 0.65)],
    28: [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)],
}
"""Corners of a tick, an arrow and a diamond, by number of the sign."""


def _word(random: Random) -> tuple[Images, int]:
    """Letters side by side, of which some alone would look like digits, uint8 (192, 192)."""
    picture = Image.new("L", (192, 192))
    draw = ImageDraw.Draw(picture)
    letters = "".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), random.integers(2, 8)))
    if random.random() < 0.3:
        letters = letters.upper() if random.random() < 0.5 else letters.capitalize()
    font = _font(int(min(110, 300 / len(letters))))
    draw.text((96, 96), letters, 255, font, anchor="mm", stroke_width=int(random.integers(0, 3)))
    return np.asarray(picture), MARK


def _sign(random: Random) -> tuple[Images, int]:
    """A letter or sign, bent as a hand would bend it, uint8 (96, 96)."""
    picture = Image.new("L", (96, 96))
    draw = ImageDraw.Draw(picture)
    width = int(random.integers(4, 12))
    kind = random.integers(0, 29)
    corners = _CORNERS.get(int(kind))
    if corners is not None:
        moved = np.array(corners) + random.normal(0, 0.04, (len(corners), 2))
        at = (48 + 80 * (moved - 0.5)).ravel().tolist()
        if kind == 25:  # a tick
            draw.line(at, 255, width, "curve")
        else:
            draw.polygon(at, 255 if random.random() < 0.5 else None, 255, width // 2 + 1)
        if kind > 26:
            turned = picture.rotate(90 * random.integers(0, 4) + random.normal(0, 10))
            return _bent(random, turned), MARK
    elif kind == 26:  # a heart
        is_full = random.random() < 0.5
        for left in (12, 44):
            draw.ellipse((left, 15, left + 40, 55), 255)
        draw.polygon((15, 46, 81, 46, 48, 86), 255)
        if not is_full:
            inner = picture.resize((96 - 3 * width,) * 2)
            picture.paste(0, (48 - inner.width // 2, 48 - inner.width // 2), inner)
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
            font=_font(int(random.integers(50, 80))),
            anchor="mm",
            stroke_width=int(random.integers(0, 5)),
        )
    return _bent(random, picture), MARK


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


# What it is written on


def _cloud(random: Random, shape: tuple[int, ...], down: int, right: int) -> Field:
    """Smooth noise from 0 to 1 with so many pixels in a cell."""
    height, width = shape[:2]
    cells = random.random((max(2, height // down), max(2, width // right)), np.float32)
    return np.asarray(Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC))


def _colour(random: Random, light: float) -> Field:
    """Red, green and blue of about this lightness, 0 to 1."""
    colour = light + random.normal(0, 0.03, 3)
    if random.random() < 0.6:
        tint = random.normal(0, 1, 3)
        most = random.uniform(0, 0.25) * (1 - 0.7 * abs(2 * light - 1))
        colour = colour + (tint - tint.mean()) * most
    return colour.clip(0.01, 1).astype(np.float32)


def _texture(random: Random, shape: tuple[int, ...]) -> Field:
    """What share of light each place throws back, about 1: paper, wood, cloth, folds, bricks."""
    height, width = shape[:2]
    kind = random.integers(0, 8)
    if kind <= 2:
        return np.ones((height, width, 1), np.float32)
    if kind == 3:  # grain
        grain = _cloud(random, shape, int(random.integers(3, 30)), int(random.integers(30, 120)))
        fine = _cloud(random, shape, int(random.integers(1, 6)), int(random.integers(15, 80)))
        waves = 0.6 * grain + 0.4 * fine
        if random.random() < 0.5:
            waves = np.sin(waves * random.uniform(6, 40))
    elif kind == 4:  # a weave, or the pixels of a screen
        y, x = np.indices((height, width), np.float32) * (2 * np.pi / random.uniform(2, 14))
        angle = random.uniform(0, np.pi)
        along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        waves = np.sin(along) + np.sin(across * random.uniform(0.7, 1.4))
    elif kind == 5:
        cell = int(random.integers(6, 80))
        waves = _cloud(random, shape, cell, cell)
    elif kind == 6:  # folds
        cell = int(random.integers(25, 120))
        waves = np.abs(_cloud(random, shape, cell, cell) - 0.5)
    else:
        picture = Image.new("L", (width, height), 200)
        draw = ImageDraw.Draw(picture)
        brick = int(random.integers(10, 60))
        long, joint = int(brick * random.uniform(1.5, 3)), int(random.integers(1, 4))
        shade = int(random.integers(60, 255))
        for row, top in enumerate(range(0, height + brick, brick)):
            draw.line((0, top, width, top), shade, joint)
            for left in range(-(row % 2) * long // 2, width, long):
                draw.line((left, top, left, top + brick), shade, joint)
        waves = np.asarray(picture, np.float32) / 255
    waves = waves - waves.mean()
    depth = random.uniform(0.03, 0.45) / max(float(np.abs(waves).max()), 1e-3)
    texture: Field = (1 + depth * waves).astype(np.float32)[..., np.newaxis]
    return texture


def _lines(random: Random, shape: tuple[int, ...]) -> Field:
    """Shares of ruling: lines, squares, dots, single lines, a box or circle."""
    height, width = 2 * shape[0], 2 * shape[1]
    picture = Image.new("L", (width, height))
    draw = ImageDraw.Draw(picture)
    kind, step = random.integers(0, 6), random.uniform(16, 110)
    thick, tilt = int(random.integers(1, 5)), random.normal(0, 0.02)
    first = random.uniform(0, step)
    if kind <= 2:
        for y in np.arange(first - step, height + step, step):
            draw.line((0, y, width, y + tilt * width), 255, thick)
    if kind in (1, 2):
        for x in np.arange(first - step, width + step, step):
            draw.line((x, 0, x - tilt * height, height), 255, thick)
    if kind == 3:
        radius = random.uniform(1, 3.5)
        for y in np.arange(first, height, step):
            for x in np.arange(first, width, step):
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), 255)
    if kind == 4:
        for _ in range(int(random.integers(1, 6))):
            ends = random.uniform(0, 1, 4) * (width, height, width, height)
            draw.line(ends.tolist(), 255, int(random.integers(1, 8)))
    if kind == 5:
        middle, radii = random.uniform(0.2, 0.8, 2) * (width, height), random.uniform(20, 220, 2)
        shape_of = draw.ellipse if random.random() < 0.5 else draw.rectangle
        shape_of((*(middle - radii), *(middle + radii)), None, 255, int(random.integers(1, 9)))
    half = picture.resize((shape[1], shape[0]), Image.Resampling.BOX)
    return np.asarray(half, np.float32)[..., np.newaxis] / 255


def _clutter(random: Random, shape: tuple[int, ...]) -> Field:
    """Shares of something else: printed text, a disc, a scrap, a stroke."""
    height, width = shape[:2]
    picture = Image.new("L", (width, height))
    draw = ImageDraw.Draw(picture)
    kind = random.integers(0, 4)
    middle = random.uniform(-0.1, 1.1, 2) * (width, height)
    if kind == 0:
        size = int(random.integers(7, 16))
        for line in range(int(random.integers(1, 6))):
            letters = random.choice(
                list("abcdefghiklmnoprstuvwy  0123456789,."), random.integers(4, 24)
            )
            place = middle[0] - 20, middle[1] + 1.2 * line * size
            draw.text(place, "".join(letters), fill=255, font=_font(size))
    elif kind == 1:
        radii = random.uniform(4, 60, 2)
        draw.ellipse((*(middle - radii), *(middle + radii)), 255)
    elif kind == 2:
        scrap = middle + random.normal(0, random.uniform(4, 40), (int(random.integers(3, 7)), 2))
        draw.polygon(scrap.ravel().tolist(), 255)
    else:
        steps = random.normal(0, random.uniform(5, 60), (int(random.integers(3, 7)), 2))
        stroke = middle + np.cumsum(steps, 0)
        draw.line(stroke.ravel().tolist(), 255, int(random.integers(1, 6)), "curve")
    return np.asarray(picture, np.float32)[..., np.newaxis] / 255


def _surface(random: Random, scene: Field, share: Field) -> Field:
    """The paper's texture, ruling, surroundings, and clutter beside the ink."""
    shape = scene.shape
    scene = scene * _texture(random, shape)
    if random.random() < 0.3:
        light = random.uniform(0, 0.9)
        scene += (_colour(random, light) - scene) * (
            _lines(random, shape) * random.uniform(0.15, 1)
        )
    if random.random() < 0.35:
        table = _colour(random, random.uniform(0, 1)) * _texture(random, shape)
        if random.random() < 0.3:
            table = table + (_colour(random, random.uniform(0, 1)) - table) * _lines(random, shape)
        sheet = _sheet(random, share)
        scene = scene * sheet + table * (1 - sheet)
    for _ in range(int(random.integers(0, 4)) if random.random() < 0.4 else 0):
        something = _clutter(random, shape)
        near = Image.fromarray((share * 255).astype(np.uint8)).filter(ImageFilter.MaxFilter(7))
        if not (something[..., 0] * np.asarray(near)).any():
            opaque = something * random.uniform(0.3, 1)
            scene += (_colour(random, random.uniform(0, 1)) - scene) * opaque
    return scene


def _sheet(random: Random, share: Field) -> Field:
    """The shares of a turned sheet or disc around the ink, at times beyond the picture's edges."""
    height, width = share.shape
    rows, columns = np.nonzero(share > 0.1)
    if rows.size:
        margins = random.uniform(3, 0.4 * max(height, width), 4)
        top, bottom = rows.min() - margins[0], rows.max() + margins[1]
        left, right = columns.min() - margins[2], columns.max() + margins[3]
    else:
        top, left = random.uniform(0, 0.4 * height), random.uniform(0, 0.4 * width)
        bottom, right = random.uniform(0.6 * height, height), random.uniform(0.6 * width, width)
    if random.random() < 0.6:
        beyond = random.random(4) < 0.5
        top, left = -20 if beyond[0] else top, -20 if beyond[1] else left
        bottom, right = height + 20 if beyond[2] else bottom, width + 20 if beyond[3] else right
    picture = Image.new("L", (width, height))
    draw = ImageDraw.Draw(picture)
    if random.random() < 0.15:
        draw.ellipse((left - 6, top - 6, right + 6, bottom + 6), 255)
    else:
        angle = random.normal(0, 0.12)
        corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        middle = corners.mean(0)
        draw.polygon((middle + 1.08 * (corners - middle) @ turn).ravel().tolist(), 255)
    return np.asarray(picture, np.float32)[..., np.newaxis] / 255


# How it is seen


def _lit(random: Random, scene: Field) -> Field:
    """Uneven light, shadows with an edge, a reflection, and the exposure."""
    height, width, _ = scene.shape
    y, x = np.indices((height, width), np.float32)
    if random.random() < 0.5:
        angle = random.uniform(0, 2 * np.pi)
        along = x / width * np.cos(angle) + y / height * np.sin(angle)
        along = along + random.uniform(-0.5, 0.5) * (x / width - random.random()) ** 2
        along = (along - along.min()) / np.ptp(along)
        scene = scene * (1 - random.uniform(0, 0.6) * along)[..., np.newaxis]
    if random.random() < 0.25:
        picture = Image.new("L", (width, height))
        middle = random.uniform(0, 1, 2) * (width, height)
        if random.random() < 0.7:
            angle, far = random.uniform(0, 2 * np.pi), 4 * max(height, width)
            along = np.array([np.cos(angle), np.sin(angle)]) * far
            across = np.array([-along[1], along[0]])
            edge = [
                middle + along,
                middle + along + across,
                middle - along + across,
                middle - along,
            ]
        else:
            edge = [middle + random.normal(0, max(height, width) / 3, 2) for _ in range(5)]
        ImageDraw.Draw(picture).polygon(np.ravel(edge).tolist(), 255)
        soft = picture.filter(ImageFilter.GaussianBlur(random.uniform(0.3, 6)))
        depth = random.uniform(0.2, 0.65) / 255
        scene = scene * (1 - np.asarray(soft, np.float32) * depth)[..., np.newaxis]
    if random.random() < 0.12:
        row, column = random.uniform(0, 1, 2) * (height, width)
        radius = random.uniform(0.05, 0.3) * max(height, width)
        glare = np.exp(-((y - row) ** 2 + (x - column) ** 2) / radius**2) * random.uniform(0.2, 0.7)
        scene = scene + (1 - scene) * glare[..., np.newaxis]
    return scene * random.uniform(0.6, 1.05) + random.uniform(0, 0.12)


def _photographed(random: Random, picture: Image.Image) -> Image.Image:
    """Blur, noise and a JPEG's losses."""
    if random.random() < 0.5:
        most = max(0.5, max(picture.size) / 220)
        picture = picture.filter(ImageFilter.GaussianBlur(random.uniform(0.3, most)))
    if random.random() < 0.6:
        shape = (picture.height, picture.width, 3 if random.random() < 0.5 else 1)
        noise = random.normal(0, 1 + abs(random.normal(0, 8)), shape)
        picture = Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))
    if random.random() < 0.35:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(random.integers(35, 92)))
        picture = Image.open(file)
    return picture
