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


def exif(orientation: int, order: str) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entries = struct.pack(order + "HHIHH", 271, 3, 1, 5, 0)
    entries += struct.pack(order + "HHIHH", 274, 3, 1, orientation, 0)
    return b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 2) + entries + bytes(4)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation, order):
    upright = Image.fromarray(seven(10, 0, 255))
    stored = upright
    if orientation in STORED_BY:
        stored = upright.transpose(STORED_BY[orientation])
    got = read(encoded(stored, JPEG, exif=exif(orientation, order), quality=90), JPEG)
    assert np.abs(got - EXPECTED).mean() < 3


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
        for size in range(12, len(body) - 1, 7):
            assert "not a readable" in refused(body[:size], kind)


def test_too_many_segments_are_refused():
    assert "more than 16384 chunks" in refused(png_of(header(1, 1), *[(b"teXt", b"")] * 20_000))
    body = b"\xff\xd8" + b"\xff\xfe\0\x02" * 20_000
    assert "more than 16384 segments" in refused(body, JPEG)


def test_too_many_scans_are_refused():
    body = encoded(seven(), JPEG, progressive=True)
    at = body.rindex(b"\xff\xda")
    assert "more than 32 scans" in refused(body[:at] + body[at:-2] * 40 + body[-2:], JPEG)


# properties
