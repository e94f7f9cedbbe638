"""From logits to tokens.

The order is: raw log probabilities; the edits (``edits.py``: grammar, allowed tokens, bad words,
``min_tokens``, bias, penalties); greedy rows take the argmax; the others divide by the temperature,
then min-p, top-k and top-p narrow the choice, and one uniform number per row
picks a token by inverting the cumulative distribution over the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.counter_rng import draw_uniforms
from vllm.v1.sample.edits import StepEdits, apply_edits
from vllm.v1.sample.filters import apply_min_p, apply_top_k, apply_top_p
from vllm.v1.sample.logprobs import gather_sampled_logprobs
from vllm.v1.sample.metadata import RandomRows, RowSubset, SamplingMetadata

# A draw is put strictly below the total mass, where rounding could put it on it.
_BELOW_ONE = 1.0 - 2.0**-23

# (logits fp32 [R, V], rows to draw, uniforms fp32 [N] in [0, 1) on the host) -> tokens int64 [N] on
# the logits' device. It may overwrite the rows it draws.
DrawTokens = Callable[[torch.Tensor, RandomRows, np.ndarray], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Sampled tokens of one step that the host has not asked for.

    Attributes:
        token_ids: int64 ``[R]``, where the logits are.
        logprobs: As ``SamplerOutput``.
    """

    token_ids: torch.Tensor
    logprobs: LogprobsLists | None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Sampled tokens of one step.

    Attributes:
        token_ids: int64 ``[R]``, on the host.
        logprobs: All rows', if any row asked; ``cu_num_generated_tokens`` is left to the caller.
    """

    token_ids: np.ndarray
    logprobs: LogprobsLists | None


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    positions: np.ndarray,
    step_edits: StepEdits | None = None,
    draw: DrawTokens | None = None,
) -> SamplerOutput:
    """Sample one token per row and wait for it; see ``sample_on_device``."""
    sampled = sample_on_device(logits, metadata, positions, step_edits, draw)
    return SamplerOutput(sampled.token_ids.cpu().numpy(), sampled.logprobs)


def sample_on_device(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    positions: np.ndarray,
    step_edits: StepEdits | None = None,
    draw: DrawTokens | None = None,
) -> DeviceSample:
    """Sample one token per row; the host waits for log probabilities alone, where any row asks.

    Args:
        logits: fp32 ``[R, V]``.
        metadata: Of these rows.
        positions: int64 ``[R]``: the position in its sequence that each sampled token will have.
        step_edits: What the tokens before the rows ask for; None: nothing.
        draw: How random rows are drawn; None: by torch.

    Mutates: ``logits``, by the edits and ``draw``.
    """
    raw_logits = logits
    stops = None
    if metadata.forbidden_stops is not None:
        stops = metadata.forbidden_stops.find(positions, logits.device)
    is_edited = not (metadata.edits is None and step_edits is None and stops is None)
    if metadata.num_logprobs is not None and (is_edited or metadata.random is not None):
        # Reported log probabilities are those of the model, whatever it was made to say; and draws
        # overwrite what they draw from.
        raw_logits = logits.clone()
    if is_edited:
        apply_edits(logits, metadata.edits, step_edits, stops)
    token_ids = _choose(logits, metadata.random, positions, draw or draw_tokens)
    logprobs = None
    if metadata.num_logprobs is not None:
        logprobs = gather_sampled_logprobs(
            raw_logits, token_ids, metadata.num_logprobs, metadata.logprob_ids
        )
    return DeviceSample(token_ids, logprobs)


def _choose(
    logits: torch.Tensor, random: RandomRows | None, positions: np.ndarray, draw: DrawTokens
) -> torch.Tensor:
    if random is None:
        return find_highest(logits)
    uniforms = draw_uniforms(random.rng_keys, positions[random.rows_host])
    if random.rows is None:
        return draw(logits, random, uniforms)
    token_ids = find_highest(logits)
    token_ids[random.rows] = draw(logits, random, uniforms)
    return token_ids


def find_highest(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of each row's highest logits: fp32 ``[R, V]`` to int64 ``[R]``."""
    if logits.device.type == "cpu":
        # Torch looks at one value after another there, numpy at a vector: 10 us instead of 2 ms
        # for 32 rows of 4,096.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def draw_tokens(logits: torch.Tensor, random: RandomRows, uniforms: np.ndarray) -> torch.Tensor:
    """Draw by torch; see ``DrawTokens``."""
    rows = logits if random.rows is None else logits[random.rows]
    scaled = rows / random.temperature
    if random.min_p is not None:
        scaled = _update(
            scaled, random.min_p, apply_min_p(_pick(scaled, random.min_p), random.min_p.values)
        )
    if random.top_k is not None:
        kept = apply_top_k(
            _pick(scaled, random.top_k), random.top_k.values, int(random.top_k.max_value)
        )
        scaled = _update(scaled, random.top_k, kept)
    probs = scaled.softmax(-1)
    if random.top_p is not None:
        kept = apply_top_p(_pick(probs, random.top_p), random.top_p.values)
        probs = _update(probs, random.top_p, kept)
    return invert_cdf(probs, torch.from_numpy(uniforms).to(logits.device))


def invert_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return per row the first token whose cumulative mass exceeds ``uniform * total``.

    A token without mass is never returned: its cumulative mass is its predecessor's.

    Args:
        probs: fp32 ``[N, V]``, not negative; need not sum to 1.
        uniforms: fp32 ``[N]`` in [0, 1).
    """
    mass = probs.cumsum(-1)
    total = mass[:, -1:]
    targets = torch.minimum(uniforms[:, None] * total, total * _BELOW_ONE)
    found = torch.searchsorted(mass, targets, right=True)[:, 0]
    # Only NaN logits leave the range; the engine must survive them.
    return found.clamp_max(probs.shape[-1] - 1)


def _pick(values: torch.Tensor, subset: RowSubset) -> torch.Tensor:
    return values if subset.rows is None else values[subset.rows]


def _update(values: torch.Tensor, subset: RowSubset, kept: torch.Tensor) -> torch.Tensor:
    return kept if subset.rows is None else values.index_copy(0, subset.rows, kept)
