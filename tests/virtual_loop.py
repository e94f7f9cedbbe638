"""An event loop whose clock jumps to the next timer: minutes of waiting take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.SelectSelector):
    """Waits for nothing: what would have been waited is added to a clock.

    Owns: the clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all tasks wait, and nothing will ever happen"
            # Nothing less moves the clock: timers would be due, and not found due, for ever.
            self.now += max(timeout, 1e-6) if timeout else 0.0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. Threads have no place in it."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
