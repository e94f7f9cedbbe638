"""Recurrent layers where the families' common tests do not go: other shapes, drafts, boundaries."""

import random
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.recurrent_checks import resume_at
from tests.model_executor.models.decoder.reference import build_hf_model, qwen3_5, run_reference
from tests.model_executor.models.hf_reference import random_tokens
from vllm.native.loader import load_library

pytestmark = pytest.mark.slow

LENGTH = 200

SHAPES: dict[str, dict[str, Any]] = {
    "one key head": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 1,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
    },
    "a recurrent layer last": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "as many key heads": {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2},
}


_EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
OTHERS = {
    "qwen 3.5 with experts": {
        **qwen3_5(**_EXPERTS),
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
    },
    "qwen3-next": {
        **qwen3_5(**_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1], intermediate_size=96),
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}


# Threads of the native kernels; 0: torch.
PATHS = [0, 2] if load_library() else [0]


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
def test_other_shapes_equal_transformers(shape: str, native: int) -> None:
    raw = OTHERS.get(shape) or qwen3_5(**SHAPES[shape])
    reference = build_hf_model(raw, seed=7)
    model = build_model(raw, reference.state_dict())
    rng = random.Random(1)
    sequences = [random_tokens(LENGTH, seed) for seed in (1, 4, 5)]
    runs = [run_reference(reference, token_ids) for token_ids in sequences]
    assert min(run.margins.min() for run in runs) > 1e-5, "a near-tie of a router"
    expected = [run.logits for run in runs]
    harness = make_harness(model, 32, packed=True, native=native)
    live = [harness.add(token_ids) for token_ids in sequences]
    while any(sequence.num_left for sequence in live):
        picked = [i for i, s in enumerate(live) if s.num_left]
        counts = [min(rng.choice([1, 2, 3, 4, 9, 70]), live[i].num_left) for i in picked]
        rejected = [rng.randrange(count) if count <= 4 else 0 for count in counts]
        starts = [live[i].num_computed for i in picked]
        work = [(live[i], count) for i, count in zip(picked, counts, strict=True)]
        logits = harness.step(work, rejected)
        for i, start, count, wrong, rows in zip(
            picked, starts, counts, rejected, logits, strict=True
        ):
            own = expected[i][start : start + count - wrong]
            torch.testing.assert_close(rows[: count - wrong], own, atol=1e-3, rtol=0)


@pytest.mark.parametrize("native", PATHS)
def test_every_state_that_a_chunk_leaves_can_be_resumed_from(native: int) -> None:
    """States are tagged by nothing here: who resumes at one must get the reference's logits."""
    raw = qwen3_5()
    reference = build_hf_model(raw, seed=7)
    model = build_model(raw, reference.state_dict())
    token_ids = random_tokens(LENGTH, 5)
    expected = run_reference(reference, token_ids).logits
    harness = make_harness(model, 16, native=native)
    first = harness.add(token_ids)
    first.keeps_states = True
    harness.step([(first, LENGTH)])
    assert harness.layout.groups[1].kind == "recurrent"
    for boundary in range(16, LENGTH, 16):
        resumed = resume_at(harness, first, boundary)
        logits = harness.step([(resumed, 5)])[0]
        torch.testing.assert_close(logits, expected[boundary : boundary + 5], atol=1e-3, rtol=0)
