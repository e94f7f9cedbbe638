"""The block that drafts equals transformers' layer, wherever a chunk is cut."""

import random
from functools import partial
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import make_harness
from tests.model_executor.models.decoder.drafting import (
    BlockOracle,
    BlockRows,
    BlockRunner,
    DeepseekBlockOracle,
    GlmBlockOracle,
    Oracle,
    build_block_model,
)
from tests.model_executor.models.decoder.reference import glm5_next, glm_moe_dsa, qwen3_5
from tests.model_executor.models.decoder.test_gated_delta import OTHERS, PATHS
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import ConfigError
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs, drafter_cache_name
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model

LENGTH = 90


def raw_config(**overrides: Any) -> dict[str, Any]:
    return qwen3_5(mtp_num_hidden_layers=1, **overrides)


def test_rows_of_a_block_that_does_not_run_are_not_kept() -> None:
    config = resolve_model(["Qwen3_5ForCausalLM"]).parse_config(raw_config())
    assert config.num_nextn_predict_layers == 1
    name = drafter_cache_name(config)
    make = partial(
        decoder_kv_cache_specs, block_size=16, cache_dtype=torch.float32, state_dtype=torch.float32
    )
    assert name in make(config)
    assert name not in make(config.for_drafts(False))
    for raw in (raw_config(mtp_use_dedicated_embeddings=True), qwen3_5()):
        parsed = resolve_model(["Qwen3_5ForCausalLM"]).parse_config(raw)
        assert parsed.num_nextn_predict_layers == 0
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers"):
        resolve_model(["Qwen3_5ForCausalLM"]).parse_config(qwen3_5(mtp_num_hidden_layers=-1))


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_its_logits_equal_transformers(is_tied: bool, native: int) -> None:
    model, oracle = build_block_model(raw_config(tie_word_embeddings=is_tied), BlockOracle)
    assert model.ignored_weight_prefixes == (("lm_head.",) if is_tied else ())
    check_logits(model, oracle, native)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_block_with_experts_equals_transformers(name: str, native: int) -> None:
    check_logits(*build_block_model(OTHERS[name], BlockOracle), native)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_a_block_that_chooses_keys_equals_transformers_parts(native: int) -> None:
    """Of four chosen pools of four tokens, behind more than twenty; of 32 tokens, behind them."""
    check_logits(*build_block_model(glm_moe_dsa(), DeepseekBlockOracle), native)
    model, oracle = build_block_model(glm5_next(index_topk=16), GlmBlockOracle)
    # The block reads the model's own embedding and head; copies of them in files are left out.
    copies = ("mtp.layers.0.embed_tokens.", "mtp.layers.0.shared_head.head.")
    assert model.ignored_weight_prefixes == ("visual.", *copies)
    check_logits(model, oracle, native)


def check_logits(model: DecoderForCausalLM, oracle: Oracle, native: int) -> None:
    """Compares the block's logits, in chunks of random sizes."""
    token_ids = random_tokens(LENGTH, 3)
    expected, hidden = oracle.logits(token_ids), oracle.hidden(token_ids)
    runner = BlockRunner(make_harness(model, 16, native=native), 1 + LENGTH // 16)
    rng, start = random.Random(0), 0
    while start < LENGTH - 1:
        end = min(LENGTH - 1, start + rng.choice([1, 2, 5, 17, 30]))
        rows = BlockRows(0, start, hidden[start:end], token_ids[start + 1 : end + 1])
        _, logits = runner.run([rows])
        torch.testing.assert_close(logits[0], expected[start:end], atol=1e-3, rtol=0)
        start = end
