"""Parallelism; one worker for now, the fields are what other parts ask for."""

from dataclasses import dataclass

from vllm.exceptions import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel groups."""

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_index: int = 0
    data_parallel_rank: int = 0
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1 or self.pipeline_parallel_size < 1:
            raise ConfigError("parallel sizes must be at least 1.")

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size
