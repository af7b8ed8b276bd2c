"""Kinds of pictures that people send, each made from a digit of MNIST and a random generator.

    LENET_TEST_MNIST=FOLDER python -m tests.picture_kinds [--count 300] [--seed 1000] [KIND ...]
    LENET_TEST_MNIST=FOLDER python -m tests.picture_kinds --megapixels 1 12 24 48 [--count 300]

prints how many of each kind the model `lenet` reads right, how many are warned of, and what a
picture takes to decode; or the same of photographs of the same scenes in several sizes. A kind is a
function from a digit, uint8 (28, 28) with ink high, to the file of a picture and its content type.
Sizes, positions, colours and distortions are drawn from the generator.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from benchmarks.command import latest_weights
from lenet.reference import logits
from lenet.weightfile import WeightFile
from service.errors import InvalidInput
from service.forms.body import decode
from service.forms.reader import Doubts, Limits
from service.pictures.headers import Digits
from trainer.mnist import load

Random = np.random.Generator
Field = np.ndarray[Any, np.dtype[np.float64]]
"""Shares of ink, 0 to 1, or brightness, 0 to 255."""
Kind = Callable[[Any, Random], tuple[bytes, str]]


def encoded(picture: Any, kind: str = "PNG", **options: Any) -> tuple[bytes, str]:
    """A picture's file and its content type; arrays are rounded to bytes."""
    if not isinstance(picture, Image.Image):
        picture = Image.fromarray(np.clip(np.rint(picture), 0, 255).astype(np.uint8))
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue(), f"image/{kind.lower()}"


def strokes(
    digit: Any, side: int, *, threshold: float = 0.5, slant: float = 0.0, degrees: float = 0.0
) -> Field:
    """The digit as a pen would draw it on a field of `side` pixels; a low threshold is a thick pen.

    `slant` is the tangent of the angle by which it leans to the right.
    """
    image = Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC)
    if slant:
        leaning = (1, slant, -slant * side / 2, 0, 1, 0)
        image = image.transform(
            image.size, Image.Transform.AFFINE, leaning, Image.Resampling.BILINEAR
        )
    if degrees:
        image = image.rotate(degrees, Image.Resampling.BILINEAR)
    share = np.asarray(image) / 255
    return np.clip((share - threshold) * side / 28 + 0.5, 0, 1)


def drawn(
    digit: Any,
    random: Random,
    *,
    size: tuple[int, int] = (200, 420),
    room: float = 0.05,
    **how: Any,
) -> Field:
    """Shares of ink on a canvas of random size; the digit keeps `room` of it from each side."""
    height, width = random.integers(*size, 2)
    largest = min(height, width) * (1 - 2 * room)
    side = int(largest * random.uniform(0.6, 1.0) * 28 / 22)
    share = strokes(digit, side, **how)
    lines, columns = np.flatnonzero(share.any(1)), np.flatnonzero(share.any(0))
    share = share[lines[0] : lines[-1] + 1, columns[0] : columns[-1] + 1]
    canvas = np.zeros((height, width))
    margin = int(room * min(height, width))
    top = random.integers(margin, max(margin, height - margin - share.shape[0]) + 1)
    left = random.integers(margin, max(margin, width - margin - share.shape[1]) + 1)
    share = share[: height - top, : width - left]
    canvas[top : top + share.shape[0], left : left + share.shape[1]] = share
    return canvas


def on(paper: Any, ink: Any, share: Field) -> Field:
    """`ink` over `paper`."""
    return paper * (1 - share) + ink * share


def levels(random: Random) -> tuple[float, float]:
    """Brightness of light paper and of dark ink."""
    return random.uniform(190, 255), random.uniform(0, 80)


def shading(random: Random, shape: tuple[int, int], most: float = 0.35) -> Field:
    """Uneven light: what share of itself each pixel keeps."""
    y, x = np.mgrid[0 : 1 : complex(0, shape[0]), 0 : 1 : complex(0, shape[1])]
    angle = random.uniform(0, 2 * np.pi)
    along = x * np.cos(angle) + y * np.sin(angle)
    curve = random.uniform(-0.3, 0.3) * (x - random.uniform(0, 1)) ** 2
    light = along + curve
    light = (light - light.min()) / max(float(np.ptp(light)), 1e-9)
    return 1 - random.uniform(0.1, most) * light


# Right before frames and ruling were removed.


def inked(tones: Callable[[Random], tuple[float, float]] = levels, **how: Any) -> Kind:
    """Drawings on paper with ink of these tones; an option of `drawn` may be a range to draw in."""

    def kind(digit: Any, random: Random) -> tuple[bytes, str]:
        paper, ink = tones(random)
        options = {
            name: given if name == "size" else random.uniform(*given) for name, given in how.items()
        }
        return encoded(on(paper, ink, drawn(digit, random, **options)))

    return kind


def black_on_white(_: Random) -> tuple[float, float]:
    return 255, 0


def off_centre(digit: Any, random: Random) -> tuple[bytes, str]:
    side = int(random.integers(300, 500))
    small = drawn(digit, random, size=(side // 4, side // 3))
    share = np.zeros((side, side))
    top, left = random.integers(0, [side - small.shape[0], side - small.shape[1]])
    share[top : top + small.shape[0], left : left + small.shape[1]] = small
    return encoded(on(255, 0, share))


def thick(digit: Any, random: Random) -> tuple[bytes, str]:
    share = drawn(digit, random, threshold=random.uniform(0.12, 0.25))
    return encoded(on(*levels(random)[:: random.choice((1, -1))], share))


def noisy(digit: Any, random: Random) -> tuple[bytes, str]:
    picture = on(*levels(random), drawn(digit, random))
    return encoded(picture + random.normal(0, random.uniform(3, 12), picture.shape))


def uneven_light(digit: Any, random: Random) -> tuple[bytes, str]:
    picture = on(*levels(random), drawn(digit, random))
    return encoded(picture * shading(random, picture.shape))


def photographed(digit: Any, random: Random) -> tuple[bytes, str]:
    return photograph(
        on(random.uniform(170, 230), random.uniform(20, 90), drawn(digit, random)), random
    )


def photograph(picture: Field, random: Random) -> tuple[bytes, str]:
    """A JPEG of uneven light, a tint, blur and noise."""
    picture = picture * shading(random, picture.shape)
    image = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
    picture = np.asarray(image.filter(ImageFilter.GaussianBlur(random.uniform(0, 1.2)))) + 0.0
    picture += random.normal(0, random.uniform(2, 6), picture.shape)
    tint = np.array([1, random.uniform(0.9, 1), random.uniform(0.75, 1)])
    return encoded(picture[..., np.newaxis] * tint, "JPEG", quality=int(random.integers(60, 95)))


def scene(digit: Any, random: Random, *, megapixels: float) -> tuple[bytes, str]:
    """A digit on paper, somewhere in a photograph of 4:3, by a camera of so many megapixels.

    Equal generators give equal scenes, but for the noise of each pixel.
    """
    height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
    width = round(height * 4 / 3)
    side = int(height * random.uniform(0.15, 0.8) * 28 / 22)
    margin = (28 - 22) / 28 * side / 2
    top, left = random.uniform(-margin, [height - side + margin, width - side + margin])
    paper, ink = random.uniform(170, 230), random.uniform(20, 90)
    light = shading(random, (256, 256)).astype(np.float32)
    blur, sigma = random.uniform(0, height / 600), random.uniform(2, 6)
    tint = (1, random.uniform(0.9, 1), random.uniform(0.75, 1))
    quality = int(random.integers(75, 95))

    share = Image.new("L", (width, height))
    digit_share = (255 * strokes(digit, side)).astype(np.uint8)
    share.paste(Image.fromarray(digit_share), (round(left), round(top)))
    bright = np.asarray(Image.fromarray(light).resize((width, height)))
    sharp = bright * (paper - (paper - ink) / 255 * np.asarray(share, np.float32))
    soft = Image.fromarray(sharp.astype(np.uint8)).filter(ImageFilter.GaussianBlur(blur))
    noise = random.standard_normal((height, width), np.float32)
    grey = np.clip(soft + np.float32(sigma) * noise, 0, 255).astype(np.uint8)
    channels = [Image.fromarray(grey).point(lambda level, part=part: level * part) for part in tint]
    return encoded(Image.merge("RGB", channels), "JPEG", quality=quality)


def tight(digit: Any, random: Random) -> tuple[bytes, str]:
    """Cut at the digit's own box, dark or light, in a thick pen."""
    share = drawn(digit, random, room=0.2, threshold=random.uniform(0.2, 0.5))
    lines, columns = np.flatnonzero(share.any(1)), np.flatnonzero(share.any(0))
    share = share[lines[0] : lines[-1] + 1, columns[0] : columns[-1] + 1]
    return encoded(on(*levels(random)[:: random.choice((1, -1))], share))


# Dark edges.


def bordered(digit: Any, random: Random) -> tuple[bytes, str]:
    """A border of one colour all round."""
    paper, ink = levels(random)
    picture = on(paper, ink, drawn(digit, random, room=0.09))
    width = int(random.integers(1, 13))
    level = random.uniform(0, 130)
    framed = np.full_like(picture, level)
    framed[width:-width, width:-width] = picture[width:-width, width:-width]
    return encoded(framed)


def box_cut_at_its_line(digit: Any, random: Random) -> tuple[bytes, str]:
    """A scanned box: lines of another width on each side, not quite straight, and noise."""
    paper, ink = levels(random)
    picture = on(paper, ink, drawn(digit, random, room=0.1))
    height, width = picture.shape
    box = Image.new("L", (4 * width, 4 * height), 255)
    inside = [
        (4 * random.uniform(0.5, 10), 4 * random.uniform(0.5, 10)),
        (4 * (width - random.uniform(0.5, 10)), 4 * random.uniform(0.5, 10)),
        (4 * (width - random.uniform(0.5, 10)), 4 * (height - random.uniform(0.5, 10))),
        (4 * random.uniform(0.5, 10), 4 * (height - random.uniform(0.5, 10))),
    ]
    ImageDraw.Draw(box).polygon(inside, fill=0)
    share = np.asarray(box.resize((width, height), Image.Resampling.BOX)) / 255
    picture = on(picture, random.uniform(0, 110), share)
    return encoded(picture + random.normal(0, random.uniform(0, 6), picture.shape))


def dark_sides(digit: Any, random: Random, *, count: int) -> tuple[bytes, str]:
    paper, ink = levels(random)
    picture = on(paper, ink, drawn(digit, random, room=0.13))
    level = random.uniform(0, 120)
    for side in random.permutation(4)[:count]:
        width = int(random.integers(1, max(2, int(0.1 * min(picture.shape)))))
        np.rot90(picture, side)[:width] = level
    return encoded(picture + random.normal(0, random.choice((0, 4)), picture.shape))


def sheet_on(picture: Field, random: Random, *, sides: int = 4) -> Field:
    """The sheet `picture`, turned and in perspective, on a table that is seen at some sides."""
    height, width = picture.shape
    reach = int(random.uniform(0.08, 0.35) * min(height, width))
    size = (width + 2 * reach, height + 2 * reach)
    turn = np.deg2rad(random.uniform(-10, 10) if sides > 2 else random.uniform(-4, 4))
    corners = np.array([(0, 0), (0, height), (width, height), (width, 0)], float)
    middle = np.array([width, height]) / 2
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    seen = (corners - middle) @ rotation.T * 0.97 + random.normal(0, 0.012 * width, (4, 2))
    seen += np.array(size) / 2
    system, wanted = [], []
    for (x, y), (u, v) in zip(seen, corners, strict=True):
        system += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        wanted += [u, v]
    mapping = tuple(np.linalg.solve(np.array(system), np.array(wanted)))
    perspective, smooth = Image.Transform.PERSPECTIVE, Image.Resampling.BILINEAR
    sheet = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
    shown = np.asarray(sheet.transform(size, perspective, mapping, smooth)) + 0.0
    mask = Image.new("L", sheet.size, 255).transform(size, perspective, mapping, smooth)
    share = np.asarray(mask) / 255
    table = random.uniform(10, 110)
    wood = random.normal(0, random.uniform(0, 8), (size[1], 1)) * random.choice((0, 1))
    # `shown` is dark beyond the sheet, and at its border in part.
    photo = shown + (table + wood) * (1 - share)
    if sides < 4:
        kept = random.permutation(4)[: 4 - sides]
        for side in kept:  # cut within the sheet
            cut = int(reach * 1.0 + 0.06 * min(height, width))
            photo = np.rot90(np.rot90(photo, side)[cut:], -side)
    return photo


def paper_on_a_table(
    digit: Any, random: Random, *, room: float = 0.2, sides: int = 4
) -> tuple[bytes, str]:
    paper = on(random.uniform(170, 235), random.uniform(10, 80), drawn(digit, random, room=room))
    return photograph(sheet_on(paper, random, sides=sides), random)


def dark_canvas_on_a_light_page(digit: Any, random: Random) -> tuple[bytes, str]:
    paper, ink = levels(random)
    picture = on(ink, paper, drawn(digit, random, room=0.09))
    width = int(random.integers(1, 40))
    return encoded(np.pad(picture, width, constant_values=random.uniform(200, 255)))


def box_inside(digit: Any, random: Random) -> tuple[bytes, str]:
    """A box drawn around the digit, away from the picture's edge."""
    paper, ink = levels(random)
    share = drawn(digit, random, room=0.16)
    image = Image.fromarray(share)
    gap, line = int(0.03 * min(share.shape)), int(random.integers(1, 9))
    box = (gap, gap, share.shape[1] - 1 - gap, share.shape[0] - 1 - gap)
    ImageDraw.Draw(image).rectangle(box, outline=1.0, width=line)
    return encoded(on(paper, ink, np.asarray(image)))


# Lines.

_LINE_COLOURS = (
    *((140, 160, 220), (170, 185, 225), (200, 210, 235), (150, 150, 150), (100, 180, 120)),
    *((230, 150, 150), (110, 120, 160), (90, 90, 90), (60, 110, 190), (190, 160, 120)),
)


def lined(
    share: Field,
    random: Random,
    *,
    squared: bool,
    colour: Sequence[float] | None = None,
    spacing: tuple[float, float] = (0.04, 0.2),
    widest: int = 3,
) -> Field:
    """A sheet with lines below the ink, (height, width, 3); also along the edge at times."""
    height, width = share.shape
    side = min(height, width)
    if colour is None:
        colour = _LINE_COLOURS[random.integers(len(_LINE_COLOURS))]
    sheet = np.full((height, width, 3), random.uniform(225, 255))
    step = max(8.0, side * random.uniform(*spacing))
    line = int(random.integers(1, widest + 1))
    line = max(1, min(line, int(step / 6), round(side / 100)))
    begin = 0.0 if random.random() < 0.3 else random.uniform(0, step)
    for at in np.arange(begin, height, step).astype(int):
        sheet[at : at + line] = colour
    if squared:
        begin = 0.0 if random.random() < 0.3 else random.uniform(0, step)
        for at in np.arange(begin, width, step).astype(int):
            sheet[:, at : at + line] = colour
    elif random.random() < 0.3:  # a margin
        at = int(width * random.uniform(0.05, 0.95))
        sheet[:, at : at + line] = (225, 120, 120)
    ink = np.array([random.uniform(0, 60), random.uniform(0, 60), random.uniform(0, 130)])
    return on(sheet, ink, share[..., np.newaxis])


def lined_paper(digit: Any, random: Random, **how: Any) -> tuple[bytes, str]:
    return encoded(lined(drawn(digit, random), random, **how))


def lines_as_dark_as_the_ink(digit: Any, random: Random) -> tuple[bytes, str]:
    squared = bool(random.integers(2))
    share = drawn(digit, random)
    return encoded(lined(share, random, squared=squared, colour=(20, 20, 40), widest=2))


def thin_pen_on_squared_paper(digit: Any, random: Random) -> tuple[bytes, str]:
    share = drawn(digit, random, threshold=random.uniform(0.55, 0.65))
    return encoded(lined(share, random, squared=True, widest=2))


def lines_photographed(digit: Any, random: Random) -> tuple[bytes, str]:
    squared = bool(random.integers(2))
    sheet = lined(drawn(digit, random, room=0.2), random, squared=squared, widest=2)
    grey = sheet @ np.array([0.299, 0.587, 0.114])
    photo = sheet_on(grey, random)
    inner = int(0.22 * min(photo.shape))
    return photograph(photo[inner:-inner, inner:-inner], random)


def lines_on_a_table(digit: Any, random: Random) -> tuple[bytes, str]:
    squared = bool(random.integers(2))
    sheet = lined(drawn(digit, random, room=0.12), random, squared=squared, widest=2)
    return photograph(sheet_on(sheet @ np.array([0.299, 0.587, 0.114]), random), random)


def lines_and_a_border(digit: Any, random: Random) -> tuple[bytes, str]:
    squared = bool(random.integers(2))
    sheet = lined(drawn(digit, random, room=0.1), random, squared=squared)
    width = int(random.integers(1, 10))
    framed = np.full_like(sheet, random.uniform(0, 110))
    framed[width:-width, width:-width] = sheet[width:-width, width:-width]
    return encoded(framed)


# Transparent canvases.


def clear_canvas(digit: Any, random: Random, *, light: bool) -> tuple[bytes, str]:
    """Ink of one colour on transparent pixels."""
    share = drawn(digit, random)
    colour = random.uniform(190, 255, 3) if light else random.uniform(0, 90, 3)
    pixels = np.broadcast_to(colour, (*share.shape, 3))
    return encoded(np.dstack([pixels, 255 * share]))


RIGHT_BEFORE: dict[str, Kind] = {
    "plain": inked(black_on_white),
    "large": inked(black_on_white, size=(900, 1400)),
    "off_centre": off_centre,
    "dark_on_light": inked(),
    "light_on_dark": inked(lambda random: levels(random)[::-1]),
    "thick": thick,
    "thin": inked(threshold=(0.6, 0.7)),
    "noisy": noisy,
    "uneven_light": uneven_light,
    "slanted": inked(slant=(-0.25, 0.25)),
    "turned": inked(degrees=(-12, 12)),
    "photographed": photographed,
    "tight": tight,
    "one_side_dark": partial(dark_sides, count=1),
    "dark_ink_on_transparent": partial(clear_canvas, light=False),
}
ADDED: dict[str, Kind] = {
    "bordered": bordered,
    "box_cut_at_its_line": box_cut_at_its_line,
    "two_sides_dark": partial(dark_sides, count=2),
    "three_sides_dark": partial(dark_sides, count=3),
    "paper_on_a_table": partial(paper_on_a_table, room=0.12),
    "paper_on_a_table_at_two_sides": partial(paper_on_a_table, sides=2),
    "paper_on_a_table_at_three_sides": partial(paper_on_a_table, sides=3),
    "dark_canvas_on_a_light_page": dark_canvas_on_a_light_page,
    "box_inside": box_inside,
    "squared_paper": partial(lined_paper, squared=True),
    "ruled_paper": partial(lined_paper, squared=False),
    "lines_as_dark_as_the_ink": lines_as_dark_as_the_ink,
    "thin_pen_on_squared_paper": thin_pen_on_squared_paper,
    "fine_squares": partial(lined_paper, squared=True, spacing=(0.02, 0.04), widest=1),
    "lines_photographed": lines_photographed,
    "lines_on_a_table": lines_on_a_table,
    "lines_and_a_border": lines_and_a_border,
    "light_ink_on_transparent": partial(clear_canvas, light=True),
}
KINDS = RIGHT_BEFORE | ADDED


# Several digits, and none.


def number(digits: Sequence[Any], random: Random, *, rows: int = 1) -> tuple[bytes, str]:
    """Digits in a row, or in several, of about the same size."""
    side = int(random.integers(60, 150))
    per_row = -(-len(digits) // rows)
    height, width = int(rows * side * 1.25) + side, int(per_row * side * 0.95) + side
    share = np.zeros((height, width))
    for i, digit in enumerate(digits):
        row, column = divmod(i, per_row)
        one = strokes(digit, int(side * random.uniform(0.9, 1.1)), threshold=0.4)
        top = int((0.5 + 1.25 * row) * side + random.uniform(-0.06, 0.06) * side)
        left = int((0.5 + 0.95 * column) * side + random.uniform(-0.03, 0.03) * side)
        at = share[top : top + one.shape[0], left : left + one.shape[1]]
        np.maximum(at, one[: at.shape[0], : at.shape[1]], out=at)
    return encoded(on(*levels(random)[:: random.choice((1, -1))], share))


def letter(random: Random) -> tuple[bytes, str]:
    """A printed letter that no digit looks like."""
    font = ImageFont.load_default(int(random.integers(80, 200)))
    image = Image.new("L", (300, 300), 255)
    text = "ACEFHKMNPRTWXadefhkmnrtwx"[random.integers(25)]
    ImageDraw.Draw(image).text((150, 150), text, fill=0, font=font, anchor="mm")
    return encoded(image)


def noise(random: Random) -> tuple[bytes, str]:
    side = int(random.choice((28, 64, 200)))
    return encoded(random.uniform(0, 255, (side, side)))


def texture(random: Random) -> tuple[bytes, str]:
    """Blurred noise, as of cloth or stone."""
    side = int(random.integers(100, 300))
    image = Image.fromarray(random.integers(0, 256, (side, side)).astype(np.uint8))
    soft = np.asarray(image.filter(ImageFilter.GaussianBlur(random.uniform(2, 5)))) + 0.0
    return encoded((soft - soft.min()) * 255 / np.ptp(soft))


def scribble(random: Random) -> tuple[bytes, str]:
    """A long curve that crosses itself many times."""
    image = Image.new("L", (300, 300), 255)
    points = np.clip(150 + np.cumsum(random.normal(0, 45, (40, 2)), 0) % 200 - 100, 40, 260)
    ImageDraw.Draw(image).line([tuple(p) for p in points], fill=0, width=7, joint="curve")
    return encoded(image)


def blot(random: Random) -> tuple[bytes, str]:
    """A filled disc or rectangle."""
    image = Image.new("L", (300, 300), 255)
    x, y = random.integers(30, 120, 2)
    draw = ImageDraw.Draw(image)
    shape = draw.ellipse if random.integers(2) else draw.rectangle
    shape((x, y, x + random.integers(80, 150), y + random.integers(80, 150)), fill=0)
    return encoded(image)


NO_DIGITS: dict[str, Callable[[Random], tuple[bytes, str]]] = {
    kind.__name__: kind for kind in (letter, noise, texture, scribble, blot)
}


# Decoding and prediction.

_ROOT = Path(__file__).parents[1]
_LIMITS = Limits(max_images=64)


@cache
def _weights() -> WeightFile:
    return WeightFile.read(latest_weights(_ROOT / "weights" / "lenet"))


def labels(images: Any) -> Any:
    """The labels that the model `lenet` predicts."""
    weights = _weights()
    pieces = [images[at : at + 64] for at in range(0, len(images), 64)]
    return np.concatenate(
        [logits(weights.model, weights.tensors, piece).argmax(1) for piece in pieces]
    )


@dataclass
class Outcome:
    """Answers to pictures of a kind."""

    right: int = 0
    refused: int = 0
    warned: Counter[str] = field(default_factory=Counter)
    decode_s: float = 0.0


def outcome(
    pictures: Iterable[tuple[tuple[bytes, str], Sequence[int]]], digits: Digits = "one"
) -> Outcome:
    """The outcome of pictures, each with the digits that it shows."""
    found, decoded, shown = Outcome(), [], []
    for (body, content_type), expected in pictures:
        doubts: Doubts = []
        began_s = time.process_time()
        try:
            images = decode(body, content_type, digits=digits, limits=_LIMITS, doubts=doubts)
        except InvalidInput:
            found.refused += 1
        else:
            decoded.append(images)
            shown.append(list(expected))
            found.warned.update({doubt for _, doubt in doubts})
        found.decode_s += time.process_time() - began_s
    if decoded:
        read = iter(labels(np.concatenate(decoded)).tolist())
        found.right = sum(
            [next(read) for _ in images] == expected
            for images, expected in zip(decoded, shown, strict=True)
        )
    return found


def of_kind(
    kind: Kind, images: Any, expected: Any, count: int, seed: int
) -> Iterable[tuple[tuple[bytes, str], list[int]]]:
    """`count` pictures, each with its digit: another draw for another seed."""
    for i in range(count):
        random = np.random.default_rng((seed, i))
        index = int(random.integers(len(images)))
        yield kind(images[index], random), [int(expected[index])]


def numbers(
    images: Any, expected: Any, count: int, seed: int
) -> Iterable[tuple[tuple[bytes, str], list[int]]]:
    """Numbers of 2 to 10 digits, those of 4 and more at times in two rows."""
    for i in range(count):
        random = np.random.default_rng((seed, i))
        length = int(random.integers(2, 11))
        rows = int(random.integers(1, 3)) if length > 3 else 1
        chosen = random.integers(0, len(images), length)
        picture = number(images[chosen], random, rows=rows)
        yield picture, expected[chosen].astype(int).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.picture_kinds", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--megapixels", nargs="+", type=float, metavar="N")
    arguments = parser.parse_args()
    test = load(Path(os.environ["LENET_TEST_MNIST"])).test
    # The other half was looked at while the preparation was built.
    draw = (test.images[:5000], test.labels[:5000], arguments.count, arguments.seed)
    count = arguments.count

    def show(name: str, found: Outcome, of: str = "right") -> None:
        share = 100 * found.right / count
        warned = ", ".join(f"{code} {share}" for code, share in sorted(found.warned.items()))
        refused = f"refused {found.refused}" if found.refused else ""
        took_ms = 1e3 * found.decode_s / count
        notes = "; ".join(filter(None, (refused, warned)))
        print(f"{name:34} {of} {share:5.1f} %  {took_ms:5.1f} ms  {notes}", flush=True)

    if arguments.megapixels:
        for size in arguments.megapixels:
            pictures = of_kind(partial(scene, megapixels=size), *draw)
            show(f"photographed, {size:g} megapixels", outcome(pictures))
        return
    for name in arguments.kinds or KINDS:
        show(name, outcome(of_kind(KINDS[name], *draw)))
    if arguments.kinds:
        return
    show("numbers, digits=several", outcome(numbers(*draw), "several"))
    show("numbers, digits=one", outcome(numbers(*draw)))
    for name, make in NO_DIGITS.items():
        pictures = ((make(np.random.default_rng((arguments.seed, i))), [-1]) for i in range(count))
        show(name, outcome(pictures))


if __name__ == "__main__":
    main()
