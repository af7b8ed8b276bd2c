"""Injected faults, to test recovery from real ones; only with `--fault-injection`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Literal, TypeAlias

from lenet.backend import Backend, BatchResult, Pending
from lenet.context import ExecutionContext
from lenet.pixels import Images
from lenet.weightfile import WeightFile

_log = logging.getLogger(__name__)

Fault: TypeAlias = Literal["poison", "hang"]


class Faults:
    """Faults for the next batches, of whichever model and context."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Fault] = SimpleQueue()

    def inject(self, fault: Fault) -> None:
        """Let the next batch find its device poisoned, or hang for ever."""
        _log.warning("the next batch gets an injected fault: %s", fault)
        self._waiting.put(fault)

    @property
    def waiting(self) -> bool:
        """Whether the next batch has a fault."""
        return not self._waiting.empty()

    def strike(self, context: ExecutionContext) -> None:
        """Apply the next fault, if there is one, to `context`, on whose thread this is called."""
        try:
            fault = self._waiting.get_nowait()
        except Empty:
            return
        _log.warning("injecting fault: %s", fault)
        if fault == "poison":
            context.poison()
        else:
            context.hang()


class FaultyContext(ExecutionContext):
    """A context that takes a fault of `faults` before each batch."""

    def __init__(self, backend: Backend, weights: WeightFile, largest: int, faults: Faults) -> None:
        super().__init__(backend, weights, largest)
        self._faults = faults

    def launch(self, images: Sequence[Images]) -> BatchResult | Pending | None:
        """None for a batch with a fault, which strikes on the context's own thread."""
        return None if self._faults.waiting else super().launch(images)

    def run(self, images: Images) -> BatchResult:
        """Inject the next fault, then call `ExecutionContext.run`."""
        self._faults.strike(self)
        return super().run(images)
