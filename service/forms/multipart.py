"""The parts of a multipart/form-data body."""

from __future__ import annotations

from dataclasses import dataclass

from service.errors import InvalidInput, invalid, shown
from service.forms.pixels import check_count, no_pixels
from service.pictures.headers import Between, recognise

_ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/x-ms-bmp": "image/bmp",
    "image/x-png": "image/png",
    "image/apng": "image/png",
    "application/csv": "text/csv",
    "application/vnd.ms-excel": "text/csv",
}
"""Other names of types, which clients send; Excel's is that of CSV in browsers on Windows."""

_MAX_TYPE_CHARACTERS = 1024
"""Limit of the Content-Type of a form: python-multipart takes 1.4 us a character."""

_SLICE_BYTES = 64 * 1024
"""Parsed in one piece: 3 ms of small parts."""


def media_type(content_type: str) -> str:
    """A Content-Type in lower case, without its parameters."""
    kind = content_type.partition(";")[0].strip().lower()
    return _ALIASES.get(kind, kind)


@dataclass(slots=True)
class Part:
    """A part of a form; `kind` is its content type, "" where it has none."""

    kind: str = ""
    disposition: bytes = b""
    content: bytes = b""


def no_file(part: Part, field: str) -> InvalidInput:
    """The error for a part without a type that is no file read here."""
    from python_multipart.multipart import parse_options_header

    options = parse_options_header(part.disposition)[1]
    if options.get(b"filename") == b"":
        return invalid(field, "an empty file", "a file; none was chosen in the form")
    text = recognise(part.content)[0]
    if b"filename" not in options and text.startswith("the text "):
        name = shown(options.get(b"name", b"").decode("utf-8", "replace"))
        expected = "files alone; with curl: -F image=@FILE, and leave out other fields"
        return invalid(field, f"the field {name} with {text}", expected)
    return no_pixels(part.content, field)


def parts_of(body: bytes, content_type: str, max_parts: int, between: Between) -> list[Part]:
    """The parts of a form, of which there may be `max_parts`. Raises: InvalidInput, TooLarge."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    parts: list[Part] = []
    contents: list[bytearray] = []
    name, value, ends = bytearray(), bytearray(), list[bool]()

    def part_begin() -> None:
        check_count(len(parts) + 1, "parts", max_parts)
        parts.append(Part())
        contents.append(bytearray())

    def header_end() -> None:
        header = name.lower()
        if header == b"content-type":
            parts[-1].kind = media_type(value.decode("latin-1"))
        elif header == b"content-disposition":
            parts[-1].disposition = bytes(value)
        name.clear()
        value.clear()

    if len(content_type) > _MAX_TYPE_CHARACTERS:
        got = f"{len(content_type)} characters"
        raise invalid("content-type", got, f"at most {_MAX_TYPE_CHARACTERS} of multipart/form-data")
    try:
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if not boundary:
            raise invalid("content-type", "no boundary", "multipart/form-data; boundary=...")
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": part_begin,
                "on_part_data": lambda data, start, end: contents[-1].extend(data[start:end]),
                "on_header_field": lambda data, start, end: name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: value.extend(data[start:end]),
                "on_header_end": header_end,
                "on_end": lambda: ends.append(True),
            },
        )
        # What precedes the first boundary is no part: RFC 2046, 5.1.1.
        has_preamble = not body.startswith(b"--%b" % boundary)
        begin = max(0, body.find(b"\r\n--%b" % boundary)) if has_preamble else 0
        for start in range(begin, len(body), _SLICE_BYTES):
            between(0)
            parser.write(body[start : start + _SLICE_BYTES])
    except (FormParserError, UnicodeEncodeError) as exc:
        raise InvalidInput(f"body: not multipart/form-data: {exc}", field="body") from exc
    if not ends or not parts:
        got = f"{len(parts)} parts" + ("" if ends else " and no closing boundary")
        expected = "at least one file and a boundary after the last; with curl: -F image=@FILE"
        raise invalid("body", got, expected)
    for part, content in zip(parts, contents, strict=True):
        part.content = bytes(content)
    return parts
