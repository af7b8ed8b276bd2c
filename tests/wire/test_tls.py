from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from wire import tls
from wire.errors import InvalidCertificate
from wire.tls import CertificateFiles, ServedCertificate


@pytest.fixture
def contents():
    """A certificate and its key, in PEM and in other forms."""
    leaf = trustme.CA().issue_cert("localhost")
    certificate, key = leaf.cert_chain_pems[0].bytes(), leaf.private_key_pem.bytes()
    private = serialization.load_pem_private_key(key, None)
    encrypted = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    return {
        "certificate": certificate,
        "key": key,
        "other key": trustme.CA().issue_cert("localhost").private_key_pem.bytes(),
        "encrypted key": encrypted,
        "DER": b"0\x82\x03\x01",
        "text": b"hello\n",
        "damaged": certificate.replace(b"\n", b"\n#", 3),
        "nothing": b"",
    }


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("key", "certificate", "the two are swapped"),
        ("certificate", "other key", "the key belongs to another certificate"),
        ("certificate", "encrypted key", "the key has a password; write one without it: openssl p"),
        (
            "DER",
            "key",
            "the certificate is not in PEM, which begins -----BEGIN CERTIFICATE-----: o",
        ),
        ("text", "key", "the certificate is not in PEM, which begins -----BEGIN CERTIFICATE-----"),
        ("nothing", "key", "the certificate is not in PEM"),
        (
            "certificate",
            "DER",
            "the key is not in PEM, which begins -----BEGIN PRIVATE KEY-----: o",
        ),
        ("certificate", "certificate", "the key is not in PEM"),
        ("damaged", "key", ""),
    ],
)
def test_what_is_wrong_with_a_certificate_and_its_key_is_named(
    contents, tmp_path, certificate, key, message
):
    files = CertificateFiles(tmp_path / "a.pem", tmp_path / "a.key")
    files.certificate.write_bytes(contents[certificate])
    files.key.write_bytes(contents[key])
    with pytest.raises(InvalidCertificate) as caught:
        files.context()
    expected = f"certificate {files.certificate}, key {files.key}: {message}"
    assert str(caught.value).startswith(expected)


def test_an_authority_that_is_no_certificate_is_named(contents, tmp_path):
    files = CertificateFiles(tmp_path / "a.pem", tmp_path / "a.key", tmp_path / "ca.pem")
    for path, content in ((files.certificate, "certificate"), (files.key, "key")):
        path.write_bytes(contents[content])
    files.client_ca.write_bytes(contents["text"])
    with pytest.raises(InvalidCertificate, match=r"client CA .*ca\.pem: .*; expected PEM"):
        files.context()


@pytest.mark.parametrize("year", [2035, 2055])  # in X.509 two digits of the year, or four
def test_the_end_of_a_certificate_is_that_of_the_first_in_its_chain_to_end(tmp_path, year):
    first, last = datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2061, 1, 1, tzinfo=UTC)
    leaf, other = (trustme.CA().issue_cert("localhost", not_after=end) for end in (last, first))
    files = CertificateFiles(tmp_path / "a.pem", tmp_path / "a.key")
    files.certificate.write_bytes(b"".join(c.cert_chain_pems[0].bytes() for c in (leaf, other)))
    files.key.write_bytes(leaf.private_key_pem.bytes())
    assert ServedCertificate(files).ends_s == first.timestamp()


@pytest.mark.parametrize("content", ["AAAA", "MIIB", "MAMwAQA=", "!"])
def test_a_certificate_whose_end_cannot_be_read_is_served_all_the_same(content):
    pem = f"-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n"
    assert tls._ends_s(pem) == math.inf
