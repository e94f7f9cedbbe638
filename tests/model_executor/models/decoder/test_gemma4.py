"""Gemma 4: the published shapes in small and random ones, its two spellings, what is refused."""

import random
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness, wrap_text
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    config_as_saved,
    gemma4,
    gemma4_moe,
    gemma4_small,
    run_reference,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import ConfigError
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.model_executor.models.registry import resolve_model
from vllm.native.loader import load_library

TOLERANCE = 1e-3
LENGTH = 150
LOCAL, FULL = "sliding_attention", "full_attention"


def parse(raw: dict[str, Any]) -> Any:
    return resolve_model(raw["architectures"]).parse_config(raw)


def draw_variant(seed: int) -> dict[str, Any]:
    """Return a tiny model of a random shape."""
    rng = random.Random(seed)
    num_layers = rng.randint(3, 7)
    kinds = [rng.choice([LOCAL, LOCAL, FULL]) for _ in range(num_layers)]
    kinds[:2], kinds[-1] = rng.choice([[LOCAL, FULL], [FULL, LOCAL]]), FULL
    kv_heads = rng.choice([1, 2, 4])
    has_inputs = rng.random() < 0.6
    fields = {
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 16, 24]),
        "global_head_dim": rng.choice([16, 32]),
        "sliding_window": rng.choice([2, 7, 16, 33]),
        "attention_k_eq_v": rng.random() < 0.5,
        "num_global_key_value_heads": rng.choice([1, 2]),
        # transformers needs layer inputs where keys and values are shared.
        "num_kv_shared_layers": rng.randint(0, num_layers - 2) if has_inputs else 0,
        "use_double_wide_mlp": rng.random() < 0.5,
        "hidden_size_per_layer_input": 8 if has_inputs else 0,
        "vocab_size_per_layer_input": 96,
        "final_logit_softcapping": rng.choice([None, 5.0, 30.0]),
        "attention_bias": rng.random() < 0.3,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
            },
        },
    }
    return (gemma4_moe if rng.random() < 0.4 else gemma4)(**fields)


PUBLISHED = {"small": gemma4_small(), "equal": gemma4(), "experts": gemma4_moe()}
VARIANTS = {f"random-{seed}": draw_variant(seed) for seed in range(10)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PUBLISHED, *VARIANTS])
def test_numbers_are_those_of_transformers(name: str) -> None:
    raw = {**PUBLISHED, **VARIANTS}[name]
    reference = build_hf_model(raw, seed=7)
    model = build_model(raw, reference.state_dict())
    saved = {**config_as_saved(reference), "architectures": raw["architectures"]}
    assert parse(saved) == model.config
    for seed in range(20):
        token_ids = random_tokens(LENGTH, seed)
        expected = run_reference(reference, token_ids)
        if expected.margins.min() > 1e-5:
            break
    else:
        raise AssertionError("every sequence has a near-tie of a router")
    for native in (0, 2) if load_library() else (0,):
        check_steps(model, token_ids, expected.logits, native)


def check_steps(model: Any, token_ids: list[int], expected: torch.Tensor, native: int) -> None:
    """Compare whole, then in chunks beside another request, with drafts that turn out wrong."""
    whole = make_harness(model, native=native).run(token_ids, [LENGTH])
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)
    harness = make_harness(model, native=native, packed=True)
    request, other = harness.add(token_ids), harness.add(token_ids[:90])
    rng, first = random.Random(3), 0
    while request.num_left > 4:
        count = min(rng.choice([1, 5, 30, 60]), request.num_left - 4)
        work, wrong = [(request, count + 3)], [3]
        if other.num_left:
            work, wrong = [*work, (other, min(40, other.num_left))], [3, 0]
        logits = harness.step(work, wrong)[0][:count]
        torch.testing.assert_close(logits, expected[first : first + count], atol=TOLERANCE, rtol=0)
        first += count
    assert other.num_computed == 90


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_rows_that_nobody_reads_change_nothing(name: str) -> None:
    raw = PUBLISHED[name]
    model = build_model(raw, build_hf_model(raw, seed=7).state_dict())
    token_ids = random_tokens(100, 3)
    whole, part = make_harness(model), make_harness(model)
    expected, request = whole.add(token_ids), part.add(token_ids)
    for count, num_wanted in ((40, 0), (30, 1), (20, 17), (10, 10)):
        logits = whole.step([(expected, count)])[0]
        request.wanted_from = request.num_computed + count - num_wanted
        found = part.step([(request, count)])[0]
        torch.testing.assert_close(
            found[count - num_wanted :], logits[count - num_wanted :], atol=1e-4, rtol=0
        )
        assert not part.last_streams[: count - num_wanted].any()
    for cache, pages in whole.kv_caches.items():
        torch.testing.assert_close(pages.nan_to_num(7), part.kv_caches[cache].nan_to_num(7))


def test_layers_that_share_have_no_cache_and_read_the_last_of_their_kind() -> None:
    config = parse(gemma4_small())
    assert [layer.kv_owner for layer in config.layers] == [None] * 5 + [4, 4, 3]
    assert [layer.feed_forward.inner_size for layer in config.layers] == [96] * 5 + [192] * 3
    specs = decoder_kv_cache_specs(config, 16, torch.bfloat16, torch.float32)
    assert list(specs) == [f"model.layers.{index}.self_attn" for index in range(5)]
    assert [spec.head_size for spec in specs.values()] == [16, 16, 16, 32, 16]
    assert config.last_owner == 4


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (gemma4(layer_types=[LOCAL] * 5), "'layer_types'"),
        (gemma4(layer_types=[LOCAL] * 5 + ["chunked_attention"]), "'chunked_attention'"),
        (gemma4_small(num_kv_shared_layers=8), "num_kv_shared_layers.*less than"),
        (gemma4_small(num_kv_shared_layers=5), f"num_kv_shared_layers.*{FULL}"),
        (gemma4(num_kv_shared_layers=-1), "num_kv_shared_layers"),
        (gemma4_small(vocab_size_per_layer_input=95), "vocab_size_per_layer_input"),
        (gemma4(use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (gemma4(per_layer_config={"9": {"head_dim": 32}}), r"per_layer_config\.9"),
        (gemma4(per_layer_config={"5": {"window": 3}}), r"per_layer_config\.5\.window"),
        (gemma4(per_layer_config={"5": {"head_dim": 0}}), r"per_layer_config\.5\.head_dim"),
        (gemma4(global_head_dim=15), "head_dim is 15"),
        (gemma4(num_global_key_value_heads=3), "num_key_value_heads is 3"),
        (gemma4(enable_moe_block=True), "num_experts"),
        (gemma4_moe(top_k_experts=9), "num_experts_per_tok is 9"),
        (gemma4(hidden_activation="relu"), "'relu'"),
        (gemma4(sliding_window=1), "sliding_window is 1"),
        (gemma4(model_type="gemma3_text"), "'gemma3_text'"),
        (
            {
                "architectures": ["Gemma4ForConditionalGeneration"],
                "model_type": "gemma4",
                "vision_config": {},
            },
            "text_config.*towers",
        ),
        (
            {
                "architectures": ["Gemma4UnifiedForConditionalGeneration"],
                "model_type": "gemma4_unified",
                "text_config": {"rope_parameters": {FULL: {"partial_rotary_factor": 1.5}}},
            },
            r"text_config\.rope_parameters\.full_attention\.partial_rotary_factor",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_field(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(raw)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_wrapper_is_its_text_part(prefix: str) -> None:
    text = gemma4_small()
    tensors = build_hf_model(text, seed=7).state_dict()
    raw, nested = wrap_text(text, tensors, "Gemma4ForConditionalGeneration", "gemma4", prefix)
    unused = {
        "model.vision_tower.patch_embedder.weight": torch.zeros(2),
        "model.audio_tower.layers.0.weight": torch.zeros(2),
        "model.embed_vision.embedding_projection.weight": torch.zeros(2),
        # Releases keep them.
        f"{prefix}layers.7.self_attn.k_proj.weight": torch.zeros(2),
        f"{prefix}layers.5.self_attn.v_proj.weight": torch.zeros(2),
        f"{prefix}layers.6.self_attn.k_norm.weight": torch.zeros(2),
    }
    model, alone = build_model(raw, nested | unused), build_model(text, tensors)
    token_ids = random_tokens(20, 1)
    assert torch.equal(
        make_harness(model).run(token_ids, [20]), make_harness(alone).run(token_ids, [20])
    )
