"""A JSON body -> uint8 (n, 28, 28), and the sentences in which values are doubted.

The quick way where a body is right, a slow one to name what is wrong. It refuses to repair: a float
is not a pixel, even 1.0, for whoever sends floats usually means 0 to 1.
"""

from __future__ import annotations

import binascii
from typing import NoReturn

import numpy as np
import orjson

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import InvalidInput, TooLarge

_SHAPES = "28 rows of 28, 784 integers 0 to 255, or a base64 string of 784 bytes"
_SHOWN = 40
_TRUSTED_BYTES = 64 * 1024  # whatever it holds, it costs little


def json_images(body: bytes, max_images: int) -> Images:
    """One or many images under `images`, each as `_SHAPES` has it, at most `max_images` of them.

    Raises: InvalidInput, TooLarge.
    """
    if len(body) > _TRUSTED_BYTES:
        _check_containers(body, max_images)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InvalidInput(f"body: not JSON: {exc}", field="body") from exc
    if type(document) is not dict:
        refuse("body", shown(document), 'an object, {"images": [...]}')
    if len(document) != 1 or "images" not in document:
        for key in document:
            if key != "images":
                refuse(key[:_SHOWN], "an unknown key", 'only "images"')
        refuse("images", "nothing", f"one image or a list of them, each {_SHAPES}")
    images = document["images"]
    # bytes([True]) is b"\x01": where these words occur at all, each pixel is looked at.
    doubt = b"true" in body or b"false" in body
    if type(images) is not list or _is_one_image(images):
        content = _pixels(images, "images", doubt)
        return np.frombuffer(content, np.uint8).reshape(1, HEIGHT, WIDTH)
    check_count(len(images), "images", max_images)
    content = b"".join([_pixels(image, f"images[{i}]", doubt) for i, image in enumerate(images)])
    return np.frombuffer(content, np.uint8).reshape(len(images), HEIGHT, WIDTH)


def _check_containers(body: bytes, max_images: int) -> None:
    """Count what a body would be built into: orjson builds it all before any can be doubted.

    It holds the interpreter lock meanwhile; 32 MB of empty lists took 1 GB and 2 s.
    """
    if body.count(b"{") > 1:
        refuse("body", "an object within an object", 'one object, {"images": [...]}')
    if body.count(b"[") > 1 + (1 + HEIGHT) * max_images:
        message = f"body: got more lists than {max_images} images have, the most in a request"
        raise TooLarge(message, field="body")


def _is_one_image(images: list[object]) -> bool:
    """Whether `images` is itself an image: 784 numbers, or rows of numbers."""
    first = images[0] if images else None
    if type(first) is not list:
        return isinstance(first, (int, float))
    if first and type(first[0]) is list:
        return False
    return len(first) == WIDTH or (len(images) == HEIGHT and len(first) != PIXELS)


def _pixels(image: object, field: str, doubt: bool) -> bytes:
    """784 bytes. Quick where the image is right; where it is not, `_inspected` says why."""
    if type(image) is list and not doubt:
        try:
            if len(image) == PIXELS:
                return bytes(image)
            # `bytes` of a number is that many zeros: `len` makes sure there is none among the rows.
            if len(image) == HEIGHT and set(map(len, image)) == {WIDTH}:
                return b"".join(map(bytes, image))
        except (TypeError, ValueError):
            pass
    return _inspected(image, field)


def _inspected(image: object, field: str) -> bytes:
    """The slow road: element by element, to name the one that is wrong."""
    if type(image) is str:
        try:
            content = binascii.a2b_base64(image, strict_mode=True)
        except ValueError as exc:
            raise InvalidInput(f"{field}: not base64: {exc}", field=field) from exc
        if len(content) != PIXELS:
            refuse(field, f"base64 of {len(content)} bytes", "784")
        return content
    if type(image) is not list:
        refuse(field, shown(image), _SHAPES)
    place, values = "[{0}]", image
    if image and type(image[0]) is list:
        if len(image) != HEIGHT:
            refuse(field, f"{len(image)} rows", _SHAPES)
        for y, row in enumerate(image):
            if type(row) is not list or len(row) != WIDTH:
                refuse(f"{field}[{y}]", shown(row), "a list of 28 integers 0 to 255")
        place, values = "[{1}][{2}]", [value for row in image for value in row]
    if len(values) != PIXELS:
        refuse(field, f"{len(values)} values", _SHAPES)
    for i, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= 255:
            hint = "; for fractions 0 to 1 send round(255 * x)" if type(value) is float else ""
            where = field + place.format(i, *divmod(i, WIDTH))
            refuse(where, shown(value), f"an integer 0 to 255{hint}")
    return bytes(values)


def check_count(count: int, field: str, max_images: int) -> None:
    """Refuse no images, and more than `max_images`."""
    if not count:
        refuse(field, "0 images", "at least 1")
    if count > max_images:
        message = f"{field}: got {count} images, expected at most {max_images} in a request"
        raise TooLarge(message, field=field)


def refuse(field: str, got: str, expected: str) -> NoReturn:
    """Raise the InvalidInput that names `field`, what it got and what was expected."""
    raise InvalidInput(f"{field}: got {got}, expected {expected}", field=field)


def shown(value: object) -> str:
    """A value as JSON has it, cut to 40 characters; a container by its length alone."""
    if isinstance(value, list | dict):
        return f"{'a list' if type(value) is list else 'an object'} of {len(value)}"
    if isinstance(value, str):
        return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    return orjson.dumps(value).decode()
