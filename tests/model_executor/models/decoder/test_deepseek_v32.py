"""DeepSeek V3.2 and GLM 5: latent attention to keys that an indexer chooses, token by token."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.model_loader.gguf_families import write_family
from tests.model_executor.model_loader.gguf_files import gguf
from tests.model_executor.model_loader.test_gguf import load
from tests.model_executor.models.decoder.building import (
    assert_same_weights,
    build_model,
    make_harness,
)
from tests.model_executor.models.decoder.recurrent_checks import (
    Case,
    check_batches_with_rejected_drafts,
    make_case,
)
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    config_as_saved,
    deepseek_v32,
    glm_moe_dsa,
)
from tests.model_executor.models.decoder.test_glm5_next import PATHS
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import ConfigError
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.core.layout.grouping import get_kv_cache_groups
from vllm.v1.engine.engine_args import EngineArgs


@pytest.fixture(scope="module", params=[(deepseek_v32, 3), (glm_moe_dsa, 4)])
def case(request: pytest.FixtureRequest) -> Case:
    make, seed = request.param
    made = make_case(make(), seed)
    least = min(float(run.index_margins.min()) for run in made.runs)
    assert least > 5e-6, "a near-tie of an indexer"
    return made


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_batches_with_rejected_drafts(case: Case, native: int) -> None:
    check_batches_with_rejected_drafts(case, 16, True, native)


@pytest.mark.parametrize("native", PATHS)
def test_of_equal_scores_the_first_are_chosen_wherever_chunks_end(native: int) -> None:
    """One head's relu makes most scores zero."""
    raw = deepseek_v32(index_n_heads=1, num_nextn_predict_layers=0)
    model = build_model(raw, dict(build_hf_model(raw, 7).state_dict()))
    token_ids = random_tokens(60, 3)
    whole = make_harness(model, native=native).run(token_ids, [60])
    for chunks in ([53, 7], [33, *[1] * 27]):
        cut = make_harness(model, native=native).run(token_ids, chunks)
        torch.testing.assert_close(cut, whole, atol=1e-4, rtol=0)


def parse(raw: dict[str, Any]) -> Any:
    return resolve_model(raw["architectures"]).parse_config(raw)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"index_head_dim": 6}, "index_head_dim"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_n_heads": -1}, "index_n_heads"),
        ({"layer_types": ["indexed_attention"] * 2 + ["full_attention"]}, "'full_attention'"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"n_group": 3}, "n_group"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(deepseek_v32(**fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "deepseek_v32"}, "'deepseek_v32'"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"indexer_types": ["shared", *["full"] * 3]}, "'shared'; allowed: full in the first"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "'half'"),
        ({"indexer_types": ["full"]}, "at least 4 items"),
        ({"indexer_types": None, "index_topk_pattern": "FSTS"}, "index_topk_pattern.*'T'"),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 0}, "offset"),
        ({"indexer_types": None, "index_topk_freq": -1}, "index_topk_freq"),
    ],
)
def test_what_is_not_served_of_glm_5_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(glm_moe_dsa(**fields))


@pytest.mark.parametrize(
    ("fields", "owners"),
    [
        ({}, [None] * 7),
        # One of every four from the third layer on.
        (
            {"index_topk_freq": 4, "index_skip_topk_offset": 3},
            [None, None, None, 2, 2, 2, None],
        ),
        ({"index_topk_freq": 3}, [None, None, 1, 1, None, 4, 4]),
        ({"index_topk_pattern": "FSSFFSF"}, [None, 0, 0, None, None, 4, None]),
        ({"indexer_types": ["full", *["shared"] * 7]}, [None, *[0] * 6]),
    ],
)
def test_layers_without_an_indexer_attend_to_what_the_last_one_chose(
    fields: dict[str, Any], owners: list[int | None]
) -> None:
    raw = glm_moe_dsa(**{"indexer_types": None, "num_hidden_layers": 7, **fields})
    config = parse(raw)
    assert [layer.index_owner for layer in config.layers] == owners
    # transformers reads the same of it.
    kinds = config_as_saved(build_hf_model(raw, 7))["indexer_types"]
    assert [kind == "shared" for kind in kinds[:7]] == [owner is not None for owner in owners]
    # The block that drafts chooses by itself.
    assert config.drafter is not None
    assert config.drafter.index_owner is None


def test_a_gguf_file_says_which_layers_have_an_indexer_and_holds_the_block(tmp_path: Path) -> None:
    raw, path = glm_moe_dsa(), tmp_path / "model.gguf"
    own = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "indexer_types": ["full"]}
    block, count = build_hf_model({**raw, **own}, 11), raw["num_hidden_layers"]
    state = dict(build_hf_model(raw, 7).state_dict())
    for name, tensor in block.state_dict().items():
        if name.startswith(first := "model.layers.0."):
            state[f"model.layers.{count}.{name.removeprefix(first)}"] = tensor
    generator, width = torch.Generator().manual_seed(1), raw["hidden_size"]
    for name, shape in {
        "eh_proj": (width, 2 * width),
        **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (width,)),
    }.items():
        state[f"model.layers.{count}.{name}.weight"] = torch.randn(shape, generator=generator)
    expected = build_model(raw, state, drafts=True)

    def write(*kinds: str) -> DecoderForCausalLM:
        grown = {**raw, "num_hidden_layers": count + 1, "indexer_types": kinds}
        more = partial(gguf.GGUFWriter.add_nextn_predict_layers, count=1)
        write_family("glm-dsa", grown, state, path, write_more=more)
        return load(path, drafts=True)

    # A file may say it of the block, too.
    for kinds in (raw["indexer_types"], [*raw["indexer_types"], "full"]):
        found = write(*kinds)
        assert found.config.layers == expected.config.layers
        assert_same_weights(found, expected)
    with pytest.raises(ConfigError, match=r"indexer.types is .*allowed: 4 booleans"):
        write("full")


def test_weights_of_an_indexer_that_nobody_asks_are_left_out() -> None:
    raw = glm_moe_dsa(num_nextn_predict_layers=0)
    state = dict(build_hf_model(raw, 7).state_dict())
    unread = "model.layers.1.self_attn.indexer.wk.weight"
    assert unread not in state
    state[unread] = state[unread.replace("layers.1", "layers.0")]
    build_model(raw, state)


@pytest.mark.parametrize("shares", [False, True])
def test_a_token_of_the_release_takes_a_latent_and_an_index_key_a_layer(shares: bool) -> None:
    """All lie in one group, of one block table and without padding."""
    release = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1536,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
    }
    own = {"indexer_types": None, "index_topk_freq": 4} if shares else {}
    config = parse((glm_moe_dsa if shares else deepseek_v32)(**release, **own)).for_drafts(False)
    specs = decoder_kv_cache_specs(config, 16, torch.bfloat16, torch.float32)
    (group,) = get_kv_cache_groups(EngineArgs(model="deepseek-v4").create_vllm_config(), specs)
    # Of 61 layers the first, and every fourth from the second on.
    num_indexers = 16 if shares else 61
    widths = 61 * (512 + 64) + num_indexers * 128
    assert group.kv_cache_spec.page_size_bytes == 16 * widths * 2
    assert {spec.block_size for spec in specs.values()} == {16}
