"""Sizes of keys' channels: how they are found, and that they change no number of float caches."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    gemma4_small,
    gpt_oss,
    qwen3_5,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm.distributed.parallel_state import SingleProcessGroup
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.key_sizes import (
    NUM_TOKENS,
    digest_sizes,
    draw_token_ids,
    find_sizes,
    measure_key_sizes,
)
from vllm.v1.worker.one_request import OneRequest

# Windows and sinks; layers that read the rows of others; recurrent layers, heads turned in part.
MODELS = {"gpt-oss": gpt_oss(), "gemma 4": gemma4_small(), "qwen 3.5": qwen3_5()}


def test_sizes_are_roots_of_what_keys_and_queries_come_to() -> None:
    # Two pairs of keys that make 5 and 500, of queries that make 5 and 1 / 13, and two values that
    # are not turned.
    own = [3.0, 300, 4, 400, 0.01, 1]
    keys = torch.tensor([own, [0, 0, 0, 0, 0, torch.inf]]).double().expand(100, 2, 6).clone()
    keys[0] *= 1000  # the first token of a text
    keys[1:50] /= 2
    queries = torch.tensor([4, 5 / 169, 3, 12 / 169, 2.5, 0]).double().expand(2, 6)
    sizes = find_sizes(keys, queries.square(), 4)
    assert sizes[0].tolist() == [1, 64, 1, 64, 1 / 16, 1]
    assert sizes[1].tolist() == [1] * 6


@pytest.mark.parametrize("vocab_size", [1, 2, 96, 151_936])
def test_tokens_are_of_the_vocabulary(vocab_size: int) -> None:
    token_ids = draw_token_ids(vocab_size)
    assert len(token_ids) == NUM_TOKENS
    assert all(0 <= token < vocab_size for token in token_ids)
    if vocab_size > 1000:
        assert sum(token < 400 for token in token_ids) > NUM_TOKENS / 4
        assert max(token_ids) > vocab_size / 4


def measure(model: Any, make_step_model: Any) -> dict[str, torch.Tensor]:
    make_request = partial(
        OneRequest,
        model,
        decoder_kv_cache_specs(model.config, 16, torch.float32, torch.float32),
        CpuPlatform(),
        torch.device("cpu"),
        make_step_model,
        num_tokens=NUM_TOKENS,
        stored=frozenset({"keys", "dense"}),
    )
    return measure_key_sizes(model, make_request)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_change_no_number_of_a_float_cache(name: str) -> None:
    raw = MODELS[name]
    reference = build_hf_model(raw, seed=7)
    with torch.no_grad():
        for parameter_name, weight in reference.named_parameters():
            if "k_proj.weight" in parameter_name:
                weight[::3] *= 9  # some channels are larger
    model = build_model(raw, reference.state_dict())
    platform = CpuPlatform()
    by_torch = measure(model, super(CpuPlatform, platform).make_step_model)
    sizes = measure(model, platform.make_step_model)
    assert {len(own.unique()) > 1 for own in sizes.values()} == {True}
    group = SingleProcessGroup()
    assert digest_sizes(sizes, group) == digest_sizes(by_torch, group)
    assert digest_sizes({n: 2 * own for n, own in sizes.items()}, group) != digest_sizes(
        sizes, group
    )
    token_ids = random_tokens(70, 1)
    for native in (0, 1):
        expected = make_harness(model, native=native).run(token_ids, [50, 1, 19])
        model.put_key_sizes(sizes)
        harness = make_harness(model, native=native)
        assert torch.equal(harness.run(token_ids, [50, 1, 19]), expected)
        model.put_key_sizes({})
