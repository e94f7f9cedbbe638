"""DeepSeek V3.2: latent attention to keys that an indexer chooses, token by token."""

from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.recurrent_checks import (
    Case,
    check_batches_with_rejected_drafts,
    make_case,
)
from tests.model_executor.models.decoder.reference import build_hf_model, deepseek_v32
from tests.model_executor.models.decoder.test_glm5_next import PATHS, find_index_margin
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import ConfigError
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.core.layout.grouping import get_kv_cache_groups
from vllm.v1.engine.engine_args import EngineArgs


@pytest.fixture(scope="module")
def case() -> Case:
    made = make_case(deepseek_v32(), seed=3)
    assert find_index_margin(made.model, made.sequences) > 5e-6, "a near-tie of an indexer"
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


def test_a_token_of_the_release_takes_a_latent_and_an_index_key_a_layer() -> None:
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
    config = parse(deepseek_v32(**release)).for_drafts(False)
    specs = decoder_kv_cache_specs(config, 16, torch.bfloat16, torch.float32)
    (group,) = get_kv_cache_groups(EngineArgs(model="deepseek-v4").create_vllm_config(), specs)
    assert group.kv_cache_spec.page_size_bytes == 16 * 61 * (512 + 64 + 128) * 2
    assert {spec.block_size for spec in specs.values()} == {16}
