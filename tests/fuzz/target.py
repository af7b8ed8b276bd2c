"""A fuzzing target: one parser, what is expected of it, and how its inputs are changed."""

from __future__ import annotations

import logging
import random
import resource
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
LARGEST_INPUT_BYTES = 10_000
"""Largest input of the corpus."""

MutateBytes = Callable[[bytes], bytes]
"""Changes bytes without knowing what they mean: libFuzzer's mutations, or `mutated`."""

CASE_CPU_S = 1.0
"""CPU time of one case. The slowest seed, a JPEG of noise that is searched for digits four times,
takes 0.27 s; the margin is for instrumented code and a busy machine, and still finds what is
quadratic in an input of 64 KiB."""

CASE_RSS_BYTES = 64 << 20
"""How much one case may raise the process's largest memory. Inputs have 64 KiB at most, pictures
2^16 pixels: what is linear in them stays below a quarter of this."""

CASE_TRACED_MULTIPLE = 64
"""Memory that Python allocates for one case, by the bytes of its input, beyond the target's
constant. An empty list of JSON, 3 bytes, takes 64."""


class Finding(AssertionError):
    """The parser did something else than it promises."""


class Target:
    """One parser.

    `run` raises `Finding`, or whatever error the parser raised that it does not document.
    """

    max_bytes = 1 << 16
    traced_bytes = 1 << 20
    """Allowance for Python's own allocations in any case, such as first imports and caches."""

    def __init__(self) -> None:
        self.undo = ExitStack()
        """Undone by `close`: nothing of a target is left for the tests that follow."""

    def run(self, data: bytes) -> None:
        """Parse `data`, and compare with what is expected."""
        raise NotImplementedError

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        """A variant of `data` that gets past the checks of the format, where there are any."""
        return mutate(data)

    def close(self) -> None:
        """Undo what the target has changed outside of itself."""
        self.undo.close()


_PICTURE = (
    *("service.pictures.picture", "service.pictures.picture_files", "service.pictures.headers"),
    *("service.pictures.candidates", "service.pictures.shapes"),
)

MODULES = MappingProxyType(
    {
        "json": ("bodies", "JsonTarget", ("service.forms.pixel_json",)),
        "octets": ("bodies", "OctetsTarget", ("service.forms",)),
        "npy": ("bodies", "NpyTarget", ("service.forms",)),
        "csv": ("bodies", "CsvTarget", ("service.forms",)),
        "multipart": ("bodies", "MultipartTarget", ("service.forms", "python_multipart")),
        "png": ("pictures", "PngTarget", (*_PICTURE, "PIL.PngImagePlugin")),
        "jpeg": ("pictures", "JpegTarget", (*_PICTURE, "PIL.JpegImagePlugin")),
        "webp": ("pictures", "WebpTarget", (*_PICTURE, "PIL.WebPImagePlugin")),
        "gif": ("pictures", "GifTarget", (*_PICTURE, "PIL.GifImagePlugin")),
        "bmp": ("pictures", "BmpTarget", (*_PICTURE, "PIL.BmpImagePlugin")),
        "avif": ("pictures", "AvifTarget", (*_PICTURE, "PIL.AvifImagePlugin")),
        "tiff": ("pictures", "TiffTarget", (*_PICTURE, "PIL.TiffImagePlugin")),
        "connection": ("connection", "ConnectionTarget", ("wire",)),
        "head": (
            "head",
            "HeadTarget",
            ("wire.head", "service.request", "service.api.explain"),
        ),
        "http2": (
            "http2",
            "Http2Target",
            ("wire.http2", "wire.http2_head"),
        ),
        "header_blocks": (
            "http2",
            "HeaderBlocksTarget",
            ("wire.http2", "wire.http2_head"),
        ),
        "grpc": ("rpc", "GrpcTarget", ("service.forms", "service.api")),
        "tensorflow": ("tensorflow", "TensorflowBodyTarget", ("service.forms.tensorflow",)),
        "infer": (
            "infer",
            "InferBodyTarget",
            ("service.forms.oip_json", "service.forms.tensors"),
        ),
        "compressed": (
            *("bodies", "CompressedTarget"),
            ("service.forms.compressed", "wire.inflate"),
        ),
        "weights": ("files", "WeightsTarget", ("lenet.weightfile", "lenet.model")),
        "idx": ("files", "IdxTarget", ("trainer.mnist",)),
    }
)
"""For each name: module below `tests.fuzz`, class, and modules whose coverage guides."""


def load(name: str) -> Target:
    """The target called `name`, imported now: coverage has to be measured before."""
    module, kind, _ = MODULES[name]
    target: Target = getattr(import_module(f"tests.fuzz.{module}"), kind)()
    return target


def run_bounded(target: Target, data: bytes) -> None:
    """Run one case within `CASE_CPU_S` and `CASE_RSS_BYTES`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    target.run(data)
    took_s = time.process_time() - began_s
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    grown_bytes = grown * (1 if sys.platform == "darwin" else 1024)
    _within(f"{len(data)} bytes took {{}} s", took_s, CASE_CPU_S)
    _within(f"{len(data)} bytes took {{}} bytes of memory", grown_bytes, CASE_RSS_BYTES)


def run_traced(target: Target, data: bytes) -> None:
    """Run one case within its bounds, and again within a limit of traced memory.

    Tracing makes a case two to four times as slow, so that its time is not that of the parser.
    """
    run_bounded(target, data)
    tracemalloc.start()
    try:
        target.run(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    limit = target.traced_bytes + CASE_TRACED_MULTIPLE * len(data)
    _within(f"{len(data)} bytes took {{}} bytes of Python's memory", peak, limit)


def _within(text: str, value: float, limit: float) -> None:
    if value > limit:
        raise Finding(f"{text.format(value)}, expected at most {limit}")


def corpus(name: str) -> list[bytes]:
    """The inputs of the corpus of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def quiet(logger: str, undo: ExitStack) -> None:
    """Turn off the warnings of a logger, which a fuzzer would fill a disk with."""
    found = logging.getLogger(logger)
    undo.callback(found.setLevel, found.level)
    found.setLevel("ERROR")


_NUMBERS = (0, 1, 2, 7, 8, 27, 28, 29, 64, 127, 128, 255, 256, 783, 784, 785, 1023, 1024, 65_535)


def mutated(data: bytes, rng: random.Random, max_bytes: int, tokens: Sequence[bytes] = ()) -> bytes:
    """`data` with one to four changes: of bytes, ranges, numbers in binary, or by `tokens`."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(changed))
        end = min(len(changed), start + rng.choice((1, 1, 2, 4, 8, 64, 1024)))
        match rng.randrange(8):
            case 0 if changed:
                at = rng.randrange(len(changed))
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[rng.randrange(len(changed))] = rng.choice(_NUMBERS) & 255
            case 2:
                changed[start:end] = b""
            case 3:
                changed[start:start] = rng.randbytes(rng.choice((1, 2, 4, 16)))
            case 4:
                changed[start:start] = changed[start:end] * rng.choice((1, 2, 10, 1000))
            case 5:
                at = rng.randint(0, len(changed))
                changed[at:at] = changed[start:end]
            case 6 if tokens:
                changed[start : rng.choice((start, end))] = rng.choice(tokens)
            case _:
                form = rng.choice(("B", "<H", ">H", "<I", ">I", "<Q", ">Q"))
                size = struct.calcsize(form)
                number = rng.choice((*_NUMBERS, -1, -2, 1 << 31, 1 << 63, len(data)))
                packed = (number % (1 << 8 * size)).to_bytes(
                    size, "little" if form[0] == "<" else "big"
                )
                changed[start : rng.choice((start, start + size))] = packed
        del changed[max_bytes:]
    return bytes(changed)


def mutate_list(items: list[bytes], rng: random.Random, change: MutateBytes) -> list[bytes]:
    """`items` with one changed, dropped, repeated, moved or copied to another place."""
    items = list(items)
    if not items:
        return [change(b"")]
    at, to = rng.randrange(len(items)), rng.randrange(len(items))
    match rng.randrange(7):
        case 0:
            del items[at]
        case 1:
            items[at:at] = [items[at]] * rng.choice((1, 1, 1, 1, 2, 2, 3, 30, 300))
        case 2:
            items[at], items[to] = items[to], items[at]
        case 3:
            items.insert(to, items[at])
        case _:
            items[at] = change(items[at])
    return items


def pick(rng: random.Random, choices: Iterable[bytes]) -> bytes:
    """One of `choices`."""
    return rng.choice(tuple(choices))


def changed_json(value: Any, rng: random.Random, others: Sequence[Any]) -> Any:
    """`value` with one change somewhere in it, often to one of `others`."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: content for name, content in value.items() if name != key}
        if rng.random() < 0.05:
            return {**value, key + "x": value[key]}
        return {**value, key: changed_json(value[key], rng, others)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        before, one, after = value[:at], value[at], value[at + 1 :]
        match rng.randrange(8):
            case 0:
                return before + after
            case 1:
                return before + [one] * rng.choice((2, 2, 100)) + after
            case 2:
                return value * 2 if len(value) < 5000 else value[:28]
            case 3 if isinstance(one, list):
                return before + one + after
            case _:
                return [*before, changed_json(one, rng, others), *after]
    return rng.choice((*others, [value], {"images": value}, [[value]], [value] * 2))
