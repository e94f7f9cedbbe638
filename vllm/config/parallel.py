"""Parallelism: sizes of the groups, what runs the workers, who gets a request."""

from dataclasses import dataclass
from typing import Literal

from vllm.exceptions import ConfigError

DATA_PARALLEL_BACKENDS = ("mp", "ray")
DATA_PARALLEL_ROUTINGS = ("prefix", "round-robin")
MAX_DATA_PARALLEL_SIZE = 64
EXECUTOR_BACKENDS = ("uni", "mp", "ray")


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel groups.

    Attributes:
        data_parallel_size: Engine cores behind one front end.
        data_parallel_size_local: The same, where all are on this machine; None: as it is.
        data_parallel_rank: The core that this configuration is for.
        data_parallel_index: The same, of the labels of metrics and the ports of KV events.
        data_parallel_backend: "mp": processes of this machine; "ray": actors of a ray cluster.
        data_parallel_address: Of the front end, as cores on other machines reach it.
        data_parallel_routing: Who gets a request: the core with the longest cached "prefix", or
            "round-robin" to compare with.
        data_parallel_fault_tolerance: A core that dies takes only its own requests along.
        data_parallel_restarts: How often each core is started again then.
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
    data_parallel_size_local: int | None = None
    data_parallel_backend: str = "mp"
    data_parallel_address: str = "127.0.0.1"
    data_parallel_routing: Literal["prefix", "round-robin"] = "prefix"
    data_parallel_fault_tolerance: bool = False
    data_parallel_restarts: int = 0
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
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
        self._check_data_parallel()

    def _check_data_parallel(self) -> None:
        size, local = self.data_parallel_size, self.data_parallel_size_local
        if not 1 <= size <= MAX_DATA_PARALLEL_SIZE:
            raise ConfigError(
                f"data_parallel_size={size} is out of range: use 1 to {MAX_DATA_PARALLEL_SIZE}."
            )
        if local is not None and local != size:
            raise ConfigError(
                f"data_parallel_size_local={local} must be data_parallel_size={size}: cores on "
                "other machines are started by data_parallel_backend='ray' alone, without it."
            )
        for name, allowed in (
            ("data_parallel_backend", DATA_PARALLEL_BACKENDS),
            ("data_parallel_routing", DATA_PARALLEL_ROUTINGS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is unknown: use {' or '.join(allowed)}."
                )
        if self.data_parallel_restarts < 0:
            raise ConfigError(
                f"data_parallel_restarts={self.data_parallel_restarts} must be at least 0."
            )
        if self.data_parallel_restarts and not self.data_parallel_fault_tolerance:
            raise ConfigError(
                f"data_parallel_restarts={self.data_parallel_restarts} needs "
                "data_parallel_fault_tolerance: without it the server ends with its first core."
            )

    @property
    def num_local_cores(self) -> int:
        """Engine cores that share a machine; of a cluster's, at most."""
        return self.data_parallel_size

    @property
    def first_device(self) -> int:
        """Index on its machine of the first device of this core."""
        if self.data_parallel_backend == "ray":
            return 0  # an actor sees its own devices alone
        return self.data_parallel_rank * self.world_size

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size
