"""gzip and zlib's format, decompressed a part at a time."""

from __future__ import annotations

import zlib

from wire.errors import InvalidInput

_WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""The argument `wbits` of zlib for each coding."""

CODINGS = ("identity", *_WINDOW_BITS)
"""The first leaves bytes as they are."""


class Inflater:
    """Turns compressed bytes into those of a message or body.

    Args:
        coding: one of `CODINGS`, but not identity.
        part: what is compressed, in errors.
        header: the field that says so, in errors.
    """

    def __init__(self, coding: str, part: str, header: str) -> None:
        self._decompressor = zlib.decompressobj(_WINDOW_BITS[coding])
        self._part, self._says = part, f"compressed as {header} says"
        self._input = b""
        self._last = False
        self.busy = False
        """Whether `step` has to be called before more is taken."""
        self.complete = False

    @property
    def input_bytes(self) -> int:
        """How many bytes are taken and not decompressed."""
        return len(self._input)

    def take(self, piece: bytes, last: bool) -> None:
        """Take the next bytes; `last`: there are no more."""
        self._input, self._last, self.busy = self._input + piece, last, True

    def step(self, most_bytes: int) -> bytes:
        """Up to `most_bytes` more, decompressed. Raises: InvalidInput."""
        decompressor = self._decompressor
        try:
            found = decompressor.decompress(self._input, most_bytes)
        except zlib.error:
            raise self._invalid(f"not {self._says}") from None
        if decompressor.unused_data:
            raise self._invalid(f"{self._says}, but bytes follow its end")
        self._input = b"" if decompressor.eof else decompressor.unconsumed_tail
        may_have_more = len(found) == most_bytes and not decompressor.eof
        self.busy = bool(self._input) or may_have_more
        if self._last and not self.busy:
            if not decompressor.eof:
                raise self._invalid(f"{self._says}, but it ends too early")
            self.complete = True
        return found

    def _invalid(self, what: str) -> InvalidInput:
        return InvalidInput(f"{self._part}: {what}", field=self._part)
