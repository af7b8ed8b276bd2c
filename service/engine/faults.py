"""Faults on purpose, for tests of what happens on real ones: `--fault-injection` and nothing else.

It refuses to be there otherwise: without that setting no context of this kind is made.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue
from typing import Literal, TypeAlias

from lenet.backend import BatchResult, Pending
from lenet.context import ExecutionContext
from lenet.pixels import Images

_log = logging.getLogger(__name__)

Fault: TypeAlias = Literal["poison", "hang"]


class Faults:
    """Faults that wait for the next batch, whichever context of whichever model runs it."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Fault] = SimpleQueue()
        self._never = threading.Event()

    def inject(self, fault: Fault) -> None:
        """Let the next batch find its device poisoned, or hang for ever."""
        _log.warning("a fault waits for the next batch: %s", fault)
        self._waiting.put(fault)

    @property
    def waiting(self) -> bool:
        """Whether the next batch has a fault."""
        return not self._waiting.empty()

    def strike(self, context: ExecutionContext) -> None:
        """Let `context`, whose thread calls, have the fault that waits, if one does."""
        try:
            fault = self._waiting.get_nowait()
        except Empty:
            return
        _log.warning("a batch meets its fault: %s", fault)
        if fault == "poison":
            context.poison()
        else:
            self._never.wait()


class FaultyContext(ExecutionContext):
    """A context that asks `faults` before each batch."""

    faults: Faults

    def launch(self, images: Images) -> Pending | None:
        """None for a batch that has a fault: it strikes on the context's own thread."""
        return None if self.faults.waiting else super().launch(images)

    def run(self, images: Images) -> BatchResult:
        """As its base; see `lenet.context.ExecutionContext.run`."""
        self.faults.strike(self)
        return super().run(images)
