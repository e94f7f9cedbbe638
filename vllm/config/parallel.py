"""Parallelism: sizes of the groups, and what runs the workers."""

from dataclasses import dataclass

from vllm.exceptions import ConfigError

EXECUTOR_BACKENDS = ("uni", "mp", "ray")


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel groups.

    Attributes:
        enable_expert_parallel: The workers of a replica hold whole experts, not parts of each.
        distributed_executor_backend: "uni" (one worker in the engine core's process), "mp" (a
            process each on this machine), "ray" (actors of a Ray cluster); None: as the number of
            workers says.
    """

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_index: int = 0
    data_parallel_rank: int = 0
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1 or self.pipeline_parallel_size < 1:
            raise ConfigError("parallel sizes must be at least 1.")
        backend = self.distributed_executor_backend
        if backend is not None and backend not in EXECUTOR_BACKENDS:
            raise ConfigError(
                f"distributed_executor_backend={backend!r} is unknown: use one of "
                f"{', '.join(EXECUTOR_BACKENDS)}."
            )
        if backend == "uni" and self.world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend='uni' runs one worker, but {self.world_size} were "
                "asked for: use mp or ray, or tensor_parallel_size=1."
            )

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size
