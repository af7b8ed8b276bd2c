"""asyncio's event loop without sockets and without waiting: time passes where nothing is left.

A case takes a fraction of what a selector of the system takes, and is always the same.
"""

from __future__ import annotations

from asyncio import base_events, events
from collections.abc import Callable
from typing import Any

MOST_TURNS = 100_000


class Turns(base_events.BaseEventLoop):
    """`settle` runs what is ready, `wait` also what a timer starts. Errors are raised."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = self._until_s = 1000.0
        self._selector = self
        self.errors: list[BaseException] = []
        self.set_exception_handler(self._keep)

    def __del__(self) -> None:
        """Nothing has to be closed."""

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> tuple[()]:
        """Let time pass to the next timer, or to the end of `wait`."""
        next_s = self._until_s if timeout is None else self._now_s + timeout
        self._now_s = max(self._now_s, min(next_s, self._until_s))
        return ()

    def _process_events(self, _: object) -> None:
        pass

    def _keep(self, _: object, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as if from this loop."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            return function(*args)
        finally:
            events._set_running_loop(before)

    def settle(self) -> None:
        """Run what is ready, and what that makes ready.

        Raises:
            RuntimeError: there is no end to it.
        """
        turns = 0
        while self._ready:
            self.call(self._run_once)
            turns += 1
            if turns > MOST_TURNS:
                raise RuntimeError(f"callbacks that are ready after {MOST_TURNS} turns")
        if self.errors:
            raise self.errors.pop()

    def wait(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, up to `until_s` or until `done`."""
        self._until_s = until_s
        self.settle()
        while not done() and self._now_s < until_s:
            self.call(self._run_once)
            self.settle()
