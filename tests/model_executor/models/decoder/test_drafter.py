"""The block that drafts equals transformers' layer, wherever a chunk is cut."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.drafting import (
    BlockOracle,
    GlmBlockOracle,
    build_quiet_model,
)
from tests.model_executor.models.decoder.reference import (
    glm5_next,
    published_tensors,
    qwen3_5,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import ConfigError
from vllm.model_executor.models.decoder.kv_cache import (
    decoder_kv_cache_specs,
    drafter_cache_name,
    drafter_cache_names,
)
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.metadata import BlockTableView, RequestSlice, build_step_metadata

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
@pytest.mark.parametrize("is_tied", [False, True])
def test_its_logits_equal_transformers(is_tied: bool) -> None:
    raw = raw_config(tie_word_embeddings=is_tied)
    target = build_quiet_model(raw, 7)
    oracle = BlockOracle(raw, target, 11)
    model = build_model(raw, {**target.state_dict(), **oracle.tensors()}, drafts=True)
    assert model.ignored_weight_prefixes == (("lm_head.",) if is_tied else ())
    with torch.inference_mode():
        tokens = torch.tensor([random_tokens(LENGTH, 3)])
        hidden = target.model(tokens, use_cache=False).last_hidden_state[0]
    check_logits(model, tokens[0].tolist(), hidden, oracle)


@pytest.mark.slow
def test_a_block_that_chooses_keys_equals_transformers_parts() -> None:
    """Of four chosen pools of four tokens, behind more than twenty."""
    raw = glm5_next(index_topk=16)
    target = build_quiet_model(raw, 7)
    oracle = GlmBlockOracle(raw, target, 11)
    model = build_model(raw, {**published_tensors(target), **oracle.tensors()}, drafts=True)
    assert model.ignored_weight_prefixes == ("visual.",)
    token_ids = random_tokens(LENGTH, 3)
    check_logits(model, token_ids, oracle.hidden(token_ids), oracle)


def check_logits(
    model: Any, token_ids: list[int], hidden: torch.Tensor, oracle: BlockOracle | GlmBlockOracle
) -> None:
    """Compares the block's logits, in chunks of random sizes."""
    expected = oracle.logits(token_ids)
    harness = make_harness(model, 16)
    names = drafter_cache_names(model.config)
    groups = tuple(harness.layout.groups[harness.layout.group_of[name]] for name in names)
    group_of = {name: index for index, name in enumerate(names)}
    layout = replace(harness.layout, groups=groups, group_of=group_of)
    rng, start = random.Random(0), 0
    ids = np.arange(1, 1 + LENGTH // 16 + 1)
    with torch.inference_mode():
        while start < LENGTH - 1:
            end = min(LENGTH - 1, start + rng.choice([1, 2, 5, 17, 30]))
            item = RequestSlice(start, end - start, (BlockTableView(0, ids),) * len(names))
            streams = model.forward_mtp(
                hidden[start:end],
                torch.tensor(token_ids[start + 1 : end + 1]),
                torch.arange(start, end),
                build_step_metadata([item], layout, device=torch.device("cpu")),
                harness.kv_caches,
            )
            logits = model.compute_mtp_logits(streams)
            torch.testing.assert_close(logits, expected[start:end], atol=1e-3, rtol=0)
            start = end
