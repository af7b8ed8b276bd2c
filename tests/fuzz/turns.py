"""An event loop without sockets and without waiting: callbacks run when asked to.

A case takes a fraction of what asyncio's own loop takes for its selector, and is always the same.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

MOST_TURNS = 100_000


class Turns(asyncio.AbstractEventLoop):
    """`settle` runs what is ready, `wait` also what a timer starts. Errors are raised."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._made = 0
        self.errors: list[BaseException] = []

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._made += 1
        heapq.heappush(self._timers, (when, self._made, timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # skipped when its time comes

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
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
        self.call(self._settle)
        if self.errors:
            raise self.errors.pop()

    def _settle(self) -> None:
        for _ in range(MOST_TURNS):
            if not self._ready:
                return
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
        raise RuntimeError(f"callbacks that are ready after {MOST_TURNS} of them")

    def wait(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, up to `until_s` or until `done`."""
        self.settle()
        while not done() and self._timers and self._timers[0][0] <= until_s:
            when_s, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._now_s = max(self._now_s, when_s)
                self.call(timer._run)
                self.settle()
        if not done():
            self._now_s = max(self._now_s, until_s)

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """The result of `main`, which may wait for no timer beyond an hour."""
        task = self.call(self.create_task, main)
        self.wait(self._now_s + 3600, task.done)
        return task.result()
