"""What a worker remembers of a running request."""

from collections.abc import Sequence

import numpy as np

from vllm.exceptions import InvariantError
from vllm.sampling_params import SamplingParams
from vllm.v1.request_options import PoolingParams
from vllm.v1.sample.history import make_history
from vllm.v1.sample.metadata import RowSampling
from vllm.v1.worker.block_table import RequestBlockTables
from vllm.v1.worker.request_pictures import RequestPictures

_MIN_SPARE_TOKENS = 64
UNKNOWN_TOKEN_ID = -1
"""Stands for a token whose value is still on the device."""


class RequestState:
    """Tokens, block tables and sampling of one request.

    Owns: the request's known tokens on the worker (the scheduler has its own list; both append what
    was sampled), and its block tables.

    Attributes:
        req_id: The request.
        num_prompt_tokens: Tokens of the prompt, without the answer.
        num_tokens: Known tokens: prompt and accepted answer.
        num_computed_tokens: Tokens whose KV rows exist, as the scheduler says.
        num_cached_tokens: Those of its prompt that it found computed when it came.
        text_owner: Whose later requests may be drafted what stands in its text; None: nobody's.
        tables: Block tables.
        sampling: The request's rows for the sampler.
        history: What its own tokens ask of the next one; None: nothing.
        tokens_in_flight: Step -> position of the token that it samples, whose value is not on the
            host yet; the known tokens count it.
        pictures: Those of its prompt; None: it has none.
        pooling: What is wanted in place of an answer; None: tokens are sampled.
        num_pooled: Prompt positions whose vectors were reported already, where all are wanted.
        num_prompt_logprobs: Prompt positions whose log probabilities were reported already; a
            prompt computed again after a preemption does not report them twice.
    """

    __slots__ = (
        "_token_ids",
        "history",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pooled",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "pictures",
        "pooling",
        "req_id",
        "sampling",
        "tables",
        "text_owner",
        "tokens_in_flight",
    )

    def __init__(
        self,
        req_id: str,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling_params: SamplingParams,
        rng_key: int,
        num_groups: int,
        pooling: PoolingParams | None = None,
        pictures: RequestPictures | None = None,
    ) -> None:
        self.req_id = req_id
        self.pictures = pictures
        self.pooling = pooling
        self.num_pooled = 0
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = len(token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.text_owner: str | None = None
        self.num_prompt_logprobs = 0
        self.tokens_in_flight: dict[int, int] = {}
        self.tables = RequestBlockTables(num_groups)
        self.sampling = RowSampling(sampling_params, rng_key, num_prompt_tokens)
        self.history = make_history(sampling_params, num_prompt_tokens)
        self._token_ids = np.empty(len(token_ids) + _MIN_SPARE_TOKENS, dtype=np.int64)
        self._token_ids[: self.num_tokens] = token_ids

    def get_tokens(self, start: int, end: int) -> np.ndarray:
        """Return a view of the tokens at positions start..end-1, drafts included."""
        return self._token_ids[start:end]

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """Take the scheduler's list of all known tokens."""
        self.num_tokens = 0
        self.tokens_in_flight.clear()
        self.append_tokens(token_ids)

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Add accepted tokens."""
        self._write_behind(token_ids)
        self.num_tokens += len(token_ids)

    def append_token(self, token_id: int) -> None:
        """Add one accepted token: the decode step's path."""
        if self.num_tokens == len(self._token_ids):
            self.append_tokens((token_id,))
            return
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def expect_token(self, step: int) -> None:
        """Count the token that a step samples, before its value is on the host."""
        self.tokens_in_flight[step] = self.num_tokens
        self.append_token(UNKNOWN_TOKEN_ID)

    def receive_token(self, step: int, token_id: int) -> None:
        """Take the value of an expected token; one that was given up meanwhile is nothing."""
        position = self.tokens_in_flight.pop(step, None)
        if position is not None:
            self._token_ids[position] = token_id

    def place_drafts(self, token_ids: Sequence[int]) -> None:
        """Write draft tokens behind the known ones, for this step only."""
        self._write_behind(token_ids)

    def match_num_tokens(self, num_tokens: int) -> None:
        """Drop sampled tokens that the scheduler did not keep.

        Raises:
            InvariantError: The scheduler has tokens that never reached this worker.
        """
        if num_tokens > self.num_tokens:
            raise InvariantError(
                f"request {self.req_id}: the scheduler counts {num_tokens} tokens, the worker "
                f"knows {self.num_tokens}; tokens from elsewhere must come in all_token_ids"
            )
        if num_tokens < self.num_tokens and self.tokens_in_flight:
            kept = {step: at for step, at in self.tokens_in_flight.items() if at < num_tokens}
            self.tokens_in_flight = kept
        self.num_tokens = num_tokens

    def _write_behind(self, token_ids: Sequence[int]) -> None:
        end = self.num_tokens + len(token_ids)
        if end > len(self._token_ids):
            grown = np.empty(2 * end, dtype=np.int64)
            grown[: self.num_tokens] = self._token_ids[: self.num_tokens]
            self._token_ids = grown
        self._token_ids[self.num_tokens : end] = token_ids
