"""Base64 as clients write it: one function for every form that takes bytes within JSON."""

from __future__ import annotations

import binascii
import re

ALPHABET = "base64, whose alphabet is A-Z, a-z, 0-9, + and / (or - and _), padded with ="

_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.ASCII | re.IGNORECASE)
_URL_SAFE = str.maketrans("-_", "+/")


def bytes_of(text: object) -> bytes:
    """The bytes that `text` encodes.

    Taken are the usual alphabet and that of URLs (RFC 4648, 4 and 5), white space anywhere (RFC
    2045), missing padding, and a data URL in base64 (RFC 2397), whose media type is not read. The
    memory taken is linear in the text.

    Raises: ValueError (other characters, a length of 4n + 1, no string).
    """
    if type(text) is not str:
        raise ValueError("no string")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        pass
    if url := _DATA_URL.match(text):
        text = text[url.end() :]
    text = "".join(text.split()).translate(_URL_SAFE).rstrip("=")
    return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
