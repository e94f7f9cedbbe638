"""Parallelism: sizes of the groups, what runs the workers, who gets a request."""

from dataclasses import dataclass
from typing import Literal

from vllm.config.options import AT_LEAST_ONE, NOT_NEGATIVE, check_options, option, within
from vllm.exceptions import ConfigError

DATA_PARALLEL_BACKENDS = ("mp", "ray")
DATA_PARALLEL_ROUTINGS = ("prefix", "round-robin")
MAX_DATA_PARALLEL_SIZE = 64
EXECUTOR_BACKENDS = ("uni", "mp", "ray")
_GROUP = "data parallel"


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel groups.

    Attributes:
        data_parallel_rank: The core that this configuration is for.
        data_parallel_index: The same, of the labels of metrics and the ports of KV events.
        cores_see_all_devices: Of their machine; else each sees its own alone.
    """

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = option(
        1,
        "Workers that share the model, each with a part of every matrix.",
        group="parallelism",
        also=("-tp",),
        metavar="N",
        limit=AT_LEAST_ONE,
        more="See `docs/distributed.md`.",
    )
    data_parallel_size: int = option(
        1,
        "Engine cores behind this server, each with a model and a KV cache of its own. Default: 1.",
        group=_GROUP,
        also=("-dp",),
        parse=int,
        metavar="N",
        limit=within(1, MAX_DATA_PARALLEL_SIZE),
    )
    data_parallel_index: int = 0
    data_parallel_rank: int = 0
    cores_see_all_devices: bool = True
    data_parallel_size_local: int | None = option(
        None,
        "The same number: cores on other machines take --data-parallel-backend ray.",
        group=_GROUP,
        also=("-dpl",),
        parse=int,
        metavar="N",
    )
    data_parallel_backend: str = option(
        "mp",
        "mp: processes; ray: actors of a ray cluster (needs the package ray).",
        group=_GROUP,
        also=("-dpb",),
        choices=DATA_PARALLEL_BACKENDS,
    )
    data_parallel_address: str = option(
        "127.0.0.1",
        "Of this machine, as cores on a ray cluster's others reach it. Default: 127.0.0.1.",
        group=_GROUP,
        also=("-dpa",),
        metavar="HOST",
    )
    data_parallel_routing: Literal["prefix", "round-robin"] = option(
        "prefix",
        "Who gets a request: the core that caches most of its prompt, unless it has too much to "
        "do; or each in turn, to compare. Default: prefix.",
        group=_GROUP,
        choices=DATA_PARALLEL_ROUTINGS,
    )
    data_parallel_fault_tolerance: bool = option(
        False,
        "A core that dies takes only its own requests along; else the server ends.",
        group=_GROUP,
    )
    data_parallel_restarts: int = option(
        0,
        "How often each core that died is started again, with fault tolerance. Default: 0.",
        group=_GROUP,
        parse=int,
        metavar="N",
        limit=NOT_NEGATIVE,
    )
    warm_pull_bytes: int = option(
        0,
        "Most that an engine core that is started, or started again, beside others pulls of what "
        "these use most, before it serves (1G). 0: it begins with an empty cache. Default: 0.",
        group=_GROUP,
        limit=NOT_NEGATIVE,
        more="See `docs/fleet.md`.",
    )
    warm_pull_seconds: float = option(
        10.0,
        "For how long at most. Default: 10.",
        group=_GROUP,
        parse=float,
        metavar="S",
        limit=within(1, 3600),
    )
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = option(
        False,
        "Those workers hold whole experts instead of a part of each.",
        group="parallelism",
        also=("-ep",),
    )
    distributed_executor_backend: str | None = option(
        None,
        "uni: one worker in the engine core's process; mp: a process each on this machine; ray: "
        "actors of a Ray cluster. Default: uni for one worker, else mp.",
        group="parallelism",
        choices=EXECUTOR_BACKENDS,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.pipeline_parallel_size < 1:
            raise ConfigError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} must be at least 1."
            )
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend='uni' runs one worker, but {self.world_size} were "
                "asked for: use mp or ray, or tensor_parallel_size=1."
            )
        self._check_data_parallel()

    def _check_data_parallel(self) -> None:
        size, local = self.data_parallel_size, self.data_parallel_size_local
        if local is not None and local != size:
            raise ConfigError(
                f"data_parallel_size_local={local} must be data_parallel_size={size}: cores on "
                "other machines are started by data_parallel_backend='ray' alone, without it."
            )
        if self.data_parallel_restarts and not self.data_parallel_fault_tolerance:
            raise ConfigError(
                f"data_parallel_restarts={self.data_parallel_restarts} needs "
                "data_parallel_fault_tolerance: without it the server ends with its first core."
            )

        if self.warm_pull_bytes and size > 1 and self.data_parallel_backend == "ray":
            raise ConfigError(
                f"warm_pull_bytes={self.warm_pull_bytes} is not for data_parallel_backend='ray': "
                "cores answer each other on this machine alone. Use a fleet (docs/fleet.md)."
            )

    @property
    def num_local_cores(self) -> int:
        """Engine cores that share a machine; of a cluster's, at most."""
        return self.data_parallel_size

    @property
    def first_device(self) -> int:
        """Index on its machine of the first device of this core."""
        if self.data_parallel_backend == "ray" or not self.cores_see_all_devices:
            return 0  # an actor sees its own devices alone
        return self.data_parallel_rank * self.world_size

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size
