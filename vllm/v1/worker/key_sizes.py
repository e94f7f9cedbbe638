"""What keys are divided by before they are rounded to eight bits: a size for each channel.

Some channels of keys are many times as large as others, in every token. Under one scale for a head
the small ones would keep few bits, so keys are stored as k / size and met by q * size: the product
is the same. Sizes are powers of two, by which floats are multiplied without rounding. They follow
from the weights alone: a fixed sequence of tokens runs through the loaded model, over fp32 rows.
"""

from collections.abc import Mapping
from hashlib import sha256

import torch

from vllm.distributed.parallel_state import TensorParallelGroup
from vllm.model_executor.models.decoder.config import DecoderConfig
from vllm.model_executor.models.decoder.kv_cache import cache_name
from vllm.v1.worker.one_request import OneRequest

NUM_TOKENS = 128
"""Tokens that sizes are measured on."""

# Knuth's constants of a linear congruential generator.
_FACTOR, _ADDEND, _MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64
_DIGEST_DIGITS = 16
# The first token of a text is often unlike all others.
_SHARE_BELOW = 0.98
# Were large channels made as small as the others, their own roundings would be felt most: queries
# are often large there too. Perplexity: SmolLM2 +0.06% (with the root +0.09%), Qwen 2.5, whose keys
# have large biases, +0.02% (with the root +0.26%, with no sizes +3.1%).
_POWER = 0.75
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
def measure_key_sizes(request: OneRequest, config: DecoderConfig) -> dict[str, torch.Tensor]:
    """Return by cache name the sizes of its keys' channels, fp32 [K, d].

    Args:
        request: Of the loaded model, over fp32 rows that are all stored; takes ``NUM_TOKENS``.
        config: The model's.
    """
    # By one thread a step has the same sums whatever the machine's threads.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        request.run(torch.tensor(draw_token_ids(config.vocab_size)))
    finally:
        torch.set_num_threads(num_threads)
    sizes = {}
    for index, layer in enumerate(config.layers):
        if layer.kv_owner is not None or layer.recurrence is not None:
            continue
        pages = request.pages[cache_name(index)]
        rows = pages[1:].flatten(0, 1)[:NUM_TOKENS].double()
        head_dim = config.shape_of(layer).head_dim
        keys = rows.view(NUM_TOKENS, 2, -1, head_dim)[:, 0]
        num_turned = 0 if layer.rope is None else layer.rope.dim
        sizes[cache_name(index)] = find_sizes(keys, num_turned)
    return sizes


def find_sizes(keys: torch.Tensor, num_turned: int) -> torch.Tensor:
    """Return the powers of two nearest to a power of how large channels become: fp32 [K, d].

    That is what all but a few tokens stay below. Positions turn pairs of channels into each other:
    both get the size of the two together.

    Args:
        keys: fp64 [T, K, d].
        num_turned: First values of a head that are turned: pairs (i, i + num_turned / 2).
    """
    magnitudes = keys.abs()
    half = num_turned // 2
    both = torch.hypot(magnitudes[..., :half], magnitudes[..., half : 2 * half])
    magnitudes[..., :half] = magnitudes[..., half : 2 * half] = both
    num_below = max(1, int(len(keys) * _SHARE_BELOW))
    large = magnitudes.kthvalue(num_below, 0).values
    is_sized = large.isfinite() & (large > 0)
    exponents = torch.where(is_sized, (large.log2() * _POWER).round(), 0.0)
    return torch.exp2(exponents.clamp(-_MAX_EXPONENT, _MAX_EXPONENT)).float()


def digest_sizes(sizes: Mapping[str, torch.Tensor], group: TensorParallelGroup) -> str:
    """Return what tells the sizes of all ranks' keys from others."""
    flat = torch.cat([own.flatten() for own in sizes.values()]) if sizes else torch.ones(0)
    exponents = group.all_gather(flat.log2()).to(torch.int8)
    return sha256(bytes(exponents.view(torch.uint8).tolist())).hexdigest()[:_DIGEST_DIGITS]
