"""The certificate of the service, for HTTP and gRPC, read again when the weights are."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from service.errors import InvalidCertificate


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: the certificate with its chain, its key, and whose clients' certificates count.

    With `client_ca` every client has to present a certificate that it has signed (mutual TLS).
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For HTTP: TLS 1.2 or later.

        Raises:
            InvalidCertificate: a file cannot be read, or they do not belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.load(context)
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as exc:
                raise InvalidCertificate(f"--tls-client-ca: {_fault(exc, self.client_ca)}") from exc
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Let `context` present what the files hold now to clients that connect from now on.

        Raises:
            InvalidCertificate: as `context`; the earlier certificate stays.
        """
        for flag, path in (("--tls-certificate", self.certificate), ("--tls-key", self.key)):
            try:
                path.read_bytes()
            except OSError as exc:
                raise InvalidCertificate(f"{flag}: {_fault(exc, path)}") from exc
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for one in (trial, context):
            try:
                # Without a password, OpenSSL would ask for one on the terminal.
                one.load_cert_chain(self.certificate, self.key, password="")
            except (OSError, ValueError) as exc:
                raise InvalidCertificate(
                    f"--tls-certificate is {self.certificate}, --tls-key {self.key}: they are not "
                    f"a certificate and its key without a password, in PEM ({_reason(exc)})"
                ) from exc

    def contents(self) -> tuple[bytes, bytes, bytes | None]:
        """For gRPC: key, certificate, and the clients' authority.

        Raises:
            InvalidCertificate: a file cannot be read.
        """
        try:
            authority = None if self.client_ca is None else self.client_ca.read_bytes()
            return self.key.read_bytes(), self.certificate.read_bytes(), authority
        except OSError as exc:
            raise InvalidCertificate(_fault(exc, Path(exc.filename or ""))) from exc


def _fault(error: OSError, path: Path) -> str:
    return f"{path}: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
