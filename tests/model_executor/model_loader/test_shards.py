"""What a rank holds, by name: parts make up the whole, and which numbers of ranks do not fit."""

from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder import reference
from tests.model_executor.models.tiny_config import tiny_config
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.dummy import fill_with_dummy_weights
from vllm.model_executor.model_loader.loader import take_shard
from vllm.model_executor.model_loader.shards import ELSEWHERE, RankShare, Shard
from vllm.model_executor.models.registry import resolve_model


def find_shard(raw: dict[str, Any], share: RankShare, name: str) -> Shard | None:
    entry = resolve_model(raw["architectures"])
    return entry.make_shard_finder(entry.parse_config(raw), share)(name)


def test_parts_make_up_the_whole() -> None:
    tensor = torch.arange(24).view(4, 6)
    for axis in range(2):
        shards = [Shard(axis, index, 2) for index in range(2)]
        parts = [take_shard(tensor, shard) for shard in shards]
        assert torch.equal(torch.cat(parts, axis), tensor)
        assert all(part.untyped_storage().data_ptr() == tensor.data_ptr() for part in parts)
        assert [tuple(p.shape) for p in parts] == [s.cut_shape(tensor.shape) for s in shards]
        assert shards[0].whole_shape(parts[0].shape) == (4, 6)
    assert take_shard(tensor, None) is tensor


V4 = tiny_config()
FIRST, SECOND = RankShare(0, 2), RankShare(1, 2)
SPREAD = RankShare(1, 2, spreads_experts=True)


@pytest.mark.parametrize(
    ("raw", "share", "name", "expected"),
    [
        (V4, SECOND, "head.weight", Shard(0, 1, 2)),
        (V4, FIRST, "layers.3.attn.wq_b.scale", Shard(0, 0, 2)),
        (V4, SECOND, "mtp.0.attn.wo_b.weight", Shard(1, 1, 2)),
        (V4, SECOND, "layers.3.attn.wo_b.weight_scale", None),
        (V4, SECOND, "layers.2.attn.indexer.wq_b.weight", None),
        (V4, SECOND, "layers.2.attn.wkv.weight", None),
        (V4, SECOND, "layers.0.ffn.shared_experts.w2.weight", Shard(1, 1, 2)),
        (V4, SECOND, "layers.0.ffn.experts.7.w1.weight", Shard(0, 1, 2)),
        (V4, SPREAD, "layers.0.ffn.experts.7.w1.weight", None),
        (V4, SPREAD, "layers.0.ffn.experts.3.w2.scale", ELSEWHERE),
        (V4, RankShare(), "head.weight", None),
        (reference.llama(), SECOND, "model.layers.0.self_attn.k_proj.bias", Shard(0, 1, 2)),
        (
            reference.llama(),
            RankShare(3, 4),
            "model.layers.0.self_attn.v_proj.weight",
            Shard(0, 1, 2),
        ),
        (
            reference.llama(num_key_value_heads=1),
            SECOND,
            "model.layers.0.self_attn.k_proj.weight",
            None,
        ),
        (reference.llama(), SECOND, "model.layers.0.mlp.down_proj.bias", None),
        (reference.gpt_oss(), SECOND, "model.layers.0.self_attn.sinks", Shard(0, 1, 2)),
        (
            reference.gpt_oss(),
            SECOND,
            "model.layers.0.mlp.experts.down_proj_blocks",
            Shard(2, 1, 2),
        ),
        (reference.gpt_oss(), SECOND, "model.layers.0.mlp.experts.down_proj_bias", None),
        (reference.gpt_oss(), SPREAD, "model.layers.0.mlp.experts.down_proj_bias", Shard(0, 1, 2)),
        (reference.qwen3_moe(), SPREAD, "model.layers.0.mlp.experts.3.up_proj.weight", ELSEWHERE),
        (reference.qwen3_moe(), SECOND, "model.layers.0.mlp.gate.weight", None),
    ],
)
def test_a_rank_holds(
    raw: dict[str, Any], share: RankShare, name: str, expected: Shard | None
) -> None:
    assert find_shard(raw, share, name) == expected


@pytest.mark.parametrize(
    ("raw", "size", "spreads", "message"),
    [
        (V4, 3, False, "3 does not divide the model's num_attention_heads 4, o_groups 2"),
        (tiny_config(n_routed_experts=7), 2, True, "n_routed_experts 7"),
        (reference.llama(vocab_size=97), 2, False, "vocab_size 97"),
        (
            reference.llama(num_attention_heads=12, num_key_value_heads=3),
            2,
            False,
            "num_key_value_heads 3",
        ),
        (reference.llama(intermediate_size=81), 2, False, "intermediate_size 81"),
        (reference.llama(), 2, True, "--enable-expert-parallel needs a model with experts"),
        (reference.qwen3_moe(moe_intermediate_size=25), 2, False, "width of an expert 25"),
        (
            reference.gpt_oss(
                quantization_config={"quant_method": "mxfp4"}, intermediate_size=96, hidden_size=64
            ),
            2,
            False,
            r"MXFP4 scale \(of intermediate_size\) 3",
        ),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(
    raw: dict[str, Any], size: int, spreads: bool, message: str
) -> None:
    entry = resolve_model(raw["architectures"])
    config = entry.parse_config(raw)
    entry.check_ranks(config, 1, False)
    with pytest.raises(ConfigError, match=message):
        entry.check_ranks(config, size, spreads)


def test_dummy_weights_of_ranks_are_one_models() -> None:
    whole = {"a.weight": torch.empty(4, 6), "norm.weight": torch.empty(4)}
    fill_with_dummy_weights(whole, 1)
    for index in range(2):
        part = {"a.weight": torch.empty(4, 3), "norm.weight": torch.empty(4)}
        shard = Shard(1, index, 2)
        fill_with_dummy_weights(part, 1, lambda name, s=shard: s if name == "a.weight" else None)
        assert torch.equal(part["a.weight"], whole["a.weight"][:, 3 * index : 3 * index + 3])
        assert torch.equal(part["norm.weight"], whole["norm.weight"])
