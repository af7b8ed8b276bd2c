"""The certificate of a server. `ServedCertificate.renew` reads its files again."""

from __future__ import annotations

import math
import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from wire.errors import InvalidCertificate


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: the certificate with its chain, its key, and whose clients' certificates count.

    With `client_ca` every client has to present a certificate that it has signed (mutual TLS).
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """A TLS context for HTTP, TLS 1.2 or later.

        Raises:
            InvalidCertificate: a file cannot be read, or they do not belong together.
        """
        key, certificate, _ = self.contents()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2", "http/1.1"])
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as exc:
            raise InvalidCertificate(
                f"certificate {self.certificate}, key {self.key}: "
                f"{_mistake(certificate, key) or _reason(exc)}"
            ) from exc
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as exc:
                raise InvalidCertificate(
                    f"client CA {self.client_ca}: {_reason(exc)}; expected PEM, from "
                    "-----BEGIN CERTIFICATE----- on"
                ) from exc
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def contents(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificate and the clients' authority, as bytes.

        Raises:
            InvalidCertificate: a file cannot be read.
        """
        return (
            _read("key", self.key),
            _read("certificate", self.certificate),
            None if self.client_ca is None else _read("client CA", self.client_ca),
        )


class ServedCertificate:
    """The certificate in `files` when they were last read.

    `ends_s` is when it expires, or one of its chain does, as `time.time()`.

    Raises:
        InvalidCertificate: they must not be served.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self.renew()

    def renew(self) -> None:
        """Read the files again, for clients that connect from now on.

        Raises:
            InvalidCertificate: they must not be served; the earlier ones stay.
        """
        contents, context = self._files.contents(), self._files.context()
        if self._files.contents() != contents:
            raise InvalidCertificate("the files of the certificate changed while they were read")
        self.contents, self.context = contents, context
        self.ends_s = _ends_s(contents[1].decode("latin-1"))


_PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


def _ends_s(pem: str) -> float:
    """When the first of the certificates in `pem` to expire does, as `time.time()`, or infinity.

    The ssl module shows that of a peer's certificate alone. What comes before it is fixed (RFC
    5280, 4.1): perhaps a version, then number, algorithm, issuer.
    """
    ends_s = [math.inf]
    for block in _PEM.findall(pem):
        try:
            ((_, certificate),) = _der(ssl.PEM_cert_to_DER_cert(block))
            fields = _der(_der(certificate)[0][1])
            validity = fields[4 if fields[0][0] == _VERSION else 3][1]
            _, (tag, text) = _der(validity)
            form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
            end = datetime.strptime(text.decode(), form).replace(tzinfo=UTC)
        except (ValueError, IndexError):  # OpenSSL takes it, and says whether it may be served
            continue
        ends_s.append(end.timestamp())
    return min(ends_s)


def _der(data: bytes) -> list[tuple[int, bytes]]:
    """Tags and contents of the DER elements in `data`."""
    elements = []
    while data:
        tag, length, start = data[0], data[1], 2
        if length > 0x7F:
            start += length & 0x7F
            length = int.from_bytes(data[2:start])
        elements.append((tag, data[start : start + length]))
        data = data[start + length :]
    return elements


def _read(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidCertificate(f"{what} {path}: {_reason(exc)}") from exc


_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"


def _mistake(certificate: bytes, key: bytes) -> str:
    """Why the two could not be loaded; "" if that is not known."""
    if _CERTIFICATE not in certificate and _CERTIFICATE in key and _KEY in certificate:
        return "the two are swapped"
    if _CERTIFICATE not in certificate:
        advice = ": openssl x509 -inform DER -in FILE -out NEW" if certificate[:1] == b"0" else ""
        return f"the certificate is not in PEM, which begins {_CERTIFICATE.decode()}{advice}"
    if _KEY not in key:
        advice = ": openssl pkey -inform DER -in FILE -out NEW" if key[:1] == b"0" else ""
        return f"the key is not in PEM, which begins -----BEGIN PRIVATE KEY-----{advice}"
    if b"ENCRYPTED" in key:
        return "the key has a password; write one without it: openssl pkey -in FILE -out NEW"
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key belongs to another certificate"
        return (error.reason or "its PEM is damaged").lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
