"""DeepSeek-V4.1 in random shapes of its layout: the reference's numbers, on torch and natively."""

import random
from typing import Any

import pytest
import torch

from tests.model_executor.models.deepseek_v41.test_model import (
    TOLERANCE,
    build_both,
    make_harness,
    run_reference,
)
from tests.model_executor.models.hf_reference import random_tokens


def draw_layers(rng: random.Random) -> dict[str, Any]:
    """Returns sections of one ratio each, with window layers between and tables anywhere."""
    count = rng.randint(2, 8)
    ratios = [0] * rng.randint(0, min(2, count - 1))
    first, sources = len(ratios), []
    while len(ratios) < count:
        sources.append(len(ratios))
        ratios += [rng.choice([1, 1, 2, 2, 4])] * rng.randint(1, count - len(ratios))
    for layer in range(first, count):
        if layer not in sources and rng.random() < 0.2:
            ratios[layer] = 0
    own = {layer for layer in range(first, count) if ratios[layer] and rng.random() < 0.3}
    choosers = sorted(own | set(sources))
    late = [layer for layer in choosers if layer >= sources[-1]]
    return {
        "num_hidden_layers": count,
        "compress_ratios": ratios + [0] * rng.randint(0, 2),
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": choosers,
        "candidate_source_layer_id": rng.choice([None, *late]),
        "engram_layer_ids": sorted(rng.sample(range(count), rng.randint(0, min(3, count)))),
    }


def draw_sizes(rng: random.Random) -> dict[str, Any]:
    """Returns widths and counts, one expert and one stream among them."""
    heads, experts = rng.choice([1, 2, 4]), rng.choice([1, 2, 5, 8])
    return {
        "hidden_size": rng.choice([24, 40, 48]),
        "num_attention_heads": heads,
        "o_groups": rng.choice([groups for groups in (1, 2, 4) if heads % groups == 0]),
        "head_dim": rng.choice([8, 16, 24]),
        "qk_rope_head_dim": rng.choice([2, 4, 8]),
        "q_lora_rank": rng.choice([8, 24]),
        "sliding_window": rng.choice([2, 3, 8, 20, 33]),
        "hc_mult": rng.choice([1, 2, 4]),
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(3, experts)),
        "moe_intermediate_size": rng.choice([8, 24, 33]),
        "index_topk": rng.choice([1, 8, 30, 500]),
        "candidate_topk_blocks": rng.choice([1, 2, 4, 50]),
        "candidate_block_size": rng.choice([1, 3, 4, 8]),
        "engram_max_ngram_size": rng.randint(2, 5),
        "engram_n_heads": rng.randint(1, 3),
        "image_token_id": rng.choice([None, 95]),
    }


@pytest.mark.parametrize("seed", range(5))
def test_random_shapes(seed: int) -> None:
    rng = random.Random(seed)
    model, reference = build_both(seed, **draw_layers(rng), **draw_sizes(rng))
    count = rng.randint(40, 80)
    ids, end = random_tokens(count, seed), rng.randint(20, count - 2)
    expected = run_reference(reference, ids, [count])
    for native in (0, 1):
        found = make_harness(model, native=native).run(ids, [end, 1, count - end - 1])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        harness = make_harness(model, native=native)
        request = harness.add(ids)
        request.output_from, left = end - 1, end
        while left:
            rows = min(left, rng.choice([3, 20, 60]))
            logits, left = harness.step([(request, rows)])[0], left - rows
        torch.testing.assert_close(logits[-1], expected[end - 1], atol=TOLERANCE, rtol=0)
