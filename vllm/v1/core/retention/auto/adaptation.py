"""What ``auto`` has learnt of the traffic: the eviction rule and the interval in force."""

from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.retention.auto.duel import Duel
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.interval import IntervalLearner
from vllm.v1.core.retention.auto.spans import SpanSampler
from vllm.v1.metrics.stats import CachePolicyStats

logger = init_logger(__name__)


class Adaptation:
    """Learns from every admitted prompt, once.

    Owns: the duel of eviction rules, the learner of the interval.

    Args:
        geometry: The model's groups.
        num_blocks: Blocks of the pool.
    """

    def __init__(self, geometry: CacheGeometry, num_blocks: int) -> None:
        blocks_per_token = sum(1 / group.block_size for group in geometry.dense)
        self._capacity_tokens = int(num_blocks / blocks_per_token) if blocks_per_token else 0
        self._weight = sum(geometry.lean_blocks) / (blocks_per_token or 1.0)
        self._geometry = geometry
        self.reset()

    def reset(self) -> None:
        """Forget what was learnt."""
        self._sampler = SpanSampler(self._geometry.unit, self._capacity_tokens)
        self._duel = Duel(self._sampler.capacity)
        step = max(self._geometry.unit, self._geometry.lean)
        self._learner = IntervalLearner(self._sampler.capacity, self._weight, step)

    @property
    def rule(self) -> Rule:
        """The eviction rule in force."""
        return self._duel.rule

    @property
    def interval(self) -> int:
        """Tokens between two checkpoints that new prompts leave; 0: none."""
        return self._learner.interval

    def stats(self, spare_share: float, proven_share: float) -> CachePolicyStats:
        """Return what was learnt, with the shares of the pool it led to."""
        return CachePolicyStats(self.rule.value, self.interval, spare_share, proven_share)

    def observe(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, dense_share: float
    ) -> None:
        """Take note of an admitted prompt.

        Args:
            block_hashes: Its chained hashes.
            num_tokens: Its tokens.
            dense_share: The part of what the pool caches that is dense rows.
        """
        spans = self._sampler.sample(block_hashes, num_tokens)
        if not spans:
            return
        self._duel.resize(max(1, int(self._sampler.capacity * dense_share)))
        if self._duel.serve([span.key for span in spans]):
            logger.debug("Prefix cache: eviction rule is now %s.", self.rule.value)
        if self._learner.serve(spans):
            logger.debug("Prefix cache: interval of checkpoints is now %d tokens.", self.interval)
