"""What the model runner asks of a drafter."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch

from vllm.v1.worker.step_input import StepInput


class Proposer(Protocol):
    """Guesses the tokens that follow those a step accepted. Keeps no state per request.

    Attributes:
        reads_all_rows: Whether it reads the streams of every row of a step; else those of sampled
            rows alone, so that others need not be computed to the end.
    """

    reads_all_rows: ClassVar[bool]

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        """Draft for every request of a step.

        Args:
            step: The step as it ran; its requests know their accepted tokens already.
            streams: ``[T, n, D]`` residual streams of its rows, before the collapse.
            rebuilds: Requests whose row before the step's first must be made anew, because another
                token followed when it was made, and the block in which it was found.

        Returns:
            Draft tokens by request, in batch order; none for a chunk that was not sampled.
        """

    def forget(self, block_ids: Sequence[int]) -> None:
        """Overwrite what is kept of blocks whose content nobody may read again."""
