"""API keys: `Authorization: Bearer KEY` or `X-API-Key: KEY`, over HTTP and as metadata of gRPC.

Keys are kept as digests, which are compared in constant time. Nothing here is logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from wire.errors import Forbidden, Refusal, Unauthorized

HEADERS = ("authorization", "x-api-key")
"""The headers that may hold a key."""

MIN_CHARACTERS = 16
"""Least length of a key: 96 random bits in base64."""


class Keys:
    """The keys that a request may come with. Without `keys`, every request may come.

    Those of `admin` may do whatever `keys` may, and alone what administrators may. Without any,
    nobody may, and gets the message `without_admin`.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        admin: Iterable[str] = (),
        without_admin: str = "only administrators may do this, and none has a key",
    ) -> None:
        self._without_admin = without_admin
        self._keys = tuple(map(_digest, keys))
        self._admin = tuple(map(_digest, admin))

    def __bool__(self) -> bool:
        return bool(self._keys)

    def check(self, headers: Mapping[str, str], *, admin: bool = False) -> Refusal | None:
        """The error to answer with, None if the key in `headers` is accepted.

        Names of `headers` are in lower case. A request with both headers must have the same key in
        both. `admin`: only administrators may do what the request asks for.
        """
        if admin and not self._admin:
            return Forbidden(self._without_admin, field="authorization")
        if not admin and not self._keys:
            return None
        expected = "of the administrator's keys" if admin else "of the service's keys"
        authorization, other = map(headers.get, HEADERS)
        field, key = HEADERS[authorization is None and other is not None], other
        if authorization is not None:
            scheme, _, key = authorization.partition(" ")
            if scheme.lower() != "bearer":
                return _unauthorized(field, "another scheme", expected)
            if other is not None and other.strip() != key.strip():
                return _unauthorized(field, "another key than x-api-key", expected)
        if key is None:
            return _unauthorized(field, "none", expected)
        given = _digest(key.strip())
        # All of them, so that the time does not tell which one it resembles.
        is_admin = sum(hmac.compare_digest(given, digest) for digest in self._admin)
        is_known = sum(hmac.compare_digest(given, digest) for digest in self._keys)
        if is_admin or (is_known and not admin):
            return None
        if is_known:
            return Forbidden(f"{field}: expected one {expected}", field=field)
        return _unauthorized(field, "an unknown key", expected)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(field: str, found: str, expected: str) -> Unauthorized:
    headers = "'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
    return Unauthorized(
        f"{field}: got {found}, expected {headers} with one {expected}", field=field
    )
