from __future__ import annotations

import gzip
import zlib

import numpy as np
import pytest

from service.errors import InvalidInput, TooLarge
from service.forms.compressed import CompressedForm
from service.forms.prediction import ImageForm
from service.forms.reader import OCTETS, Limits

RAW = ImageForm.of(OCTETS, "auto", "one", Limits(max_images=10_000))
MOST = 784 * 10_000
SAYS = "compressed as content-encoding says"
ONE = gzip.compress(bytes(784), mtime=0)


def form(coding="gzip", most=MOST):
    return CompressedForm(RAW, coding, most)


def nothing(_):
    pass


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
@pytest.mark.parametrize(("rows", "is_now"), [(1, True), (83, True), (84, False), (9999, False)])
def test_a_body_is_decompressed_at_once_if_it_is_small(pack, rows, is_now):
    coded = form("gzip" if pack is gzip.compress else "deflate")
    images = np.resize(np.arange(251, dtype=np.uint8), (rows, 28, 28))
    body = pack(images.tobytes())
    found = coded.decode_now(body)
    assert (found is not None) == is_now
    np.testing.assert_array_equal((found or coded.decode(body, nothing)).images, images)


def test_a_large_body_that_decompresses_to_little_is_left_to_a_process():
    assert form().decode_now(ONE + bytes(20_000)) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", f"body: {SAYS}, but it ends too early"),
        (ONE[:-1], f"body: {SAYS}, but it ends too early"),
        (bytes(784), f"body: not {SAYS}"),
        (zlib.compress(bytes(784)), f"body: not {SAYS}"),
        (ONE[:-5] + b"x" + ONE[-4:], f"body: not {SAYS}"),
        (ONE + b"\0", f"body: {SAYS}, but bytes follow its end"),
        (ONE + ONE, f"body: {SAYS}, but bytes follow its end"),
    ],
)
def test_what_is_not_compressed_as_the_header_says_is_refused(body, message):
    for decode in (form().decode_now, lambda body: form().decode(body, nothing)):
        with pytest.raises(InvalidInput) as caught:
            decode(body)
        assert caught.value.message == message


def test_a_body_is_not_decompressed_beyond_the_limit():
    seen = []
    bomb = gzip.compress(bytes(200 * MOST))
    assert form().decode_now(bomb[:10_000]) is None
    with pytest.raises(TooLarge) as caught:
        form().decode(bomb, seen.append)
    expected = f"decompresses to more than {MOST} bytes; send fewer images at a time"
    assert caught.value.message == f"body: {expected}"
    assert MOST < sum(seen) < MOST + 300_000
    assert max(seen) < 300_000
