"""Drawn scenes with digits of MNIST, as people photograph them.

A scene is a surface, its surroundings, ruling, clutter and light, drawn at random, with a digit, a
number, a letter, a doodle, a scribble or nothing on it. `trainer.judge` makes of them what the
judge of pictures learns.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from trainer.marks import Field, Random, font, marks
from trainer.mnist import Digits

_SIDE = 256
"""Longer side of most scenes, as of the copy that the service searches."""


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
    written = marks(digits, random, height, width)
    share = np.zeros((height, width), np.float32)
    for mark, _ in written:
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
    return Scene(picture, [(mark, label) for mark, label in written if (mark > 0.5).any()])


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
            draw.text(place, "".join(letters), fill=255, font=font(size))
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
