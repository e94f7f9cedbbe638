"""The tensor-parallel group that parallel layers ask; a single process needs no communication."""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm.exceptions import ConfigError


class TensorParallelGroup(Protocol):
    """What parallel layers ask of the processes that share one model."""

    @property
    def rank(self) -> int:
        """This process's index, 0..size-1."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the processes; the same bits on each. May write into ``tensor``."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the processes' tensors along the last axis, in rank order."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker stands among those that share its model.

    Attributes:
        rank: Its index, 0..size-1.
        size: Number of workers.
        local_rank: Index of its device on its machine.
        local_size: Workers on its machine.
        rendezvous: Where the workers meet, a URL; empty for a single one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous: str = ""


ALONE = WorkerPlace()
"""The place of a single worker."""


class SingleProcessGroup:
    """The group of one: every collective is the identity."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself."""
        return tensor

    def close(self) -> None:
        """Does nothing."""


def shard_size(name: str, total: int, group: TensorParallelGroup) -> int:
    """Returns this process's share of an axis.

    Raises:
        ConfigError: The axis does not divide evenly.
    """
    if total % group.size:
        raise ConfigError(
            f"{name} is {total}, which --tensor-parallel-size {group.size} does not divide"
        )
    return total // group.size
