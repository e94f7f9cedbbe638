"""From a step's token ids to the rows of the tables that stand for their n-grams."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm.model_executor.models.deepseek_v41.ngram_plan import NgramPlan
from vllm.v1.attention.step_tables import PreviousTokens


class NgramRows:
    """Finds rows.

    Args:
        plan: The tables.
        folded: int64 [V]: the folded id of every token id.
        image_token_id: Ends n-grams; None: nothing does.
    """

    def __init__(self, plan: NgramPlan, folded: np.ndarray, image_token_id: int | None) -> None:
        self._plan = plan
        self._folded = torch.from_numpy(folded)
        self._pad = int(folded[plan.pad_token_id])
        self._image_token_id = image_token_id
        tables = range(len(plan.layer_ids))
        self._multipliers = [torch.tensor(plan.find_multipliers(table)) for table in tables]
        self._primes = [torch.tensor(plan.find_primes(table)) for table in tables]
        self._offsets = [torch.tensor(plan.find_offsets(table)) for table in tables]

    def find(self, token_ids: torch.Tensor, previous: PreviousTokens) -> Sequence[torch.Tensor]:
        """Returns the rows int64 [T, R] of each table, of token ids [T]."""
        tokens = self._find_tokens(token_ids, previous)
        return [self._hash(tokens, table) for table in range(len(self._primes))]

    def find_images(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Returns bool [T], True for those that take nothing from the tables; None: none may."""
        return None if self._image_token_id is None else token_ids == self._image_token_id

    def _find_tokens(self, token_ids: torch.Tensor, previous: PreviousTokens) -> torch.Tensor:
        """Returns the folded ids [T, longest] of each token and those before it, newest first."""
        ids = torch.cat([previous.ids, token_ids, token_ids.new_zeros(1)])
        before = ids[previous.index]
        is_there = previous.index >= 0
        if self._image_token_id is not None:
            # An image also hides what stands before it.
            is_there = is_there & (before != self._image_token_id)
        is_there = is_there.cumprod(1).bool()
        folded = torch.where(is_there, self._folded[before], self._pad)
        return torch.cat([self._folded[token_ids].unsqueeze(1), folded], 1)

    def _hash(self, tokens: torch.Tensor, table: int) -> torch.Tensor:
        # No product is as large as 2^63: multipliers are below it divided by the folded ids.
        products = tokens * self._multipliers[table]
        mixed, by_length = products[:, 0], []
        for distance in range(1, self._plan.longest):
            mixed = mixed ^ products[:, distance]
            by_length.append(mixed.unsqueeze(1).expand(-1, self._plan.num_heads))
        return torch.cat(by_length, 1) % self._primes[table] + self._offsets[table]
