"""``vllm serve`` with the prefix cache as it was before hits at one unit, to compare with.

    python -m benchmarks.old_server [flags of vllm serve]

Hits are whole blocks of all groups (the least common multiple of the block sizes: 4,096 tokens of
DeepSeek-V4 at ``--block-size 32``), checkpoints stand at every such boundary and nowhere else
(interval ``none``), and a prefill step takes pool blocks for every window row that it writes,
those that die within the step included. Scheduler, model and kernels are ours.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.policies import VariantPolicy
from vllm.config import VllmConfig
from vllm.entrypoints.cli.main import make_parser
from vllm.entrypoints.cli.serve import prepare
from vllm.entrypoints.openai.api_server import run_server
from vllm.platforms import current_platform
from vllm.v1.core.cache_settings import CacheSettings
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.kv_cache_setup import KVCachePlan
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager


def old_policy(config: KVCacheConfig) -> RetentionPolicy:
    """Return the policy: every whole block of all groups, and nothing cleverer."""
    geometry = CacheGeometry.from_config(config)
    return VariantPolicy(
        geometry,
        "old",
        interval=geometry.unit,
        keeps_lean=False,
        keeps_junctions=False,
        supersedes=False,
        keeps_coarse=False,
        private_window=False,
    )


class OldScheduler(Scheduler):
    """The scheduler over a cache of whole blocks."""

    def __init__(self, config: VllmConfig, plan: KVCachePlan, log_stats: bool) -> None:
        unit = plan.hash_block_size
        super().__init__(
            config,
            plan.scheduler_config,
            StructuredOutputManager(config),
            block_size=unit,
            hash_block_size=unit,
            log_stats=log_stats,
        )
        settings = CacheSettings(
            kv_cache_config=plan.scheduler_config,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            scheduler_block_size=unit,
            hash_block_size=unit,
            enable_caching=config.cache_config.enable_prefix_caching,
            policy=old_policy(plan.scheduler_config),
        )
        self.kv_cache_manager = KVCacheManager.from_settings(settings)


class OldCore(EngineCore):
    """The engine core with that scheduler."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: Callable[[VllmConfig], Executor]
    ) -> None:
        self._plan: KVCachePlan | None = None
        super().__init__(vllm_config, executor_class)
        assert self._plan is not None
        log_stats = vllm_config.observability_config.log_stats
        self.scheduler = OldScheduler(vllm_config, self._plan, log_stats)

    def _set_up_kv_cache(self, vllm_config: VllmConfig) -> KVCachePlan:
        plan = super()._set_up_kv_cache(vllm_config)
        groups = plan.scheduler_config.kv_cache_groups
        unit = math.lcm(*(group.kv_cache_spec.block_size for group in groups))
        configs = [replace(config, hit_unit=unit) for config in plan.worker_configs]
        scheduler_config = replace(plan.scheduler_config, hit_unit=unit)
        self._plan = KVCachePlan(configs, scheduler_config, unit, unit)
        return self._plan


def build_old_core(vllm_config: VllmConfig) -> EngineCore:
    """Make the engine core of this process."""
    return OldCore(current_platform.check_and_update_config(vllm_config), UniProcExecutor)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; returns the exit code."""
    args = make_parser().parse_args(["serve", *(sys.argv[1:] if argv is None else argv)])
    return run_server(*prepare(args), core_factory="benchmarks.old_server:build_old_core")


if __name__ == "__main__":
    sys.exit(main())
