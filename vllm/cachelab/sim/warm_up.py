"""What a simulated server that comes back pulls of others' caches before it serves."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.requests import SimRequest
from vllm.cachelab.sim.settings import block_bytes
from vllm.exceptions import ConfigError

_MAX_CONVERSATIONS = 10_000


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The budget.

    Attributes:
        seconds: Most that pulling may take; the server begins to serve after it.
        num_bytes: Most that is pulled.
        bytes_per_s: How fast.
    """

    seconds: float
    num_bytes: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if min(self.seconds, self.num_bytes, self.bytes_per_s) <= 0:
            raise ConfigError(
                f"--warm-up {self.seconds:g} {self.num_bytes:g} {self.bytes_per_s:g}: all three "
                "must be above 0."
            )


@dataclass(frozen=True, slots=True)
class Popular:
    """A conversation's last prompt, and where it was sent."""

    request: SimRequest
    rank: int


class PopularPrompts:
    """The last prompts of conversations, those asked for last at the end.

    Owns: the prompts.
    """

    def __init__(self) -> None:
        self._by_session: OrderedDict[int, Popular] = OrderedDict()

    def note(self, session: int, request: SimRequest, rank: int) -> None:
        """A prompt was sent."""
        self._by_session[session] = Popular(request, rank)
        self._by_session.move_to_end(session)
        if len(self._by_session) > _MAX_CONVERSATIONS:
            self._by_session.popitem(last=False)

    def list_popular(self) -> Iterable[Popular]:
        """Yield the prompts, those asked for last first."""
        return tuple(reversed(self._by_session.values()))


def find_cached(engine: SimEngine, request: SimRequest) -> SimRequest | None:
    """Return the part of a prompt that an engine has cached; None: nothing."""
    manager = engine.scheduler.kv_cache_manager
    num_tokens = manager.look_up(request.make()).num_tokens
    if not num_tokens:
        return None
    # The token behind is computed in any case, and makes the boundary before it a place to resume.
    return replace(request, num_prompt_tokens=num_tokens + 1, num_output_tokens=1)


_NUMBERS = count()


def pull(engine: SimEngine, prompts: Iterable[SimRequest], budget: WarmUp) -> tuple[int, float]:
    """Fill an idle engine's cache with prompts, as far as the budget goes.

    Returns:
        Bytes pulled, and the seconds that took.
    """
    manager = engine.scheduler.kv_cache_manager
    pool, size = manager.block_pool, block_bytes(engine.plan)
    num_bytes = 0
    most = min(budget.num_bytes, budget.seconds * budget.bytes_per_s)
    for prompt in prompts:
        before = pool.num_scratch_blocks
        missing = prompt.num_prompt_tokens - manager.look_up(prompt.make()).num_tokens
        if missing <= 1:
            continue
        engine.add(replace(prompt, request_id=f"warm-{next(_NUMBERS)}").make())
        while engine.has_work():
            step, _shape = engine.schedule()
            engine.finish(step)
        num_bytes += max(0, before - pool.num_scratch_blocks) * size
        # Of a cache that is full nothing more is pulled: it would flush what was.
        if num_bytes >= most or pool.num_scratch_blocks == 0:
            break
    return num_bytes, num_bytes / budget.bytes_per_s
