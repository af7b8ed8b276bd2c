from __future__ import annotations

import numpy as np
import pytest

from service.errors import TooLarge
from service.forms.cost import CHEAP_S, body_cost_s
from service.pictures.headers import stated_size
from tests.pictures import FORM, PNG, encoded, form, long_form, seven

PIXELS = 16_777_216
JPEG = "image/jpeg"
BLANK = np.zeros((1000, 1000, 3), np.uint8)
SCANS = {"one scan": {}, "many scans": {"progressive": True}}


def with_exif(jpeg, size):
    return jpeg[:2] + b"\xff\xe1" + (size + 2).to_bytes(2, "big") + bytes(size) + jpeg[2:]


@pytest.mark.parametrize("options", SCANS.values(), ids=SCANS)
def test_the_size_of_a_picture_is_read_from_its_header(options):
    wide = np.zeros((30, 50, 3), np.uint8)
    jpeg = encoded(wide, "JPEG", **options)
    for content in (
        encoded(wide),
        *(encoded(wide, kind) for kind in ("WEBP", "GIF", "BMP")),
        encoded(wide, "WEBP", lossless=True),
        encoded(wide, "WEBP", exif=b"x"),
        jpeg,
        with_exif(jpeg, 60_000),
        jpeg[:2] + b"\xff" * 9 + jpeg[2:],
    ):
        assert stated_size(content) == (50, 30)
        assert stated_size(b"before" + content, 6) == (50, 30)
        assert stated_size(bytearray(content)) == (50, 30)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_no_size_is_made_up_when_a_header_is_cut_or_damaged(kind):
    content = encoded(BLANK, kind)
    for end in range(200):
        assert stated_size(content[:end]) in (None, (1000, 1000))
    for begin in (b"", b"\xff\xd8\xff", b"\xff\xd8" + b"\xff\xe0\0\0" * 100, b"GIF89a\0"):
        assert stated_size(begin) is None


CHEAP = {
    "a small PNG": (PNG, seven()),
    "a megapixel": (PNG, encoded(BLANK)),
    "a megapixel as JPEG": (JPEG, encoded(BLANK, "JPEG")),
    "a form of some pictures": (FORM, form(*[seven()] * 20)),
    "JSON of 300 images": ("application/json", bytes(1_000_000)),
    "a damaged PNG": (PNG, b"\x89PNG\r\n\x1a\n"),
}
COSTLY = {
    "16 megapixels": (PNG, encoded(np.zeros((4096, 4096), np.uint8))),
    "a megapixel in many scans": (JPEG, encoded(BLANK, "JPEG", progressive=True)),
    "four megapixels of WebP": ("image/webp", encoded(np.zeros((2000, 2000), np.uint8), "WEBP")),
    "a JPEG without a size": (JPEG, b"\xff\xd8\xff" + bytes(1000)),
    "a form of one large picture": (FORM, form(encoded(np.zeros((2000, 2000), np.uint8)))),
    "a form of many pictures": (FORM, long_form(200)),
    "a form of more pictures": (FORM, long_form(10_000)),
    "JSON of 32 MB": ("application/json; charset=utf-8", bytes(32 << 20)),
}


@pytest.mark.parametrize(("kind", "body"), CHEAP.values(), ids=CHEAP)
def test_what_is_decoded_quickly_is_cheap(kind, body):
    assert body_cost_s(kind, body, PIXELS) <= CHEAP_S


@pytest.mark.parametrize(("kind", "body"), COSTLY.values(), ids=COSTLY)
def test_what_takes_long_is_costly(kind, body):
    assert body_cost_s(kind, body, PIXELS) > CHEAP_S


def test_too_many_pixels_are_refused_by_the_header_alone():
    content = encoded(np.zeros((100, 201), np.uint8))[:30]
    with pytest.raises(TooLarge, match="body: got 201 x 100 pixels, expected at most 20000"):
        body_cost_s(PNG, content, 20_000)
