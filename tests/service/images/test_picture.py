import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from service.errors import InvalidInput, TooLarge
from service.forms.body import Limits, decode
from tests.documented import documented

FILES_ROW = "run lengths in a BMP; blocks in a GIF; chunks in a PNG or WebP; scans in a JPEG"
LIMITS = Limits(max_images=1, max_picture_pixels=4_000_000)
PNG, JPEG = "image/png", "image/jpeg"


def encoded(image: Any, kind: str = PNG, **more: Any) -> bytes:
    file = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture.save(file, kind.removeprefix("image/").upper(), **more)
    return file.getvalue()


def read(body: bytes, kind: str = PNG, **more: Any) -> Any:
    images = decode(body, kind, limits=LIMITS, **more)
    assert images.shape == (1, 28, 28)
    assert images.dtype == np.uint8
    assert images.flags.c_contiguous
    return images[0].astype(int)


def refused(body: bytes, kind: str = PNG, **more: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        decode(body, kind, limits=LIMITS, **more)
    assert caught.value.field == "body"
    assert "/" not in caught.value.message.replace("image/", "")
    return caught.value.message


def seven(scale: int = 1, ink: int = 255, paper: int = 0) -> Any:
    """A 7 whose box is 14 x 20 and that no rotation or reflection maps to itself."""
    image = np.full((28, 28), paper, np.uint8)
    image[4:8, 7:21] = ink
    image[8:24, 16:20] = ink
    return np.repeat(np.repeat(image, scale, 0), scale, 1)


EXPECTED = decode(encoded(seven()), PNG, limits=LIMITS)[0].astype(int)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


def header(width: int, height: int, depth: int = 8, colour: int = 0) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)


def rows(values: Any) -> tuple[bytes, bytes]:
    """Unfiltered rows of big-endian samples."""
    return b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in values))


def with_chunk(body: bytes, kind: bytes, data: bytes) -> bytes:
    return body[:33] + chunk(kind, data) + body[33:]


# MNIST


@pytest.mark.parametrize("turned_over", [False, True])
def test_mnist_comes_back_as_itself_when_sent_as_png(mnist, turned_over):
    sent = mnist[0][:600]
    got = np.stack([read(encoded(255 - one if turned_over else one)) for one in sent])
    same = (got == sent).all((1, 2))
    # 9,989 of the 10,000: the others have two faint outermost rows, or thin pale strokes.
    assert same.mean() >= 0.995
    assert np.abs(got - sent).mean((1, 2)).max() < 13


def test_mnist_comes_back_nearly_when_photographed(mnist):
    random = np.random.default_rng(3)
    y, x = np.mgrid[0:600, 0:500]
    alike = []
    for one in mnist[0][:20]:
        ink = np.zeros((600, 500))
        top, left = random.integers(0, 264), random.integers(0, 164)
        enlarged = Image.fromarray(one).resize((336, 336), Image.Resampling.BICUBIC)
        ink[top : top + 336, left : left + 336] = np.asarray(enlarged) / 255
        paper = 150 + x * 0.08 + y * 0.05 + 10 * np.sin(x / 200)
        photo = paper * (1 - 0.6 * ink) + random.normal(0, 6, ink.shape)
        colours = np.stack([photo, photo * 0.95, photo * 0.8], -1).clip(0, 255).astype(np.uint8)
        got = read(encoded(colours, JPEG, quality=80), JPEG)
        assert np.abs(got - one.astype(int)).mean() < 25
        alike.append(np.corrcoef(got.ravel(), one.ravel())[0, 1])
    # A thin 1 that lands half a pixel beside itself has the least.
    assert min(alike) > 0.75
    assert np.mean(alike) > 0.9


@pytest.mark.parametrize("scale", [1, 3, 10, 40])
@pytest.mark.parametrize(("ink", "paper"), [(255, 0), (0, 255), (20, 200), (200, 20), (90, 120)])
def test_a_picture_of_any_size_and_contrast_becomes_the_same_digit(scale, ink, paper):
    got = read(encoded(seven(scale, ink, paper)))
    # Above 512 pixels the average's blocks and the digit's edges need not meet.
    np.testing.assert_allclose(got, EXPECTED, atol=1 if scale * 28 <= 512 else 16)
    assert got.max() == 255


def test_a_digit_smaller_than_the_box_is_enlarged_to_it():
    small = seven()[4:24, 7:21][::2, ::2]
    canvas = np.zeros((50, 50), np.uint8)
    canvas[2:12, 30:37] = small
    got = read(encoded(canvas))
    columns, lines = np.flatnonzero((got > 60).any(0)), np.flatnonzero((got > 60).any(1))
    assert lines[-1] - lines[0] + 1 in (20, 21, 22)
    assert columns[-1] - columns[0] + 1 in (14, 15, 16)


def test_no_ink_leaves_the_field_when_its_mass_is_at_one_end():
    image = np.zeros((28, 28), np.uint8)
    image[2:4, 2:26] = 255
    image[2:26, 2:3] = 255
    image[2:12, 2:14] = 255
    lines = np.flatnonzero(read(encoded(np.kron(image, np.ones((5, 5), np.uint8)))).any(1))
    assert lines[-1] - lines[0] + 1 >= 20


@pytest.mark.parametrize("invert", ["auto", "true", "false"])
def test_invert_says_which_is_ink(invert):
    for ink, paper in ((0, 255), (255, 0)):
        body = encoded(seven(5, ink, paper))
        if invert == "auto" or (invert == "true") == (ink < paper):
            np.testing.assert_allclose(read(body, invert=invert), EXPECTED, atol=1)
        else:
            assert "no digit found" in refused(body, invert=invert)
            assert "try auto" in refused(body, invert=invert)


@pytest.mark.parametrize("level", [0, 128, 255])
def test_an_empty_picture_has_no_digit(level):
    message = refused(encoded(np.full((40, 30), level, np.uint8)))
    assert "no digit found: the picture is blank, or no ink in it stands out" in message


@pytest.mark.parametrize("size", [28, 300])
def test_noisy_paper_alone_has_no_digit(size):
    noise = np.random.default_rng(1).normal(200, 5, (size, size)).astype(np.uint8)
    assert "no digit found" in refused(encoded(noise))
    assert "no digit found" in refused(encoded(noise, JPEG), JPEG)


# kinds of pictures


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_every_kind_of_jpeg_gives_the_digit(mode, progressive):
    picture = Image.fromarray(seven(10, 0, 255)).convert(mode)
    got = read(encoded(picture, JPEG, progressive=progressive, quality=90), JPEG)
    np.testing.assert_allclose(got, EXPECTED, atol=60)
    assert np.abs(got - EXPECTED).mean() < 3


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


def stored(orientation: int) -> Image.Image:
    """A 7 as a camera that was held like this stores it."""
    upright = Image.fromarray(seven(10, 0, 255))
    return upright.transpose(STORED_BY[orientation]) if orientation in STORED_BY else upright


def exif(orientation: int, order: str) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entries = struct.pack(order + "HHIHH", 271, 3, 1, 5, 0)
    entries += struct.pack(order + "HHIHH", 274, 3, 1, orientation, 0)
    return b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 2) + entries + bytes(4)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation, order):
    got = read(encoded(stored(orientation), JPEG, exif=exif(orientation, order), quality=90), JPEG)
    assert np.abs(got - EXPECTED).mean() < 3


def xmp(orientation: int) -> bytes:
    return b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>' % orientation


def profile(content: bytes, name: bytes = b"exif") -> bytes:
    """A profile as ImageMagick writes it in a text chunk."""
    digits = content.hex().encode()
    lines = b"\n".join(digits[at : at + 72] for at in range(0, len(digits), 72))
    return b"Raw profile type %b\0" % name + b"\n%b\n%8d\n%b\n" % (name, len(content), lines)


def compressed(text: bytes) -> bytes:
    keyword, _, content = text.partition(b"\0")
    return keyword + b"\0\0" + zlib.compress(content)


XMP_KEYWORD = b"XML:com.adobe.xmp\0"
PNG_METADATA = {
    "eXIf": lambda n: (b"eXIf", exif(n, ">")[6:]),
    "eXIf, little-endian": lambda n: (b"eXIf", exif(n, "<")[6:]),
    "eXIf with its mark": lambda n: (b"eXIf", exif(n, "<")),
    "a profile": lambda n: (b"tEXt", profile(exif(n, "<"))),
    "a compressed profile": lambda n: (b"zTXt", compressed(profile(exif(n, ">"), b"APP1"))),
    "XMP": lambda n: (b"iTXt", XMP_KEYWORD + b"\0\0en\0x\0" + xmp(n)),
    "compressed XMP": lambda n: (b"iTXt", XMP_KEYWORD + b"\1\0\0\0" + zlib.compress(xmp(n))),
}


@pytest.mark.parametrize("name", PNG_METADATA)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_a_png_is_applied(orientation, name):
    body = with_chunk(encoded(stored(orientation)), *PNG_METADATA[name](orientation))
    np.testing.assert_array_equal(read(body), read(encoded(stored(1))))
    if "APP1" not in str(PNG_METADATA[name](1)) and "mark" not in name:
        with Image.open(io.BytesIO(body)) as picture:
            picture.load()
            assert picture.getexif()[274] == orientation, "Pillow reads it, too"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_real_7_is_turned_upright(mnist, orientation):
    images, labels = mnist
    upright = Image.fromarray(images[labels == 7][0])
    turned = upright.transpose(STORED_BY[orientation]) if orientation > 1 else upright
    got = read(encoded(turned, exif=exif(orientation, "<")))
    np.testing.assert_array_equal(got, read(encoded(upright)))


def test_orientation_is_read_behind_the_pixels_of_a_png():
    body = encoded(stored(6))
    body = body[:-12] + chunk(b"eXIf", exif(6, "<")[6:]) + body[-12:]
    np.testing.assert_array_equal(read(body), read(encoded(stored(1))))


@pytest.mark.parametrize("kind", [JPEG, "image/webp"])
def test_xmp_has_the_orientation_where_exif_has_none(kind):
    upright = read(encoded(stored(1), kind), kind)
    for metadata in ({"xmp": xmp(6)}, {"xmp": xmp(3), "exif": exif(6, "<")}):
        got = read(encoded(stored(6), kind, **metadata), kind)
        assert np.abs(got - upright).mean() < 3


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (b"eXIf", b""),
        (b"eXIf", b"II*\0\x08\0\0\0\xff\xff"),
        (b"tEXt", b"Raw profile type exif\0no digits"),
        (b"tEXt", b"Raw profile type exif\0\nexif\n 2\nzz"),
        (b"zTXt", b"Raw profile type exif\0\0no zlib"),
        (b"zTXt", b"Raw profile type exif"),
        (b"iTXt", XMP_KEYWORD + b"\1\0"),
        (b"iTXt", XMP_KEYWORD + b"\0\0\0\0" + xmp(9)),
        (b"tEXt", b"Comment\0" + xmp(6)),
    ],
)
def test_damaged_metadata_of_a_png_are_upright(kind, content):
    np.testing.assert_array_equal(read(with_chunk(encoded(seven()), kind, content)), EXPECTED)


def test_of_compressed_metadata_no_more_than_64_kib_are_unpacked():
    bomb = compressed(profile(exif(1, "<")) + bytes(20_000_000))
    body = encoded(seven())
    for _ in range(20):
        body = with_chunk(body, b"zTXt", bomb)
    read(body)
    tracemalloc.start()
    np.testing.assert_array_equal(read(body), EXPECTED)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(body) + 1_000_000


@pytest.mark.parametrize(
    "segment",
    [
        b"Exif\0\0",
        b"Exif\0\0II",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\0",
        exif(0, "<"),
        exif(9, "<"),
    ],
)
def test_damaged_exif_is_upright(segment):
    body = encoded(seven(10, 0, 255), JPEG, quality=90)
    segment = b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment
    assert np.abs(read(body[:2] + segment + body[2:], JPEG) - EXPECTED).mean() < 3


# hostile and damaged files


@pytest.mark.parametrize(
    ("body", "kind", "found"),
    [
        (encoded(seven(), JPEG), PNG, "got image/jpeg, expected image/png; send it with Content-"),
        (encoded(seven()), JPEG, "got image/png, expected image/jpeg; send it with Content-"),
        (b"GIF89a" + bytes(100), PNG, "got image/gif, expected image/png; send it with Content-"),
        (b"BM" + bytes(100), JPEG, "got bytes that begin with 42 4d 00"),
        (b"<svg>" + bytes(100), PNG, "got bytes that begin with 3c 73 76 67"),
    ],
)
def test_another_type_than_declared_is_refused(body, kind, found):
    assert found in refused(body, kind)


def test_a_bomb_is_refused_by_its_header_before_it_is_decoded(monkeypatch):
    line = zlib.compressobj(9)
    data = b"".join(line.compress(bytes(2501) * 100) for _ in range(200)) + line.flush()
    body = png_of(header(20_000, 20_000, 1), (b"IDAT", data), (b"IEND", b""))
    assert len(body) < 70_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    tracemalloc.start()
    with pytest.raises(
        TooLarge, match="20000 x 20000 pixels, expected at most 4000000 in a request; scale"
    ) as caught:
        read(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.field == "body"
    assert peak < 4 * len(body) + 100_000


@pytest.mark.parametrize("marker", [0xC0, 0xC2])
def test_a_jpeg_that_declares_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch, marker):
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    body = bytearray(encoded(seven(), JPEG, progressive=marker == 0xC2))
    at = body.index(bytes([0xFF, marker]))
    body[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(TooLarge, match="65535 x 65535"):
        read(bytes(body), JPEG)


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (2**31, 1), (2**32 - 1, 2**32 - 1)])
def test_impossible_sizes_are_refused(size):
    with pytest.raises((InvalidInput, TooLarge)):
        read(png_of(header(*size), rows(seven()), (b"IEND", b"")))


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_a_bomb_in_metadata_is_never_unpacked(monkeypatch, kind):
    monkeypatch.setattr(PngImagePlugin, "_safe_zlib_decompress", None)
    bomb = zlib.compress(bytes(10_000_000))
    data = b"name\0\1\0\0\0" + bomb if kind == b"iTXt" else b"name\0\0" + bomb
    np.testing.assert_array_equal(read(with_chunk(encoded(seven()), kind, data)), EXPECTED)


def test_metadata_of_a_jpeg_is_left_out():
    body = encoded(seven(10, 0, 255), JPEG)
    extra = (
        b"\xff\xe2\0\x06MPF\0" + b"\xff\xed\0\x0ePhotoshop 3" + b"\xff\xfe\0\x04hi" + b"\xff" * 50
    )
    np.testing.assert_array_equal(read(body[:2] + extra + body[2:], JPEG), read(body, JPEG))


def test_every_truncation_is_refused():
    for kind in (PNG, JPEG):
        body = encoded(seven(2), kind)
        for size in range(12, len(body) - 2, 7):
            assert "not a readable" in refused(body[:size], kind)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_jpeg_without_its_end_marker_is_read_unless_pixels_are_missing(mode):
    body = encoded(Image.fromarray(seven(20)).convert(mode), JPEG)
    expected = read(body, JPEG)
    for left in (body[:-1], body[:-2], body[:-2] + bytes(100)):
        np.testing.assert_array_equal(read(left, JPEG), expected)
    for missing in (8, 9, 20, 50, 200):
        assert "before its last pixels" in refused(body[:-missing], JPEG)


def test_a_progressive_jpeg_without_its_end_marker_is_refused():
    body = encoded(seven(20), JPEG, progressive=True)
    for size in (*range(12, len(body), 31), len(body) - 2):
        assert "not a readable" in refused(body[:size], JPEG)


@pytest.mark.states("limits", FILES_ROW, found="files with as many chunks, and one more")
def test_too_many_segments_are_refused():
    most = int(documented(FILES_ROW)[2])
    picture = encoded(seven())
    body = picture[:33] + chunk(b"teXt", b"") * (most - 3) + picture[33:]  # three are its own
    assert read(body).any()
    assert f"more than {most} chunks" in refused(body[:33] + chunk(b"teXt", b"") + body[33:])
    body = b"\xff\xd8" + b"\xff\xfe\0\x02" * 20_000
    assert "more than 16384 segments" in refused(body, JPEG)


@pytest.mark.states("limits", FILES_ROW, found="a progressive JPEG of as many scans, and one more")
def test_too_many_scans_are_refused():
    most, body = int(documented(FILES_ROW)[3]), encoded(seven(), JPEG, progressive=True)
    at = body.rindex(b"\xff\xda")
    scan, more = body[at:-2], most - body.count(b"\xff\xda")
    assert read(body[:-2] + scan * more + body[-2:], JPEG).any()
    assert f"more than {most} scans" in refused(body[:-2] + scan * (more + 1) + body[-2:], JPEG)


# properties


def arithmetic(side: int, scans: int) -> bytes:
    """A progressive JPEG in arithmetic coding, whose scans have a few bytes each."""

    def segment(kind: int, content: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, kind, len(content) + 2) + content

    def scan(first: int, last: int) -> bytes:
        return segment(0xDA, bytes((1, 1, 0, first, last, 0))) + bytes.fromhex("78debdcd1c")

    frame = struct.pack(">BHHBBBB", 8, side, side, 1, 1, 0x11, 0)
    tables = segment(0xDB, b"\0" + b"\1" * 64) + segment(0xCA, frame)
    return b"\xff\xd8" + tables + scan(0, 0) + scan(1, 63) * (scans - 1) + b"\xff\xd9"


def test_a_jpeg_in_arithmetic_coding_may_have_a_megapixel(monkeypatch):
    assert read(arithmetic(256, 2), JPEG).any()
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    message = "it has 2000 x 2000 pixels in arithmetic coding, expected at most 1048576; save it as"
    assert message in refused(arithmetic(2000, 32), JPEG)
