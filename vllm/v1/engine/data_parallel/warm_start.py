"""Filling the cache of an engine core that is new with what its neighbours use most."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import cast

from vllm.logger import init_logger
from vllm.v1.engine.wire import AskHot, HotPrefixes, Pulled, PullHot, ToCore
from vllm.v1.messages import HotPrefix
from vllm.v1.metrics.stats import PullStats

logger = init_logger(__name__)

# So many neighbours are asked at most.
MAX_NEIGHBOURS = 8
# They answer between two steps.
ASK_S = 5.0
# Loads that run when the time is over end by their own deadlines.
MARGIN_S = 10.0

Send = Callable[[ToCore], None]
Answer = HotPrefixes | Pulled


def merge_offers(offers: Sequence[Sequence[HotPrefix]]) -> list[HotPrefix]:
    """Return what several neighbours hold, the most used first."""
    return sorted(itertools.chain(*offers), key=lambda prefix: -prefix.weight)


def share_out(prefixes: Sequence[HotPrefix], num_takers: int) -> list[list[HotPrefix]]:
    """Return what each of several takers shall pull: conversations in turns, each as a whole."""
    shares: list[list[HotPrefix]] = [[] for _ in range(num_takers)]
    for prefix in prefixes:
        shares[prefix.conversation % num_takers].append(prefix)
    return shares


class WarmStart:
    """Has one core pull what others use most. Any thread may call.

    Owns: the questions that wait for answers.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._ids = itertools.count(1)
        self._open: dict[int, Future[Answer]] = {}

    def settle(self, answer: Answer) -> None:
        """Take a core's answer; one that nobody waits for any more is passed over."""
        with self._lock:
            waiting = self._open.pop(answer.call_id, None)
        if waiting is not None:
            waiting.set_result(answer)

    def _ask(self, send: Send, make: Callable[[int], ToCore]) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._lock:
            call_id = next(self._ids)
            self._open[call_id] = future
        send(make(call_id))
        return future

    def run(
        self, new: Send, neighbours: Sequence[Send], max_bytes: int, seconds: float
    ) -> PullStats | None:
        """Block until a core has pulled what fits into the budget.

        Args:
            new: Sends it messages.
            neighbours: Send those messages that hold something.
            max_bytes: Most to pull.
            seconds: For how long.

        Returns:
            What came of it; None: nobody had anything, or an answer did not come.
        """
        asked = [
            self._ask(send, lambda call_id: AskHot(call_id, max_bytes))
            for send in neighbours[:MAX_NEIGHBOURS]
        ]
        offers: list[Sequence[HotPrefix]] = []
        for future in asked:
            try:
                offers.append(cast("HotPrefixes", future.result(ASK_S)).prefixes)
            except TimeoutError:
                logger.warning("A core did not say within %g s what it uses most.", ASK_S)
        wanted = merge_offers(offers)
        if not wanted:
            return None
        pull = self._ask(new, lambda call_id: PullHot(call_id, wanted, max_bytes, seconds))
        try:
            return cast("Pulled", pull.result(seconds + MARGIN_S)).report
        except TimeoutError:
            logger.warning("A new core did not end its pull within %g s.", seconds + MARGIN_S)
            return None
