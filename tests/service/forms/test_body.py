import base64
import gzip
import io
from typing import Any

import numpy as np
import orjson
import pytest

from service.errors import InvalidInput, TooLarge, UnsupportedMediaType
from service.forms import pixel_json as json_images
from service.forms.body import ACCEPTED, decode
from service.forms.reader import Limits
from tests.pictures import FORM, form, seven

LIMITS = Limits(max_images=8, max_picture_pixels=1_000_000)
JSON, RAW, NPY = "application/json", "application/octet-stream", "application/x-npy"
CSV = "text/csv"
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 28, 28), np.uint8)
ONE = IMAGES[0]
FLAT: list[Any] = ONE.ravel().tolist()
ROWS: list[Any] = ONE.tolist()
TEXT = base64.b64encode(ONE.tobytes()).decode()


def as_json(images: Any) -> bytes:
    return orjson.dumps({"images": images})


def as_npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def as_csv(images: Any, *names: str, label: str = "") -> bytes:
    lines = [",".join(names)] if names else []
    lines += [label + ",".join(map(str, image)) for image in images.reshape(-1, 784).tolist()]
    return "\n".join(lines).encode()


def npy_with(header: str, data: bytes = ONE.tobytes(), version: int = 1) -> bytes:
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode("latin-1") + data


def refused(body: bytes, kind: str, limits: Limits = LIMITS, **more: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        decode(body, kind, limits=limits, **more)
    error = caught.value
    assert error.field
    assert error.message.startswith(error.field)
    assert len(error.message) < 400
    return error


# JSON


def test_images_are_read_in_every_form_and_in_their_order():
    for sent, count in ((FLAT, 1), (ROWS, 1), (TEXT, 1), ([FLAT, ROWS, TEXT], 3)):
        images = decode(as_json(sent), JSON, limits=LIMITS)
        assert (images.shape, images.dtype) == ((count, 28, 28), np.uint8)
        assert images.flags.c_contiguous
        np.testing.assert_array_equal(images, [ONE] * count)
    forms = [IMAGES[0].tolist(), base64.b64encode(IMAGES[1]).decode(), IMAGES[2].ravel().tolist()]
    np.testing.assert_array_equal(decode(as_json(forms), JSON, limits=LIMITS), IMAGES[:3])


def edited(form: str, value: Any) -> list[Any]:
    if form == "flat":
        return [FLAT, [*FLAT[:123], value, *FLAT[124:]]]
    rows = [list(row) for row in ROWS]
    rows[4][11] = value
    return [ROWS, rows]


@pytest.mark.parametrize(("form", "place"), [("flat", "[123]"), ("rows", "[4][11]")])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1, "-1"),
        (256, "256"),
        (2**63, str(2**63)),
        (0.5, "0.5"),
        (256.0, "256.0"),
        (-1.0, "-1.0"),
        (True, "true"),
        (False, "false"),
        (None, "null"),
        ("7", "'7'"),
        ("y" * 100, "'" + "y" * 40 + "'..."),
        ([], "a list of 0"),
        ([1] * 28, "a list of 28"),
        ({"a": 1}, "an object of 1"),
    ],
)
def test_a_wrong_pixel_is_named_with_its_place_and_value(form, place, value, shown):
    error = refused(as_json(edited(form, value)), JSON)
    assert error.field == f"images[1]{place}"
    assert f"got {shown}, expected an integer 0 to 255" in error.message
    assert ("; " in error.message) == isinstance(value, float)


@pytest.mark.parametrize("shape", [(28, 28), (784,)])
def test_whole_floats_are_read_as_the_integers_they_are(shape):
    floats = ONE.astype(np.float32).reshape(shape).tolist()
    for images in (floats, [floats, FLAT], [[0.0] * 784]):
        read = decode(as_json(images), JSON, limits=LIMITS)
        assert read[0].tolist() in (ROWS, np.zeros((28, 28)).tolist())


def test_an_image_of_fractions_that_are_all_0_or_1_is_refused():
    error = refused(as_json([(ONE > 127).astype(float).tolist()]), JSON)
    assert error.message.startswith("images[0][0][0]: got 0.0, expected an integer 0 to 255")
    assert "; fractions 0 to 1 need the parameter scale=unit" in error.message


@pytest.mark.parametrize(
    ("kind", "encode"),
    [(JSON, lambda x: as_json(x.tolist())), (NPY, lambda x: as_npy(x))],
    ids=["json", "npy"],
)
@pytest.mark.parametrize(
    ("numbers", "advice"),
    [
        (ONE / 255, "; fractions 0 to 1 need the parameter scale=unit, or send round"),
        (ONE - 0.25 * (ONE > 0), "; for floats 0 to 255 send round(x), in NumPy np.rint(x).astype"),
        ((ONE - 33.3) / 78.6, "; negative numbers look normalised: send the pixels before that"),
        (ONE * 256.5, "; they go up to 65407.5: scale them to 0 to 255"),
    ],
    ids=["0 to 1", "0 to 255", "normalised", "16 bits"],
)
def test_floats_are_answered_with_the_conversion_that_fits(kind, encode, numbers, advice):
    assert advice in refused(encode(numbers), kind).message


@pytest.mark.parametrize(
    ("images", "field", "words"),
    [
        ([], "images", "0 images"),
        (7, "images", "got 7"),
        ([None], "images[0]", "got null"),
        ([FLAT, None], "images[1]", "got null"),
        (FLAT[:-1], "images", "783 values"),
        ([FLAT[:-1]], "images[0]", "783 values"),
        ([ROWS[:-1]], "images[0]", "27 rows"),
        ([*ROWS[:-1], ROWS[0][:-1]], "images[27]", "a list of 27"),
        ([ROWS[0][:-1], *ROWS[1:]], "images[0]", "a list of 27"),
        ([*ROWS[:-1], 28], "images[27]", "got 28"),
        ([28] * 28, "images", "28 values"),
        ([ROWS, [{str(i): i for i in range(28)}] * 28], "images[1]", "28 values"),
        ([ROWS, [[ROWS]]], "images[1]", "got shape (1, 1, 28, 28), expected 28 rows of 28"),
        (np.zeros((28, 28, 3), int).tolist(), "images:", "; send grey, one number a pixel, or"),
        (np.zeros((2, 28, 28, 4), int).tolist(), "images[0]", "; send grey, one number a pixel"),
        ([[ROWS] * 3], "images[0]", "; send grey, one number a pixel"),
        ([[5] * 32] * 32, "images:", "got shape (32, 32), expected 28 rows"),
        ([[5] * 32] * 32, "images:", "; scale it to 28 x 28, or send the picture's file"),
        ([[[5] * 32] * 32], "images[0]", "32 rows, expected 28 rows"),
        (
            [5] * 1024,
            "images",
            "1024 values, expected 28 rows of 28, 784 integers 0 to 255, or a base",
        ),
        ([[5] * 2352], "images[0]", "; send grey, one number a pixel"),
        ("0, 0, 255", "images", "; send a list of numbers without quotes"),
        (
            ONE.tobytes().hex(),
            "images",
            "got base64 of 1176 bytes, expected the file of a picture, or 784 b",
        ),
        (base64.b64encode(ONE.astype("<f4").tobytes()).decode(), "images", "; floats have more"),
        (TEXT[:-4], "images", "base64 of 783 bytes"),
        (
            base64.b64encode(as_npy(ONE)).decode(),
            "images",
            "base64 of 912 bytes, an npy file, expected the file of a picture, or 784",
        ),
        ("https://example.org/7.png", "images", "; files and URLs are not read: send the pic"),
        ([FLAT, "\u00e9" + TEXT[1:]], "images[1]", "784 bytes in base64, whose alphabet"),
        (TEXT[:-4] + "QQ==QQ==", "images", "784 bytes in base64, whose alphabet"),
        (["data:image/png;base64,iVBORw0KGgo="], "images[0]", "not a readable image/png"),
        ([1.5] * 1_000_000, "images", "1000000 values"),
    ],
)
def test_a_wrong_structure_is_refused_with_its_place(images, field, words):
    error = refused(as_json(images), JSON, Limits(max_images=64))
    assert error.message.startswith(field)
    assert words in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"images": "\xff"}',
        b'{"images": [NaN]}',
        b'{"images": [1e999]}',
        b'{"images": "\\ud800"}',
        b"{'images': []}",
        b'{"images": []} {}',
    ],
)
def test_a_body_that_is_not_json_is_refused(body):
    assert "not JSON" in refused(body, JSON).message


@pytest.mark.parametrize("inner", [b"[],", b"{},", b'{"a":1},', b"[[]],"])
def test_a_large_body_of_containers_is_refused_before_it_is_built(monkeypatch, inner):
    monkeypatch.setattr(json_images.orjson, "loads", None)
    body = b'{"images":[' + inner * 100_000 + b"0]}"
    with pytest.raises((InvalidInput, TooLarge)) as caught:
        decode(body, JSON, limits=Limits(max_images=100))
    assert caught.value.field == "body"


def test_a_byte_order_mark_before_json_is_skipped():
    many = as_json(np.tile(IMAGES, (16, 1, 1)).tolist())
    assert len(many) > json_images._SLICE_BYTES
    for body, count in ((as_json(FLAT), 1), (many, 128)):
        assert len(decode(b"\xef\xbb\xbf" + body, JSON, limits=Limits(128))) == count


def test_a_large_body_of_as_many_lists_as_rows_is_read():
    images = np.zeros((90, 28, 28), np.uint8)
    body = as_json(images.tolist())
    assert len(body) > 64 * 1024
    np.testing.assert_array_equal(decode(body, JSON, limits=Limits(16_384)), images)


# bytes and npy


@pytest.mark.parametrize("n", [1, 8])
def test_octets_are_read_without_a_copy(n):
    body = IMAGES[:n].tobytes()
    images = decode(body, RAW, limits=LIMITS)
    np.testing.assert_array_equal(images, IMAGES[:n])
    assert np.shares_memory(images, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (as_npy(ONE), "got 912 bytes, an npy file, expected n x 784 bytes"),
        (as_npy(ONE), "; send it with Content-Type: application/x-npy"),
        (bytes([0, 0, 8, 3, 0, 0, 0, 1]) + bytes(792), "got 800 bytes, an IDX file, expected"),
        (
            bytes([0, 0, 8, 3, 0, 0, 0, 1]) + bytes(792),
            "; send what follows its header of 16 bytes",
        ),
        (seven(), "; send it with Content-Type: image/png"),
        (gzip.compress(bytes(784), mtime=0), " bytes, gzip data, expected"),
        (b"seven.bin", "got 9 bytes, the text 'seven.bin', expected n x 784"),
        (b"seven.bin", "; with curl: --data-binary @FILE"),
        (bytes(785), "got 785 bytes, expected n x 784"),
        (b"7\x1b[31m" + b"x" * 60, "got 66 bytes, expected"),
        (as_json(FLAT), "; send it with Content-Type: application/json"),
        (b"\xef\xbf\xbdPNG\r\n", "got 8 bytes, a file that was read as text"),
        (
            gzip.compress(b"", mtime=0),
            "; send the body uncompressed, or gzip with Content-Encoding: gzip",
        ),
    ],
)
def test_what_was_sent_as_octets_is_named(body, words):
    assert words in refused(body, RAW).message


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (28, 28), }\n",
        '{"shape":(1,784),"descr":"<u1","fortran_order":False}',
        "{'descr': 'u1', 'shape': (784,), 'fortran_order': True}   ",
    ],
)
def test_npy_headers_of_other_writers_are_read(header, version):
    images = decode(npy_with(header, version=version), NPY, limits=LIMITS)
    np.testing.assert_array_equal(images[0], ONE)


@pytest.mark.parametrize("dtype", ["complex64", "S784", "datetime64[s]"])
def test_npy_of_what_is_no_number_is_refused(dtype):
    message = refused(as_npy(np.zeros((28, 28), dtype)), NPY).message
    assert "got dtype '" in message
    assert "expected real numbers, as of uint8" in message


@pytest.mark.parametrize("shape", [(28,), (28, 27), (2, 28, 27), (1, 3, 28, 28), (785,), (2, 785)])
def test_npy_of_another_shape_is_refused(shape):
    message = refused(as_npy(np.zeros(shape, np.uint8)), NPY).message
    assert f"got shape {shape}, expected (28, 28), (784,), (n, 28, 28) or (n, 784)" in message
    assert ("; send grey, one number a pixel" in message) == (len(shape) == 4)


def test_npy_is_refused_when_its_shape_promises_more_than_it_brings():
    body = as_npy(IMAGES)
    assert "6271 bytes of data, expected 6272" in refused(body[:-1], NPY).message
    assert "6273 bytes of data" in refused(body + b"x", NPY).message
    assert "0 images" in refused(as_npy(IMAGES[:0]), NPY).message


# CSV

NAMES = [f"pixel{i}" for i in range(784)]
LINES = as_csv(IMAGES)


@pytest.mark.parametrize(
    "body",
    [
        LINES,
        LINES.replace(b"\n", b"\r\n") + b"\r\n\r\n",
        as_csv(IMAGES, *NAMES),
        as_csv(IMAGES, "label", *NAMES, label="300,"),
        as_csv(IMAGES, "LABEL", *[f'"{y}x{x}"' for y in range(28) for x in range(28)], label="7, "),
        as_csv(IMAGES, *map(str, range(784))),
        as_csv(IMAGES, "", *map(str, range(784)), label="12,"),
        b"\xef\xbb\xbf" + as_csv(IMAGES, label="5,"),
        b'"%b"' % LINES.replace(b",", b'","').replace(b"\n", b'"\n"'),
        as_csv(IMAGES.astype(float)),
    ],
    ids=[
        *("SageMaker", "CRLF", "Kaggle's test", "Kaggle's train", "MNIST in CSV", "pandas"),
        *("pandas with index", "EMNIST, BOM", "quoted", "floats"),
    ],
)
def test_csv_is_read_with_and_without_header_and_label(body):
    np.testing.assert_array_equal(decode(body, CSV, limits=LIMITS), IMAGES)


def test_csv_of_many_lines_is_read_in_slices():
    images = np.resize(IMAGES, (600, 28, 28))
    limits = Limits(max_images=600)
    np.testing.assert_array_equal(decode(as_csv(images), CSV, limits=limits), images)
    with pytest.raises(InvalidInput, match="got 256 at line 601, column 2,"):
        decode(
            as_csv(images, *NAMES)[:-4].rpartition(b"\n")[0] + b"\n0,256" + b",0" * 782,
            CSV,
            limits=limits,
        )


def test_fractions_of_csv_are_read_when_the_scale_is_unit():
    body = as_csv(IMAGES / 255)
    np.testing.assert_array_equal(decode(body, CSV, scale="unit", limits=LIMITS), IMAGES)
    assert "fractions 0 to 1 need the parameter scale=unit" in refused(body, CSV).message


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (b"1_0", "got '1_0' at line 3, column 2, expected a number in each column"),
        (b"", "got '' at line 3, column 2, expected a number"),
        (b"0x1", "got '0x1' at line 3, column 2, expected a number"),
        (b"\xd9\xa3", "at line 3, column 2, expected a number"),
        (b'"1', "got an open quote in lines 2 to 3, expected a number"),
        (b"9" * 40, "at line 3, column 2, expected a number"),
        (b"256", "got 256 at line 3, column 2, expected whole numbers 0 to 255"),
        (b"-1", "got -1.0 at line 3, column 2, expected whole numbers"),
        (b"nan", "got nan at line 3, column 2, expected whole numbers"),
        (b"infinity", "got inf at line 3, column 2, expected whole numbers"),
        (b"0.5", "got 0.5 at line 3, column 2, expected whole numbers"),
        (b"0,0", "got 785 values in line 3, expected 784, as in line 1"),
        (b"0\n0", "got 2 values in line 3, expected 784"),
    ],
)
def test_a_wrong_cell_of_csv_is_named_by_line_and_column(cell, words):
    lines = as_csv(IMAGES[:1], *NAMES) + b"\n0," + cell + b",0" * 782
    assert words in refused(lines, CSV).message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b",".join([b"0"] * 783), "got 783 values in line 1, expected 784 numbers in a line"),
        (LINES.replace(b",", b";"), "expected 784 numbers in a line, between commas, or 785"),
        (seven(), "got image/png, expected 784 numbers"),
        (as_csv(IMAGES, *NAMES, "class"), "785 columns, of which the first is 'pixel0', expected"),
        (as_csv(IMAGES[:0], *NAMES), "got 0 images, expected at least 1"),
        (b"," * 783 + b"\n" + as_csv(ONE), "got '' at line 1, column 1, expected a number"),
    ],
)
def test_csv_of_another_form_is_refused(body, words):
    assert words in refused(body, CSV).message


# content types, invert, limits


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("", "; with curl: -H 'Content-Type: image/png'"),
        ("application/x-www-form-urlencoded", "image/png', or application/json for numbers"),
        ("image/heic", "; convert it to PNG or JPEG"),
        ("image/svg+xml", "; convert it to PNG or JPEG"),
        ("application/pdf", "; convert it to PNG or JPEG"),
        ("text/plain;charset=UTF-8", "; say what it is, as in Content-Type: image/png"),
        ("application/npy", "; did you mean application/x-npy?"),
        ("json", "; did you mean application/json?"),
        ("png", "; did you mean image/png?"),
    ],
)
def test_another_content_type_is_answered_with_what_to_do(kind, advice):
    with pytest.raises(UnsupportedMediaType) as caught:
        decode(b"", kind, limits=LIMITS)
    assert caught.value.message.endswith(advice)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_an_empty_body_is_distinguished_from_a_wrong_one(kind):
    assert "got nothing" in refused(b"", kind).message


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, as_json(FLAT)),
        (RAW, ONE.tobytes()),
        (NPY, as_npy(ONE)),
        (CSV, as_csv(ONE)),
        (FORM, form((RAW, ONE.tobytes()))),
    ],
)
def test_pixels_are_inverted_only_when_invert_is_true(kind, body):
    for invert in ("auto", "false"):
        np.testing.assert_array_equal(decode(body, kind, invert=invert, limits=LIMITS)[0], ONE)
    np.testing.assert_array_equal(decode(body, kind, invert="true", limits=LIMITS)[0], 255 - ONE)


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (JSON, as_json([TEXT] * 9), "images: got 9 images, expected at most 8"),
        (RAW, bytes(9 * 784), "9 images"),
        (NPY, as_npy(np.zeros((9, 28, 28), np.uint8)), "9 images"),
        (CSV, as_csv(np.zeros((9, 28, 28), np.uint8)), "9 images"),
        (FORM, form(*[(RAW, IMAGES[:5].tobytes())] * 2), "parts: got 10 images"),
        (FORM, form(*[(None, b"")] * 1000), "parts: got 9 images"),
    ],
)
def test_too_many_images_are_too_large_in_every_form(kind, body, words):
    with pytest.raises(TooLarge, match=words):
        decode(body, kind, limits=LIMITS)


# multipart


def test_parts_of_every_type_are_read_in_their_order():
    body = form(
        ("application/octet-stream", IMAGES[:2].tobytes()),
        ("application/x-npy; v=1", as_npy(IMAGES[2])),
        ("application/vnd.ms-excel", as_csv(IMAGES[3], "label", *NAMES, label="3,")),
        ("application/octet-stream", as_csv(IMAGES[4], label="4,")),
        ("Image/PNG", seven()),
        ("image/jpeg", seven(kind="JPEG")),
    )
    images = decode(body, FORM, limits=LIMITS)
    assert images.shape == (7, 28, 28)
    np.testing.assert_array_equal(images[:5], IMAGES[:5])
    for read, kind in zip(images[5:], ("PNG", "JPEG"), strict=True):
        alone = decode(seven(kind=kind), f"image/{kind.lower()}", limits=LIMITS)
        np.testing.assert_array_equal(read, alone[0])


def test_pictures_of_a_form_share_the_limit_of_pixels():
    limits = Limits(max_images=8, max_picture_pixels=2 * 784)
    assert len(decode(form(*[(None, seven())] * 2), FORM, limits=limits)) == 2
    with pytest.raises(
        TooLarge, match="at most 1568 in a request, 1568 of which are used"
    ) as caught:
        decode(form(*[(None, seven())] * 3), FORM, limits=limits)
    assert caught.value.field == "parts[2]"


def test_a_long_content_type_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr("python_multipart.multipart.parse_options_header", None)
    error = refused(form((RAW, ONE.tobytes())), "multipart/form-data" + "; a=b" * 12_000)
    assert error.field == "content-type"
    assert "got 60019 characters, expected at most 1024" in error.message


def test_a_wrong_part_is_named_by_its_number():
    assert refused(form((RAW, ONE.tobytes()), (RAW, b"auto")), FORM).field == "parts[1]"
    assert "no closing boundary" in refused(form((RAW, ONE.tobytes()))[:-9], FORM).message
    for kind in ("text/plain", "application/json", "multipart/form-data; boundary=y"):
        with pytest.raises(UnsupportedMediaType, match="image/png") as caught:
            decode(form((kind, b"1")), FORM, limits=LIMITS)
        assert caught.value.field == "parts[0]"
