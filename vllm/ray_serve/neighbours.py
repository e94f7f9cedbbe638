"""What a replica takes of others' caches before it serves, and hands on when it goes."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException

from vllm.config import ParallelConfig
from vllm.exceptions import VllmError
from vllm.logger import init_logger
from vllm.ray_serve.placement import Anyone, Fleet, Only
from vllm.v1.engine.data_parallel.warm_start import (
    ASK_S,
    MARGIN_S,
    MAX_NEIGHBOURS,
    share_out,
)
from vllm.v1.engine.questions import OfferPopular, PullPopular, Question, Reply
from vllm.v1.engine.wire import Answer, Codec

logger = init_logger(__name__)

# Serve tells a new replica of the others within this time; the first of a fleet waits for nobody.
_LOOK_S = 3.0

# What a question may end with, instead of an answer.
_FAILURES = (TimeoutError, VllmError, RayActorError, RayTaskError, RayServeException)

AskCore = Callable[[bytes], Awaitable[bytes | None]]


class Neighbours:
    """The other replicas of a fleet, as one of them sees them.

    Args:
        parallel: Has the budget of a pull.
        handle: Serve's, of all replicas.
        places: Follows which there are.
        name: Of this replica.
    """

    def __init__(self, parallel: ParallelConfig, handle: Any, places: Fleet, name: str) -> None:
        self._max_bytes = parallel.warm_pull_bytes
        self._seconds = parallel.warm_pull_seconds
        self._handle = handle
        self._places = places
        self._name = name
        self._codec = Codec()

    def _others(self) -> list[str]:
        return [name for name in self._places.living() if name != self._name][:MAX_NEIGHBOURS]

    async def _look(self) -> list[str]:
        """Return who there is; waits a moment for Serve to say so."""
        try:
            # Once any replica has answered, the handle knows all that serve.
            async with asyncio.timeout(_LOOK_S):
                await self._handle.describe.remote(Anyone())
        except (TimeoutError, RayActorError, RayTaskError, RayServeException):
            return []
        return self._others()

    async def _ask(self, name: str, question: Question[Reply], timeout_s: float) -> Sequence[Reply]:
        """Put a question to the core of another replica; no reply: there was no answer."""
        return await self._read(
            question, lambda data: self._handle.ask.remote(Only(name), data), timeout_s, name
        )

    async def _read(
        self, question: Question[Reply], ask: AskCore, timeout_s: float, name: str
    ) -> Sequence[Reply]:
        try:
            async with asyncio.timeout(timeout_s):
                data = await ask(self._codec.encode(question.to_message(0)))
            if data is None:
                return ()
            answer = self._codec.decode_from_core(data)
            assert isinstance(answer, Answer)
            return (question.read(answer),)
        except _FAILURES as error:
            logger.warning("Replica %s does not answer: %r", name, error)
            return ()

    async def pull(self, ask_own: AskCore) -> None:
        """Have this replica's core pull what others use most."""
        others = await self._look()
        question = OfferPopular(self._max_bytes)
        offers = await asyncio.gather(*(self._ask(name, question, ASK_S) for name in others))
        wanted = question.merge([*itertools.chain(*offers)])
        if wanted:
            pull = PullPopular(wanted, self._max_bytes, self._seconds)
            # It serves, whatever came of it.
            await self._read(pull, ask_own, self._seconds + MARGIN_S, self._name)

    async def hand_on(self, ask_own: AskCore) -> None:
        """Have others pull what this replica's core used most."""
        others = self._others()
        if not others:
            return
        question = OfferPopular(self._max_bytes)
        offered = question.merge(await self._read(question, ask_own, ASK_S, self._name))
        if not offered:
            return
        pulls = [
            self._ask(
                name, PullPopular(share, self._max_bytes, self._seconds), self._seconds + MARGIN_S
            )
            for name, share in zip(others, share_out(offered, len(others)), strict=True)
            if share
        ]
        reports = itertools.chain(*await asyncio.gather(*pulls))
        num_taken = sum(report.num_prefixes for report in reports)
        logger.info("Others took %d of %d prefixes.", num_taken, len(offered))
