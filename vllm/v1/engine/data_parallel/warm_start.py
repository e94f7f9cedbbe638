"""Filling the cache of an engine core that is new with what its neighbours use most."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.exceptions import VllmError
from vllm.logger import init_logger
from vllm.v1.engine.questions import OfferPopular, PullPopular, Question, Reply
from vllm.v1.engine.wire import Answer
from vllm.v1.messages import PopularPrefix
from vllm.v1.metrics.stats import PullStats

logger = init_logger(__name__)

# So many neighbours are asked at most.
MAX_NEIGHBOURS = 8
# They answer between two steps.
ASK_S = 5.0
# Loads that run when the time is over end by their own deadlines.
MARGIN_S = 10.0

# Puts a question to one core.
Asker = Callable[[Question[Any]], Future[Answer]]


def share_out(prefixes: Sequence[PopularPrefix], num_takers: int) -> list[list[PopularPrefix]]:
    """Return what each of several takers shall pull: conversations in turns, each as a whole."""
    shares: list[list[PopularPrefix]] = [[] for _ in range(num_takers)]
    for prefix in prefixes:
        shares[prefix.conversation % num_takers].append(prefix)
    return shares


def pull_from_neighbours(
    new: Asker, neighbours: Sequence[Asker], max_bytes: int, seconds: float
) -> PullStats | None:
    """Block until a core has pulled what fits into the budget.

    Args:
        new: Asks it.
        neighbours: Ask those that hold something.
        max_bytes: Most to pull.
        seconds: For how long.

    Returns:
        What came of it; None: nobody had anything, or an answer did not come.
    """
    question = OfferPopular(max_bytes)
    asked = [ask(question) for ask in neighbours[:MAX_NEIGHBOURS]]
    offers = [_wait(question, call, ASK_S) for call in asked]
    wanted = question.merge([offer for offer in offers if offer is not None])
    if not wanted:
        return None
    pull = PullPopular(wanted, max_bytes, seconds)
    return _wait(pull, new(pull), seconds + MARGIN_S)


def _wait(question: Question[Reply], call: Future[Answer], timeout_s: float) -> Reply | None:
    """Return a core's reply; None: there is none."""
    name = type(question).__name__
    try:
        return question.read(call.result(timeout_s))
    except TimeoutError:
        logger.warning("A core did not answer %s within %g s.", name, timeout_s)
    except VllmError as error:
        logger.warning("A core did not answer %s: %s", name, error)
    return None
