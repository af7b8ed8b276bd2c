"""Header blocks of an HTTP/2 connection (RFC 7541), decoded by the package hpack.

The client is asked for a table of size 0, so that a block means the same on every connection: equal
blocks of requests are decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpack import Decoder, HPACKError, OversizedHeaderListError

from wire.http2_fields import VARYING, Fields, cut

if TYPE_CHECKING:
    from wire.http2_head import Http2Head

MAX_HEADER_BYTES = 16 * 1024
"""A header list of more, counted as RFC 9113, 6.5.2 does, is refused."""

MOST_BLOCK_BYTES = 2 * MAX_HEADER_BYTES
"""A header block or list of more ends the connection: it is not decoded to its end."""

_SMALL_LIST_BYTES = 4096
_EXPANSION = 2
"""A header list of more than `_SMALL_LIST_BYTES` and `_EXPANSION` times its block ends the
connection, too: 900 fields of 2 bytes took 2.8 ms. 100 literal fields are less, as Huffman's code
makes 8 bytes of 5, and so is all that a table of 4,096 bytes can hold."""

_KNOWN_BLOCKS = 512
_KNOWN_BLOCK_BYTES = 2048
_KNOWN_FIELDS = 48

_SOME_NAME = b"\1"
"""Begins a literal field with a name of the static table."""

_THREE_UPDATES = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")
"""A block may begin with two updates of the table's size: RFC 7541, 4.2."""


class HeaderBlocks:
    """Decodes the header blocks of one connection, in the order in which they come.

    Args:
        read: checks the fields of a request, and returns its head. Raises: Malformed.
        decoded: called with the fields of each block that is decoded, and the bytes of the block.
        known: heads by header block, shared by connections whose `read` is alike. Where a block
            has `VARYING` fields, by its pieces between their values: what `Http2Head.for_values`
            returned, the names, the latest values and their head.
    """

    def __init__(
        self,
        read: Callable[[Fields], Http2Head],
        decoded: Callable[[Fields, int], None],
        known: dict[Any, Any],
    ) -> None:
        self._read, self._decoded, self.known = read, decoded, known
        self._decoder = Decoder(MOST_BLOCK_BYTES)
        self.table_is_empty = False
        """Whether blocks may be looked for in `known`."""

    def empty_table(self) -> None:
        """The client has acknowledged that the size of the table is 0.

        It should announce the empty table, too. nginx's module for gRPC does not (seen with 1.22),
        and never refers to an entry; where one does, decoding fails.
        """
        self._decoder.max_allowed_table_size = self._decoder.header_table_size = 0
        self.table_is_empty = True

    def decode(self, block: bytes) -> Fields:
        """The fields of a block.

        Raises:
            HPACKError: it cannot be decoded; OversizedHeaderListError: its list is too large.
        """
        most = min(MOST_BLOCK_BYTES, _SMALL_LIST_BYTES + _EXPANSION * len(block))
        self._decoder.max_header_list_size = most
        if _THREE_UPDATES.match(block):
            raise HPACKError
        try:
            fields: Fields = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            message = f"headers of more than {most} bytes in a block of {len(block)}"
            raise OversizedHeaderListError(message) from None
        except IndexError as exc:
            raise HPACKError from exc
        self.table_is_empty = not self._decoder.header_table_size
        self._decoded(fields, len(block))
        return fields

    def new_head(self, block: bytes) -> Http2Head:
        """The head of a request whose block is not in `known`, or may not be looked for there.

        Raises: Malformed; HPACKError, as `decode`.
        """
        known = self.known
        values: list[bytes] = []
        if self.table_is_empty:  # so that a literal changes nothing, however it is indexed
            pieces, values = cut(block)
            if values and (maker := known.get(pieces)) is not None:
                return self._with_values(maker, values)
        fields = self.decode(block)
        head = self._read(fields)
        small = len(block) <= _KNOWN_BLOCK_BYTES and len(fields) <= _KNOWN_FIELDS
        if self.table_is_empty and small:
            names = [name for name, _ in fields if name in VARYING]
            alone = values and names == self._names(pieces)
            make = head.for_values(fields) if alone else None
            if make or not head.once:
                if len(known) >= _KNOWN_BLOCKS:
                    del known[next(iter(known))]
                known[pieces if make else block] = [make, names, values, head] if make else head
        return head

    def _with_values(self, maker: list[Any], values: list[bytes]) -> Http2Head:
        """The head that `maker` makes for `values`, the latest one if these are equal."""
        make, names, last_values, _ = maker
        if values != last_values:
            # A first byte of 128 and more begins a value in Huffman's code.
            found = [
                one[1:] if one[0] < 128 else self.decode(_SOME_NAME + one)[0][1] for one in values
            ]
            maker[3] = make(tuple(zip(names, found, strict=True)))
            maker[2] = values
        head: Http2Head = maker[3]
        return head

    def _names(self, pieces: Sequence[bytes]) -> list[bytes]:
        """Names of the fields whose values were cut out of a block between `pieces`.

        [] if a cut is in the middle of another field. The block needs no table.
        """
        try:
            blocks = [self._decoder.decode(one + b"\0", raw=True) for one in pieces[:-1]]
        except (HPACKError, IndexError):
            return []
        return [list(fields)[-1][0] for fields in blocks]
