"""Bodies and answers with Content-Encoding, around the form of what is compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from service.errors import InvalidInput, TooLarge
from service.forms.form import JSON, Answered, Asked, Body, Content, Decoded, Form
from service.pictures.headers import Between
from wire import errors as wire
from wire.inflate import Inflater

_NOW_BYTES, _NOW_INFLATED_BYTES = 16 * 1024, 64 * 1024
"""The largest body that is decompressed on the event loop, and what it may become: 0.2 ms at most
(one Xeon core, 2026-11-27)."""

_STEP_BYTES = 256 * 1024
"""Decompressed between two looks at whether the work is to end."""

_LEAST_BYTES = 8 * 1024
"""Shorter answers are not compressed."""

_LEVEL = 1
"""188 kB of JSON, 1,000 images, become 69 in 1.7 ms, by level 6 60 in 7.4 (one Xeon core,
2026-11-27)."""

_LINES = b"content-encoding: gzip\r\nvary: accept-encoding\r\n"


@dataclass(frozen=True, slots=True)
class CompressedForm:
    """The form of a body that `coding` compresses, which is at most `max_bytes` decompressed.

    `packs`: whether long answers in JSON are compressed.
    """

    form: Form
    coding: str
    max_bytes: int
    packs: bool = False

    part: ClassVar[str] = "body"
    names_model: ClassVar[bool] = False

    @property
    def in_place(self) -> bool:
        """Compressed bytes are no pixels."""
        return self.coding == "identity" and self.form.in_place

    @property
    def max_images(self) -> int:
        """The most that one request may have."""
        return self.form.max_images

    def decode_now(self, body: Body) -> Decoded | None:
        """Decode what decompresses to little, if its form decodes that at once."""
        if self.coding == "identity":
            return self.form.decode_now(body)
        if len(body) > _NOW_BYTES:
            return None
        most = min(_NOW_INFLATED_BYTES, self.max_bytes)
        content = _joined(self._inflated(body), most)
        return None if content is None else self.form.decode_now(content)

    def decode(self, body: bytes, between: Between) -> Decoded:
        """Decode any body. Decompressed bytes count as pixels for whether the work is large."""
        if self.coding == "identity":
            return self.form.decode(body, between)
        content = _joined(self._inflated(body, between), self.max_bytes)
        if content is None:
            message = f"body: decompresses to more than {self.max_bytes} bytes; send fewer images"
            raise TooLarge(f"{message} at a time", field="body")
        return self.form.decode(content, between)

    def write(self, asked: Asked, answered: Answered) -> Content:
        """The answer of its form, compressed where that was asked for."""
        content = self.form.write(asked, answered)
        steps = content.steps
        is_short = steps is None and len(content.body) < _LEAST_BYTES
        if self.packs and content.media_type == JSON and not is_short:
            content.lines += _LINES
            if steps is None:
                content.body = b"".join(_packed(iter((content.body,))))
            else:
                content.steps = _packed(steps)
        return content

    def _inflated(self, body: Body, between: Between = lambda _: None) -> Iterator[bytes]:
        """The decompressed bytes in pieces. Raises: InvalidInput."""
        inflater = Inflater(self.coding, self.part, "content-encoding")
        try:
            for start in range(0, len(body) or 1, _STEP_BYTES):
                end = start + _STEP_BYTES
                inflater.take(bytes(body[start:end]), last=end >= len(body))
                while inflater.busy:
                    piece = inflater.step(_STEP_BYTES)
                    between(len(piece))
                    yield piece
        except wire.InvalidInput as exc:
            raise InvalidInput(exc.message, field=exc.field) from None


def _joined(pieces: Iterator[bytes], most_bytes: int) -> bytes | None:
    """All pieces; None if they are longer than `most_bytes`."""
    found, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > most_bytes:
            return None
        found.append(piece)
    return b"".join(found)


def _packed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """`pieces` as one stream of gzip."""
    compressor = zlib.compressobj(_LEVEL, wbits=31)
    for piece in pieces:
        if found := compressor.compress(piece):
            yield found
    yield compressor.flush()
