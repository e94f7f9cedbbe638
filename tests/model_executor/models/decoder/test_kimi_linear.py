"""Kimi Linear: decays by channel, latent attention, experts by sigmoids in groups."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import (
    assert_same_weights,
    build_model,
    make_harness,
)
from tests.model_executor.models.decoder.reference import (
    ReferenceRun,
    build_hf_model,
    config_as_saved,
    kimi_linear,
    published_tensors,
    run_reference,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import ConfigError, UnsupportedFeatureError
from vllm.model_executor.models.decoder.kv_cache import STATES, decoder_kv_cache_specs
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model
from vllm.native.loader import load_library
from vllm.v1.kv_cache_interface import RecurrentStateSpec

TOLERANCE = 1e-3
LENGTH = 300
# Threads of the native kernels; 0: torch.
PATHS = [0, 2] if load_library() else [0]


def linear_config(**overrides: Any) -> dict[str, Any]:
    return {**kimi_linear()["linear_attn_config"], **overrides}


CONFIGS: dict[str, dict[str, Any]] = {
    # Its last layer is recurrent, as no release's is.
    "one group": kimi_linear(),
    # Its last layer is one of attention, as that of the 48B.
    "groups": kimi_linear(
        num_hidden_layers=3,
        num_expert_group=4,
        topk_group=2,
        num_experts_per_token=3,
        num_shared_experts=2,
        moe_renormalize=False,
        linear_attn_config={
            "full_attn_layers": [2, 3],
            "kda_layers": [1],
            "head_dim": 8,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
        },
    ),
}


@dataclass
class Case:
    """A model, and sequences with the reference's logits."""

    raw: dict[str, Any]
    reference: Any
    model: DecoderForCausalLM
    sequences: list[list[int]]
    runs: list[ReferenceRun]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest) -> Case:
    raw = CONFIGS[request.param]
    reference = build_hf_model(raw, seed=7)
    sequences = [random_tokens(LENGTH, seed) for seed in (2, 3, 4)]
    runs = [run_reference(reference, token_ids) for token_ids in sequences]
    assert min(float(run.margins.min()) for run in runs) > 1e-5, "a near-tie of a router"
    return Case(raw, reference, build_model(raw, published_tensors(reference)), sequences, runs)


def parse(raw: dict[str, Any]) -> Any:
    return resolve_model(raw["architectures"]).parse_config(raw)


@pytest.mark.slow
def test_both_spellings_of_the_config_are_one_model(case: Case) -> None:
    saved = {**config_as_saved(case.reference), "architectures": case.raw["architectures"]}
    assert parse(saved) == case.model.config
    nested = saved.pop("linear_attn_config")
    assert "linear_head_dim" in saved
    assert nested["head_dim"] == saved["linear_head_dim"]
    assert parse(saved) == case.model.config


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("chunk", [LENGTH, 1, 7, 64])
def test_every_length_up_to_300(case: Case, chunk: int, native: int) -> None:
    # The model is causal: row i of one forward of n > i tokens is the answer for length i + 1.
    harness = make_harness(case.model, (16, 32, 64, 128)[chunk % 4], native=native, packed=True)
    chunks = [min(chunk, LENGTH - first) for first in range(0, LENGTH, chunk)]
    logits = harness.run(case.sequences[0], chunks)
    torch.testing.assert_close(logits, case.runs[0].logits, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_1500_tokens(case: Case, native: int) -> None:
    token_ids = random_tokens(1500, 5)
    expected = run_reference(case.reference, token_ids)
    assert float(expected.margins.min()) > 2e-6, "a near-tie of a router"
    harness = make_harness(case.model, 32, num_blocks=600, native=native)
    logits = harness.run(token_ids, [1000, 1, 499])
    torch.testing.assert_close(logits, expected.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "packed", "native"), [(16, False, 0), (64, True, 0), (32, True, PATHS[-1])]
)
def test_batches_with_rejected_drafts(
    case: Case, block_size: int, packed: bool, native: int
) -> None:
    rng = random.Random(block_size)
    harness = make_harness(case.model, block_size, packed=packed, native=native)
    live = [harness.add(token_ids) for token_ids in case.sequences]
    num_wrong = 0
    while any(sequence.num_left for sequence in live):
        picked = [i for i, s in enumerate(live) if s.num_left and rng.random() < 0.8]
        starts = [live[i].num_computed for i in picked]
        counts = [min(rng.choice([1, 2, 3, 4, 9, 70]), live[i].num_left) for i in picked]
        rejected = [rng.randrange(count) if count <= 4 else 0 for count in counts]
        num_wrong += sum(rejected)
        work = [(live[i], count) for i, count in zip(picked, counts, strict=True)]
        logits = harness.step(work, rejected)
        for i, start, count, wrong, rows in zip(
            picked, starts, counts, rejected, logits, strict=True
        ):
            expected = case.runs[i].logits[start : start + count - wrong]
            torch.testing.assert_close(rows[: count - wrong], expected, atol=TOLERANCE, rtol=0)
    assert num_wrong > 10


@pytest.mark.slow
def test_unread_rows_need_not_be_computed(case: Case) -> None:
    harness = make_harness(case.model)
    sequence = harness.add(case.sequences[1])
    sequence.wanted_from = 150
    for start, count in ((0, 100), (100, 100), (200, 100)):
        logits = harness.step([(sequence, count)])[0]
        wanted = max(0, 150 - start)
        expected = case.runs[1].logits[start : start + count][wanted:]
        torch.testing.assert_close(logits[wanted:], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_every_state_that_a_chunk_leaves_can_be_resumed_from(case: Case, native: int) -> None:
    harness = make_harness(case.model, 16, num_blocks=600, native=native)
    first = harness.add(case.sequences[2])
    first.keeps_states = True
    harness.step([(first, LENGTH)])
    (states,) = [i for i, group in enumerate(harness.layout.groups) if group.state is not None]
    rows = 1 - states
    pieces = harness.layout.groups[states].state.num_blocks  # type: ignore[union-attr]
    for boundary in range(16, LENGTH - 5, 16):
        resumed = harness.add(first.token_ids)
        resumed.num_computed = boundary
        resumed.blocks[rows] = {i: first.blocks[rows][i] for i in range(boundary // 16)}
        span = range((boundary // 16 - 1) * pieces, boundary // 16 * pieces)
        resumed.blocks[states] = {i: first.blocks[states][i] for i in span}
        logits = harness.step([(resumed, 5)])[0]
        expected = case.runs[2].logits[boundary : boundary + 5]
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_names_of_releases_and_of_transformers_are_one_model(case: Case) -> None:
    saved = published_tensors(case.reference)
    renamed = {
        name.replace("block_sparse_moe", "mlp")
        if "moe.gate_proj" in name or "moe.up_proj" in name or "moe.down_proj" in name
        else name: tensor
        for name, tensor in saved.items()
    }
    assert "model.layers.0.mlp.gate_proj.weight" in renamed
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in saved
    assert_same_weights(build_model(case.raw, renamed), case.model)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (kimi_linear(model_type="kimi"), "'kimi'"),
        (kimi_linear(q_lora_rank=16), "q_lora_rank"),
        (kimi_linear(mla_use_nope=False), "mla_use_nope"),
        (kimi_linear(moe_router_activation_func="softmax"), "moe_router_activation_func"),
        (kimi_linear(moe_layer_freq=2), "moe_layer_freq"),
        (kimi_linear(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
        (kimi_linear(attention_bias=True), "attention_bias"),
        (kimi_linear(tie_word_embeddings=True), "tie_word_embeddings"),
        (kimi_linear(num_key_value_heads=2), "num_key_value_heads"),
        (kimi_linear(qk_rope_head_dim=7), "qk_rope_head_dim"),
        (kimi_linear(hidden_act="relu"), "'relu'"),
        (kimi_linear(num_expert_group=3), "num_expert_group"),
        (kimi_linear(num_expert_group=8), "num_expert_group"),
        (kimi_linear(topk_group=2), "topk_group"),
        (kimi_linear(num_expert_group=4, num_experts_per_token=3), "num_experts_per_token"),
        (kimi_linear(layer_types=["sliding_attention"] * 5), "'sliding_attention'"),
        (kimi_linear(mlp_layer_types=["wide"] * 5), "'wide'"),
        (kimi_linear(linear_attn_config=linear_config(kda_layers=[1, 2, 5])), "full_attn_layers"),
        (kimi_linear(linear_attn_config=linear_config(full_attn_layers=[3])), "full_attn_layers"),
        (
            kimi_linear(
                linear_attn_config=linear_config(full_attn_layers=[], kda_layers=[1, 2, 3, 4, 5])
            ),
            "full_attn_layers",
        ),
        (
            kimi_linear(
                linear_attn_config=linear_config(full_attn_layers=[1, 2, 3, 4, 5], kda_layers=[])
            ),
            "kda_layers",
        ),
        (
            kimi_linear(linear_attn_config=linear_config(short_conv_kernel_size=1)),
            "linear_attn_config.short_conv_kernel_size",
        ),
        (kimi_linear(linear_attn_config=linear_config(head_dim=0)), "linear_attn_config.head_dim"),
    ],
)
def test_what_is_not_served_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(raw)


def test_other_quantised_weights_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="bitsandbytes"):
        parse(kimi_linear(quantization_config={"quant_method": "bitsandbytes"}))


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=2"):
        resolve_model(["KimiLinearForCausalLM"]).check_ranks(parse(kimi_linear()), 2, False)


def release_config() -> Any:
    """The 48B's, of which absent fields are the defaults."""
    full = [4, 8, 12, 16, 20, 24, 27]
    return parse(
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "vocab_size": 163_840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "linear_attn_config": {
                "full_attn_layers": full,
                "kda_layers": [i for i in range(1, 28) if i not in full],
            },
        }
    )


def test_a_token_of_the_48b_takes_7_9_kib() -> None:
    config = release_config()
    specs = decoder_kv_cache_specs(config, 16, torch.bfloat16, torch.float32)
    states = specs.pop(STATES)
    assert isinstance(states, RecurrentStateSpec)
    assert states.shape.num_values == 20 * (32 * 128 * 128 + 3 * 32 * 128 * 3)
    assert len(specs) == 7
    assert sum(spec.page_size_bytes for spec in specs.values()) == 16 * 7 * 576 * 2
    assert {spec.page_layout().width for spec in specs.values()} == {576}
