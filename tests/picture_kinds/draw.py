"""Scenes with a digit, drawn step by step: a surface, marks, the pen, light, and a file at the end.

A scene holds brightness, float32 (height, width, 3), 0 to 255. A step is a function of a scene; the
last step of a kind returns the picture's file and its content type. A texture is a function of a
generator and a shape that returns brightness.
"""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WORDS = ("total", "sum", "date", "name", "street", "paid", "item", "cash", "note", "form", "copy")
F32 = np.float32


def encoded(pixels, kind="PNG", **options):
    """A picture's file and its content type; a colourless picture is saved as grey."""
    pixels = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    if pixels.shape[2:] == (3,) and (pixels[::7] == pixels[::7, :, :1]).all():
        pixels = pixels[..., 0]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue(), f"image/{kind.lower()}"


def cropped(share):
    rows, columns = np.flatnonzero(share.any(1)), np.flatnonzero(share.any(0))
    return share[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def strokes(glyph, height, *, threshold=0.5, slant=0.0, degrees=0.0):
    """The glyph, uint8 with ink high, as a pen would draw it `height` pixels high: shares of ink.

    A low threshold is a thick pen; `slant` is the tangent of the angle by which it leans.
    """
    cut = cropped(glyph)
    scale = height / len(cut)
    cut = np.pad(cut, 3)
    size = [max(1, round(length * scale)) for length in cut.shape[::-1]]
    image = Image.fromarray(cut).resize(size, Image.Resampling.BICUBIC)
    if slant:
        across = abs(slant) * size[1] / 2
        wide = (round(size[0] + 2 * across), size[1])
        leaning = (1, slant, -slant * size[1] / 2 - across, 0, 1, 0)
        image = image.transform(wide, Image.Transform.AFFINE, leaning, Image.Resampling.BILINEAR)
    if degrees:
        image = image.rotate(degrees, Image.Resampling.BILINEAR, expand=True)
    share = np.asarray(image, F32) / 255
    steep = max(scale, 0.5 / min(threshold, 1 - threshold))  # paper has no ink, strokes are full
    return cropped(np.clip((share - threshold) * steep + 0.5, 0, 1))


class Scene:
    """A picture in the making. Ranges are drawn from; `share` is the digit's of the height."""

    def __init__(
        self,
        glyphs,
        random,
        *,
        size=(200, 1600),
        aspect=(0.75, 1.35),
        share=(0.3, 0.66),
        room=0.07,
        pen=(0.3, 0.5),
        slant=(0.0, 0.0),
        degrees=(-10, 10),
        rows=1,
    ):
        self.random = random
        height = math.exp(random.uniform(*np.log(size)))
        width = min(max(height * random.uniform(*aspect), size[0]), 1600)
        height, width = self.shape = round(height), round(width)
        self.side = min(self.shape)
        self.pixels = np.full((*self.shape, 3), 255, F32)
        how = {"threshold": random.uniform(*pen), "slant": random.uniform(*slant)}
        how["degrees"] = random.uniform(*degrees)
        across = -(-len(glyphs) // rows)
        most = width * (1 - 2 * room) / (1.15 * across) if len(glyphs) > 1 else height
        high = min(height * random.uniform(*share) / (1 + 1.4 * (rows - 1)), most)
        ink = _rows([strokes(glyph, high, **how) for glyph in glyphs], across, high, random)
        largest = (1 - 2 * room) * min(height / ink.shape[0], width / ink.shape[1])
        if largest < 1:
            to = [max(1, int(length * largest)) for length in ink.shape[::-1]]
            ink = np.asarray(Image.fromarray(ink).resize(to)).clip(0, 1)
        free = [
            (int(room * of), of - length - int(room * of))
            for of, length in zip(self.shape, ink.shape, strict=True)
        ]
        top, left = (int(random.integers(low, max(low, high) + 1)) for low, high in free)
        self.box = (top, left, top + ink.shape[0], left + ink.shape[1])
        self.ink = np.zeros(self.shape, F32)
        self.ink[self.box[0] : self.box[2], self.box[1] : self.box[3]] = ink

    def over(self, share, colour, opacity=1.0):
        """Colour over the pixels, by a share of each: an array, or a mask with levels to 255."""
        if isinstance(share, Image.Image):
            share = np.asarray(share, F32) / 255
        share = (share * F32(opacity))[..., np.newaxis]
        self.pixels += (np.asarray(colour, F32) - self.pixels) * share

    def mask(self):
        image = Image.new("L", self.shape[::-1])
        return image, ImageDraw.Draw(image)

    def beside(self, gap=0.04):
        """The widest strip beside the digit: (left, top, right, bottom), the side's angle."""
        gap = int(gap * self.side)
        (height, width), (top, left, bottom, right) = self.shape, self.box
        strips = {
            left: ((0, 0, left - gap, height), 180),
            top: ((0, 0, width, top - gap), 270),
            width - right: ((right + gap, 0, width, height), 0),
            height - bottom: ((0, bottom + gap, width, height), 90),
        }
        return strips[max(strips)]

    def distance(self, point=None):
        """Pixels from a random line through the point, by default one of the digit's box."""
        top, left, bottom, right = self.box
        y, x = point or (self.random.uniform(top, bottom), self.random.uniform(left, right))
        return distance(self.random, self.shape, (y, x))


def _rows(glyphs, across, high, random):
    """Glyphs in rows of `across`, apart from each other and not quite in line."""
    if len(glyphs) == 1:
        return glyphs[0]
    lines = [glyphs[at : at + across] for at in range(0, len(glyphs), across)]
    gaps = random.uniform(0.14, 0.3, len(glyphs)) * high
    wide = int(max(sum(one.shape[1] for one in line) for line in lines) + gaps.sum()) + 1
    field = np.zeros((int(1.5 * high * len(lines)) + 20, wide), F32)
    for row, line in enumerate(lines):
        left = 0.0
        for one, gap in zip(line, gaps, strict=False):
            top = int((1.45 * row + random.uniform(0, 0.08)) * high)
            field[top : top + one.shape[0], int(left) : int(left) + one.shape[1]] = one
            left += one.shape[1] + gap
    return cropped(field)


def distance(random, shape, point, angle=None):
    angle = random.uniform(0, 2 * np.pi) if angle is None else angle
    y, x = np.ogrid[: shape[0], : shape[1]]
    return ((x - point[1]) * np.cos(angle) + (y - point[0]) * np.sin(angle)).astype(F32)


def cloud(random, shape, cell):
    """Smooth noise of mean 0 and deviation near 1; a cell has so many pixels, or (down, across)."""
    down, across = np.broadcast_to(cell, 2)
    small = random.standard_normal((int(shape[0] / down) + 3, int(shape[1] / across) + 3), F32)
    return np.asarray(Image.fromarray(small).resize(shape[::-1], Image.Resampling.BICUBIC))


def near(random, colours, spread=10):
    """One of the colours, or the colour, changed a little."""
    colours = np.atleast_2d(colours)
    return (colours[random.integers(len(colours))] + random.normal(0, spread, 3)).astype(F32)


# Textures.

WHITE = ((245, 244, 240), (232, 230, 225), (250, 250, 250), (222, 224, 228))
CREAM = ((244, 233, 205), (238, 226, 190))
NOTES = ((250, 232, 110), (250, 160, 190), (165, 225, 130))
KRAFT = ((190, 150, 105), (175, 135, 92))
DARK = ((22, 22, 26), (35, 32, 38), (15, 22, 35))
BLUE = ((30, 50, 150), (45, 70, 175), (25, 35, 110))
BLACK = ((25, 25, 30), (40, 40, 48), (10, 10, 12))
NEON = ((255, 60, 160), (60, 220, 255), (120, 255, 120), (255, 150, 40))
RED = ((200, 30, 40), (175, 25, 35))


def paper(random, shape, colours=WHITE, fibre=1.5, cell=2):
    return near(random, colours, 4) + F32(fibre) * cloud(random, shape, cell)[..., np.newaxis]


def flat(random, shape):
    """A dark table, at times with a fine grain."""
    grain = random.normal(0, random.choice((0, 5)), (shape[0], 1, 1))
    return np.broadcast_to(random.uniform(10, 110) + grain, (*shape, 3)).astype(F32)


def kraft(random, shape):
    return paper(random, shape, KRAFT) + 5 * cloud(random, shape, (2, 14))[..., np.newaxis]


def wood(random, shape, colours=((150, 105, 65), (110, 72, 45), (180, 140, 95), (80, 55, 40))):
    """Grain along the boards, with a dark joint between two."""
    turned = bool(random.integers(2))
    height, width = shape[::-1] if turned else shape
    grain = cloud(random, (height, width), (2, width / 3)) * 6
    y = np.arange(height, dtype=F32)[:, np.newaxis]
    rings = 2.5 * cloud(random, (height, width), (height / 3, width / 2))
    grain += 9 * np.sin(y / height * random.uniform(20, 50) + rings)
    board = random.uniform(0.2, 0.6) * height
    grain[(y[:, 0] + random.uniform(0, board)) % board < max(1, height / 250)] -= 45
    return near(random, colours) + (grain.T if turned else grain)[..., np.newaxis]


def brick(random, shape):
    high = max(6, int(shape[0] * random.uniform(0.07, 0.12)))
    wide, joint = int(high * 2.6), max(1, high // 9)
    y, x = np.ogrid[: shape[0], : shape[1]]
    row = y // high
    column = (x + row % 2 * (wide // 2)) // wide
    tone = random.normal(0, 9, (shape[0] // high + 1, shape[1] // wide + 2)).astype(F32)
    wall = (
        near(random, (165, 85, 65)) + (tone[row, column] + 5 * cloud(random, shape, 3))[..., None]
    )
    wall[(y % high < joint) | ((x + row % 2 * (wide // 2)) % wide < joint)] = (190, 180, 170)
    return wall


def speckled(random, shape, colours=((85, 85, 88),), deep=14):
    """Asphalt, or sand."""
    fine = cloud(random, shape, max(1.0, min(shape) / 300)) + 0.4 * cloud(random, shape, 40)
    return near(random, colours) + (deep * fine)[..., np.newaxis]


def linen(random, shape):
    step = max(3, min(shape) / random.uniform(70, 140))
    y, x = np.ogrid[: shape[0], : shape[1]]
    weave = np.sin(2 * np.pi * y / step) + np.sin(2 * np.pi * x / step)
    uneven = cloud(random, shape, (step, 9 * step)) + cloud(random, shape, (9 * step, step))
    return (
        near(random, ((225, 215, 195), (205, 210, 215)))
        + ((5 * weave + 4 * uneven).astype(F32)[..., np.newaxis])
    )


def tablecloth(random, shape):
    """Checks of two colours, or dots."""
    step = min(shape) * random.uniform(0.06, 0.14)
    y, x = np.ogrid[: shape[0], : shape[1]]
    down, across = y % step < step / 2, x % step < step / 2
    share = (down.astype(F32) + across) / 2
    if random.integers(2):
        share = (np.hypot(y % step - step / 2, x % step - step / 2) < step / 4).astype(F32)
    colour = near(random, ((190, 40, 45), (40, 80, 160), (50, 120, 70)))
    return 235 + (colour - 235) * share[..., np.newaxis] + cloud(random, shape, 2)[..., None] * 3


def newspaper(random, shape):
    """Columns of print."""
    image = Image.new("L", shape[::-1])
    wide = max(60, int(shape[1] / random.uniform(3, 5)))
    for left in range(4, shape[1], wide):
        text_lines(random, image, (left, 0, left + wide - 8, shape[0]), max(7, shape[0] // 60))
    share = np.asarray(image, F32)[..., np.newaxis] / 255
    return paper(random, shape, ((215, 212, 203),)) * (1 - 0.75 * share)


def text_lines(random, image, box, size):
    """Lines of printed words within (left, top, right, bottom) of a mask."""
    font, draw = ImageFont.load_default(size), ImageDraw.Draw(image)
    left, top, right, bottom = box
    for y in np.arange(top + 2, bottom - size, 1.35 * size):
        words = list(random.choice(WORDS, max(1, int((right - left) / (2.6 * size)))))
        while words and font.getlength(" ".join(words)) > right - left:
            words.pop()
        draw.text((left, y), " ".join(words), fill=255, font=font)


# Marks on the surface, and the pen.


def surface(scene, texture=paper, **how):
    scene.pixels = texture(scene.random, scene.shape, **how)


def grey(scene, light=(190, 255), dark=(0, 80), inverted=False):
    """Paper and ink without colour."""
    tones = scene.random.uniform(*light), scene.random.uniform(*dark)
    scene.pixels[:], ink = tones[::-1] if inverted else tones
    scene.grey = ink
    scene.paper = scene.pixels[0, 0, 0]


def pen(scene, colours=BLACK + BLUE, opacity=(0.9, 1.0), rough=0.0, blur=0.0, multiply=False):
    """The digit in a colour; `rough` is the strength of gaps in it, as of chalk."""
    share = scene.ink
    if blur:
        soft = Image.fromarray((share * 255).astype(np.uint8))
        radius = blur * scene.side
        share = np.asarray(soft.filter(ImageFilter.GaussianBlur(radius)), F32) / 255
    if rough:
        gaps = cloud(scene.random, scene.shape, max(1.2, scene.side / 400))
        share = share * np.clip(0.85 + rough * gaps, 0, 1)
    colour = near(scene.random, colours, 6)
    if multiply:
        colour = scene.pixels * colour / 255
    scene.over(share, colour, scene.random.uniform(*opacity))


def grey_pen(scene):
    scene.over(scene.ink, [scene.grey] * 3)


LINES = ((140, 160, 220), (170, 185, 225), (150, 150, 150), (100, 180, 120), (230, 150, 150))


def lines(scene, *, squared=False, colours=LINES, spacing=(0.05, 0.18), widest=3, margin=False):
    """Ruling, or squares, and at times a margin line."""
    random, (height, width) = scene.random, scene.shape
    step = max(8.0, scene.side * random.uniform(*spacing))
    line = max(1, min(int(random.integers(1, widest + 1)), int(step / 6), scene.side // 100))
    colour = near(random, colours, 5)
    for at in np.arange(random.uniform(0, step), height, step).astype(int):
        scene.pixels[at : at + line] = colour
    for at in np.arange(random.uniform(0, step), width if squared else 0, step).astype(int):
        scene.pixels[:, at : at + line] = colour
    if margin:
        at = int(width * random.choice((0.12, 0.88)) + random.uniform(-0.04, 0.04) * width)
        scene.pixels[:, at : at + 2 * line] = near(random, (220, 110, 110))


def dots(scene):
    """A dot at each crossing of a grid."""
    random = scene.random
    step = max(9.0, scene.side * random.uniform(0.045, 0.09))
    y, x = np.ogrid[: scene.shape[0], : scene.shape[1]]
    start = random.uniform(0, step, 2)
    radius = max(0.9, step * random.uniform(0.06, 0.1))
    apart = np.hypot((y + start[0]) % step - step / 2, (x + start[1]) % step - step / 2)
    scene.over(np.clip(radius + 0.5 - apart, 0, 1).astype(F32), near(random, (150, 155, 170), 15))


def ring(scene):
    """The ring that a coffee cup left."""
    random, (height, width) = scene.random, scene.shape
    middle = random.uniform(0.1, 0.9) * height, random.uniform(0.1, 0.9) * width
    radius = scene.side * random.uniform(0.2, 0.35)
    y, x = np.ogrid[:height, :width]
    off = np.abs(np.hypot(y - middle[0], x - middle[1]) - radius) / (0.02 * scene.side)
    share = np.exp(-off) * np.clip(0.6 + 0.3 * cloud(random, scene.shape, scene.side / 8), 0.1, 1)
    scene.over(share.astype(F32), scene.pixels * F32([0.66, 0.5, 0.34]), 0.75)


def fold(scene, count=1, deep=0.12):
    """Folds: one side is darker than the other, and the fold itself is a fine shade."""
    _height, _width = scene.shape
    for _ in range(count):
        off = scene.distance(tuple(scene.random.uniform(0.1, 0.9, 2) * scene.shape))
        shade = deep * (off > 0) + 0.2 * np.exp(-np.abs(off) / (0.006 * scene.side))
        scene.pixels *= (1 - shade * scene.random.uniform(0.4, 1))[..., np.newaxis].astype(F32)


def crumple(scene):
    """Facets of light and shade between many creases."""
    light = np.zeros(small := (192, 192), F32)
    for _ in range(22):
        off = distance(scene.random, small, scene.random.uniform(0, 192, 2))
        here = distance(scene.random, small, scene.random.uniform(0, 192, 2)) > 0
        light += here * scene.random.normal(0, 0.06) * np.tanh(off / 9)
    wide = Image.fromarray(light).resize(scene.shape[::-1], Image.Resampling.BICUBIC)
    scene.pixels *= (0.92 + np.asarray(wide).clip(-0.3, 0.12))[..., np.newaxis]


def dust(scene, colour=(215, 220, 215), deep=0.16):
    """Smears of wiped chalk."""
    random = scene.random
    smear = cloud(random, scene.shape, (scene.side / 9, scene.side / 3))
    streaks = cloud(random, scene.shape, (3, scene.side / 4))
    share = np.clip(0.5 + 0.4 * smear + 0.15 * streaks, 0, 1)
    scene.over(share, colour, random.uniform(0.4, 1) * deep)


# What lies on the sheet and around it.


def homography(source, target):
    """The eight numbers that map four points to four, as Pillow's PERSPECTIVE takes them."""
    system, wanted = [], []
    for (x, y), (u, v) in zip(source, target, strict=True):
        system += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        wanted += [u, v]
    return tuple(np.linalg.solve(np.array(system), np.array(wanted)))


def onto(scene, texture=wood, around=(0.3, 0.55), turn=10, tilt=0.02, sides=4, torn=0.0, **how):
    """The sheet on a table, which takes `around` of the picture and is seen at some sides.

    `turn` is in degrees; `tilt` moves the corners, in shares of the sheet, as perspective does.
    """
    random, (height, width) = scene.random, scene.shape
    grow = 1 / math.sqrt(1 - random.uniform(*around))
    whole = round(height * grow), round(width * grow)
    corners = np.array([(0, 0), (0, height), (width, height), (width, 0)], float)
    angle = np.deg2rad(random.uniform(-turn, turn))
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    seen = (corners - corners[2] / 2) @ rotation.T + random.normal(0, 1, (4, 2)) * tilt * width
    pad = np.array(whole[::-1]) - corners[2]
    seen += corners[2] / 2 + pad * random.uniform(0.35, 0.65, 2)
    forth, back = homography(corners, seen), homography(seen, corners)
    way = (whole[::-1], Image.Transform.PERSPECTIVE, back, Image.Resampling.BICUBIC)
    sheet = Image.fromarray(np.clip(scene.pixels, 0, 255).astype(np.uint8)).transform(*way)
    mask = Image.new("L", (width, height), 255).transform(*way)
    if torn:
        edge = np.asarray(mask.filter(ImageFilter.GaussianBlur(torn * scene.side)), F32) / 255
        rough = 0.14 * cloud(random, whole, scene.side / 40) + 0.07 * cloud(random, whole, 2)
        ripped = np.clip((edge + rough.clip(-0.25, 0.25) - 0.6) * 8, 0, 1)
        mask = Image.fromarray((np.asarray(mask) * ripped).astype(np.uint8))
    top, left, bottom, right = scene.box
    a, b, c, d, e, f, g, h = forth
    box = [
        ((d * x + e * y + f) / (g * x + h * y + 1), (a * x + b * y + c) / (g * x + h * y + 1))
        for x in (left, right)
        for y in (top, bottom)
    ]
    scene.shape, scene.side = whole, min(whole)
    scene.pixels = texture(random, whole, **how).astype(F32)
    cast = mask.filter(ImageFilter.BoxBlur(0.01 * scene.side))
    shift = tuple(int(off) for off in random.uniform(-0.012, 0.012, 2) * scene.side)
    under = Image.new("L", whole[::-1])
    under.paste(cast, shift)
    scene.over(under, (10, 10, 10), 0.4)
    scene.over(mask, np.asarray(sheet, F32))
    low, high = np.min(box, 0).clip(0), np.max(box, 0)
    scene.box = (int(low[0]), int(low[1]), int(high[0]), int(high[1]))
    if sides < 4:
        (a, b, c, d) = seen.clip(0, whole[::-1]).round().astype(int)
        inner = [max(a[1], d[1]), max(a[0], b[0]), min(b[1], c[1]), min(c[0], d[0])]
        edges = [0, 0, *whole]
        for side in random.permutation(4)[: 4 - sides]:  # cut within the sheet
            edges[side] = inner[side] + (3 if side < 2 else -3)
        crop(scene, *edges)


def crop(scene, top, left, bottom, right):
    scene.pixels = scene.pixels[top:bottom, left:right]
    scene.ink = scene.ink[top:bottom, left:right]
    scene.shape = scene.pixels.shape[:2]
    scene.side = min(scene.shape)
    a, b, c, d = scene.box
    scene.box = (max(0, a - top), max(0, b - left), c - top, d - left)


def print_beside(scene, size=(0.03, 0.045), opacity=0.8):
    """Small printed text away from the digit."""
    image, _ = scene.mask()
    (left, top, right, bottom), _ = scene.beside(0.06)
    high = max(8, int(scene.random.uniform(*size) * scene.side))
    text_lines(scene.random, image, (left + high, top, right - high, bottom), high)
    scene.over(image, (45, 45, 50), opacity)


def finger(scene):
    """A finger that holds the sheet at an edge, as far from the digit as can be."""
    random, (image, draw) = scene.random, scene.mask()
    (left, top, right, bottom), angle = scene.beside(0.03)
    wide = random.uniform(0.1, 0.16) * scene.side
    flat = angle % 180 == 0
    deep = min((right - left) if flat else (bottom - top), 0.3 * scene.side)
    if flat:
        y = random.uniform(0.2, 0.8) * scene.shape[0]
        x, tip = (right, right - deep) if angle == 0 else (left, left + deep)
        box = (min(x, tip), y - wide / 2, max(x, tip), y + wide / 2)
        box = (box[0], box[1], box[2] + wide, box[3]) if angle == 0 else (box[0] - wide, *box[1:])
    else:
        x = random.uniform(0.2, 0.8) * scene.shape[1]
        y, tip = (bottom, bottom - deep) if angle == 90 else (top, top + deep)
        box = (x - wide / 2, min(y, tip), x + wide / 2, max(y, tip))
        box = (*box[:3], box[3] + wide) if angle == 90 else (box[0], box[1] - wide, *box[2:])
    draw.rounded_rectangle(box, wide / 2, fill=255)
    image = image.filter(ImageFilter.GaussianBlur(0.004 * scene.side))
    round_ = np.asarray(image.filter(ImageFilter.BoxBlur(wide / 4)), F32) / 255
    skin = near(random, ((225, 175, 150), (150, 105, 80), (100, 68, 50)))
    scene.over(image, skin * (0.45 + 0.6 * round_)[..., np.newaxis])


def tape(scene):
    """A strip of tape over a corner of the strip beside the digit."""
    random, (image, draw) = scene.random, scene.mask()
    (left, top, right, bottom), angle = scene.beside(0.03)
    wide = 0.35 * min(right - left, bottom - top)
    x, y = (left + right) / 2, (top + bottom) / 2
    if angle % 180:
        ends = [(x - 0.4 * scene.side, y), (x + 0.4 * scene.side, y + random.uniform(-1, 1) * wide)]
    else:
        ends = [(x, y - 0.4 * scene.side), (x + random.uniform(-1, 1) * wide, y + 0.4 * scene.side)]
    draw.line(ends, fill=255, width=max(4, int(wide)))
    scene.over(image, near(random, ((215, 200, 150), (225, 225, 220))), 0.55)


def stamp(scene):
    """A postage stamp with a postmark, in a corner of the strip beside the digit."""
    random, (image, draw) = scene.random, scene.mask()
    (left, top, right, bottom), _ = scene.beside(0.05)
    wide = min(0.22 * scene.side, 0.8 * min(right - left, bottom - top))
    x, y = right - 1.15 * wide, top + 0.12 * wide
    draw.rectangle((x, y, x + wide * 0.9, y + wide), fill=255)
    scene.over(image, (250, 250, 245))
    image, draw = scene.mask()
    draw.rectangle((x + 0.08 * wide, y + 0.08 * wide, x + 0.82 * wide, y + 0.92 * wide), fill=230)
    draw.ellipse((x + 0.25 * wide, y + 0.25 * wide, x + 0.65 * wide, y + 0.65 * wide), fill=90)
    scene.over(image, near(random, ((170, 60, 60), (60, 90, 150), (70, 130, 90))))
    image, draw = scene.mask()
    draw.ellipse(
        (x - 0.4 * wide, y + 0.2 * wide, x + 0.3 * wide, y + 0.9 * wide),
        outline=255,
        width=max(1, int(wide / 40)),
    )
    scene.over(image, (60, 60, 70), 0.8)


def frame(
    scene,
    shape="rectangle",
    gap=(0.06, 0.12),
    thick=(0.004, 0.012),
    colours=BLACK + BLUE,
    neighbours=0,
    fill=None,
):
    """A shape drawn around the digit, at times with equal ones beside it, as of a form."""
    random, (image, draw) = scene.random, scene.mask()
    top, left, bottom, right = scene.box
    pad = random.uniform(*gap) * scene.side
    line = max(1, round(random.uniform(*thick) * scene.side))
    box = [left - pad, top - pad, right + pad, bottom + pad]
    if shape == "ellipse":  # around the corners of the box
        radius = math.hypot(right - left, bottom - top) / 2 + pad / 2
        x, y = (left + right) / 2, (top + bottom) / 2
        box = [x - radius, y - radius, x + radius, y + radius]
    if fill is not None:
        getattr(draw, shape)(box, fill=255)
        scene.over(image, near(random, fill))
        image, draw = scene.mask()
    wide, high = box[2] - box[0], box[3] - box[1]
    for column in range(-neighbours, neighbours + 1):
        for row in range(-neighbours, neighbours + 1) if shape == "rectangle" else (0,):
            moved = [box[0] + column * wide, box[1] + row * high]
            moved += [moved[0] + wide + line - 1, moved[1] + high + line - 1]
            if row == 0 or gap[1] > 0.03:
                getattr(draw, shape)(moved, outline=255, width=line)
    scene.over(image, near(random, colours))


def watermark(scene, text="SAMPLE"):
    """A large pale word across the sheet, below the ink."""
    image, draw = scene.mask()
    font = ImageFont.load_default(max(20, scene.shape[1] // 5))
    height, width = scene.shape
    draw.text((width / 2, height / 2), text, fill=255, font=font, anchor="mm")
    image = image.rotate(scene.random.uniform(20, 40), Image.Resampling.BILINEAR)
    scene.over(image, (150, 155, 165), scene.random.uniform(0.2, 0.35))


# Light, and the camera.


def lamp(scene, most=0.4):
    """Light that falls off to one side."""
    y, x = np.mgrid[0:1:64j, 0:1:64j]
    angle, bend = scene.random.uniform((0, -0.4), (2 * np.pi, 0.4))
    light = x * np.cos(angle) + y * np.sin(angle) + bend * (x - scene.random.uniform()) ** 2
    light = (light - light.min()) / np.ptp(light)
    light = (1 - scene.random.uniform(0.1, most) * light).astype(F32)
    wide = Image.fromarray(light).resize(scene.shape[::-1], Image.Resampling.BILINEAR)
    scene.pixels *= np.asarray(wide)[..., np.newaxis]


def shadow(scene, deep=(0.35, 0.6), soft=0.008):
    """The straight edge of a hard shadow, across the digit or close to it."""
    off = scene.distance() / (scene.random.uniform(0.1, 1) * soft * scene.side)
    share = scene.random.uniform(*deep) * (0.5 + 0.5 * np.tanh(off))
    scene.pixels *= (1 - share)[..., np.newaxis] * F32([1, 1, 1.04])


def glow(scene, colour=(255, 255, 255), size=(0.08, 0.2), strength=0.95, where=None):
    """A soft round spot of light, beside the digit."""
    random = scene.random
    (left, top, right, bottom), _ = scene.beside(0)
    x, y = random.uniform((left, top), (max(right, left + 1), max(bottom, top + 1)))
    rows, columns = np.ogrid[: scene.shape[0], : scene.shape[1]]
    radius = random.uniform(*size) * scene.side
    off = np.hypot((rows - y) / random.uniform(0.5, 1), columns - x) / radius
    scene.over(np.exp(-(off**2)).astype(F32), colour, strength)


def reflection(scene):
    """Bright bars of a window in the glass before the sheet."""
    random = scene.random
    off = scene.distance() / scene.side
    bars = sum(
        1 / (1 + np.exp((np.abs(off - at) - random.uniform(0.05, 0.12)) * 60))
        for at in random.uniform(-0.5, 0.5, 2)
    )
    scene.over(np.clip(bars, 0, 1).astype(F32), (235, 242, 250), random.uniform(0.25, 0.45))


def vignette(scene):
    y, x = np.ogrid[-1 : 1 : complex(scene.shape[0]), -1 : 1 : complex(scene.shape[1])]
    fall = 1 - scene.random.uniform(0.3, 0.42) * (x**2 + y**2)
    scene.pixels *= np.clip(fall, 0.08, 1).astype(F32)[..., np.newaxis]


def exposure(scene, gain=(1, 1), lift=(0, 0), tint=(1, 1, 1)):
    scene.pixels *= F32(scene.random.uniform(*gain)) * F32(tint)
    scene.pixels += F32(scene.random.uniform(*lift))


def motion(scene, reach=(0.012, 0.025)):
    """The mean of the picture along a short way."""
    reach = max(2, int(scene.random.uniform(*reach) * scene.side))
    angle = scene.random.uniform(0, np.pi)
    steps = np.linspace(0, reach, min(reach + 1, 9))
    image = Image.fromarray(np.clip(scene.pixels, 0, 255).astype(np.uint8))
    total = np.zeros_like(scene.pixels)
    for step in steps:
        way = (1, 0, step * np.cos(angle), 0, 1, step * np.sin(angle))
        total += np.asarray(image.transform(image.size, Image.Transform.AFFINE, way))
    scene.pixels = total / F32(len(steps))
    crop(scene, reach, reach, scene.shape[0] - reach, scene.shape[1] - reach)


def pixel_grid(scene):
    """The grid of a screen's pixels, and the wide bands that it makes with the camera's."""
    random = scene.random
    period = random.uniform(3, 5)
    y, x = np.ogrid[: scene.shape[0], : scene.shape[1]]
    bands = scene.distance() / (scene.side * random.uniform(0.08, 0.2))
    grid = np.cos(2 * np.pi * y / period) + np.cos(2 * np.pi * x / period)
    light = 0.9 + 0.045 * grid + 0.05 * np.sin(2 * np.pi * bands)
    phase = np.array([0, 2.1, 4.2])
    fringe = 6 * np.sin(2 * np.pi * bands[..., np.newaxis] * 0.7 + phase)
    scene.pixels = (scene.pixels * light[..., np.newaxis] + fringe).astype(F32)


def camera(scene, blur=(0, 0.0025), noise=(1.5, 5), quality=(55, 95), tint=0.2):
    """A JPEG with blur, as a share of the shorter side, noise and a tint."""
    random = scene.random
    scene.pixels *= 1 - random.uniform(0, 1, 3).astype(F32) * F32([0.03, tint / 2, tint])
    image = Image.fromarray(np.clip(scene.pixels, 0, 255).astype(np.uint8))
    image = image.filter(ImageFilter.GaussianBlur(random.uniform(*blur) * scene.side))
    sigma = F32(random.uniform(*noise))
    grain = sigma * random.standard_normal((*scene.shape, 1), F32)
    return encoded(image + grain, "JPEG", quality=int(random.integers(*quality)))


def png(scene):
    return encoded(scene.pixels)


def scanner(scene, sigma=(3, 12)):
    """A PNG of even noise."""
    grain = scene.random.standard_normal((*scene.shape, 1), F32)
    return encoded(scene.pixels + F32(scene.random.uniform(*sigma)) * grain)


def clear(scene, colours=BLACK):
    """Ink of one colour on transparent pixels."""
    colour = np.broadcast_to(near(scene.random, colours), scene.pixels.shape)
    return encoded(np.dstack([colour, 255 * scene.ink]))


def tight(scene):
    """The picture, cut at the digit's own box."""
    crop(scene, *scene.box)


def edges(scene, count=4, widest=0.04, dark=(0, 120)):
    """Bars of one level along some sides."""
    level = scene.random.uniform(*dark)
    same = int(scene.random.integers(1, max(2, int(widest * scene.side)))) if count == 4 else 0
    for side in scene.random.permutation(4)[:count]:
        width = same or int(scene.random.integers(1, max(2, int(widest * scene.side))))
        np.rot90(scene.pixels, side)[:width] = level


def box_edge(scene, dark=(0, 110)):
    """The lines of a box at which it was cut: of another width on each side, not quite straight."""
    image, draw = scene.mask()
    (height, width), off = scene.shape, scene.random.uniform(0.5, 10, 8)
    inside = [(off[0], off[1]), (width - off[2], off[3]), (width - off[4], height - off[5])]
    draw.polygon([*inside, (off[6], height - off[7])], fill=255)
    scene.over(255 - np.asarray(image, F32), [scene.random.uniform(*dark)] * 3, 1 / 255)
