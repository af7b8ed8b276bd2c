"""The interface of wire formats: bytes to images, and results to bytes.

A new form is a class like those beside this module, and a line in `service.api.routes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, get_args

from lenet.pixels import Images
from service.pictures.headers import Between, Doubt

if TYPE_CHECKING:  # decoding processes do not load it
    from service.engine.queue import Work

Body: TypeAlias = bytes | bytearray | memoryview
"""Bytes as they arrived."""

BINARY = b"application/octet-stream"
JSON = b"application/json"

WRITTEN_ROWS = 256
"""Rows of a JSON answer that are written in one turn of the event loop, which takes 0.3 ms."""

MAX_DOUBTS = 256
"""Images of a request that are warned of."""

MAX_CANDIDATES = 24
"""Candidates of a picture in an explanation, or as many as were taken for digits."""

_DOUBTS = get_args(Doubt)
_VIEW_CHARACTERS = 1048  # 784 bytes in base64


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that a request asks for.

    `classes`: instead of its values the best so many as text, "VALUE:INDEX:NAME"; 0 for its values.
    `binary`: as bytes, where a request chooses for each output.
    """

    name: str
    binary: bool = False
    classes: int = 0


@dataclass(frozen=True, slots=True)
class JudgedCandidate:
    """A mark in a picture that may be a digit, see `schemas.ExplainedCandidate`."""

    box: tuple[float, float, float, float]
    image: str
    digit: float
    mark: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """Options in a body besides its pixels. Each form sets those that it supports."""

    model: str = ""
    version: str = ""
    id: str | None = None
    outputs: tuple[RequestedOutput, ...] = ()
    raw: bool = False
    """Whether the images came as raw bytes, as then do the outputs."""
    by_column: bool = False
    """Whether the outputs come one after another, and not image by image."""
    by_instance: bool = False
    """Whether the images came as instances, where both those and images may come."""
    timeout_us: int = 0
    """How long the request may take; 0 without a limit of its own."""
    doubts: tuple[tuple[int, Doubt], ...] = ()
    """Images whose answer may mean nothing, and why; at most `MAX_DOUBTS`."""
    candidates: tuple[JudgedCandidate, ...] = ()
    """What was considered in a picture that is explained."""


NOTHING = Asked()


@dataclass(slots=True)
class Decoded:
    """The images of a body, uint8 (n, 28, 28), and what else it asks for."""

    images: Images
    asked: Asked = NOTHING


@dataclass(slots=True)
class Content:
    """The content of an answer.

    `lines` are lines of its head. A large one comes in `steps` instead of `body`, each of which
    takes less than a millisecond to make.
    """

    media_type: bytes
    body: bytes = b""
    lines: bytes = b""
    steps: Iterator[bytes] | None = None


Answered: TypeAlias = "Work"
"""A request that was computed: `rows` rows of `batch` from `row` on."""


class Form(Protocol):
    """How requests and answers look. Frozen, with plain fields: a decoding process gets a copy."""

    def __hash__(self) -> int: ...

    part: ClassVar[str]
    """Name in error messages: "body" or "message"."""
    names_model: ClassVar[bool]
    """Whether the body names the model, and not the path or the query."""

    @property
    def in_place(self) -> bool:
        """Whether the bytes of a body may be used as pixels where they are."""
        ...

    @property
    def max_images(self) -> int:
        """The most that one request may have."""
        ...

    def decode_now(self, body: Body) -> Decoded | None:
        """Decode `body`, unless it would hold the event loop up for more than 3 ms: then None.

        Raises: InvalidInput, TooLarge, UnsupportedMediaType. `asked` of the error is what could be
            read of a body that says whom it is for.
        """
        ...

    def decode(self, body: bytes, between: Between) -> Decoded:
        """Decode any body, in a decoding process, and call `between` again and again.

        Raises: likewise, MemoryError, and what `between` raises to end the work.
        """
        ...

    def write(self, asked: Asked, answered: Answered) -> Content:
        """The content of the answer."""
        ...


def asked_from(values: Mapping[str, Any], rows: int) -> Asked:
    """`Asked` from its fields as JSON brings them, for a request with `rows` images.

    Raises: ValueError, TypeError or KeyError, where a process sent something else.
    """
    outputs = tuple(RequestedOutput(**one) for one in values["outputs"])
    doubts = tuple((int(index), doubt) for index, doubt in values["doubts"])
    if len(doubts) > MAX_DOUBTS or not all(
        0 <= index < rows and doubt in _DOUBTS for index, doubt in doubts
    ):
        raise ValueError(f"{len(doubts)} doubts about {rows} images")
    candidates = tuple(map(_candidate, values["candidates"]))
    if len(candidates) > max(MAX_CANDIDATES, rows):
        raise ValueError(f"{len(candidates)} candidates of {rows} images")
    return Asked(**{**values, "outputs": outputs, "doubts": doubts, "candidates": candidates})


def _candidate(values: Mapping[str, Any]) -> JudgedCandidate:
    top, bottom, left, right = map(float, values["box"])
    image, digit, mark = values["image"], float(values["digit"]), float(values["mark"])
    if not (0 <= digit <= 1 and 0 <= mark <= 1 and len(str(image)) == _VIEW_CHARACTERS):
        raise ValueError("a candidate with other values")
    return JudgedCandidate((top, bottom, left, right), image, digit, mark, bool(values["chosen"]))
