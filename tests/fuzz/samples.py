"""Inputs by name, from which fuzzing starts, and the words of each format."""

from __future__ import annotations

import io
import re
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


# JSON

JSON_TOKENS = (
    *(b"0", b"255", b"256", b"-1", b"-0", b"1.0", b"1e2", b"true", b"null", b"NaN", b"1e999"),
    *(b"[", b"]", b"{", b"}", b",", b":", b" ", b'"images"', b'"a"', b'""', b'"\\ud800"', b"[]"),
    *(b"18446744073709551616", b"9" * 400, b'"data:image/png;base64,"', b"\xef\xbb\xbf", b"\xff"),
)


# npy

NPY_TOKENS = (
    *(b"'descr'", b"'fortran_order'", b"'shape'", b"'|u1'", b"'<u1'", b"'>u1'", b"'u1'", b"'<f4'"),
    *(b"True", b"False", b"None", b":", b",", b"(", b")", b"{", b"}", b" ", b"", b"0", b"1", b"28"),
    *(b"784", b"2", b"1000000000000000000", b"-1", b"1L", b"'O'", b"[('a','u1')]", b"\xe9", b'"'),
)


def npy(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    """An array as `np.save` writes it."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version, allow_pickle=False)
    return buffer.getvalue()


# CSV

CSV_TOKENS = (
    *(
        b"0",
        b"1",
        b"255",
        b"256",
        b"-1",
        b"-0",
        b"+5",
        b"007",
        b"1.0",
        b"0.5",
        b".5",
        b"5.",
        b"1e2",
    ),
    *(
        b"1_0",
        b"nan",
        b"inf",
        b"-Infinity",
        b"0x1",
        b"",
        b" 7 ",
        b"7 7",
        b'"7"',
        b'"7',
        b'7"',
        b'""',
    ),
    *(b'"7"8', b'"7,8"', b"label", b"pixel0", b"783", b"9" * 20, b"1e400", b"\xa07", b"\0", b"\r"),
    *(b"\n", b"\r\n", b";", b"#", b"\xef\xbb\xbf", b"\xd9\xa3"),
)


# Pictures


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG with its checksum."""
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I4s", len(content), kind) + content + struct.pack(">I", checksum)


def png(grey: np.ndarray[Any, Any]) -> bytes:
    """An 8-bit grey PNG without a filter."""
    height, width = grey.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in grey)
    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return PNG_MAGIC + b"".join(chunks)


# multipart

PART_HEADERS = (
    *(b"Content-Type: image/png", b"content-type: application/x-npy", b"Content-Type: text/plain"),
    *(b"Content-Type: application/octet-stream", b"Content-Type: multipart/form-data", b"", b":"),
    *(b"Content-Type: image/jpeg; name=x", b"Content-Type: application/json", b"X: 1", b"X", b" x"),
    *(b'Content-Disposition: form-data; name="a"; filename="b"', b"Content-Type:", b"\xff: \xff"),
    *(b"Content-Transfer-Encoding: base64", b"Content-Type: IMAGE/PNG", b"A" * 300, b"--x--"),
)


def sniffed(content: bytes) -> str:
    """Content type of a part that states none."""
    for start, kind in (
        (PNG_MAGIC, "image/png"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"\x93NUMPY", "application/x-npy"),
        (b"GIF87a", "image/gif"),
        (b"GIF89a", "image/gif"),
        (b"II*\0", "image/tiff"),
        (b"MM\0*", "image/tiff"),
    ):
        if content.startswith(start):
            return kind
    if re.match(rb'(\xef\xbb\xbf)?[\w."+-]{0,40},[\w."+-]{1,40},', content):
        return "text/csv"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    if content[4:12] in (b"ftypavif", b"ftypavis"):
        return "image/avif"
    if content[:2] == b"BM" and content[15:18] == bytes(3) and content[14] in BMP_HEADERS:
        return "image/bmp"
    return "application/octet-stream"


BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)


def picture_pixels(content: bytes) -> int:
    """Width times height of a picture that could be read; 0 of anything else."""
    if not sniffed(content).startswith("image/"):
        return 0
    with Image.open(io.BytesIO(content)) as picture:
        return picture.width * picture.height
