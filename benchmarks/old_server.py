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

from vllm.config import VllmConfig
from vllm.entrypoints.cli.main import make_parser
from vllm.entrypoints.cli.serve import prepare
from vllm.entrypoints.openai.api_server import run_server
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.kv_cache_setup import KVCachePlan
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.structured_output import StructuredOutputManager


class OldCore(EngineCore):
    """The engine core over hits at whole blocks (``vllm/v1/core/whole_block``).

    The worker's pages are as ever: only what the scheduler caches, and takes blocks for, differs.
    """

    _plan: KVCachePlan

    def __init__(
        self, vllm_config: VllmConfig, executor_class: Callable[[VllmConfig], Executor]
    ) -> None:
        super().__init__(vllm_config, executor_class)
        config = replace(
            self._plan.scheduler_config, hit_unit=None, prefix_cache_retention_interval="none"
        )
        sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self.scheduler = Scheduler(
            vllm_config,
            config,
            StructuredOutputManager(vllm_config),
            block_size=math.lcm(*sizes),
            hash_block_size=math.gcd(*sizes),
            log_stats=vllm_config.observability_config.log_stats,
        )
        if vllm_config.cache_config.enable_prefix_caching:
            hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
            self._block_hasher = get_request_block_hasher(math.gcd(*sizes), hash_fn)

    def _set_up_kv_cache(self, vllm_config: VllmConfig) -> KVCachePlan:
        self._plan = super()._set_up_kv_cache(vllm_config)
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
