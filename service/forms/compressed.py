"""Bodies with Content-Encoding: decompressed, then read by their form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from service.errors import InvalidInput, TooLarge
from service.forms.form import Answered, Asked, Body, Content, Decoded, Form
from service.pictures.headers import Between
from wire import errors as wire
from wire.inflate import Inflater

_NOW_BYTES, _NOW_INFLATED_BYTES = 16 * 1024, 64 * 1024
"""The largest body that is decompressed on the event loop, and what it may become: 0.2 ms at most
(one Xeon core, 2026-11-27)."""

_STEP_BYTES = 256 * 1024
"""Decompressed between two looks at whether the work is to end."""


@dataclass(frozen=True, slots=True)
class CompressedForm:
    """The form of a body that `coding` compresses, which is at most `max_bytes` decompressed."""

    form: Form
    coding: str
    max_bytes: int

    part: ClassVar[str] = "body"
    names_model: ClassVar[bool] = False

    @property
    def in_place(self) -> bool:
        """False: compressed bytes are no pixels."""
        return False

    @property
    def max_images(self) -> int:
        """The most that one request may have."""
        return self.form.max_images

    def decode_now(self, body: Body) -> Decoded | None:
        """Decode what decompresses to little, if its form decodes that at once."""
        if len(body) > _NOW_BYTES:
            return None
        most = min(_NOW_INFLATED_BYTES, self.max_bytes)
        content = _joined(self._inflated(body), most)
        return None if content is None else self.form.decode_now(content)

    def decode(self, body: bytes, between: Between) -> Decoded:
        """Decode any body. Decompressed bytes count as pixels for whether the work is large."""
        content = _joined(self._inflated(body, between), self.max_bytes)
        if content is None:
            message = f"body: decompresses to more than {self.max_bytes} bytes; send fewer images"
            raise TooLarge(f"{message} at a time", field="body")
        return self.form.decode(content, between)

    def write(self, asked: Asked, answered: Answered) -> Content:
        """The answer of its form."""
        return self.form.write(asked, answered)

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
