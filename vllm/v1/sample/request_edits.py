"""What a request changes in its logits at every position, as arrays made once."""

from dataclasses import dataclass

import numpy as np

from vllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestEdits:
    """The edits that depend on nothing but the parameters; None: not asked for.

    Attributes:
        bias_ids: int64 ``[B]``: tokens with a bias.
        bias_values: float32 ``[B]``.
        allowed_ids: int64 ``[A]``: the only tokens that may be sampled.
        banned_ids: int64 ``[N]``: bad words of one token.
    """

    bias_ids: np.ndarray | None
    bias_values: np.ndarray | None
    allowed_ids: np.ndarray | None
    banned_ids: np.ndarray | None


def make_request_edits(params: SamplingParams) -> RequestEdits | None:
    """Lay out a request's edits; None when it asks for none."""
    bias = params.logit_bias or {}
    banned = [ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1]
    if not bias and not banned and params.allowed_token_ids is None:
        return None
    return RequestEdits(
        bias_ids=np.array(list(bias), dtype=np.int64) if bias else None,
        bias_values=np.array(list(bias.values()), dtype=np.float32) if bias else None,
        allowed_ids=(
            None
            if params.allowed_token_ids is None
            else np.array(params.allowed_token_ids, dtype=np.int64)
        ),
        banned_ids=np.array(banned, dtype=np.int64) if banned else None,
    )
