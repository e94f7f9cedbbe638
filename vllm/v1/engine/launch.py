"""Starting an engine core: in a process, a thread or the caller's own thread."""

from collections.abc import Sequence

from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.engine.attached_core import AttachedCore
from vllm.v1.engine.channel import Endpoints
from vllm.v1.engine.client import (
    AsyncEngineCoreHandle,
    CoreBuilder,
    EngineCoreHandle,
    InlineCore,
    ThreadCore,
)
from vllm.v1.engine.core_proc import load_factory
from vllm.v1.engine.data_parallel.ranks import agree_on_hashes, make_rank_config
from vllm.v1.engine.process_client import ProcessCore

# By name: the front end must not import what imports torch.
DEFAULT_CORE_FACTORY = "vllm.v1.engine.core_factory:build_engine_core"


def launch_engine_core(
    vllm_config: VllmConfig,
    *,
    core_factory: str = DEFAULT_CORE_FACTORY,
    more_endpoints: Sequence[tuple[Endpoints, ...]] = (),
) -> AsyncEngineCoreHandle:
    """Start an engine core and return at once; ``wait_ready`` on the handle blocks.

    In a process of its own, or with ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` in a thread. Several cores
    (``data_parallel_size``) look like one.

    Args:
        vllm_config: What to start; not to be changed until the core is ready.
        core_factory: ``module:function`` that makes the core, see ``core_proc.CoreFactory``.
        more_endpoints: Of front ends that share it, by data parallel rank; needs processes.
    """
    if vllm_config.parallel_config.data_parallel_size > 1:
        return _launch_several(vllm_config, core_factory, more_endpoints)
    return _launch_one(vllm_config, core_factory, more_endpoints[0] if more_endpoints else ())


def _launch_one(
    vllm_config: VllmConfig, core_factory: str, more_endpoints: tuple[Endpoints, ...] = ()
) -> AsyncEngineCoreHandle:
    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return ProcessCore(vllm_config, core_factory, more_endpoints=more_endpoints)
    return ThreadCore(_make_builder(vllm_config, core_factory))


def _launch_several(
    vllm_config: VllmConfig,
    core_factory: str,
    more_endpoints: Sequence[tuple[Endpoints, ...]] = (),
) -> AsyncEngineCoreHandle:
    # Deliberately late: hashing prompts takes imports that one core's front end does without.
    from vllm.v1.engine.data_parallel.cores import DataParallelCores  # noqa: PLC0415

    config = agree_on_hashes(vllm_config)

    if config.parallel_config.data_parallel_backend == "ray":
        from vllm.v1.engine.data_parallel.ray_core import (  # noqa: PLC0415  (seldom needed)
            launch_ray_core,
        )

        return DataParallelCores(
            config, lambda rank: launch_ray_core(make_rank_config(config, rank), core_factory)
        )

    def launch(rank: int) -> AsyncEngineCoreHandle:
        shared = more_endpoints[rank] if more_endpoints else ()
        return _launch_one(make_rank_config(config, rank), core_factory, shared)

    return DataParallelCores(config, launch)


def attach_engine_cores(
    vllm_config: VllmConfig, cores: Sequence[AttachedCore]
) -> AsyncEngineCoreHandle:
    """Return a handle of the cores that another process keeps, one for each rank."""
    if vllm_config.parallel_config.data_parallel_size == 1:
        return cores[0]
    from vllm.v1.engine.data_parallel.cores import DataParallelCores  # noqa: PLC0415  (as above)

    return DataParallelCores(vllm_config, cores.__getitem__)


def launch_sync_engine_core(
    vllm_config: VllmConfig, *, core_factory: str = DEFAULT_CORE_FACTORY
) -> EngineCoreHandle:
    """Start an engine core for a caller that waits for every step.

    In a process of its own, or with ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` in the caller's thread
    (steps then run inside ``next_message``, which a debugger can follow).
    """
    if vllm_config.parallel_config.data_parallel_size > 1:
        return _launch_several(vllm_config, core_factory)
    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return ProcessCore(vllm_config, core_factory)
    return InlineCore(_make_builder(vllm_config, core_factory))


def _make_builder(vllm_config: VllmConfig, core_factory: str) -> CoreBuilder:
    return lambda: load_factory(core_factory)(vllm_config)
