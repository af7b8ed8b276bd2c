"""Numbers, and pictures of what is not a digit."""

from functools import partial as with_

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tests.picture_kinds import draw as d
from tests.picture_kinds.kinds import clean, drawn_on, kind, ruled, sheet, squared

IN_ROWS = {"aspect": (1.5, 3), "share": (0.2, 0.5), "size": (200, 900), "degrees": (-4, 4)}
NUMBERS = {
    "plain": clean(*drawn_on(), **IN_ROWS),
    "light_on_dark": clean(*drawn_on(inverted=True), **IN_ROWS),
    "two_rows": clean(*drawn_on(), rows=2, aspect=(1, 1.6), share=(0.5, 0.75), size=(250, 900)),
    "ruled": kind(*sheet(ruled), d.png, **IN_ROWS),
    "squared": kind(*sheet(squared), d.png, **IN_ROWS),
    "photographed": kind(*sheet(), d.lamp, **IN_ROWS),
}
"""Numbers of 2 to 10 digits."""


def glyph(draw_on):
    """A shape of 120 pixels with ink high, as MNIST's images have it."""

    def make(random):
        image = Image.new("L", (160, 160))
        draw_on(ImageDraw.Draw(image), random)
        return np.asarray(image)

    return make


def letter(draw, random):
    text = "AEFHKMNRWXaekmnrwx"[random.integers(18)]
    draw.text((80, 80), text, fill=255, font=ImageFont.load_default(120), anchor="mm")


def word(draw, random):
    draw.text((80, 80), random.choice(d.WORDS), 255, ImageFont.load_default(48), anchor="mm")


def outline(*points):
    """A closed line through points of a square of 100."""

    def shape(draw, random):
        at = [(30 + x, 30 + y) for x, y in points]
        if random.integers(2):
            draw.polygon(at, fill=255)
        draw.line([*at, *at[:2]], fill=255, width=int(random.integers(6, 11)), joint="curve")

    return shape


def strokes(*paths):
    def shape(draw, random):
        for path in paths:
            at = [(30 + x, 30 + y) for x, y in path]
            draw.line(at, fill=255, width=int(random.integers(8, 14)), joint="curve")

    return shape


def face(draw, random):
    draw.ellipse((20, 20, 140, 140), outline=255, width=6)
    for x in (58, 102):
        draw.ellipse((x - 7, 55, x + 7, 69), fill=255)
    draw.arc((50, 60, 110, 118), *sorted(random.uniform(0, 40, 1)), 180, fill=255, width=6)


def cup(draw, random):
    draw.line([(35, 45), (45, 125), (100, 125), (110, 45), (35, 45)], fill=255, width=7)
    draw.arc((92, 55, 145, 105), -90, 100, fill=255, width=7)


def key(draw, random):
    draw.ellipse((15, 55, 65, 105), outline=255, width=9)
    draw.line([(65, 80), (148, 80), (148, 103)], fill=255, width=9)
    draw.line([(122, 80), (122, 98)], fill=255, width=9)


def scribble(draw, random):
    points = np.clip(80 + np.cumsum(random.normal(0, 30, (40, 2)), 0) % 120 - 60, 12, 148)
    draw.line([tuple(point) for point in points], fill=255, width=5, joint="curve")


def blot(draw, random):
    shape = draw.ellipse if random.integers(2) else draw.rectangle
    shape((20, 20, *random.integers(80, 150, 2)), fill=255)


def barcode(draw, random):
    x = 15.0
    while x < 140:
        wide = random.choice((3, 4, 6))
        draw.rectangle((x, 35, x + wide, 125), fill=255)
        x += wide + random.choice((4, 6, 8))


_turn = np.linspace(0, 2 * np.pi, 40)
HEART = zip(
    50 + 3 * 16 * np.sin(_turn) ** 3,
    45 - 3 * (13 * np.cos(_turn) - 5 * np.cos(2 * _turn) - 2 * np.cos(3 * _turn)),
    strict=True,
)
STAR = [
    (50 + r * np.sin(i * np.pi / 5), 50 - r * np.cos(i * np.pi / 5))
    for i, r in enumerate([55, 22] * 5)
]
ARROW = [(0, 38), (55, 38), (55, 12), (105, 50), (55, 88), (55, 62), (0, 62)]
SHAPES = {
    **{shape.__name__: shape for shape in (letter, word, face, cup, key, scribble, blot, barcode)},
    "heart": outline(*HEART),
    "star": outline(*STAR),
    "arrow": outline(*ARROW),
    "cross": strokes(((5, 5), (95, 95)), ((95, 5), (5, 95))),
    "check": strokes(((0, 55), (35, 95), (105, 0))),
    "hash": strokes(
        ((30, 0), (20, 100)), ((75, 0), (65, 100)), ((0, 32), (100, 32)), ((0, 68), (100, 68))
    ),
}
ON = (
    clean(*drawn_on(), share=(0.3, 0.7)),
    clean(*drawn_on(inverted=True), share=(0.3, 0.7)),
    kind(*sheet(), d.lamp, size=(200, 900)),
)
"""How a shape is drawn."""


def shaped(shape):
    make = glyph(shape)

    def picture(random):
        return ON[random.integers(len(ON))](make(random), random)

    return picture


def textured(*textures, size=(100, 900)):
    """Pictures of a texture alone."""

    def picture(random):
        shape = tuple(int(side) for side in random.integers(*size, 2))
        pixels = textures[random.integers(len(textures))](random, shape)
        return d.encoded(pixels, "JPEG", quality=int(random.integers(60, 95)))

    return picture


def noise(random, shape):
    return random.uniform(0, 255, (*shape, 1)).repeat(3, 2)


def stone(random, shape):
    return 128 + 45 * d.cloud(random, shape, random.uniform(4, 20))[..., np.newaxis].repeat(3, 2)


def gradient(random, shape):
    off = d.distance(random, shape, (0, 0))
    colours = d.near(random, (150, 150, 150), 50), d.near(random, (150, 150, 150), 50)
    share = ((off - off.min()) / np.ptp(off))[..., np.newaxis]
    return colours[0] + (colours[1] - colours[0]) * share + random.normal(0, 2, (*shape, 1))


def text(random, shape):
    image = Image.new("L", shape[::-1])
    d.text_lines(random, image, (5, 5, shape[1] - 5, shape[0] - 5), max(12, shape[0] // 12))
    return 240 - 0.85 * np.asarray(image, d.F32)[..., np.newaxis].repeat(3, 2)


def empty(*marks):
    """Paper without a digit."""
    nothing = np.zeros((28, 28), np.uint8)
    nothing[13, 13] = 255
    make = kind(*(with_(d.surface), *marks, d.lamp), size=(200, 900))
    return lambda random: make(nothing, random)


NO_DIGITS = {
    **{name: shaped(shape) for name, shape in SHAPES.items()},
    "noise": textured(noise, size=(28, 300)),
    "stone": textured(stone),
    "wood": textured(d.wood),
    "wall": textured(d.brick, d.speckled),
    "cloth": textured(d.linen, d.tablecloth),
    "gradient": textured(gradient),
    "text": textured(text, d.newspaper, size=(200, 700)),
    "empty_paper": empty(),
    "empty_ruled_paper": empty(ruled),
    "empty_squared_paper": empty(squared),
    "empty_dotted_paper": empty(d.dots),
    "empty_crumpled_paper": empty(d.crumple),
}
"""Pictures of what is not a digit, each a function of a generator."""
