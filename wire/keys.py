"""API keys: `Authorization: Bearer KEY`, over HTTP and as metadata of a gRPC call.

Keys are kept as digests, which are compared in constant time. Nothing here is logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from wire.errors import Forbidden, Refusal, Unauthorized

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

    def check(self, authorization: str | None, *, admin: bool = False) -> Refusal | None:
        """The error to answer with, None if the key is accepted.

        `authorization` is None if the header is missing. `admin`: only administrators may do what
        the request asks for.
        """
        if admin and not self._admin:
            return Forbidden(self._without_admin, field="authorization")
        if not admin and not self._keys:
            return None
        expected = "of the administrator's keys" if admin else "of the service's keys"
        if authorization is None:
            return _unauthorized("none", expected)
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return _unauthorized("another scheme", expected)
        given = _digest(key.strip())
        # All of them, so that the time does not tell which one it resembles.
        is_admin = sum(hmac.compare_digest(given, digest) for digest in self._admin)
        is_known = sum(hmac.compare_digest(given, digest) for digest in self._keys)
        if is_admin or (is_known and not admin):
            return None
        if is_known:
            return Forbidden(f"authorization: expected one {expected}", field="authorization")
        return _unauthorized("an unknown key", expected)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(found: str, expected: str) -> Unauthorized:
    return Unauthorized(
        f"authorization: got {found}, expected 'Bearer KEY' with one {expected}",
        field="authorization",
    )
