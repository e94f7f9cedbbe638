"""GLM 5.3 Flash: bounded decays, latent attention to chosen keys, several residual streams."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import make_harness
from tests.model_executor.models.decoder.recurrent_checks import (
    LENGTH,
    Case,
    check_1500_tokens,
    check_batches_with_rejected_drafts,
    check_every_length,
    check_every_state,
    check_unread_rows,
    make_case,
)
from tests.model_executor.models.decoder.reference import config_as_saved, glm5_next
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import ConfigError, UnsupportedFeatureError
from vllm.model_executor.models.decoder.indexed_attention import IndexedAttention
from vllm.model_executor.models.decoder.kv_cache import STATES, decoder_kv_cache_specs
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model
from vllm.native.loader import load_library
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.core.layout.packing import group_for_packing, packed_block_stride
from vllm.v1.kv_cache_interface import RecurrentStateSpec

CONFIGS: dict[str, dict[str, Any]] = {
    # Of 300 tokens 64 and a tail are chosen; its last layer attends, as the release's.
    "pools of four": glm5_next(),
    # Its last layer is recurrent; clamps that are reached; pools as large as a block.
    "pools of sixteen": glm5_next(
        num_hidden_layers=3,
        layer_types=["linear_attention", "deepseek_sparse_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        index_kpool=16,
        index_topk=32,
        swiglu_limit=0.5,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        n_shared_experts=2,
        norm_topk_prob=False,
        linear_head_dim=8,
        linear_num_heads=3,
        linear_conv_kernel_dim=3,
        linear_lower_bound=-2.0,
        hc_mult=3,
    ),
}


NATIVE = pytest.mark.skipif(load_library() is None, reason="the native library is not built")
PATHS = [pytest.param(0, id="torch"), pytest.param(2, id="native", marks=NATIVE)]
SEEDS = {"pools of four": 10, "pools of sixteen": 9}


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest) -> Case:
    made = make_case(CONFIGS[request.param], SEEDS[request.param])
    margin = find_index_margin(made.model, [*made.sequences, random_tokens(1500, 5)])
    assert margin > 5e-6, "a near-tie of an indexer"
    return made


def find_index_margin(model: DecoderForCausalLM, sequences: Sequence[list[int]]) -> float:
    """Returns the least gap between a chosen pool's score and the next one's, in any layer."""
    margins: list[float] = []
    score = IndexedAttention._score

    def note(self: IndexedAttention, *args: torch.Tensor) -> torch.Tensor:
        scores = score(self, *args)
        count = self.latent.indexer.num_chosen  # type: ignore[union-attr]
        best = scores.topk(count + 1, dim=-1).values
        gaps = (best[:, -2] - best[:, -1])[best[:, -1] > -torch.inf]
        margins.extend(gaps.tolist())
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexedAttention, "_score", note)
        for token_ids in sequences:
            harness = make_harness(model, 32, num_blocks=600)
            harness.run(token_ids, [len(token_ids)])
    assert len(margins) > 1000
    return min(margins)


def parse(raw: dict[str, Any]) -> Any:
    return resolve_model(raw["architectures"]).parse_config(raw)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("chunk", [LENGTH, 7])
def test_every_length_up_to_300(case: Case, chunk: int, native: int) -> None:
    check_every_length(case, chunk, native)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_1500_tokens(case: Case, native: int) -> None:
    check_1500_tokens(case, native)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize(("block_size", "packed"), [(16, False), (64, True)])
def test_batches_with_rejected_drafts(
    case: Case, block_size: int, packed: bool, native: int
) -> None:
    check_batches_with_rejected_drafts(case, block_size, packed, native)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_unread_rows_need_not_be_computed(case: Case, native: int) -> None:
    check_unread_rows(case, native)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_every_state_that_a_chunk_leaves_can_be_resumed_from(case: Case, native: int) -> None:
    check_every_state(case, native)


@pytest.mark.slow
def test_the_config_as_transformers_writes_it_is_the_same_model(case: Case) -> None:
    saved = {**config_as_saved(case.reference), "architectures": case.raw["architectures"]}
    assert parse(saved).for_drafts(False) == case.model.config


def test_the_layer_that_drafts_and_vision_are_left_out() -> None:
    model = resolve_model(glm5_next()["architectures"]).load_model_class()
    made = model(
        parse(glm5_next()).for_drafts(False),
        ops=get_reference_op,
        dtype=torch.float32,
        device="meta",
    )
    prefixes = made.ignored_weight_prefixes
    for name in ("layers.5.eh_proj.weight", "layers.5.self_attn.q_a_proj.weight"):
        (part,) = made.tensor_parts(f"model.language_model.{name}", (1, 1))
        assert part.name.startswith(prefixes)
    (part,) = made.tensor_parts("model.visual.blocks.0.norm.weight", (1,))
    assert part.name.startswith(prefixes)
    (part,) = made.tensor_parts("model.language_model.layers.4.hc_attn_fn", (1, 1))
    assert part.name in made.weight_slots()


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({**glm5_next(), "model_type": "glm"}, "'glm'"),
        (glm5_next(model_type="glm_text"), "'glm_text'"),
        (glm5_next(qk_rope_head_dim=8), "qk_rope_head_dim"),
        (glm5_next(attention_bias=True), "attention_bias"),
        (glm5_next(tie_word_embeddings=True), "tie_word_embeddings"),
        (glm5_next(num_key_value_heads=2), "num_key_value_heads"),
        (glm5_next(hidden_act="relu"), "'relu'"),
        (glm5_next(indexer_types=["full"] * 4 + ["shared"]), "indexer_types"),
        (glm5_next(index_kpool_always_select_tail=False), "index_kpool_always_select_tail"),
        (glm5_next(num_nextn_predict_layers=2), "num_nextn_predict_layers"),
        (glm5_next(index_topk=62), "index_topk"),
        (glm5_next(kv_lora_rank=25), "kv_lora_rank"),
        (glm5_next(linear_lower_bound=1.0), "linear_lower_bound"),
        (glm5_next(linear_conv_kernel_dim=1), "linear_conv_kernel_dim"),
        (glm5_next(layer_types=["sliding_attention"] * 5), "'sliding_attention'"),
        (glm5_next(layer_types=["linear_attention"] * 5), "layer_types"),
        (glm5_next(layer_types=["full_attention"] * 5), "layer_types"),
        (glm5_next(mlp_layer_types=["wide"] * 5), "'wide'"),
        (glm5_next(swiglu_limit=-1.0), "swiglu_limit"),
        (glm5_next(n_group=3), "n_group"),
        (glm5_next(n_group=8, topk_group=2), "n_group"),
        (glm5_next(topk_group=2), "topk_group"),
        (glm5_next(n_group=4, num_experts_per_tok=3), "num_experts_per_tok"),
    ],
)
def test_what_is_not_served_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(raw)


def test_other_quantised_weights_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="hqq"):
        parse({**glm5_next(), "quantization_config": {"quant_method": "hqq"}})


def test_a_token_of_the_release_takes_11_kib_and_its_share_of_a_pool_key() -> None:
    """Eleven layers of a latent and a quarter of an index key; states of 34 layers."""
    kinds = ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)]
    sizes = {
        "vocab_size": 154_880,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "layer_types": kinds,
        "index_kpool": 4,
    }
    raw = glm5_next()
    raw["text_config"] = {"model_type": "glm5_next_text", **sizes}
    config = parse(raw).for_drafts(False)
    specs = decoder_kv_cache_specs(config, 32, torch.bfloat16, torch.float32)
    states = specs[STATES]
    assert isinstance(states, RecurrentStateSpec)
    assert states.shape.num_values == 34 * (64 * 128 * 128 + 3 * 64 * 128 * 3)
    kept = [spec for spec in specs.values() if spec.keeps_every_token]
    per_token = sum(spec.page_size_bytes / spec.block_size for spec in kept)
    assert per_token == 11 * (512 * 2 + 128 * 2 / 4)
    groups = group_for_packing(specs)
    assert [group.kv_cache_spec.label for group in groups] == [
        "full attention",
        "C4 entries",
        "C4 state",
        "recurrent state",
    ]
    # All groups fill a block of the common pool, the open pools' too: nothing is padded.
    assert packed_block_stride(groups) == 32 * 11 * 512 * 2
    for group in groups[:3]:
        width = sum(spec.page_size_bytes for spec in group.layer_specs().values())
        assert width == packed_block_stride(groups)
