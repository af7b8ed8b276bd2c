"""Messages between the service and its decoding processes: a JSON header, then bytes.

    head     lengths of the header and of the content, 4 + 8 bytes in network order
    header   a JSON object
    content  a body or message; in a reply the pixels of its images

A decoding process sends a head of zeros when it has started; sent to it, a head of zeros asks it to
end its work early. Each other frame has one reply.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import asdict
from importlib import import_module
from typing import Any, cast

import orjson

from service.forms.form import Form

HEAD = struct.Struct("!IQ")
READY = CANCEL = HEAD.pack(0, 0)

MAX_HEADER_BYTES = 1 << 20
"""Limit of a reply's header: an id or an unknown name in a gRPC message may be 64 KiB, six times
that in JSON."""


def form_header(form: Form) -> dict[str, Any]:
    """The header of a frame that has a body of `form` decoded."""
    kind = type(form)
    return {"form": [kind.__module__, kind.__qualname__], "fields": asdict(cast("Any", form))}


def form_of(header: dict[str, Any]) -> Form:
    """The form that such a header names."""
    module, name = header["form"]
    form: Form = getattr(import_module(module), name)(**header["fields"])
    return form


def frame(header: dict[str, Any], content_bytes: int) -> bytes:
    """A frame up to its content."""
    text = orjson.dumps(header)
    return HEAD.pack(len(text), content_bytes) + text


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, bytes] | None:
    """The next frame; its header is None if it is `CANCEL`. None at the end of the connection."""
    head = channel.recv(HEAD.size, socket.MSG_WAITALL)
    if len(head) < HEAD.size:
        return None
    header_bytes, content_bytes = HEAD.unpack(head)
    if not header_bytes:
        return None, b""
    header = channel.recv(header_bytes, socket.MSG_WAITALL)
    content = channel.recv(content_bytes, socket.MSG_WAITALL) if content_bytes else b""
    if len(header) + len(content) < header_bytes + content_bytes:
        return None
    return orjson.loads(header), content
