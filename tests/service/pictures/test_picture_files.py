import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, ImageSequence

from service.errors import InvalidInput, TooLarge
from service.forms.body import ACCEPTED, decode
from service.forms.reader import Limits
from service.pictures.picture_files import read_grey
from tests.documented import documented

PARTS_ROW = "parts of a picture's file; pixels of a JPEG times its scans"
PNG, JPEG, WEBP, GIF, BMP, AVIF, TIFF = (
    f"image/{name}" for name in ("png", "jpeg", "webp", "gif", "bmp", "avif", "tiff")
)
KINDS = [PNG, JPEG, WEBP, GIF, BMP, AVIF, TIFF]
MAX_PIXELS = 1_000_000
SEVEN = np.zeros((28, 28), np.uint8)
SEVEN[4:8, 7:21] = 255
SEVEN[8:24, 16:20] = 255
INK = np.kron(SEVEN, np.ones((5, 5), np.uint8))
GREY = Image.fromarray(INK)


def saved(picture, kind, **options):
    file = io.BytesIO()
    if more := options.get("append_images"):
        options["append_images"] = [one.copy() for one in more]
    picture.copy().save(file, kind.removeprefix("image/").upper(), **options)
    return file.getvalue()


def levels(body, kind, used=0, between=lambda pixels: None, most=MAX_PIXELS):
    """The grey levels of a file; `between` is called before each decoding, with its pixels."""
    limits = {"max_pixels": most, "used_pixels": used, "between": between}
    return read_grey(body, kind, field="body", invert="auto", **limits)[0].astype(int)


class Decoding(Exception):
    """Ends the reading of a file before its pixels are decoded. Its argument: how many they are."""


def pixels_to_decode(body, kind, most=MAX_PIXELS):
    def stop(pixels):
        raise Decoding(pixels)

    with pytest.raises(Decoding) as caught:
        levels(body, kind, between=stop, most=most)
    return caught.value.args[0]


def digit(body, kind):
    (image,) = decode(body, kind, limits=Limits(8, MAX_PIXELS))
    return image.astype(int)


def refused(body, kind):
    with pytest.raises(InvalidInput) as caught:
        levels(body, kind)
    assert caught.value.field == "body"
    return caught.value.message


EXPECTED = digit(saved(GREY, PNG), PNG)


def chunk(kind, content):
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def with_chunk(kind, content, png=None):
    png = png or saved(GREY, PNG)
    return png[:33] + chunk(kind, content) + png[33:]


def bmp(bits, compression, rows, *, size=(4, 2), palette=b"\0\0\0\0\xff\xff\xff\0"):
    offset, colours = 54 + len(palette), len(palette) // 4
    head = struct.pack("<2sIII", b"BM", offset + len(rows), 0, offset)
    info = (40, *size, 1, bits, compression, len(rows), 0, 0, colours, colours)
    return head + struct.pack("<IiiHHIIiiII", *info) + palette + rows


def tiff_of(pixels, tags):
    """A TIFF with `pixels` at 8, and the tags: their type and values."""
    content, entries = pixels + bytes(len(pixels) % 2), b""
    for tag, (kind, *values) in sorted(tags.items()):
        value = struct.pack(f"<{len(values)}" + {3: "H", 4: "I"}.get(kind, "Q"), *values)
        if len(value) > 4:
            content, value = content + value, struct.pack("<I", 8 + len(content))
        entries += struct.pack("<HHI", tag, kind, len(values)) + value.ljust(4, b"\0")
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(content)) + content + directory


def grey_tags(width, height, bits=(8,), white=1, compression=1):
    sides = {256: (4, width), 257: (4, height)}
    return sides | {258: (3, *bits), 259: (3, compression), 262: (3, white), 277: (3, len(bits))}


def strips(width, height, pixels, rows=None, offsets=(8,), **kind):
    sizes = [len(pixels)] * len(offsets)
    layout = {273: (4, *offsets), 278: (4, rows or height), 279: (4, *sizes)}
    return tiff_of(pixels, grey_tags(width, height, **kind) | layout)


# Kinds of files

COLOUR = Image.fromarray(np.stack([INK // 2, INK, INK], -1))
PALETTE = GREY.convert("RGB").quantize(4)
CLEAR = Image.merge("LA", [GREY.point(lambda _: 0), GREY]).convert("RGBA")
LIGHT = Image.merge("LA", [GREY.point(lambda _: 255), GREY]).convert("RGBA")
DEEP = Image.fromarray(INK.astype(np.uint16) * 200 + 5000)
OTHER = Image.new("L", GREY.size)
FILES = {
    PNG: [
        *(saved(one, PNG) for one in (GREY, GREY.convert("1"), PALETTE, COLOUR, CLEAR, LIGHT)),
        *(saved(one, PNG) for one in (CLEAR.convert("LA"), DEEP)),
        saved(PALETTE, PNG, transparency=PALETTE.getpixel((0, 0))),
        saved(DEEP, PNG, transparency=5000),
        saved(GREY, PNG, save_all=True, append_images=[OTHER]),
        with_chunk(b"tEXt", b"Comment\0" + bytes(100_000)),
    ],
    JPEG: [
        *(saved(one, JPEG, quality=90) for one in (GREY, COLOUR, COLOUR.convert("CMYK"))),
        saved(COLOUR, JPEG, progressive=True, quality=90),
        saved(COLOUR, "MPO", save_all=True, append_images=[OTHER]),
    ],
    WEBP: [
        *(saved(one.convert("RGBA"), WEBP, lossless=True) for one in (GREY, CLEAR)),
        *(saved(one, WEBP, quality=90) for one in (COLOUR, CLEAR)),
        saved(LIGHT, WEBP, lossless=True, exact=True),
        saved(COLOUR, WEBP, icc_profile=b"x" * 99, xmp=b"x", quality=90),
        saved(GREY, WEBP, save_all=True, append_images=[OTHER], lossless=True),
    ],
    GIF: [
        *(saved(one, GIF) for one in (GREY, PALETTE, CLEAR)),
        saved(PALETTE, GIF, interlace=1, comment=b"x" * 1000),
        saved(GREY, GIF, save_all=True, append_images=[OTHER]),
    ],
    BMP: [saved(one, BMP) for one in (GREY, GREY.convert("1"), PALETTE, COLOUR)],
    AVIF: [
        *(saved(one, AVIF, speed=10) for one in (COLOUR, CLEAR)),
        saved(COLOUR, AVIF, speed=10, save_all=True, append_images=[COLOUR.rotate(90)]),
    ],
    TIFF: [
        *(saved(one, TIFF) for one in (GREY, COLOUR, COLOUR.convert("CMYK"), CLEAR, DEEP, PALETTE)),
        saved(Image.fromarray(np.asarray(DEEP).astype(">u2")), TIFF),
        saved(GREY.convert("1"), TIFF, compression="group4"),
        *(saved(COLOUR, TIFF, compression=f"tiff_{name}") for name in ("lzw", "deflate")),
        saved(COLOUR, TIFF, compression="jpeg", quality=90),
        saved(GREY, TIFF, save_all=True, append_images=[OTHER]),
    ],
}
"""Files that Pillow wrote, each of a 7."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_digit(kind):
    assert kind in ACCEPTED
    for number, body in enumerate(FILES[kind]):
        difference = np.abs(digit(body, kind) - EXPECTED).mean()
        assert difference < (3 if kind in (JPEG, WEBP, AVIF) else 0.3), number


@pytest.mark.parametrize("kind", KINDS)
def test_another_type_than_declared_is_refused(kind):
    body, other = FILES[kind][0], next(one for one in KINDS if one != kind)
    assert f"body: got {kind}, expected {other}; send it with Content-Type" in refused(body, other)


def test_levels_of_more_than_8_bits_keep_their_highest():
    values = np.array([[0, 255, 256, 65_535]], np.uint16)
    deep = Image.fromarray(values)
    for body, kind in (
        *((saved(deep, kind), kind) for kind in (PNG, TIFF)),
        (saved(Image.fromarray(values.astype(">u2")), TIFF), TIFF),
    ):
        assert levels(body, kind).tolist() == [[0, 0, 1, 255]]
    assert levels(saved(deep, PNG, transparency=65_535), PNG).tolist() == [[0, 0, 1, 255]]
    assert levels(saved(deep, PNG, transparency=0), PNG).tolist() == [[255, 0, 1, 255]]
    for mode in ("I", "F"):
        assert "32 bits a pixel" in refused(saved(deep.convert(mode), TIFF), TIFF)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5000, 5255, 5512, 6275], [0, 31, 64, 159]),  # a fiftieth of the range
        ([5000, 5256], [0, 128]),
        ([5000, 5255], [19, 20]),  # fewer levels than 8 bits have: noise
        ([5000, 13_191], [0, 255]),
        ([5000, 13_192], [19, 51]),
    ],
)
def test_16_bits_of_which_few_are_used_become_8_of_those(values, expected):
    levels_16 = np.array([values], np.uint16)
    for body, kind in (
        *((saved(Image.fromarray(levels_16), kind), kind) for kind in (PNG, TIFF)),
        (strips(len(values), 1, (65_535 - levels_16).tobytes(), bits=(16,), white=0), TIFF),
    ):
        assert levels(body, kind).tolist() == [expected]


def test_the_range_of_16_bits_is_that_of_all_strips():
    tall = np.repeat(np.array([5000, 6275], np.uint16), 400)[:, np.newaxis]
    found = levels(saved(Image.fromarray(np.tile(tall, (1, 800))), PNG), PNG)
    assert (found[0, 0], found[-1, 0]) == (0, 159)


@pytest.mark.parametrize(
    ("bits", "white", "pixels", "expected"),
    [
        ((12,), 1, bytes((0x00, 0x00, 0x10, 0x80, 0x0F, 0xFF)), [0, 0, 128, 255]),
        ((16,), 1, struct.pack("<4H", 0, 256, 32768, 65_535), [0, 1, 128, 255]),
        ((16,), 0, struct.pack("<4H", 65_535, 65_279, 32767, 0), [0, 1, 128, 255]),
        ((8, 8), 1, bytes((0, 255, 64, 128, 9, 0, 255, 255)), [0, 191, 255, 255]),
    ],
    ids=["12 bits", "16 bits", "white is zero", "premultiplied"],
)
def test_levels_of_a_tiff_are_read_as_its_tags_say(bits, white, pixels, expected):
    body = strips(4, 1, pixels, bits=bits, white=white)
    if len(bits) == 2:
        tags = grey_tags(4, 1, bits) | {273: (4, 8), 278: (4, 1), 279: (4, 8), 338: (3, 1)}
        body = tiff_of(pixels, tags)
    assert np.abs(levels(body, TIFF) - [expected]).max() <= 1


def test_transparency_of_a_bmp_is_read():
    pixels = struct.pack("<4I", 0xFF000000, 0, 0x80000000, 0xFFFFFFFF)
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    head = struct.pack("<2sIII", b"BM", 122 + 16, 0, 122)
    info = struct.pack("<IiiHHIIiiII", 108, 4, 1, 1, 32, 3, 16, 0, 0, 0, 0)
    assert levels(head + info + masks + bytes(52) + pixels, BMP).tolist() == [[0, 255, 127, 255]]


@pytest.mark.parametrize(
    ("bits", "compression", "rows"),
    [
        (8, 0, bytes((0, 1, 1, 0, 0, 0, 0, 0))),
        (4, 0, bytes((0x01, 0x10, 0, 0, 0, 0, 0, 0))),
        (8, 1, bytes((1, 0, 2, 1, 1, 0, 0, 0, 4, 0, 0, 1))),
        (4, 2, bytes((1, 0x00, 2, 0x11, 1, 0, 0, 0, 4, 0, 0, 1))),
    ],
)
def test_a_bmp_of_two_colours_and_several_bits_or_run_lengths_is_read(bits, compression, rows):
    found = levels(bmp(bits, compression, rows), BMP)
    assert found.tolist() == [[0] * 4, [0, 255, 255, 0]]


def animated(picture, place, canvas):
    """A WebP with an animation of one frame."""
    frame = saved(picture.convert("RGB"), WEBP, lossless=True)[12:]
    sides = b"".join((side - 1).to_bytes(3, "little") for side in canvas)
    own = b"".join((side - 1).to_bytes(3, "little") for side in picture.size)
    head = b"".join((at // 2).to_bytes(3, "little") for at in place) + own + bytes(4)
    chunks = b"VP8X" + struct.pack("<II", 10, 0x12) + sides
    chunks += b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    chunks += b"ANMF" + struct.pack("<I", len(head) + len(frame)) + head + frame
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def on_screen(picture, place, screen):
    """A GIF whose frame is smaller than its screen."""
    body = bytearray(saved(picture, GIF))
    body[6:10] = struct.pack("<HH", *screen)
    at = body.index(b",\0\0\0\0") + 1
    body[at : at + 4] = struct.pack("<HH", *place)
    return bytes(body)


@pytest.mark.parametrize("place", [(0, 0), (20, 100)])
@pytest.mark.parametrize(("make", "kind"), [(animated, WEBP), (on_screen, GIF)])
def test_a_frame_smaller_than_its_canvas_lies_on_transparent_pixels(make, kind, place):
    dark = Image.fromarray(255 - INK[20:120, 35:105])
    assert np.abs(digit(make(dark, place, (300, 300)), kind) - EXPECTED).mean() < 0.1


NOISE = [
    Image.fromarray(one) for one in np.random.default_rng(5).integers(0, 256, (2, 90, 500), "u1")
]
ROWS = np.repeat(np.arange(90, dtype=np.uint8)[:, np.newaxis], 500, 1)
LIGHT_ABOVE = Image.fromarray(np.where(ROWS < 30, 230, 20).astype(np.uint8))
CLEAR_BETWEEN = Image.fromarray(np.where((ROWS < 30) | (ROWS >= 80), 255, 0).astype(np.uint8))


@pytest.mark.parametrize(
    ("picture", "transparent"),
    [
        *((NOISE[0].convert(mode), None) for mode in ("L", "1", "RGB")),
        (NOISE[0].quantize(8), None),
        (NOISE[0].quantize(8), 2),
        (NOISE[0].convert("RGB"), (7, 7, 7)),
        (Image.merge("LA", NOISE), None),
        (Image.merge("LA", [LIGHT_ABOVE, CLEAR_BETWEEN]), None),
        (Image.merge("RGBA", [*NOISE, *NOISE]), None),
        (Image.fromarray(np.asarray(NOISE[0]) * np.uint16(250)), None),
    ],
    ids=lambda value: getattr(value, "mode", str(value)),
)
def test_a_picture_of_three_times_the_sides_has_the_same_levels(picture, transparent):
    """It is averaged part by part."""
    options = {} if transparent is None else {"transparency": transparent}
    large = picture.resize((1500, 270), Image.Resampling.NEAREST)
    small = levels(saved(picture, PNG, **options), PNG)
    np.testing.assert_array_equal(levels(saved(large, PNG, **options), PNG), small)
    if picture.mode == "P":
        frame, large_frame = (
            on_screen(one, (8 * n, 9 * n), (510 * n, 103 * n))
            for one, n in ((picture, 1), (large, 3))
        )
        np.testing.assert_array_equal(levels(large_frame, GIF), levels(frame, GIF))


# Orientation

STORED_BY = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,  # to be turned clockwise
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How a camera that was held like this stores an upright picture, by EXIF 2.32's orientation."""


def exif(orientation, order="<"):
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entries = struct.pack(order + "HHIHH", 271, 3, 1, 5, 0)
    entries += struct.pack(order + "HHIHH", 274, 3, 1, orientation, 0)
    return b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 2) + entries + bytes(4)


def xmp(orientation):
    return b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>' % orientation


def profile(content, name):
    """A profile as ImageMagick writes it in a compressed text chunk."""
    lines = b"\n%b\n%8d\n%b\n" % (name, len(content), content.hex().encode())
    return b"Raw profile type %b\0\0" % name + zlib.compress(lines)


def tiff(picture, n):
    return saved(picture, TIFF, tiffinfo={274: n})


def avif(picture, n):
    return saved(picture.convert("RGB"), AVIF, quality=100, speed=10, exif=exif(n))


ORIENTED = {
    "JPEG": (JPEG, lambda one, n: saved(one, JPEG, exif=exif(n), quality=95)),
    "JPEG, big-endian": (JPEG, lambda one, n: saved(one, JPEG, exif=exif(n, ">"), quality=95)),
    "JPEG, XMP": (JPEG, lambda one, n: saved(one, JPEG, xmp=xmp(n), quality=95)),
    "WebP": (WEBP, lambda one, n: saved(one, WEBP, exif=exif(n), lossless=True)),
    "WebP, XMP": (WEBP, lambda one, n: saved(one, WEBP, xmp=xmp(n), lossless=True)),
    "TIFF": (TIFF, tiff),
    "AVIF": (AVIF, avif),
    "PNG": (PNG, lambda one, n: saved(one, PNG, exif=exif(n)[6:])),
    "PNG, marked": (PNG, lambda one, n: with_chunk(b"eXIf", exif(n, ">"), saved(one, PNG))),
    "PNG, behind the pixels": (
        PNG,
        lambda one, n: (lambda png: png[:-12] + chunk(b"eXIf", exif(n)[6:]) + png[-12:])(
            saved(one, PNG)
        ),
    ),
    **{
        f"PNG, {name.decode()}": (
            PNG,
            lambda one, n, name=name: with_chunk(b"zTXt", profile(exif(n), name), saved(one, PNG)),
        )
        for name in (b"exif", b"APP1")
    },
    "PNG, XMP": (
        PNG,
        lambda one, n: with_chunk(
            b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(n)), saved(one, PNG)
        ),
    ),
}


@pytest.mark.parametrize("name", ORIENTED)
def test_orientation_is_applied(name):
    kind, make = ORIENTED[name]
    for orientation in (1, *STORED_BY):
        stored = GREY.transpose(STORED_BY[orientation]) if orientation > 1 else GREY
        got = levels(make(stored.crop((0, 0, *stored.size)), orientation), kind)
        assert np.abs(got - INK).mean() < 2, orientation


def test_orientation_of_exif_takes_precedence_over_xmp():
    stored = GREY.transpose(STORED_BY[6])
    got = levels(saved(stored, WEBP, exif=exif(6), xmp=xmp(3), lossless=True), WEBP)
    np.testing.assert_array_equal(got, INK)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"Exif\0\0", b"II", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff"),
        *(b"MM\0*\0\0\0\x08\0\0", exif(0), exif(9)),
    ],
)
def test_damaged_exif_is_upright(content):
    np.testing.assert_array_equal(levels(with_chunk(b"eXIf", content), PNG), INK)
    body = saved(GREY, JPEG)
    content = b"Exif\0\0" + content.removeprefix(b"Exif\0\0")
    segment = b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content
    with_exif = levels(body[:2] + segment + body[2:], JPEG)
    np.testing.assert_array_equal(with_exif, levels(body, JPEG))


# Damaged files


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused(kind):
    body = FILES[kind][0]
    end = len(body) - (300 if kind == TIFF else 2)  # a TIFF ends with its directory
    for size in range(30, end, max(1, len(body) // 50)):
        assert f"not a readable {kind}: " in refused(body[:size], kind)
    if kind == JPEG:
        progressive = saved(GREY, JPEG, progressive=True)
        for size in (*range(30, len(progressive), 31), len(progressive) - 2):
            assert "not a readable" in refused(progressive[:size], kind)


def test_a_png_whose_pixels_do_not_have_their_checksum_is_refused():
    body = bytearray(saved(GREY, PNG, compress_level=0))
    body[-1000] ^= 1
    assert "checksum" in refused(bytes(body), PNG)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_jpeg_without_its_end_marker_is_read_unless_pixels_are_missing(mode):
    body = saved(GREY.convert(mode), JPEG)
    for left in (body[:-1], body[:-2], body[:-2] + bytes(100)):
        np.testing.assert_array_equal(levels(left, JPEG), levels(body, JPEG))
    for missing in (8, 9, 20, 50, 200):
        assert "before its last pixels" in refused(body[:-missing], JPEG)


# Limits


def stated(kind, width, height):
    """A file that states this size, and has few pixels."""
    body = bytearray(saved(CLEAR, kind, **({"exif": b"x"} if kind == WEBP else {})))
    if kind == PNG:
        body[16:24] = struct.pack(">II", width, height)
        body[29:33] = struct.pack(">I", zlib.crc32(body[12:29]))
    elif kind == WEBP:
        return animated(GREY, (0, 0), (width, height))
    elif kind == GIF:
        body[6:10] = struct.pack("<HH", width, height)
    elif kind == BMP:
        body[18:26] = struct.pack("<ii", width, height)
    return bytes(body)


@pytest.mark.parametrize(
    ("kind", "width", "height"),
    [
        *((kind, 1001, 1000) for kind in (PNG, WEBP, GIF, BMP)),
        *((kind, 65_000, 65_000) for kind in (PNG, GIF, BMP)),
        *((PNG, 2**31 - 1, 1), (PNG, 2**32 - 1, 2**32 - 1), (BMP, 4, -(2**31)), (BMP, -4, 2)),
        (WEBP, 16_000, 16_000),
    ],
)
def test_a_size_is_checked_before_anything_is_decoded(kind, width, height):
    decoded = []
    with pytest.raises((TooLarge, InvalidInput), match=r"pixels|Truncated|decoder") as caught:
        levels(stated(kind, width, height), kind, between=decoded.append)
    assert not decoded
    if width * height == 1_001_000:
        got = "1001000" if kind == WEBP else "1001 x 1000"
        words = f"body: got {got} pixels, expected at most 1000000 in a request; scale the"
        assert type(caught.value) is TooLarge
        assert caught.value.message.startswith(words)


MEMORY_ROW = "memory of a decoded picture"


def resized(jpeg, width, height):
    """A JPEG that states another size than that of its pixels."""
    at = max(jpeg.find(b"\xff\xc0"), jpeg.find(b"\xff\xc2"))
    return jpeg[: at + 5] + struct.pack(">HH", height, width) + jpeg[at + 9 :]


def progressive(**options):
    return saved(COLOUR, JPEG, progressive=True, **options)


@pytest.mark.parametrize(
    ("make", "kind", "byte_count"),
    [
        (lambda *size: stated(PNG, *size), PNG, 4),
        (lambda *size: bmp(8, 0, b"", size=size), BMP, 1),
        (lambda *size: strips(*size, b""), TIFF, 2),
        (lambda *size: strips(*size, b"", bits=(8,) * 3, white=2), TIFF, 8),
        (lambda *size: resized(progressive(subsampling=0), *size), JPEG, 6 + 1 / 16),
    ],
    ids=["PNG", "BMP", "TIFF", "colour TIFF", "progressive"],
)
def test_the_memory_of_a_picture_is_checked_before_it_is_decoded(make, kind, byte_count):
    width = 4096  # and so many rows of a JPEG are drafted to a quarter of both sides
    rows = int(documented(MEMORY_ROW)[-1] / width / byte_count)
    assert pixels_to_decode(make(width, rows - 8), kind, 1 << 30) >= width * (rows - 8)
    with pytest.raises(
        TooLarge, match=rf"got {width} x {rows + 8} pixels, which take \d+ bytes to"
    ):
        levels(make(width, rows + 8), kind, most=1 << 30)
    if kind == JPEG:
        subsampled = resized(progressive(subsampling=2), width, rows + 8)
        assert pixels_to_decode(subsampled, kind, 1 << 30)


def test_a_jpeg_in_one_scan_may_have_as_many_pixels_as_a_request():
    most = Limits(1).max_picture_pixels
    for mode in ("L", "RGB", "CMYK"):
        body = saved(COLOUR.convert(mode), JPEG)
        assert pixels_to_decode(resized(body, 8192, 8192), JPEG, most) == most
    with pytest.raises(TooLarge, match="got 8193 x 8192 pixels, expected at most 67108864"):
        levels(resized(body, 8193, 8192), JPEG, most=most)


@pytest.mark.parametrize("kind", [JPEG, TIFF, AVIF])
def test_pixels_that_other_pictures_took_are_not_left(kind):
    body, decoded = FILES[kind][0], []
    levels(body, kind, used=MAX_PIXELS - INK.size, between=decoded.append)
    assert decoded == [INK.size]
    with pytest.raises(TooLarge, match=f"{MAX_PIXELS} in a request, 980401 of which are used"):
        levels(body, kind, used=MAX_PIXELS - INK.size + 1, between=decoded.append)
    assert decoded == [INK.size]


def png_of_chunks(count):
    png = saved(GREY, PNG)
    return png[:33] + chunk(b"teSt", b"") * count + png[33:]


def gif_of_blocks(count):
    head, comma, rest = saved(GREY, GIF).partition(b",")
    return head + b"!\xfe" + b"\1x" * count + b"\0" + comma + rest


@pytest.mark.states(
    "limits", PARTS_ROW, found="files of nearly as many parts, and of a few more; and scans"
)
@pytest.mark.parametrize(
    ("kind", "reads", "make"),
    [
        (PNG, 2, png_of_chunks),
        (GIF, 2, gif_of_blocks),
        (BMP, 2, lambda count: bmp(8, 1, b"\1\0" * count, size=(count, 1))),
    ],
)
def test_a_file_of_too_many_parts_is_refused(kind, reads, make):
    most = int(documented(PARTS_ROW)[0])
    assert pixels_to_decode(make((most - 200) // reads), kind)
    assert "it has too many parts" in refused(make(most // reads + 1), kind)


def arithmetic(side, scans):
    """A progressive JPEG in arithmetic coding, whose scans have a few bytes each."""

    def segment(kind, content):
        return struct.pack(">BBH", 0xFF, kind, len(content) + 2) + content

    def scan(first, last):
        return segment(0xDA, bytes((1, 1, 0, first, last, 0))) + bytes.fromhex("78debdcd1c")

    frame = struct.pack(">BHHBBBB", 8, side, side, 1, 1, 0x11, 0)
    tables = segment(0xDB, b"\0" + b"\1" * 64) + segment(0xCA, frame)
    return b"\xff\xd8" + tables + scan(0, 0) + scan(1, 63) * (scans - 1) + b"\xff\xd9"


def test_a_jpeg_of_too_many_scans_for_its_pixels_is_refused():
    most = int(documented(PARTS_ROW)[1]) // 1000**2
    assert pixels_to_decode(arithmetic(1000, most), JPEG) == 1000**2 * most
    assert "passes over it are too many" in refused(arithmetic(1000, most + 1), JPEG)
    hidden = b"\xff\xfe\0\4\xff\xd9"  # an end marker within a comment ends nothing
    many = arithmetic(1000, most + 1).replace(b"\x1c\xff\xda", b"\x1c" + hidden + b"\xff\xda", 1)
    assert "passes over it are too many" in refused(many, JPEG)


def test_scans_behind_a_marker_without_a_length_are_counted():
    most = int(documented(PARTS_ROW)[1]) // 1000**2
    scans = arithmetic(1000, most + 1)
    first = scans.index(b"\x1c\xff\xda", scans.index(b"\xff\xda")) + 1
    covered = (b"\xff\x01" + b"\xff" + scans[first:-2]).ljust(2 + 0xFFDA, b"\xff")
    assert "passes over it are too many" in refused(scans[:first] + covered + b"\xff\xd9", JPEG)


def tiles(length, kind=4, note=0, planes=1):
    """A TIFF of 1000 x 16 pixels in 63 tiles of the same bytes, each 16 pixels wide."""
    pixels = zlib.compress(bytes(16 * length), 9)
    count = 63 * planes
    tags = grey_tags(1000, 16, (8,) * planes, 2 if planes == 3 else 1, compression=8)
    layout = {324: (4, *[8] * count), 325: (4, *[len(pixels)] * count)}
    tags |= layout | {322: (kind, 16), 323: (kind, length), 284: (3, 2 if planes == 3 else 1)}
    return tiff_of(pixels, tags)


def test_a_tiff_of_too_many_pixels_in_its_tiles_or_strips_is_refused():
    most = int(documented(PARTS_ROW)[1])
    for length, planes in ((16, 1), (64, 1), ((most - 16_000) // 1008, 1), (64, 3)):
        found = pixels_to_decode(tiles(length, planes=planes), TIFF)
        assert found == -(-1008 * length * planes // 16_000) * 16_000
    assert "passes over it are too many" in refused(tiles(most // 1008 + 16), TIFF)
    assert "passes over it are too many" in refused(tiles(most // 2000, planes=3), TIFF)
    repeated = strips(1000, 1000, bytes(500_000), rows=500, offsets=(8,) * (most // 500_000 + 2))
    assert "passes over it are too many" in refused(repeated, TIFF)
    scans = [strips(1000, 1000, arithmetic(1000, n), compression=7) for n in (4, 5)]
    assert pixels_to_decode(scans[0], TIFF) == 4_000_000
    assert "decoder error" in refused(scans[1], TIFF)
    for kind in (16, 17, 18):  # of which Pillow skips two, and libtiff none
        assert f"its tiles have type {kind}, expected 3 or 4" in refused(tiles(64, kind), TIFF)


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_a_bomb_in_metadata_is_unpacked_up_to_a_mebibyte(kind):
    bomb = zlib.compress(bytes(50_000_000))
    body = with_chunk(kind, b"name\0" + (b"\1\0\0\0" if kind == b"iTXt" else b"\0") + bomb)
    tracemalloc.start()
    assert "Decompressed data too large" in refused(body, PNG)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_a_png_of_too_many_compressed_texts_is_refused():
    profile = chunk(b"iCCP", b"name\0\0" + zlib.compress(b"profile"))
    body = saved(GREY, PNG)
    np.testing.assert_array_equal(levels(body[:33] + profile * 64 + body[33:], PNG), INK)
    assert "more than 64 profiles" in refused(body[:33] + profile * 65 + body[33:], PNG)


def test_the_first_frame_alone_is_decoded():
    frames = [Image.new("L", (1000, 1000), level) for level in (9, 0, 255)]
    for kind in (GIF, WEBP, PNG, TIFF):
        body, decoded = saved(frames[0], kind, save_all=True, append_images=frames[1:]), []
        assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(body))))) == 3
        assert levels(body, kind, between=decoded.append).mean() == pytest.approx(9, abs=1)
        assert decoded == [1_000_000]
