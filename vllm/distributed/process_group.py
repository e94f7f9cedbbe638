"""The processes that share one model, over torch.distributed."""

from datetime import timedelta

import torch
from torch import distributed

# Ranks start together: what keeps one from the meeting (imports on a slow machine) ends in this.
_MIN_TIMEOUT_S = 120.0


class TorchProcessGroup:
    """A ``TensorParallelGroup`` of real processes.

    Every rank gets the same bits from a collective: gloo, NCCL and HCCL make each sum once and pass
    it on. Ranks that branch on what they computed (routers, samplers) therefore branch alike.

    Args:
        rank: This process's index.
        size: Number of processes.
        backend: Of torch.distributed: "gloo", "nccl" or "hccl".
        rendezvous: Where the ranks meet, a ``file://`` or ``tcp://`` URL, the same on all.
        timeout_s: Longest wait for the others in one collective; at least two minutes.

    Raises:
        RuntimeError: The ranks did not meet in time.

    Owns: the process's default group of torch.distributed.
    """

    def __init__(
        self, rank: int, size: int, backend: str, rendezvous: str, timeout_s: float
    ) -> None:
        self._rank, self._size = rank, size
        distributed.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=max(timeout_s, _MIN_TIMEOUT_S)),
        )

    @property
    def rank(self) -> int:
        """This process's index."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the processes.

        Mutates:
            tensor, where it is contiguous; the sum is what is returned.

        Raises:
            RuntimeError: A process is gone, or too late.
        """
        summed = tensor.contiguous()
        distributed.all_reduce(summed)
        return summed

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the processes' tensors along the last axis, in rank order.

        Raises:
            RuntimeError: A process is gone, or too late.
        """
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._size)]
        distributed.all_gather(parts, own)
        return torch.cat(parts, -1)

    def close(self) -> None:
        """Leave the group."""
        distributed.destroy_process_group()
