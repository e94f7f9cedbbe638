"""min-p, top-k and top-p, each as a threshold per row.

All three keep the most likely tokens, so each is "drop what is less likely than t". Tokens exactly
as likely as the least likely one kept are kept too: the result then does not depend on how a sort
orders equal values, which differs between devices.
"""

import torch

# A nucleus mostly holds a few dozen tokens; sorting a vocabulary of 129k takes fifty times as long
# as selecting these (10 ms a row against 0.2). Rows that need more get more, by this factor.
_NUCLEUS_CANDIDATES = 128
_CANDIDATE_GROWTH = 16


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drop tokens less likely than ``min_p`` times the most likely one.

    Args:
        logits: fp32 ``[R, V]``.
        min_p: fp32 ``[R]`` in [0, 1]; 0 keeps all.

    Returns:
        Logits with dropped tokens at -inf.
    """
    thresholds = logits.amax(-1) + min_p.log()
    return logits.masked_fill(logits < thresholds[:, None], -torch.inf)


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, max_k: int) -> torch.Tensor:
    """Keep the ``top_k`` most likely tokens, and those tied with the last of them.

    Args:
        logits: fp32 ``[R, V]``.
        top_k: int64 ``[R]`` in 1..V.
        max_k: The largest of them.

    Returns:
        Logits with dropped tokens at -inf.
    """
    leading = logits.topk(max_k, dim=-1).values
    thresholds = leading.gather(1, top_k[:, None] - 1)
    return logits.masked_fill(logits < thresholds, -torch.inf)


def apply_top_p(
    probs: torch.Tensor, top_p: torch.Tensor, num_candidates: int = _NUCLEUS_CANDIDATES
) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches ``top_p``, ties included.

    Args:
        probs: fp32 ``[R, V]``, rows sum to 1.
        top_p: fp32 ``[R]`` in (0, 1].
        num_candidates: Tokens looked at first.

    Returns:
        Probabilities with dropped tokens at 0, not renormalised.
    """
    vocab_size = probs.shape[-1]
    candidates = min(num_candidates, vocab_size)
    thresholds, is_reached = _find_nucleus_floor(probs, top_p, candidates)
    while candidates < vocab_size and not bool(is_reached.all()):
        candidates = min(candidates * _CANDIDATE_GROWTH, vocab_size)
        short = (~is_reached).nonzero()[:, 0]
        thresholds[short], is_reached[short] = _find_nucleus_floor(
            probs[short], top_p[short], candidates
        )
    return probs.masked_fill(probs < thresholds, 0.0)


def _find_nucleus_floor(
    probs: torch.Tensor, top_p: torch.Tensor, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's least kept probability ``[R, 1]``, and whether the mass was reached."""
    if candidates < probs.shape[-1]:
        leading = probs.topk(candidates, dim=-1).values
    else:
        leading = probs.sort(dim=-1, descending=True).values
    mass = leading.cumsum(-1)
    # A token is kept while the mass before it is below top_p: the first always, as top_p > 0.
    num_kept = ((mass - leading) < top_p[:, None]).sum(-1, keepdim=True)
    return leading.gather(1, num_kept - 1), mass[:, -1] >= top_p
