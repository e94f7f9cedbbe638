"""What a replica takes of others' caches before it serves, and hands on when it goes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException

from vllm.config import ParallelConfig
from vllm.logger import init_logger
from vllm.ray_serve.placement import Anyone, Fleet, Only
from vllm.v1.engine.data_parallel.warm_start import (
    ASK_S,
    MARGIN_S,
    MAX_NEIGHBOURS,
    merge_offers,
    share_out,
)
from vllm.v1.engine.wire import AskHot, Codec, HotPrefixes, Pulled, PullHot, ToCore

logger = init_logger(__name__)

# Serve tells a new replica of the others within this time; the first of a fleet waits for nobody.
_LOOK_S = 3.0

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

    async def _ask(self, name: str, message: ToCore, timeout_s: float) -> Any:
        """Put a question to the core of another replica; None: there was no answer."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await self._handle.ask.remote(Only(name), self._codec.encode(message))
        except (TimeoutError, RayActorError, RayTaskError, RayServeException) as error:
            logger.warning("Replica %s does not answer: %r", name, error)
            return None
        return None if data is None else self._codec.decode_from_core(data)

    async def pull(self, ask_own: AskCore) -> None:
        """Have this replica's core pull what others use most."""
        others = await self._look()
        question = AskHot(0, self._max_bytes)
        answers = await asyncio.gather(*(self._ask(name, question, ASK_S) for name in others))
        offers = [answer.prefixes for answer in answers if isinstance(answer, HotPrefixes)]
        wanted = merge_offers(offers)
        if not wanted:
            return
        data = self._codec.encode(PullHot(0, wanted, self._max_bytes, self._seconds))
        try:
            async with asyncio.timeout(self._seconds + MARGIN_S):
                await ask_own(data)
        except TimeoutError:
            logger.warning("The pull did not end within its time: it serves all the same.")

    async def hand_on(self, ask_own: AskCore) -> None:
        """Have others pull what this replica's core used most."""
        others = self._others()
        if not others:
            return
        async with asyncio.timeout(ASK_S):
            data = await ask_own(self._codec.encode(AskHot(0, self._max_bytes)))
        offered = None if data is None else self._codec.decode_from_core(data)
        if not isinstance(offered, HotPrefixes) or not offered.prefixes:
            return
        shares = zip(others, share_out(offered.prefixes, len(others)), strict=True)
        answers = await asyncio.gather(
            *(
                self._ask(
                    name,
                    PullHot(0, share, self._max_bytes, self._seconds),
                    self._seconds + MARGIN_S,
                )
                for name, share in shares
                if share
            )
        )
        reports = [answer.report for answer in answers if isinstance(answer, Pulled)]
        num_taken = sum(report.num_prefixes for report in reports)
        logger.info("Others took %d of %d prefixes.", num_taken, len(offered.prefixes))
