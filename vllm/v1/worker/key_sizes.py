"""What keys are divided by before they are rounded to eight bits: a size for each channel.

Some channels of keys are many times as large as others, in every token. Under one scale for a head
the small ones would keep few bits, so keys are stored as k / size and met by q * size: the product
is the same. Sizes are powers of two, by which floats are multiplied without rounding.

A head's values are spread over each other before they are rounded (``Int8Rows``), so that a row's
step follows the sum of (k / size)^2 and falls on all channels alike. A channel's share of it in a
score is q * size. What the step and the shares come to is least where a size is the root of k / q.

Sizes follow from the weights alone: a fixed sequence of tokens runs through the loaded model, over
fp32 rows.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256

import torch

from vllm.distributed.parallel_state import TensorParallelGroup
from vllm.model_executor.models.decoder.kv_cache import cache_name
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.v1.worker.one_request import OneRequest

NUM_TOKENS = 128
"""Tokens that sizes are measured on."""

# Knuth's constants of a linear congruential generator.
_FACTOR, _ADDEND, _MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64
_DIGEST_DIGITS = 16
# Told apart from the digests of rows that were made in another way from the same sizes.
_ROWS = b"spread heads"
# The first token of a text is often unlike all others.
_SHARE_BELOW = 0.98
# So that neither quotients nor products leave the floats.
_MAX_EXPONENT = 40


def draw_token_ids(vocab_size: int) -> list[int]:
    """Return the tokens: every power of two up to the vocabulary is as likely as the next.

    Vocabularies list common tokens first, so that these are common ones as a text's are.
    """
    state, token_ids = 1, []
    num_powers = max(1, (vocab_size - 1).bit_length())
    for _ in range(NUM_TOKENS):
        drawn = []
        for _ in range(2):
            state = (state * _FACTOR + _ADDEND) % _MODULUS
            drawn.append(state >> 33)
        power = 1 << drawn[0] % num_powers
        token_ids.append(min(power + drawn[1] % power, vocab_size - 1))
    return token_ids


@torch.inference_mode()
def measure_key_sizes(
    model: DecoderForCausalLM, make_request: Callable[[], OneRequest]
) -> dict[str, torch.Tensor]:
    """Return by cache name the sizes of its keys' channels, fp32 [K, d].

    Args:
        model: With its weights.
        make_request: Makes a request of the model, over fp32 rows that are all stored, that takes
            ``NUM_TOKENS``.
    """
    config = model.config
    # By one thread a step has the same sums whatever the machine's threads.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with model.noting_queries(NUM_TOKENS) as noted:
            request = make_request()
            request.run(torch.tensor(draw_token_ids(config.vocab_size)))
    finally:
        torch.set_num_threads(num_threads)
    squares: dict[str, torch.Tensor] = {}
    for name, queries in noted:
        squares[name] = squares.get(name, 0.0) + queries.double().square().mean((0, 2))
    sizes = {}
    for index, layer in enumerate(config.layers):
        if layer.kv_owner is not None or layer.recurrence is not None:
            continue
        name = cache_name(index)
        rows = request.pages[name][1:].flatten(0, 1)[:NUM_TOKENS].double()
        head_dim = config.shape_of(layer).head_dim
        keys = rows.view(NUM_TOKENS, 2, -1, head_dim)[:, 0]
        num_turned = 0 if layer.rope is None else layer.rope.dim
        sizes[name] = find_sizes(keys, squares[name], num_turned)
    return sizes


def find_sizes(keys: torch.Tensor, squares: torch.Tensor, num_turned: int) -> torch.Tensor:
    """Return the powers of two nearest to the roots of how keys compare to queries: fp32 [K, d].

    A key's channel is as large as what all but a few tokens stay below. Positions turn pairs of
    channels into each other: both get the size of the two together.

    Args:
        keys: fp64 [T, K, d].
        squares: Of the queries that meet them, on average: fp64 [K, d].
        num_turned: First values of a head that are turned: pairs (i, i + num_turned / 2).
    """
    half = num_turned // 2
    first, second = slice(half), slice(half, 2 * half)
    magnitudes, met = keys.abs(), squares.clone()
    both = torch.hypot(magnitudes[..., first], magnitudes[..., second])
    magnitudes[..., first] = magnitudes[..., second] = both
    met[..., first] = met[..., second] = squares[..., first] + squares[..., second]
    num_below = max(1, int(len(keys) * _SHARE_BELOW))
    ratios = magnitudes.kthvalue(num_below, 0).values / met.sqrt()
    is_sized = ratios.isfinite() & (ratios > 0)
    exponents = torch.where(is_sized, (ratios.log2() / 2).round(), 0.0)
    return torch.exp2(exponents.clamp(-_MAX_EXPONENT, _MAX_EXPONENT)).float()


def digest_sizes(sizes: Mapping[str, torch.Tensor], group: TensorParallelGroup) -> str:
    """Return what tells the sizes of all ranks' keys from others."""
    flat = torch.cat([own.flatten() for own in sizes.values()]) if sizes else torch.ones(0)
    exponents = group.all_gather(flat.log2()).to(torch.int8)
    return sha256(_ROWS + bytes(exponents.view(torch.uint8).tolist())).hexdigest()[:_DIGEST_DIGITS]
