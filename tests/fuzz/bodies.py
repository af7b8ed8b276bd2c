"""JSON, raw pixels, npy, CSV and multipart bodies, each beside a slow and plain reading."""

from __future__ import annotations

import base64
import contextlib
import csv
import gzip
import io
import json
import random
import re
import warnings
import zlib
from email.parser import BytesParser
from typing import Any

import numpy as np
import orjson

import service.pictures.picture  # noqa: F401 a picture in a body imports it: no input's memory
from lenet.pixels import Images
from service.errors import InvalidInput, ServiceError, TooLarge, UnsupportedMediaType
from service.forms.body import decode
from service.forms.compressed import CompressedForm
from service.forms.prediction import ImageForm
from service.forms.reader import OCTETS, Limits
from service.pictures.headers import sniff
from service.pictures.judge import verdicts
from tests.fuzz import samples
from tests.fuzz.target import (
    Finding,
    MutateBytes,
    Target,
    changed_json,
    mutate_list,
    pick,
    quiet,
)
from wire.answer import error_answer

# Loads the judge, which is no input's memory or time either.
verdicts(np.zeros((1, 28, 28), np.uint8))

MAX_IMAGES = 8
LIMITS = Limits(max_images=MAX_IMAGES, max_picture_pixels=1 << 16)


def decoded(
    body: bytes,
    content_type: str,
    *,
    invert: Any = "auto",
    errors: tuple[type[ServiceError], ...] = (InvalidInput, TooLarge),
) -> Images | ServiceError:
    """The images of a body, checked to be such; or the error, checked to be answerable."""
    try:
        images = decode(body, content_type, invert=invert, limits=LIMITS)
    except errors as exc:
        check_error(exc)
        return exc
    check_images(images)
    return images


def check_images(images: Images) -> None:
    """Check the guarantees of every decoder."""
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28) or images.ndim != 3:
        raise Finding(f"got {images.dtype} {images.shape}, expected uint8 (n, 28, 28)")
    if not 1 <= len(images) <= MAX_IMAGES or not images.flags.c_contiguous:
        raise Finding(f"got {len(images)} images, contiguous: {images.flags.c_contiguous}")


def check_error(error: ServiceError) -> None:
    """The client gets a 4xx, in JSON, of bounded length."""
    answer = error_answer(error)
    document = orjson.loads(answer.body)["error"]
    if not 400 <= answer.status < 500 or document["code"] != error.code:
        raise Finding(f"answered {answer.status} {document}")
    if not document["message"] or len(answer.body) > 2000:
        raise Finding(f"a message of {len(answer.body)} bytes: {answer.body[:200]!r}")


def compare(found: Images | ServiceError, expected: Images | None) -> None:
    """`expected` is None where the body has to be refused."""
    if isinstance(found, ServiceError):
        if expected is not None:
            raise Finding(f"refused {expected.shape}: {found.message}")
    elif expected is None:
        raise Finding(f"got {found.shape}, expected an error")
    elif not np.array_equal(found, expected):
        raise Finding(f"got other pixels than expected, {found.shape} {expected.shape}")


class OctetsTarget(Target):
    """`application/octet-stream`, also inverted."""

    def run(self, data: bytes) -> None:
        pixels = reshaped(data)
        for invert in ("auto", "true", "false"):
            found = decoded(data, "application/octet-stream", invert=invert)
            expected = pixels if pixels is None or invert != "true" else 255 - pixels
            compare(found, expected)

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.5:
            return mutate(data)
        data = data or b"\0"
        times = min(rng.choice((1, 2, 784)), 1 + self.max_bytes // len(data))
        return data * times + bytes(rng.choice((0, 0, 1, 783, 784)))


class CompressedTarget(Target):
    """Raw pixels with Content-Encoding: gzip, beside Python's own reading of gzip."""

    _form = CompressedForm(ImageForm.of(OCTETS, "auto", "one", LIMITS), "gzip", 784 * MAX_IMAGES)

    def run(self, data: bytes) -> None:
        try:
            found: Images | ServiceError = self._form.decode(data, lambda _: None).images
        except (InvalidInput, TooLarge) as exc:
            check_error(exc)
            found = exc
        plain = decompressed(data, 784 * MAX_IMAGES)
        compare(found, None if plain is None else reshaped(plain))
        now = None
        with contextlib.suppress(InvalidInput, TooLarge):
            now = self._form.decode_now(data)
        if now is not None:
            compare(now.images, reshaped(plain or b""))

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        plain = decompressed(data, 784 * MAX_IMAGES)
        if plain is None or rng.random() < 0.7:
            return mutate(data)
        return gzip.compress(mutate(plain), rng.choice((0, 1, 9)), mtime=0)


def decompressed(data: bytes, most: int) -> bytes | None:
    """The content of a gzip file of one part, None of any other or of more than `most` bytes."""
    decompressor = zlib.decompressobj(31)
    try:
        plain = decompressor.decompress(data, most + 1)
        is_whole = decompressor.eof and not decompressor.unused_data and len(plain) <= most
        if not is_whole:
            return None
        read = gzip.GzipFile(fileobj=io.BytesIO(data)).read()
    except (OSError, EOFError, zlib.error):
        return None
    if read != plain:
        raise Finding("gzip and zlib read other bytes")
    return plain


def reshaped(pixels: bytes) -> Images | None:
    """The images of raw pixels; None if they are refused."""
    count, rest = divmod(len(pixels), 784)
    if rest or not 1 <= count <= MAX_IMAGES:
        return None
    return np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28)


class JsonTarget(Target):
    """`application/json` beside `json.loads` and the rules in plain Python."""

    max_bytes = 96 * 1024  # beyond the size from which lists are counted before they are parsed

    def run(self, data: bytes) -> None:
        found = decoded(data, "application/json")
        expected = _json_reference(data)
        if isinstance(found, ServiceError) and found.code == "too_large":
            # Bodies with more lists than images could have are refused before they are read.
            if expected is not None and len(expected) <= MAX_IMAGES:
                raise Finding(f"refused as too large: {found.message}")
            return
        compare(found, expected)

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.3:
            return mutate(data)
        if rng.random() < 0.5:
            tokens = re.findall(rb'"[^"]*"|[\[\]{},:]|[^\s\[\]{},:"]+|\s+', data)
            return b"".join(mutate_list(tokens, rng, lambda _: pick(rng, samples.JSON_TOKENS)))
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return mutate(data)
        return json.dumps(changed_json(document, rng, _VALUES), separators=(",", ":")).encode()


_VALUES = (
    *(0, 1, 255, 256, -1, 1.0, 0.5, -0.0, 1e400, True, False, None, "", "x", [], {}),
    *(2**63, 2**64, 10**400, [[0] * 28] * 28, [0] * 784, "\ud800"),
    *(base64.b64encode(bytes(784)).decode(), "data:image/png;base64,AAAA"),
)


def _json_reference(body: bytes) -> Images | None:
    def reject(constant: str) -> None:
        raise ValueError(constant)

    try:
        text = body.decode("utf-8-sig")
        document = json.loads(text, parse_constant=reject)
    except (ValueError, RecursionError):
        return None
    if type(document) is not dict or set(document) != {"images"}:
        return None
    if has_surrogate(document):  # json reads them, though no UTF-8 has them
        return None
    images = document["images"]
    one = _json_image(images)
    if one is not None:
        return one[np.newaxis]
    if type(images) is not list or not images or len(images) > MAX_IMAGES:
        return None
    found = [_json_image(image) for image in images]
    return None if any(image is None for image in found) else np.stack(found)  # type: ignore[arg-type]


def has_surrogate(value: Any) -> bool:
    """Whether a text in it cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def nested(value: Any, most: int = 8) -> tuple[int, ...] | None:
    """The lengths of nested lists; None where those side by side differ, or beyond `most`."""
    if type(value) is not list:
        return ()
    if not most:  # Python 3.13 reads deeper ones than it can call functions
        return None
    inner = {nested(one, most - 1) for one in value} or {()}
    (first, *others) = inner
    return None if others or first is None else (len(value), *first)


def leaves(value: Any) -> list[Any]:
    """What is in nested lists."""
    return [leaf for one in value for leaf in leaves(one)] if type(value) is list else [value]


def _json_image(image: Any) -> Images | None:
    if isinstance(image, str):
        content = plain_base64(image)
        if content is None:
            return None
        if (kind := sniff(content)) is not None:
            found = decoded(content, kind)
            return found[0] if not isinstance(found, ServiceError) else None
        if len(content) != 784:
            return None
        values: list[Any] = list(content)
    elif nested(image) in ((784,), (28, 28), (1, 28, 28), (28, 28, 1)):
        values = leaves(image)
    else:
        return None
    if any(type(value) not in (int, float) or not 0 <= value <= 255 for value in values):
        return None
    if any(value % 1 for value in values):
        return None
    if max(values) == 1 and float in map(type, values):  # fractions of 255
        return None
    return np.array(values, np.uint8).reshape(28, 28)


def plain_base64(text: str) -> bytes | None:
    """The bytes of a text in either alphabet, with white space or not, or of a data URL."""
    head, comma, rest = text.partition(",")
    if comma and head[:5].lower() == "data:" and head[-7:].lower() == ";base64":
        text = rest
    text = re.sub(r"\s+", "", text).replace("-", "+").replace("_", "/").rstrip("=")
    if not re.fullmatch("[A-Za-z0-9+/]*", text) or len(text) % 4 == 1:
        return None
    return base64.b64decode(text + "=" * (-len(text) % 4))


class NpyTarget(Target):
    """`application/x-npy` beside `numpy.load`."""

    def run(self, data: bytes) -> None:
        found = decoded(data, "application/x-npy")
        array = _npy_reference(data)
        if not isinstance(found, ServiceError):
            if array is None or array.dtype.kind not in "buif":
                raise Finding(f"got {found.shape}, where numpy reads no numbers")
            pixels = array * 255.0 if array.dtype.kind == "b" else array
            if not np.array_equal(found, pixels.reshape(len(found), 28, 28)):
                raise Finding("got other pixels than numpy")
        elif array is not None and data == samples.npy(array) and _fits(array):
            raise Finding(f"refused what np.save wrote, {array.shape}: {found.message}")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        end = data.find(b"}") + 1
        if not end or rng.random() < 0.3:
            return mutate(data)
        start = 12 if data[6:7] > b"\1" else 10
        pieces = re.findall(rb"'[^']*'|[(){},:]|[^'(){},:]+", data[start:end])
        header = b"".join(mutate_list(pieces, rng, lambda _: pick(rng, samples.NPY_TOKENS)))
        header = header[:60_000] + b"\n"
        size = len(header).to_bytes(start - 8, "little")
        return data[:8] + size + header + data[end:].lstrip(b" \n")


def _fits(array: np.ndarray[Any, Any]) -> bool:
    shape = array.shape
    one = shape in ((28, 28), (784,), (28, 28, 1))
    channel = (1, 28, 28), (28, 28, 1)
    many = shape[1:] in ((28, 28), (784,), *channel) and 1 <= shape[0] <= MAX_IMAGES
    return array.dtype == np.uint8 and (one or many)


def _npy_reference(body: bytes) -> np.ndarray[Any, Any] | None:
    """NumPy's result; our parser is lenient about spaces, quotes and zeros in the header."""
    start = 12 if body[6:7] > b"\1" else 10
    end = start + int.from_bytes(body[8:start], "little")
    header = "".join(body[start:end].decode("latin-1").replace('"', "'").split())
    header = re.sub(r"(?<=[,(])0+(?=\d)", "", header) + "\n"
    text = header.encode("latin-1")
    body = body[:8] + len(text).to_bytes(start - 8, "little") + text + body[end:]
    # The product of a shape is allocated before the data are read.
    if sum(map(len, re.findall(rb"\d+", body[:1200]))) > 40:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            array: np.ndarray[Any, Any] = np.load(io.BytesIO(body), allow_pickle=False)
        except Exception:  # noqa: BLE001 - numpy evaluates the header, and raises what it likes
            return None
    return array if isinstance(array, np.ndarray) else None


class CsvTarget(Target):
    """`text/csv` beside the package csv and `float`."""

    def run(self, data: bytes) -> None:
        compare(decoded(data, "text/csv"), _csv_reference(data))

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.2:
            return mutate(data)
        lines = data.split(b"\n")
        if rng.random() < 0.3:
            return b"\n".join(mutate_list(lines, rng, mutate))
        at = rng.randrange(len(lines))
        cells = lines[at].split(b",")
        cells[rng.randrange(len(cells))] = pick(rng, samples.CSV_TOKENS)
        if rng.random() < 0.3:
            cells = mutate_list(cells, rng, lambda _: pick(rng, samples.CSV_TOKENS))
        lines[at] = b",".join(cells)
        return b"\n".join(lines)


def _csv_reference(body: bytes) -> Images | None:
    text = body.removeprefix(b"\xef\xbb\xbf").rstrip().decode("latin-1")
    lines = text.split("\n")
    columns = lines[0].count(",") + 1
    if columns not in (784, 785):
        return None
    names = [name.strip(' "\r') for name in lines[0].split(",")]
    is_header = names[-1] in ("783", "784") or not (_is_value(names[1]) or _is_value(names[-1]))
    if is_header:
        if columns == 785 and names[0].lower() not in ("label", ""):
            return None
        lines = lines[1:]
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines), newline="")))
    except csv.Error:  # a carriage return in a line
        return None
    if len(rows) != len(lines) or any(len(row) != columns for row in rows):
        return None
    values = [[_csv_number(cell) for cell in row] for row in rows]
    if not 1 <= len(values) <= MAX_IMAGES or any(None in row for row in values):
        return None
    array = np.array(values, np.float64)
    is_whole = re.fullmatch(r'[0-9, \t\r\n"]*', "\n".join(lines))
    if is_whole and (array >= 2**63).any():
        return None
    pixels = array[:, -784:]
    if not ((pixels >= 0) & (pixels <= 255) & (pixels == np.floor(pixels))).all():
        return None
    if not is_whole and (pixels.max(axis=1) == 1).any():  # fractions of 255
        return None
    return pixels.astype(np.uint8).reshape(-1, 28, 28)


def _is_value(name: str) -> bool:
    try:
        float(name.encode("latin-1") or 0)
    except ValueError:
        return False
    return True


def _csv_number(cell: str) -> float | None:
    """The number in a cell, which `float` reads in more alphabets, and with underscores."""
    text = cell.strip()
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


class MultipartTarget(Target):
    """`multipart/form-data` beside the package email; the first line is the content type."""

    traced_bytes = 6 << 20  # of pictures

    def __init__(self) -> None:
        super().__init__()
        quiet("python_multipart", self.undo)  # as the service does

    def run(self, data: bytes) -> None:
        line, _, body = data.partition(b"\n")
        content_type = "multipart/form-data" + line.decode("latin-1")
        errors = (InvalidInput, TooLarge, UnsupportedMediaType)
        found = decoded(body, content_type, errors=errors)
        boundary = re.fullmatch(rb"; boundary=([A-Za-z0-9]{1,60})", line)
        parts = _email_parts(body, boundary[1]) if boundary else None
        if parts is None:
            return
        expected: list[Images] = []
        pixels = 0
        for kind, content in parts:
            one = decoded(content, kind, errors=errors)
            if isinstance(one, ServiceError) or not content:
                compare(found, None)
                return
            expected.append(one)
            pixels += samples.picture_pixels(content)
        if sum(map(len, expected)) > MAX_IMAGES or pixels > LIMITS.max_picture_pixels:
            compare(found, None)
        else:
            compare(found, np.concatenate(expected))

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        line, _, body = data.partition(b"\n")
        boundary = line.rpartition(b"=")[2].strip(b' "') or b"x"
        if rng.random() < 0.2:
            return mutate(data)
        parts = body.split(b"--" + boundary)
        if rng.random() < 0.3:
            parts = mutate_list(parts, rng, mutate)
        else:
            at = rng.randrange(len(parts))
            head, between, content = parts[at].partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            if rng.random() < 0.7:
                lines = mutate_list(lines, rng, lambda _: pick(rng, samples.PART_HEADERS))
            else:
                content = mutate(content)
            parts[at] = b"\r\n".join(lines) + between + content
        return line + b"\n" + (b"--" + boundary).join(parts)


_MOST_HEADERS, _VALUE = 7, re.compile("[ -~]{0,900}")
"""python-multipart refuses a part with more headers, or longer ones."""


def _email_parts(body: bytes, boundary: bytes) -> list[tuple[str, bytes]] | None:
    """Content type and content of each part by `email`; None unless it is as browsers write it."""
    line = b"--" + boundary
    message = BytesParser().parsebytes(
        b"Content-Type: multipart/form-data; boundary=%b\r\n\r\n%b" % (boundary, body)
    )
    if not message.is_multipart() or message.defects or message.preamble or message.epilogue:
        return None
    parts: list[tuple[str, bytes]] = []
    for part in message.get_payload():
        names, values = part.keys(), part.values()
        if part.defects or part.is_multipart() or not 1 <= len(names) <= _MOST_HEADERS:
            return None
        if not re.fullmatch("[A-Za-z-]*", "".join(names)) or not all(
            map(_VALUE.fullmatch, map(str, values))
        ):
            return None
        del part["content-transfer-encoding"]
        content = part.get_payload(decode=True)
        kind = part.get_all("content-type", [""])[-1].partition(";")[0].strip().lower()
        if kind in ("", "application/octet-stream"):
            kind = samples.sniffed(content)
        if kind in ("application/json", "multipart/form-data", "image/jpg"):
            kind = "text/plain"  # no part may have these, though a body may
        parts.append((kind, content))
    begun = (b"\r\n" + body).count(b"\r\n" + line + b"\r\n")
    return parts if begun == len(parts) == body.count(line) - 1 else None
