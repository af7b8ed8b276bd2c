"""NVTX ranges along the path of a request and of a training step. Names only, no payloads.

`span("name")` is a context manager and a decorator, for work that one thread does in one piece.
`begin` and `end` are for work that others may interrupt, such as a task that awaits. Without a
profiler, or without the `nvtx` package, they do nothing, and `span` returns a decorated function
unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar


def _loaded() -> Any | None:
    # A profiler sets this variable, by which NVTX loads it. Without one, ranges would cost time and
    # be dropped.
    if "NVTX_INJECTION64_PATH" not in os.environ:
        return None
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx


_nvtx = _loaded()

active = _nvtx is not None
"""Whether ranges are recorded. Where calls that do nothing would take time, it is asked first."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Span(Protocol):
    """A named range: `with span("queue"):` or `@span("decode")`."""

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None: ...

    def __call__(self, function: Function, /) -> Function:
        """Wrap `function` in the range."""
        ...


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, function: Function, /) -> Function:
        return function


_NOTHING = _Nothing()


def span(name: str) -> Span:
    """A range called `name` in the NVTX domain `lenet`."""
    if _nvtx is None:
        return _NOTHING
    annotation: Span = _nvtx.annotate(name, domain="lenet")
    return annotation


def begin(name: str) -> Any:
    """Open a range called `name`, which may overlap others. `end` closes it, on any thread."""
    return None if _nvtx is None else _nvtx.start_range(name, domain="lenet")


def end(opened: Any) -> None:
    """Close a range of `begin`, once. None is ignored."""
    if opened is not None and _nvtx is not None:
        _nvtx.end_range(opened)
