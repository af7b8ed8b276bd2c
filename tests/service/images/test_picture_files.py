"""WebP, GIF and BMP. PNG and JPEG are in `test_picture.py`, with what all of them share."""

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpRleDecoder

from service.errors import InvalidInput, TooLarge
from service.forms.body import Limits, decode
from service.pictures.picture_files import read_grey
from tests.documented import documented
from tests.pictures import FORM, encoded, form

FILES_ROW = "run lengths in a BMP; blocks in a GIF; chunks in a PNG or WebP; scans in a JPEG"
MOST_RUNS, MOST_BLOCKS = map(int, documented(FILES_ROW)[:2])
WEBP, GIF, BMP = "image/webp", "image/gif", "image/bmp"
LIMITS = Limits(max_images=8, max_picture_pixels=100_000)
SEVEN = np.zeros((28, 28), np.uint8)
SEVEN[4:8, 7:21] = 255
SEVEN[8:24, 16:20] = 255
INK = np.kron(SEVEN, np.ones((5, 5), np.uint8))
EXPECTED = decode(encoded(INK), "image/png", limits=LIMITS)[0].astype(int)


def saved(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind.removeprefix("image/").upper(), **options)
    return file.getvalue()


def read(body, kind, **more):
    (image,) = decode(body, kind, limits=LIMITS, **more)
    return image.astype(int)


def refused(body, kind):
    with pytest.raises(InvalidInput) as caught:
        decode(body, kind, limits=LIMITS)
    assert caught.value.field == "body"
    return caught.value.message


GREY = Image.fromarray(INK)
CLEAR = Image.merge("LA", [GREY.point(lambda _: 0), GREY]).convert("RGBA")
LIGHT = Image.merge("LA", [GREY.point(lambda _: 255), GREY]).convert("RGBA")
PALETTE = GREY.convert("RGB").quantize(4)
FILES = {
    "lossy WebP": saved(GREY.convert("RGB"), WEBP, quality=90),
    "lossless WebP": saved(GREY.convert("RGB"), WEBP, lossless=True),
    "lossy WebP, transparent": saved(CLEAR, WEBP, quality=90),
    "lossless WebP, light on transparent": saved(LIGHT, WEBP, lossless=True, exact=True),
    "WebP with metadata": saved(GREY.convert("RGB"), WEBP, icc_profile=b"x" * 99, xmp=b"x"),
    "animated WebP": saved(GREY, WEBP, save_all=True, append_images=[PALETTE], lossless=True),
    "grey GIF": saved(GREY, GIF),
    "GIF with a palette": saved(PALETTE, GIF),
    "interlaced GIF": saved(PALETTE, GIF, interlace=1),
    "GIF, transparent": saved(CLEAR, GIF),
    "animated GIF": saved(GREY, GIF, save_all=True, append_images=[Image.new("L", GREY.size)]),
    "GIF with a comment": saved(GREY, GIF, comment=b"x" * 1000),
    "grey BMP": saved(GREY, BMP),
    "BMP with 1 bit": saved(GREY.convert("1"), BMP),
    "BMP with a palette": saved(PALETTE, BMP),
    "colour BMP": saved(GREY.convert("RGB"), BMP),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_digit(name):
    kind = next(kind for kind in (WEBP, GIF, BMP) if kind[6:].upper() in name.upper())
    got = read(FILES[name], kind)
    assert np.abs(got - EXPECTED).mean() < (3 if name.startswith("lossy") else 0.1)


@pytest.mark.parametrize("kind", [WEBP, GIF, BMP])
def test_the_type_of_a_part_without_one_is_found(kind):
    picture = encoded(INK, kind.removeprefix("image/").upper())
    (image,) = decode(form(picture), FORM, limits=LIMITS)
    assert np.abs(image.astype(int) - EXPECTED).mean() < 3


def test_raw_pixels_that_begin_like_a_bmp_stay_pixels():
    pixels = b"BM" + bytes(782)
    (image,) = decode(form(pixels), FORM, limits=LIMITS)
    assert image.tobytes() == pixels


@pytest.mark.parametrize("kind", [WEBP, GIF, BMP])
def test_every_truncation_is_refused(kind):
    body = encoded(INK, kind.removeprefix("image/").upper())
    for size in range(1, len(body) - 1, max(1, len(body) // 60)):
        message = refused(body[:size], kind)
        assert "not a readable" in message or "got " in message


@pytest.mark.parametrize("kind", [WEBP, GIF, BMP])
def test_a_size_is_checked_before_anything_is_decoded(monkeypatch, kind):
    body = encoded(np.zeros((400, 500), np.uint8), kind.removeprefix("image/").upper())
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    monkeypatch.setattr(ImageFile.ImageFile, "__init__", None)
    with pytest.raises(TooLarge, match="500 x 400 pixels, expected at most 100000 in a request"):
        decode(body, kind, limits=LIMITS)


def test_a_frame_that_is_larger_than_its_header_states_is_refused():
    webp = bytearray(saved(CLEAR, WEBP, quality=90))
    webp[24:30] = struct.pack("<HBHB", 9, 0, 9, 0)  # 10 x 10
    assert "not of the size" in refused(bytes(webp), WEBP)
    gif = bytearray(FILES["grey GIF"])
    gif[6:10] = struct.pack("<HH", 10, 10)
    assert "reaches beyond its canvas" in refused(bytes(gif), GIF)
    animation = animated(Image.fromarray(INK), (0, 0), (10, 10))
    assert "reaches beyond its canvas" in refused(animation, WEBP)


def animated(picture, place, canvas):
    """A WebP with an animation of one frame."""
    frame = saved(picture.convert("RGB"), WEBP, lossless=True)[12:]
    sides = b"".join((side - 1).to_bytes(3, "little") for side in canvas)
    own = b"".join((side - 1).to_bytes(3, "little") for side in picture.size)
    head = b"".join((at // 2).to_bytes(3, "little") for at in place) + own + bytes(4)
    chunks = b"VP8X" + struct.pack("<II", 10, 2) + sides
    chunks += b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    chunks += b"ANMF" + struct.pack("<I", len(head) + len(frame)) + head + frame
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


@pytest.mark.parametrize("place", [(0, 0), (20, 100)])
def test_a_frame_smaller_than_its_canvas_lies_on_transparent_pixels(place):
    tight = INK[20:120, 35:105]
    dark = Image.fromarray(255 - tight)
    assert np.abs(read(animated(dark, place, (300, 300)), WEBP) - EXPECTED).mean() < 0.1
    gif = bytearray(saved(dark, GIF))
    gif[6:10] = struct.pack("<HH", 300, 300)
    at = gif.index(b",\0\0\0\0")
    gif[at + 1 : at + 5] = struct.pack("<HH", *place)
    assert np.abs(read(bytes(gif), GIF) - EXPECTED).mean() < 0.1


def test_orientation_of_a_webp_is_applied():
    exif = Image.Exif()
    exif[274] = 6
    turned = GREY.transpose(Image.Transpose.ROTATE_90).convert("RGB")
    body = saved(turned, WEBP, lossless=True, exif=exif)
    assert np.abs(read(body, WEBP) - EXPECTED).mean() < 0.1


# BMP


def bmp(bits, compression, rows, *, size=(4, 2), palette=b"\0\0\0\0\xff\xff\xff\0"):
    offset = 54 + len(palette)
    head = struct.pack("<2sIII", b"BM", offset + len(rows), 0, offset)
    count = len(palette) // 4
    info = (40, *size, 1, bits, compression, len(rows), 0, 0, count, count)
    return head + struct.pack("<IiiHHIIiiII", *info) + palette + rows


BAR = {
    "runs": (8, 1, bytes((1, 0, 2, 1, 1, 0, 0, 0, 4, 0, 0, 1))),
    "absolute": (8, 1, bytes((0, 4, 0, 1, 1, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 1))),
    "a delta": (8, 1, bytes((0, 2, 1, 0, 2, 1, 0, 1))),
    "runs of 4 bits": (4, 2, bytes((1, 0x00, 2, 0x11, 0, 0, 0, 1))),
    "absolute of 4 bits": (4, 2, bytes((0, 4, 0x01, 0x10, 0, 0, 0, 1))),
    "no end mark": (8, 1, bytes((1, 0, 2, 1, 1, 0, 0, 0, 4, 0))),
    "a run beyond the row": (8, 1, bytes((1, 0, 2, 1, 9, 0, 0, 0, 0, 1))),
}


@pytest.mark.parametrize("name", BAR)
def test_run_lengths_of_a_bmp_are_unpacked(name):
    bits, compression, rows = BAR[name]
    assert levels(bmp(bits, compression, rows)).tolist() == [[0] * 4, [0, 255, 255, 0]]


@pytest.mark.parametrize(
    ("bits", "rows"),
    [(8, bytes((0, 1, 1, 0, 0, 0, 0, 0))), (4, bytes((0x01, 0x10, 0, 0, 0, 0, 0, 0)))],
)
def test_black_and_white_of_several_bits_is_read(bits, rows):
    assert levels(bmp(bits, 0, rows)).tolist() == [[0] * 4, [0, 255, 255, 0]]


def test_run_lengths_never_reach_pillow(monkeypatch):
    monkeypatch.setattr(BmpRleDecoder, "decode", None)
    levels(bmp(*BAR["runs"]))


def levels(body):
    limits = {"max_pixels": 100_000, "used_pixels": 0}
    return read_grey(body, BMP, field="body", invert="auto", **limits)[0]


def test_transparency_of_a_bmp_is_read():
    pixels = struct.pack("<4I", 0xFF000000, 0, 0x80000000, 0xFFFFFFFF)
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    head = struct.pack("<2sIII", b"BM", 122 + 16, 0, 122)
    info = struct.pack("<IiiHHIIiiII", 108, 4, 1, 1, 32, 3, 16, 0, 0, 0, 0)
    body = head + info + masks + bytes(52) + pixels
    assert levels(body).tolist() == [[0, 255, 127, 255]]


@pytest.mark.parametrize(
    ("bits", "compression", "rows", "words"),
    [
        (8, 1, bytes((1, 0, 2)), "not a readable"),
        (8, 1, bytes((0, 9, 1)), "ends within its run lengths"),
        (4, 1, bytes((0, 1)), "not of 4 bits"),
        (8, 1, bytes(MOST_RUNS), "no digit found"),
        (8, 1, bytes(MOST_RUNS + 1), f"expected at most {MOST_RUNS}; save it as PNG"),
        (8, 4, bytes(8), "Unsupported BMP compression"),
        (7, 0, bytes(8), "Unsupported BMP pixel depth"),
        (8, 0, bytes(3), "truncated"),
    ],
)
@pytest.mark.states(
    "limits", FILES_ROW, found="a BMP of as many bytes of run lengths, and one more"
)
def test_a_bmp_that_makes_no_picture_is_refused(bits, compression, rows, words):
    assert words in refused(bmp(bits, compression, rows), BMP)


@pytest.mark.parametrize("size", [(0, 2), (2, 0)])
@pytest.mark.parametrize("compression", [0, 1])
def test_a_bmp_without_pixels_is_refused(size, compression):
    refused(bmp(8, compression, bytes((0, 1)), size=size), BMP)


@pytest.mark.parametrize("size", [(-4, 2), (4, -(2**31)), (2**31 - 1, 2**31 - 1)])
@pytest.mark.parametrize("compression", [0, 1])
def test_a_bmp_of_an_impossible_size_is_refused(size, compression):
    with pytest.raises(TooLarge):
        decode(bmp(8, compression, bytes((0, 1)), size=size), BMP, limits=LIMITS)


# GIF


@pytest.mark.states("limits", FILES_ROW, found="a GIF whose comment has as many, and 1 % less")
def test_too_many_blocks_of_a_gif_are_refused():
    head, comma, rest = FILES["grey GIF"].partition(b",")
    comment = b"!\xfe" + b"\1x" * int(0.99 * MOST_BLOCKS) + b"\0"
    assert read(head + comment + comma + rest, GIF).any()
    words = f"more than {MOST_BLOCKS} "
    assert words + "blocks" in refused(head + b"!\xfe" + b"\1x" * (MOST_BLOCKS + 1), GIF)
    assert words + "extensions" in refused(head + b"!\xfe\0" * (MOST_BLOCKS + 1), GIF)
