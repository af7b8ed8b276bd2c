"""Inputs by name, from which fuzzing starts, and the words of each format."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from service.api.openapi import example_seven

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def image_bytes() -> bytes:
    """784 bytes: a seven."""
    return bytes(pixel for row in example_seven() for pixel in row)


# JSON

JSON_TOKENS = (
    *(b"0", b"255", b"256", b"-1", b"-0", b"1.0", b"1e2", b"true", b"null", b"NaN", b"1e999"),
    *(b"[", b"]", b"{", b"}", b",", b":", b" ", b'"images"', b'"a"', b'""', b'"\\ud800"', b"[]"),
    *(b"18446744073709551616", b"9" * 400, b'"data:image/png;base64,"', b"\xef\xbb\xbf", b"\xff"),
)


def json_bodies() -> dict[str, bytes]:
    """Bodies of `application/json`."""
    seven = example_seven()
    flat = [pixel for row in seven for pixel in row]
    text = base64.b64encode(bytes(flat)).decode()
    zeros = "0," * 783 + "0"

    def body(images: Any) -> bytes:
        return json.dumps({"images": images}, separators=(",", ":")).encode()

    return {
        "empty": b"",
        "not-json": b'{"images": ',
        "not-utf-8": b'{"images": "\xff"}',
        "byte-order-mark": b'\xef\xbb\xbf{"images": []}',
        "a-list": b"[]",
        "a-number": b"1",
        "empty-object": b"{}",
        "unknown-key": b'{"image": [], "images": []}',
        "repeated-key": b'{"images": [], "images": ["' + text.encode() + b'"]}',
        "no-images": body([]),
        "images-null": body(None),
        "rows": body(seven),
        "flat": body(flat),
        "base64": body(text),
        "a-list-of-each": body([seven, flat, text]),
        "27-rows": body(seven[1:]),
        "28-rows-of-27": body([row[1:] for row in seven]),
        "a-row-is-a-number": body([*seven[1:], 28]),
        "channel-axis": body([[[[pixel] for pixel in row] for row in seven]]),
        "783-values": body(flat[1:]),
        "256": body([*flat[1:], 256]),
        "negative": body([*flat[1:], -1]),
        "fraction": body([*flat[1:], 0.5]),
        "boolean": body([*flat[1:], True]),
        "beyond-64-bits": body([*flat[1:], 2**64]),
        "infinity": b'{"images":[' + zeros.encode() + b",1e999]}",
        "nan": b'{"images":[NaN]}',
        "base64-of-too-few": body(base64.b64encode(b"x").decode()),
        "base64-of-a-png": body(base64.b64encode(png(np.zeros((2, 2), np.uint8))).decode()),
        "base64-wrong-alphabet": body("_" + text[1:]),
        "data-url": body("data:image/png;base64," + text),
        "too-many-images": body([text] * 9),
        "deep": b'{"images":' + b"[" * 1500 + b"]" * 1500 + b"}",
        "lone-surrogate": b'{"images": "\\ud800"}',
        "surrogate-key": b'{"\\ud83d": 1}',
        "object-in-an-object": b'{"images": {"images": [' + zeros.encode() + b"]}}",
        "many-digits": b'{"images": [' + b"1" * 5000 + b"]}",
        "huge-exponent": b'{"images": [1e-99999999999999999999]}',
    }


# npy

NPY_TOKENS = (
    *(b"'descr'", b"'fortran_order'", b"'shape'", b"'|u1'", b"'<u1'", b"'>u1'", b"'u1'", b"'<f4'"),
    *(b"True", b"False", b"None", b":", b",", b"(", b")", b"{", b"}", b" ", b"", b"0", b"1", b"28"),
    *(b"784", b"2", b"1000000000000000000", b"-1", b"1L", b"'O'", b"[('a','u1')]", b"\xe9", b'"'),
)


def npy(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    """What `np.save` writes."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version, allow_pickle=False)
    return buffer.getvalue()


def npy_bodies() -> dict[str, bytes]:
    """Bodies of `application/x-npy`."""
    seven = np.array(example_seven(), np.uint8)
    whole = npy(seven)
    return {
        "empty": b"",
        "magic-alone": b"\x93NUMPY",
        "a-zip": b"PK\x03\x04" + bytes(20),
        "28x28": whole,
        "784": npy(seven.ravel()),
        "2x28x28": npy(np.stack([seven, seven])),
        "1x784": npy(seven.reshape(1, 784)),
        "fortran-order": npy(np.asfortranarray(np.stack([seven, seven.T]))),
        "version-2": npy(seven, (2, 0)),
        "version-3": npy(seven, (3, 0)),
        "version-4": whole[:6] + b"\4" + whole[7:],
        "version-1.1": whole[:7] + b"\1" + whole[8:],
        "float32": npy(np.zeros((28, 28), np.float32)),
        "int64": npy(np.zeros(4, np.int64)),
        "complex": npy(np.zeros(2, np.complex64)),
        "strings": npy(np.array(["ab"])),
        "no-dimension": npy(np.array(3, np.uint8)),
        "no-images": npy(np.zeros((0, 28, 28), np.uint8)),
        "too-many-images": npy(np.zeros((9, 28, 28), np.uint8)),
        "channel-first": npy(np.zeros((2, 1, 28, 28), np.uint8)),
        "channel-last": npy(np.zeros((2, 28, 28, 1), np.uint8)),
        "27x28": npy(np.zeros((27, 28), np.uint8)),
        "two-commas-in-the-shape": whole.replace(b"(28, 28), }  ", b"(28,, 28), } "),
        "a-size-that-is-no-tuple": npy(seven.ravel()).replace(b"(784,)", b"(784) "),
        "a-byte-missing": whole[:-1],
        "a-byte-more": whole + b"\0",
        "header-cut": whole[:40],
        "header-longer-than-the-file": whole[:8] + b"\xff\x03" + whole[10:],
        "pickle": b"\x93NUMPY\1\0\x36\0{'descr': '|O', 'fortran_order': False, 'shape': (1,)} \n"
        b"cos\nsystem\n(S'true'\ntR.",
    }


# Pictures


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG with its checksum."""
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I4s", len(content), kind) + content + struct.pack(">I", checksum)


def png(grey: np.ndarray[Any, Any], *before: bytes) -> bytes:
    """An 8-bit grey PNG, without a filter, with the chunks `before` its pixels."""
    height, width = grey.shape
    rows = b"".join(b"\0" + row.tobytes() for row in grey)
    return png_of(width, height, 8, 0, rows, *before)


def png_of(
    width: int,
    height: int,
    depth: int,
    colour: int,
    rows: bytes,
    *before: bytes,
    interlaced: int = 0,
) -> bytes:
    """A PNG of rows that begin with their filter each."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    chunks = (chunk(b"IHDR", header), *before, chunk(b"IDAT", zlib.compress(rows)))
    return PNG_MAGIC + b"".join(chunks) + chunk(b"IEND", b"")


def stroke(height: int = 12, width: int = 10) -> np.ndarray[Any, Any]:
    """Grey levels of a light stroke on dark ground."""
    grey = np.zeros((height, width), np.uint8)
    grey[height // 4 : -height // 4, width // 2 - 1 : width // 2 + 1] = 255
    return grey


def two_strokes() -> np.ndarray[Any, Any]:
    """Grey levels of a dark and a light stroke on grey: a digit whatever `invert` says."""
    grey = np.full((16, 16), 128, np.uint8)
    grey[3:13, 4:6], grey[3:13, 10:12] = 0, 255
    return grey


def png_bodies() -> dict[str, bytes]:
    """Bodies of `image/png`."""
    drawn = stroke()
    whole = png(drawn)
    height, width = drawn.shape
    found = {
        "grey-8": whole,
        "empty": b"",
        "magic-alone": PNG_MAGIC,
        "a-gif": b"GIF89a" + bytes(20),
        "a-jpeg": jpeg(drawn),
        "blank": png(np.zeros((4, 4), np.uint8)),
        "white": png(np.full((4, 4), 255, np.uint8)),
        "dark-and-light": png(two_strokes()),
        "a-pixel": png(np.full((1, 1), 9, np.uint8)),
        "noise": png(np.random.default_rng(1).integers(0, 256, (13, 9), np.uint8)),
        "text-and-time-between": png(drawn, chunk(b"tEXt", b"a\0b"), chunk(b"tIME", bytes(7))),
        "text-bomb": png(drawn, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20)))),
        "bytes-behind-the-end": whole + b"more",
        "no-end": whole[:-12],
        "cut-in-the-pixels": whole[:60],
        "wrong-checksum": whole[:30] + b"\0" + whole[31:],
        "two-data-chunks": _split_data(whole),
        "data-that-is-no-zlib": PNG_MAGIC
        + whole[8:33]
        + chunk(b"IDAT", b"nothing")
        + chunk(b"IEND", b""),
        "too-few-rows": png_of(width, height + 9, 8, 0, zlib.decompress(_data(whole))),
        "too-many-rows": png_of(width, height - 3, 8, 0, zlib.decompress(_data(whole))),
        "a-wrong-filter": png_of(2, 2, 8, 0, b"\x09\0\0\0\0\0"),
        "no-header": PNG_MAGIC + chunk(b"IEND", b""),
        "two-headers": PNG_MAGIC + whole[8:33] + whole[8:],
        "a-palette-before-the-header": PNG_MAGIC + chunk(b"PLTE", bytes(3)) + whole[8:],
        "no-data": PNG_MAGIC + whole[8:33] + chunk(b"IEND", b""),
        "a-huge-width": png_of(1 << 30, 1, 8, 0, b""),
        "65537-pixels": png_of(65_537, 1, 8, 0, bytes(65_538)),
        "a-width-of-0": png_of(0, 1, 8, 0, b""),
        "a-long-thin-line": png(np.repeat(stroke(3, 12), 60, axis=1)),
        "animation": png(
            drawn, chunk(b"acTL", struct.pack(">II", 2, 0)), chunk(b"fcTL", bytes(26))
        ),
        "an-unknown-critical-chunk": png(drawn, chunk(b"ABCD", b"x")),
        "grey-4-bit": png_of(4, 2, 4, 0, b"\0\xf0\x0f\0\0\0"),
        "grey-1-bit": png_of(16, 4, 1, 0, b"\0\x18\x18" * 4),
        "grey-16-bit": png_of(3, 2, 16, 0, b"\0\0\0\xff\xff\0\0\0\0\0\xff\xff\0\0"),
        "grey-16-bit-transparent": png_of(
            3, 2, 16, 0, b"\0\0\0\xff\xff\0\0\0\0\0\xff\xff\0\0", chunk(b"tRNS", b"\0\0")
        ),
        "grey-transparent": png(drawn, chunk(b"tRNS", b"\0\0")),
        "colour": png_of(2, 2, 8, 2, b"\0\xff\0\0\0\xff\0\0\0\0\xff\0\0\0"),
        "colour-16-bit": png_of(2, 1, 16, 2, b"\0" + bytes(6) + b"\xff" * 6),
        "colour-transparent": png_of(
            2, 2, 8, 2, b"\0\xff\0\0\0\xff\0\0\0\0\xff\0\0\0", chunk(b"tRNS", bytes(6))
        ),
        "palette": png_of(
            4, 2, 8, 3, b"\0\0\1\1\0\0\0\1\1\0", chunk(b"PLTE", b"\0\0\0\xff\xff\xff")
        ),
        "palette-2-bit": png_of(4, 2, 2, 3, b"\0\x14\0\x14", chunk(b"PLTE", b"\0\0\0\xff\xff\xff")),
        "palette-transparent": png_of(
            *(4, 2, 8, 3, b"\0\0\1\1\0\0\0\1\1\0"),
            *(chunk(b"PLTE", b"\0\0\0\xff\xff\xff"), chunk(b"tRNS", b"\x80\0")),
        ),
        "palette-index-beyond": png_of(
            4, 1, 8, 3, b"\0\0\1\2\3", chunk(b"PLTE", b"\0\0\0\xff\xff\xff")
        ),
        "palette-missing": png_of(4, 1, 8, 3, b"\0\0\1\1\0"),
        "grey-alpha": png_of(3, 2, 8, 4, b"\0\0\xff\xff\xff\0\0\0\0\xff\xff\xff\0\0"),
        "grey-alpha-16-bit": png_of(2, 1, 16, 4, b"\0" + bytes(4) + b"\xff" * 4),
        "colour-alpha": png_of(2, 2, 8, 6, b"\0" + b"\0\0\0\xff" * 2 + b"\0" + bytes(8)),
        "colour-alpha-16-bit": png_of(2, 1, 16, 6, b"\0" + bytes(8) + b"\xff" * 8),
        "colour-type-1": png_of(2, 2, 8, 1, bytes(6)),
        "interlaced": png_of(3, 3, 8, 0, b"\0\xff\0\0\0\0\xff\0\0\0\xff\0", interlaced=1),
        "interlaced-in-a-wrong-way": png_of(3, 3, 8, 0, bytes(12), interlaced=2),
    }
    for number, name in enumerate(("sub", "up", "average", "paeth"), 1):
        rows = b"".join(bytes([number]) + row.tobytes() for row in drawn)
        found[f"filter-{name}"] = png_of(width, height, 8, 0, rows)
    return found


def _data(body: bytes) -> bytes:
    start = body.index(b"IDAT")
    return body[start + 4 : start + 4 + int.from_bytes(body[start - 4 : start], "big")]


def _split_data(body: bytes) -> bytes:
    data = _data(body)
    at = body.index(b"IDAT") - 4
    pieces = chunk(b"IDAT", data[:5]) + chunk(b"IDAT", b"") + chunk(b"IDAT", data[5:])
    return body[:at] + pieces + chunk(b"IEND", b"")


def jpeg(grey: np.ndarray[Any, Any], mode: str = "L", **options: Any) -> bytes:
    """What Pillow writes."""
    buffer = io.BytesIO()
    Image.fromarray(grey).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def exif(orientation: int, order: str = "<") -> bytes:
    """An APP1 segment that holds an orientation."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(order + "IHHHIHHI", 8, 1, 274, 3, 1, orientation, 0, 0)
    content = b"Exif\0\0" + magic + entry
    return b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content


def jpeg_bodies() -> dict[str, bytes]:
    """Bodies of `image/jpeg`."""
    drawn = stroke(16, 12)
    whole = jpeg(drawn, quality=50)
    scan = whole.index(b"\xff\xda")
    size = whole.index(b"\xff\xc0")
    progressive = jpeg(drawn, quality=50, progressive=True)
    first_scan = progressive.index(b"\xff\xda")
    found = {
        "empty": b"",
        "magic-alone": b"\xff\xd8\xff",
        "a-png": png(drawn),
        "grey": whole,
        "colour": jpeg(drawn, "RGB", quality=30),
        "cmyk": jpeg(drawn, "CMYK", quality=30),
        "progressive": progressive,
        "restart-markers": jpeg(drawn, quality=30, restart_marker_blocks=1),
        "dark-and-light": jpeg(two_strokes(), quality=30),
        "blank": jpeg(np.zeros((8, 8), np.uint8), quality=10),
        "no-end": whole[:-2],
        "cut-in-the-scan": whole[: scan + 20],
        "cut-in-a-header": whole[:30],
        "bytes-behind-the-end": whole + b"more",
        "no-scan": whole[:scan] + b"\xff\xd9",
        "no-tables": whole[:2] + whole[size:],
        "a-comment": whole[:2] + b"\xff\xfe\0\x04hi" + whole[2:],
        "a-segment-too-long": whole[:2] + b"\xff\xfe\xff\xffhi" + whole[2:],
        "a-segment-too-short": whole[:2] + b"\xff\xfe\0\1" + whole[2:],
        "fill-bytes": whole[:2] + b"\xff\xff\xff" + whole[2:],
        "a-thumbnail-within": whole[:2] + b"\xff\xe1\0\x0cExif\0\0MM\0*" + whole[2:],
        "4096-pixels-wide": whole[: size + 5] + b"\x10\0\x10\0" + whole[size + 9 :],
        "larger-than-its-data": whole[: size + 5] + b"\0\xff\0\xff" + whole[size + 9 :],
        "no-width": whole[: size + 5] + b"\0\x10\0\0" + whole[size + 9 :],
        "two-images": whole + whole,
        "many-scans": progressive[:first_scan]
        + progressive[first_scan : first_scan + 14] * 40
        + b"\xff\xd9",
        "arithmetic-coding": whole[:size] + b"\xff\xc9" + whole[size + 2 :],
        "12-bit": whole[: size + 4] + b"\x0c" + whole[size + 5 :],
        "lossless": whole[:size] + b"\xff\xc3" + whole[size + 2 :],
    }
    for orientation in range(10):
        order = "<>"[orientation % 2]
        found[f"exif-{orientation}"] = whole[:2] + exif(orientation, order) + whole[2:]
    broken = exif(6)
    found["exif-offset-beyond"] = whole[:2] + broken[:14] + b"\xff" * 4 + broken[18:] + whole[2:]
    many = broken[:18] + b"\xff\xff" + broken[20:]  # of which Pillow would warn
    found["exif-within-an-unknown-segment"] = whole[:2] + b"\xff\xf0\0\x26" + many + whole[2:]
    found["exif-65535-entries"] = whole[:2] + broken[:18] + b"\xff\xff" + broken[20:] + whole[2:]
    return found


def saved(grey: np.ndarray[Any, Any], kind: str, mode: str = "L", **options: Any) -> bytes:
    """A picture's file as Pillow writes it."""
    buffer = io.BytesIO()
    Image.fromarray(grey).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def clear(light: bool) -> Image.Image:
    """A stroke of light or dark ink on transparent pixels."""
    share = Image.fromarray(stroke())
    ink = Image.new("L", share.size, 255 if light else 0)
    return Image.merge("LA", [ink, share]).convert("RGBA")


def webp_of(*chunks: bytes) -> bytes:
    """A WebP of chunks, each its type and then its content."""
    body = b"WEBP"
    for one in chunks:
        size = len(one) - 4
        body += one[:4] + struct.pack("<I", size) + one[4:] + b"\0" * (size & 1)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_bodies() -> dict[str, bytes]:
    """Bodies of `image/webp`."""
    drawn = stroke(16, 12)
    lossy = saved(drawn, "WEBP", "RGB", quality=50)
    lossless = saved(drawn, "WEBP", "RGB", lossless=True)
    buffers = {light: io.BytesIO() for light in (False, True)}
    for light, buffer in buffers.items():
        clear(light).save(buffer, "WEBP", quality=50, lossless=light, exact=True)
    frame = lossless[12:]
    sides = b"\x1f\0\0\x1f\0\0"
    head = b"\1\0\0\2\0\0\x0b\0\0\x0f\0\0" + bytes(4)
    canvas = b"VP8X\2\0\0\0" + sides
    animation = webp_of(canvas, b"ANIM" + bytes(6), b"ANMF" + head + frame)
    return {
        "empty": b"",
        "magic-alone": b"RIFF\4\0\0\0WEBP",
        "a-png": png(drawn),
        "another-riff": b"RIFF\4\0\0\0WAVE",
        "lossy": lossy,
        "lossless": lossless,
        "dark-and-light": saved(two_strokes(), "WEBP", "RGB", lossless=True),
        "transparent": buffers[False].getvalue(),
        "light-on-transparent": buffers[True].getvalue(),
        "metadata": saved(drawn, "WEBP", "RGB", icc_profile=b"x" * 9, xmp=b"x", exif=exif(6)[4:]),
        "transparency-that-is-not-stated": buffers[False]
        .getvalue()
        .replace(b"VP8X\x0a\0\0\0\x10", b"VP8X\x0a\0\0\0\0"),
        "animation": animation,
        "a-frame-beyond-its-canvas": animation.replace(sides, b"\3\0\0\3\0\0"),
        "two-frames": webp_of(*(lossless[12:16] + lossless[20:],) * 2),
        "no-frame": webp_of(canvas),
        "no-width": lossy[:26] + bytes(2) + lossy[28:],
        "cut": lossy[:-9],
        "cut-in-a-header": lossy[:26],
        "too-large": lossless[:21] + b"\xff\xff\xff\x0f" + lossless[25:],
        "a-length-beyond": lossless[:16] + b"\xff\xff\xff\x7f" + lossless[20:],
        "bytes-behind-the-end": lossy + b"more",
    }


def gif_bodies() -> dict[str, bytes]:
    """Bodies of `image/gif`."""
    drawn = stroke(16, 12)
    grey = saved(drawn, "GIF")
    buffer = io.BytesIO()
    clear(light=True).save(buffer, "GIF")
    at = grey.index(b",")
    return {
        "empty": b"",
        "magic-alone": b"GIF89a",
        "a-png": png(drawn),
        "grey": grey,
        "version-87": b"GIF87a" + grey[6:],
        "palette": saved(drawn, "GIF", "P"),
        "interlaced": saved(drawn, "GIF", interlace=1),
        "dark-and-light": saved(two_strokes(), "GIF"),
        "light-on-transparent": buffer.getvalue(),
        "animation": saved(
            drawn, "GIF", save_all=True, append_images=[Image.fromarray(255 - drawn)]
        ),
        "comment": saved(drawn, "GIF", comment=b"x" * 300),
        "a-larger-canvas": grey[:6] + struct.pack("<HH", 40, 40) + grey[10:],
        "a-smaller-canvas": grey[:6] + struct.pack("<HH", 4, 4) + grey[10:],
        "too-large": grey[:6] + struct.pack("<HH", 9999, 9999) + grey[10:],
        "no-pixels": grey[: at + 5] + bytes(4) + grey[at + 9 :],
        "no-frame": grey[:at] + b";",
        "no-palette": grey[:10] + b"\0" + grey[11:13] + grey[at:],
        "cut": grey[:-9],
        "cut-in-a-header": grey[:11],
        "codes-of-15-bits": grey[: at + 10] + b"\x0f" + grey[at + 11 :],
        "bytes-behind-the-end": grey + b"more",
    }


def bmp_of(
    bits: int, compression: int, rows: bytes, size: tuple[int, int], palette: bytes = b""
) -> bytes:
    """A BMP with the header of 40 bytes."""
    offset = 54 + len(palette)
    head = struct.pack("<2sIII", b"BM", offset + len(rows), 0, offset)
    numbers = (40, *size, 1, bits, compression, len(rows), 0, 0, len(palette) // 4, 0)
    return head + struct.pack("<IiiHHIIiiII", *numbers) + palette + rows


def bmp_bodies() -> dict[str, bytes]:
    """Bodies of `image/bmp`."""
    drawn = stroke(16, 12)
    grey = saved(drawn, "BMP")
    two = bytes(4) + b"\xff\xff\xff\0"
    runs = b"\4\0\3\1\5\0\0\0" * 8 + b"\0\2\1\1\0\3\1\1\1\0\0\1"
    return {
        "empty": b"",
        "magic-alone": b"BM",
        "a-png": png(drawn),
        "grey": grey,
        "1-bit": saved(drawn, "BMP", "1"),
        "palette": saved(drawn, "BMP", "P"),
        "colour": saved(drawn, "BMP", "RGB"),
        "32-bit": saved(drawn, "BMP", "RGBA"),
        "dark-and-light": saved(two_strokes(), "BMP"),
        "from-above": grey[:22] + struct.pack("<i", -16) + grey[26:],
        "two-colours-of-8-bits": bmp_of(8, 0, drawn[:, :8].tobytes(), (8, 16), two),
        "runs": bmp_of(8, 1, runs, (12, 16), two),
        "runs-of-4-bits": bmp_of(4, 2, runs, (12, 16), two),
        "runs-without-an-end": bmp_of(8, 1, runs[:20], (12, 16), two),
        "16-bit": bmp_of(16, 0, np.repeat(drawn, 2, 1).tobytes(), (12, 16)),
        "bit-fields": bmp_of(16, 3, struct.pack("<3I", 0xF800, 0x7E0, 0x1F) + bytes(384), (12, 16)),
        "jpeg-within": bmp_of(24, 4, jpeg(drawn), (12, 16)),
        "old-header": grey[:14] + struct.pack("<IHHHH", 12, 12, 16, 1, 24) + bytes(600),
        "no-pixels": grey[:18] + bytes(8) + grey[26:],
        "too-large": grey[:18] + struct.pack("<ii", 1 << 20, 1 << 20) + grey[26:],
        "cut": grey[:-9],
        "cut-in-a-header": grey[:30],
    }


# multipart

PART_HEADERS = (
    *(b"Content-Type: image/png", b"content-type: application/x-npy", b"Content-Type: text/plain"),
    *(b"Content-Type: application/octet-stream", b"Content-Type: multipart/form-data", b"", b":"),
    *(b"Content-Type: image/jpeg; name=x", b"Content-Type: application/json", b"X: 1", b"X", b" x"),
    *(b'Content-Disposition: form-data; name="a"; filename="b"', b"Content-Type:", b"\xff: \xff"),
    *(b"Content-Transfer-Encoding: base64", b"Content-Type: IMAGE/PNG", b"A" * 300, b"--x--"),
)


def part(content: bytes, *headers: bytes, boundary: bytes = b"x") -> bytes:
    """A part of a multipart body, with the boundary before it."""
    disposition = b'Content-Disposition: form-data; name="image"; filename="a"'
    lines = b"\r\n".join((disposition, *headers))
    return b"--" + boundary + b"\r\n" + lines + b"\r\n\r\n" + content + b"\r\n"


def multipart_bodies() -> dict[str, bytes]:
    """The parameters of a content type, LF, and a body of `multipart/form-data`."""
    seven, end = image_bytes(), b"--x--\r\n"
    pixels = part(seven, b"Content-Type: application/octet-stream")
    picture = part(png(stroke()), b"Content-Type: image/png")
    first = b"; boundary=x\n"
    named = part(npy(np.zeros((2, 784), np.uint8)))
    small = [part(saved(stroke(16, 12), kind)) for kind in ("WEBP", "GIF", "BMP")]
    photograph = part(jpeg(stroke(16, 12), quality=20), b"Content-Type: image/jpeg; a=b")
    return {
        "empty": first,
        "no-boundary": b"\n" + pixels + end,
        "an-empty-boundary": b"; boundary=\n" + pixels + end,
        "boundary-not-latin-1": b"; boundary=\xff\n--\xff\r\n\r\n--\xff--",
        "boundary-percent-encoded": b"; boundary*=utf-8''%F0%9F%98%80\n" + pixels,
        "quoted-boundary": b'; boundary="a b"\n' + part(seven, boundary=b"a b") + b"--a b--\r\n",
        "a-very-long-boundary": b"; boundary=" + b"y" * 300 + b"\n" + pixels,
        "two-boundaries": b"; boundary=x; boundary=y\n" + pixels + end,
        "pixels": first + pixels + end,
        "a-part-of-each": first + picture + pixels + named + photograph + end,
        "no-content-type": first + part(png(stroke())) + end,
        "pictures-of-other-types": first + b"".join(small) + end,
        "an-empty-part": first + part(b"") + end,
        "text": first + part(b"7", b"Content-Type: text/plain") + end,
        "json": first + part(b"{}", b"Content-Type: application/json") + end,
        "too-many-parts": first + pixels.replace(seven, b"") * 9 + end,
        "too-many-images": first + part(bytes(784 * 5)) * 2 + end,
        "too-many-pixels": first + part(png(np.tile(stroke(200, 180), (1, 1)))) * 2 + end,
        "no-closing-boundary": first + pixels,
        "bytes-behind-the-end": first + pixels + end + b"more",
        "bytes-before": first + b"preamble\r\n" + pixels + end,
        "line-feeds-alone": first + (pixels + end).replace(b"\r\n", b"\n"),
        "no-header-at-all": first + b"--x\r\n\r\n" + seven + b"\r\n" + end,
        "two-content-types": first
        + part(seven, b"Content-Type: text/plain", b"Content-Type: application/octet-stream")
        + end,
        "a-header-without-colon": first + b"--x\r\nabc\r\n\r\n" + seven + b"\r\n" + end,
        "the-boundary-within": first + part(b"--xy" + bytes(780)) + end,
        "padding-behind-the-boundary": first + pixels.replace(b"--x\r", b"--x  \r") + end,
    }


_JPEG_FRAME = re.compile(rb"\xff[\xc0-\xc2].{3}(.{4})", re.DOTALL)


def sniffed(content: bytes) -> str:
    """What a part without a type of its own is taken for."""
    for start, kind in (
        (PNG_MAGIC, "image/png"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"\x93NUMPY", "application/x-npy"),
        (b"GIF87a", "image/gif"),
        (b"GIF89a", "image/gif"),
    ):
        if content.startswith(start):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    if content[:2] == b"BM" and content[15:18] == bytes(3) and content[14] in BMP_HEADERS:
        return "image/bmp"
    return "application/octet-stream"


BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)


def picture_pixels(content: bytes) -> int:
    """Width times height of a picture that could be read; 0 of anything else."""
    kind = sniffed(content)
    if kind == "image/png":
        width, height = struct.unpack(">II", content[16:24])
    elif kind == "image/jpeg" and (frame := _JPEG_FRAME.search(content)):
        height, width = struct.unpack(">HH", frame[1])
    elif kind in ("image/webp", "image/gif", "image/bmp"):
        with Image.open(io.BytesIO(content)) as picture:
            width, height = picture.size
    else:
        return 0
    return int(width * height)
