from __future__ import annotations

import base64

import pytest

from service.forms.base64_text import bytes_of

CONTENT = bytes(range(256)) + b"\xff\xfe\xfb"  # 259 bytes: padded, and with + and / in it
TEXT = base64.b64encode(CONTENT).decode()


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.rstrip("="),
        base64.encodebytes(CONTENT).decode(),
        TEXT.replace("A", " \tA\r\n"),
        base64.urlsafe_b64encode(CONTENT).decode(),
        base64.urlsafe_b64encode(CONTENT).decode().rstrip("="),
        f"data:image/png;base64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:image/png;name=a.png;BASE64,{TEXT}",
    ],
)
def test_base64_is_read_as_clients_write_it(text):
    assert bytes_of(text) == CONTENT


@pytest.mark.parametrize(
    "text",
    [7, None, "A", TEXT[:5], "?", "\u00e9===", "QQ==QQ==", "Q=Q=", f"data:image/png,{TEXT}"],
)
def test_what_is_not_base64_is_refused(text):
    with pytest.raises(ValueError, match=r"base64|padding|string"):
        bytes_of(text)
