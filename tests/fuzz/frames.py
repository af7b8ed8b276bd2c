"""What a decoding process replies: the process may have been taken over by what it decodes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from service.decode.frames import HEAD
from service.decode.pool import BodySource, Decoded, Job, _Decoder
from service.errors import ServiceError
from service.forms.body import Limits
from tests.fuzz.target import Finding, MutateBytes, Target

MAX_IMAGES = 3
_PIXELS = 28 * 28
_PIECES = (1, 7, 12, 1 << 20)
"""How many bytes the socket has at a time."""


class _Pool:
    """What a decoder calls."""

    def __init__(self) -> None:
        self.outcomes: list[Decoded | ServiceError] = []
        self.ended = 0

    def done(self, decoder: Any, job: Job, outcome: Decoded | ServiceError) -> None:
        self.outcomes.append(outcome)

    def lost(self, decoder: Any, job: Job | None, *, killed: bool) -> None:
        self.ended += 1

    def reap(self, process: Any) -> None:
        pass

    def log(self, message: str, *arguments: object) -> None:
        if len(message % arguments) > (1 << 20) + 1000:
            raise Finding("a line of more than a header")


class _Socket:
    """Gives the reply in pieces, then its end."""

    def __init__(self, data: bytes, piece: int) -> None:
        self.data, self.piece = data, piece

    def recv_into(self, room: memoryview) -> int:
        count = min(len(room), self.piece, len(self.data))
        room[:count] = self.data[:count]
        self.data = self.data[count:]
        return count

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class FrameTarget(Target):
    """A reply, after a byte that says in which pieces it comes."""

    max_bytes = 8 * 1024
    traced_bytes = 4 << 20

    def run(self, data: bytes) -> None:
        pool = _Pool()
        decoder = object.__new__(_Decoder)
        nothing = SimpleNamespace(remove_reader=lambda _: None, remove_writer=lambda _: None)
        fields: dict[str, Any] = {
            "_pool": pool,
            "_unsent": [],
            "_head": bytearray(HEAD.size),
            "_header": None,
            "_pixels": None,
            "_loop": nothing,
            "_killer": None,
            "_writing": False,
            "_process": SimpleNamespace(kill=lambda: None),
            "_socket": _Socket(data[1:], _PIECES[data[0] % len(_PIECES)] if data else 1),
        }
        for name, value in fields.items():
            setattr(decoder, name, value)
        decoder._room = memoryview(decoder._head)
        source = BodySource("image/png", "auto", "one", Limits(MAX_IMAGES, 1 << 16))
        decoder._job = Job(source, b"", lambda _: None, lambda: None)
        for _ in range(2 + len(data)):
            if pool.outcomes or pool.ended:
                break
            decoder._readable()
        if len(pool.outcomes) + pool.ended != 1:
            raise Finding(f"{len(pool.outcomes)} outcomes, and {pool.ended} ends")
        for outcome in pool.outcomes:
            if isinstance(outcome, Decoded):
                images = outcome.images
                shape = (1 <= len(images) <= MAX_IMAGES, images.shape[1:])
                if images.dtype != np.uint8 or shape != (True, (28, 28)):
                    raise Finding(f"accepted {images.dtype} {images.shape}")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        head = 1 + HEAD.size
        if len(data) < head or rng.random() < 0.2:
            return mutate(data)
        header_bytes, _ = HEAD.unpack(data[1:head])
        text = mutate(data[head : head + header_bytes])
        pixels = bytes(rng.choice((0, _PIXELS, _PIXELS, 2 * _PIXELS, 784 * 4, 5)))
        return data[:1] + HEAD.pack(len(text), len(pixels)) + text + pixels
