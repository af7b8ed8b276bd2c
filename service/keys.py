"""API keys: `Authorization: Bearer KEY`, over HTTP and as metadata of a gRPC call.

Keys are kept as digests, which are compared in constant time. Nothing here is logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from service.errors import Unauthorized

MIN_CHARACTERS = 16
"""Of a key: 96 bits in base64. One that can be guessed protects nothing."""


class Keys:
    """The keys that a request may come with. Without any, every request may come."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(map(_digest, keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> Unauthorized | None:
        """What is wrong with a request's `Authorization`, None where it has none; else None."""
        if not self._digests:
            return None
        if authorization is None:
            return _unauthorized("none")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return _unauthorized("another scheme")
        given = _digest(key.strip())
        # All of them, so that the time does not tell which one it resembles.
        if sum(hmac.compare_digest(given, digest) for digest in self._digests):
            return None
        return _unauthorized("an unknown key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(found: str) -> Unauthorized:
    return Unauthorized(
        f"authorization: got {found}, expected Bearer and one of the service's keys",
        field="authorization",
    )
