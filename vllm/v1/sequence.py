"""A sequence of tokens on its way through the engine: what is known, computed, drafted, in flight.

        0          num_computed_tokens   num_tokens
        |-- KV in the cache --|-- known --|-- spec_token_ids --|

With asynchronous scheduling some computed tokens are placeholders: their values come with the
outputs of steps in flight, so ``num_computed_tokens`` may exceed ``num_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.exceptions import UserInputError
from vllm.v1.utils import ConstantList

if TYPE_CHECKING:
    import torch

    from vllm.utils.hashing import BlockHash


class TokenSequence:
    """Tokens, their hashes, and how far they are computed.

    Owner: the Scheduler, through the methods below; a KV manager reads it.

    Attributes:
        num_computed_tokens: Tokens whose KV is in the cache (or being computed in this step).
        block_hashes: Hashes of the full units of its tokens; grows in place with them.
        spec_token_ids: Draft tokens to verify in the next step.
        num_output_placeholders: Tokens scheduled but not sampled yet (asynchronous scheduling).
        async_tokens_to_discard: Tokens in flight that were given up.
        is_prefill_chunk: Whether this step leaves prompt tokens to compute.

    Args:
        request_id: Whose it is.
        prompt_token_ids: The prompt; None: it comes as embeddings only.
        prompt_embeds: The prompt's embeddings ``[T, H]``, if given.
        block_hasher: Returns the hashes of full units that have none yet.
        block_hashes: Those that are known already.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        prompt_embeds: torch.Tensor | None,
        block_hasher: Callable[[Any], list[BlockHash]] | None,
        block_hashes: Sequence[BlockHash] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.prompt_embeds = prompt_embeds
        # Digests of embedding slices by (first token, one past the last).
        self._prompt_embeds_per_block_hashes: dict[tuple[int, int], bytes] = {}
        self.num_prompt_tokens = self._count_prompt_tokens()
        self._output_token_ids: list[int] = []
        self._all_token_ids: list[int] = (
            [0] * self.num_prompt_tokens if prompt_token_ids is None else list(prompt_token_ids)
        )
        # Others read tokens through these: only append_output_token_ids changes them.
        self.output_token_ids = ConstantList(self._output_token_ids)
        self.all_token_ids = ConstantList(self._all_token_ids)

        self.num_computed_tokens = 0
        self.spec_token_ids: list[int] = []
        self.num_output_placeholders = 0
        self.async_tokens_to_discard = 0
        self.is_prefill_chunk = False

        self._block_hasher = block_hasher
        self.block_hashes: list[BlockHash] = list(block_hashes)

    def _count_prompt_tokens(self) -> int:
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        if self.prompt_embeds is not None:
            return len(self.prompt_embeds)
        raise UserInputError(
            f"Request {self.request_id} has no prompt: give prompt_token_ids or prompt_embeds."
        )

    # ------------------------------------------------------------------ tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self._all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Tokens known, and drafts to verify."""
        return len(self._all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return len(self._output_token_ids)

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Add generated tokens; hashes of newly full units follow."""
        if isinstance(token_ids, int):
            self._output_token_ids.append(token_ids)
            self._all_token_ids.append(token_ids)
        else:
            self._output_token_ids.extend(token_ids)
            self._all_token_ids.extend(token_ids)
        if self._block_hasher is not None:
            self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Append the hashes of full units that have none yet."""
        if self._block_hasher is not None:
            hashes = self._block_hasher(self)
            if hashes:
                self.block_hashes.extend(hashes)

    # ------------------------------------------------------------------ drafts

    def propose_drafts(self, token_ids: list[int]) -> None:
        """Take draft tokens to verify in the next step; they replace earlier ones."""
        self.spec_token_ids = token_ids

    def take_drafts(self, num_tokens: int) -> list[int]:
        """Drain the drafts into a step that has room for ``num_tokens`` of them.

        Returns:
            The first ones. The others go too: drafts serve one step only.
        """
        drafts, self.spec_token_ids = self.spec_token_ids, []
        return drafts[: max(0, num_tokens)]

    def reject_drafts(self, num_tokens: int) -> None:
        """Take back draft tokens that verification refused.

        A request preempted since they were scheduled has no computed token to take back.
        """
        if self.num_computed_tokens > 0:
            self.num_computed_tokens -= num_tokens
        if self.num_output_placeholders > 0:
            self.num_output_placeholders -= num_tokens

    # ---------------------------------------------------------- tokens in flight

    @property
    def num_settled_tokens(self) -> int:
        """Computed tokens that stand, whatever the steps in flight bring."""
        return self.num_computed_tokens - self.num_output_placeholders

    def expect_tokens(self, num_drafts: int, next_drafts: list[int]) -> None:
        """Count the tokens of a step that has not returned: one, and its drafts.

        Args:
            num_drafts: Drafts the step verifies.
            next_drafts: What stands for the drafts that the worker makes meanwhile.
        """
        self.num_output_placeholders += 1 + num_drafts
        self.spec_token_ids = next_drafts

    def receive_tokens(self, num_tokens: int) -> None:
        """Count tokens of a step in flight as arrived."""
        # Never below zero: a worker may return tokens for a chunk that asked for none.
        self.num_output_placeholders = max(0, self.num_output_placeholders - num_tokens)

    def discard_tokens_in_flight(self) -> None:
        """Give up the tokens of steps in flight: the cache they rest on goes away."""
        self.async_tokens_to_discard += self.num_output_placeholders
        self.num_output_placeholders = 0

    def try_discard(self) -> bool:
        """Whether the tokens that just arrived were given up; one step's worth is."""
        if self.async_tokens_to_discard == 0:
            return False
        self.async_tokens_to_discard -= 1
        return True

    # ---------------------------------------------------------------- progress

    def advance(self, num_tokens: int) -> None:
        """Count tokens as computed: they were scheduled in this step."""
        self.num_computed_tokens += num_tokens
        self.is_prefill_chunk = self.num_computed_tokens < (
            self.num_tokens + self.num_output_placeholders
        )

    def resume_at(self, num_computed_tokens: int) -> None:
        """Go on from fewer tokens than were counted: what follows them must be computed (again).

        Drafts go: they followed a token that is not computed any more.
        """
        self.num_computed_tokens = num_computed_tokens
        self.spec_token_ids = []
