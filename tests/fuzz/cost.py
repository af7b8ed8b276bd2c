"""Search for inputs that take much CPU time for their size: `make fuzz TARGET=cost FUZZ_S=600`.

The inputs that take most time a byte are changed, and what takes more is kept. The worst of each
parser is printed, and written to `build/fuzz/cost-PARSER`. The parsers, corpora and mutations are
those of the other targets.
"""

from __future__ import annotations

import io
import random
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
from PIL import Image

from service.forms.compressed import CompressedForm
from service.forms.form import Form
from service.forms.oip_json import OipJsonForm
from service.forms.oip_proto import OipProtoForm
from service.forms.prediction import ImageForm
from service.forms.reader import OCTETS, Limits
from service.forms.tensorflow import TensorflowForm
from tests.fuzz import http2, samples
from tests.fuzz.connection import ConnectionTarget
from tests.fuzz.head import HeadTarget
from tests.fuzz.target import Target, corpus, load, mutated
from wire.gate import Gate
from wire.http2 import PREFACE
from wire.http2_fields import Fields
from wire.http2_head import Http2Head

PROCESS_US = 200.0
"""Largest CPU time a byte in a process of its own, in microseconds."""

LOOP_US = 0.3
"""Largest CPU time a byte on the event loop, in microseconds."""

CONNECTION_US = 1.0
"""`LOOP_US` where requests are answered, too, and by the target's own event loop: one of 56 bytes
takes 20 us."""

FLOOR_BYTES = 1024
"""Added to the size of an input: a small one has costs that do not grow with it."""

_MAX_BYTES = 96 * 1024
_KEPT = 8
"""Worst inputs of a parser, which are changed further."""
_REPEATS, _REPEATS_ABOVE = 2, 20
"""Further times that one of the worst is measured, and one above the limit: another program may
have been in the way."""

_LIMITS = Limits(max_images=64)

Parse = Callable[[bytes], object]
Measure = Callable[[Parse, bytes], float]


@dataclass
class Search:
    """The search in one parser, by the mutations of `target`."""

    target: Target
    parse: Parse
    limit_us: float
    worst: list[tuple[float, bytes]] = field(default_factory=list)
    """Microseconds a byte and input, the worst first."""

    def go(self, found: list[bytes], go_on: Callable[[], bool], measure: Measure) -> None:
        """Measure the inputs in `found`, and variants of the worst while `go_on`."""
        rng = random.Random(0)
        for data in found:
            self.try_one(data, measure)
        while go_on():
            self.change_one(rng, measure)

    def try_one(self, data: bytes, measure: Measure) -> None:
        """Measure `data`, and keep it if it is among the worst."""
        size = len(data) + FLOOR_BYTES
        cost_us = 1e6 * measure(self.parse, data) / size
        if len(self.worst) == _KEPT and cost_us <= self.worst[-1][0]:
            return
        repeats = _REPEATS if cost_us <= self.limit_us else _REPEATS_ABOVE
        cost_us = min(cost_us, *(1e6 * measure(self.parse, data) / size for _ in range(repeats)))
        self.worst = sorted([*self.worst, (cost_us, data)], reverse=True)[:_KEPT]

    def change_one(self, rng: random.Random, measure: Measure) -> None:
        """Try a variant of one of the worst."""
        data = rng.choice(self.worst)[1]
        for _ in range(rng.choice((1, 1, 2, 4))):
            if rng.random() < 0.2 and 0 < len(data) < _MAX_BYTES // 2:
                data *= 2  # what is quadratic shows where there is much of it
            data = self.target.mutate(data, rng, lambda data: mutated(data, rng, _MAX_BYTES))
        self.try_one(data[:_MAX_BYTES], measure)


def cpu_s(parse: Parse, data: bytes) -> float:
    """CPU time of parsing `data`, also where it is refused."""
    began_s = time.thread_time()
    with suppress(Exception):
        parse(data)
    return time.thread_time() - began_s


# The parsers.


def parsers(stack: ExitStack) -> dict[str, Search]:
    """A search for each parser; the first word of its name is that of a target."""

    def target(name: str) -> Target:
        return stack.enter_context(closing(load(name)))

    def between(_: int) -> None:
        pass

    found: dict[str, Search] = {}
    for name in ("png", "jpeg", "webp", "gif", "bmp", "avif", "tiff"):
        pictures = target(name)
        for digits in ("one", "several"):
            form = _form(f"image/{name}", digits)
            found[f"{name} {digits}"] = _in_process(pictures, form)
    multipart = target("multipart")

    def parts(data: bytes) -> object:
        line, _, body = data.partition(b"\n")
        return _form("multipart/form-data" + line.decode("latin-1")).decode(body, between)

    found["multipart"] = Search(multipart, parts, PROCESS_US)
    forms: dict[str, Form] = {
        "compressed": CompressedForm(_form(OCTETS), "gzip", 1 << 20),
        "json": _form("application/json"),
        "npy": _form("application/x-npy"),
        "csv": _form("text/csv"),
        "infer": OipJsonForm(None, _LIMITS),
        "tensorflow": TensorflowForm(_LIMITS),
        "grpc": OipProtoForm(_LIMITS),
    }
    for name, form in forms.items():
        bodies = target(name)
        found[f"{name} process"] = _in_process(bodies, form)
        found[f"{name} loop"] = Search(bodies, form.decode_now, LOOP_US)
    head = cast("HeadTarget", target("head"))
    found["head"] = Search(head, head.read, LOOP_US)
    connection = cast("ConnectionTarget", target("connection"))
    found["connection"] = Search(connection, connection.serve, CONNECTION_US)
    found["http2"] = Search(target("http2"), lambda data: _Server({}).feed(data), LOOP_US)
    return found


def _form(content_type: str, digits: str = "one") -> ImageForm:
    several = cast("Literal['one', 'several']", digits)
    return ImageForm.of(content_type, "auto", several, _LIMITS)


def _in_process(target: Target, form: Form) -> Search:
    return Search(target, lambda data: form.decode(data, lambda _: None), PROCESS_US)


class _Server(http2.Server):
    """Reads heads as the service does."""

    def read(self, fields: Fields) -> Http2Head:
        return Http2Head(fields, {}, {}, Gate())


# Inputs to begin with.


def seeds(name: str) -> list[bytes]:
    """The corpus of a parser's target, and inputs that once took long."""
    target = name.partition(" ")[0]
    return [*corpus(target), *_SLOW.get(target, list)()]


def _bars(height: int, width: int, step: int) -> bytes:
    """A stroke, and bars of this size in rows below each other."""
    grey = np.zeros((512, 512), np.uint8)
    grey[8:38, 4] = 255
    for left in range(20, 500 - width, step):
        for top in range(8, 500, 2 * height):
            grey[top : top + height, left : left + width] = 255
    return samples.png(grey)


def _pictures() -> list[bytes]:
    return [_bars(1, 6, 24), _bars(3, 5, 12), _bars(16, 6, 24), _bars(30, 8, 60)]


def _blank(kind: str, side: int, **options: object) -> bytes:
    """A large picture of few bytes."""
    file = io.BytesIO()
    Image.new("1" if kind == "PNG" else "L", (side, side)).save(file, kind, **options)
    return file.getvalue()


def _heads() -> list[bytes]:
    line = b"POST /predict%b HTTP/1.1\r\nHost: a\r\n%b\r\n"
    return [
        line % (b"", b"".join(b"a%d:\r\n" % i for i in range(8000))),
        line % (b"?" + b"&".join(b"a%d" % i for i in range(10_000)), b""),
        line % (b"?" + b"a=1&" * 10_000, b""),
        line % (b"?invert=" + b"%41" * 20_000, b""),
        line % (b"", b"Accept: " + b"a/b;q=0.1," * 6000 + b"\r\n"),
        line % (b"", b"Content-Type: " + b"a;b=c;" * 10_000 + b"\r\n"),
    ]


def _blocks() -> list[bytes]:
    """Header blocks that begin with table size updates, of many fields, and on a reset stream."""
    begun = PREFACE + struct.pack(">I", 0)[1:] + b"\4\0" + bytes(4)
    many = http2.held(*(http2.field(b"a%d" % i, b"") for i in range(1500)))
    indexed = http2.held() + b"\x55\0" * 900
    wrong = http2.headers(http2.held(http2.field(b"A", b"")))
    return [
        *(
            begun + http2.headers(payload)
            for payload in (b"\x20" * 16_000, b"\x20" * 15_800 + http2.held(), many, indexed)
        ),
        begun + wrong + http2.headers(http2.field(b"a", b"")) * 900,
    ]


def _forms() -> list[bytes]:
    return [b'; boundary="' + b"\\a" * 30_000 + b'"\n--a', b"; a=b" * 15_000 + b"; boundary=x\n--x"]


_SLOW: dict[str, Callable[[], list[bytes]]] = {
    "png": lambda: [*_pictures(), _blank("PNG", 4096)],
    "gif": lambda: [_blank("GIF", 4096)],
    "jpeg": lambda: [_blank("JPEG", 4096)],
    "webp": lambda: [_blank("WEBP", 2896, lossless=True)],
    "multipart": _forms,
    "head": _heads,
    "connection": _heads,
    "http2": _blocks,
    "grpc": lambda: [b"\x2a\0" * 1020, b"\xf8\x01\x80\0" * 1020],
    "csv": lambda: [(b"1e-300," * 783 + b"0\n") * 8, b"0," * 783 + b"0" * 60_000, b"\n" * 60_000],
    "json": lambda: [b'{"images":[' + b"[]," * 30_000 + b"0]}", b"[" * 90_000],
    "infer": lambda: [b'{"inputs":[' + b"{}," * 30_000 + b"0]}", b"[" * 90_000],
    "tensorflow": lambda: [b'{"instances":[' + b"[]," * 30_000 + b"0]}"],
}
