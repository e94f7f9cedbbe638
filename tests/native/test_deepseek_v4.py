"""DeepSeek-V4 on the native kernels: transformers' numbers, and the same bits in any batch."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.model_executor.models.harness import PagedHarness, build_model
from tests.model_executor.models.hf_reference import (
    PARITY_CONFIGS,
    build_hf_model,
    published_tensors,
    random_tokens,
    randomize_,
    run_reference,
)
from tests.model_executor.models.tiny_config import tiny_config
from tests.native.test_library import builds, make_context
from vllm.exceptions import InvariantError
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.native.deepseek_v4 import NativeDeepseekV4
from vllm.native.models import make_native_model
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.ops.registry import get_reference_op

TOLERANCE = 1e-3
# Sequences without near-ties, from the tests of the torch model.
SEEDS = {"hc4-yarn-4-128": 4, "hc2-plain-4-128": 7, "hc2-yarn-4-16": 4, "hc4-plain-4-16": 9}


def make_model(dtype: torch.dtype = torch.float32, **overrides: object) -> DeepseekV4ForCausalLM:
    config = DeepseekV4Config.from_dict(tiny_config(**overrides))
    model = DeepseekV4ForCausalLM(config, ops=get_reference_op, dtype=dtype, device="cpu")
    randomize_(model.weight_slots(), config.n_routed_experts, seed=5)
    return model


@pytest.fixture(scope="module")
def model() -> DeepseekV4ForCausalLM:
    return make_model(num_nextn_predict_layers=1)


def split_randomly(total: int, rng: random.Random) -> Iterator[int]:
    while total:
        count = min(total, rng.choice([1, 1, 1, 2, 3, 5, 8, 31, 100, 128]))
        yield count
        total -= count


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PARITY_CONFIGS))
def test_numbers_are_those_of_transformers(name: str) -> None:
    reference = build_hf_model(PARITY_CONFIGS[name], seed=7)
    model = build_model(
        DeepseekV4Config.from_dict(PARITY_CONFIGS[name]), published_tensors(reference.state_dict())
    )
    token_ids = random_tokens(300, SEEDS[name])
    expected = run_reference(reference, token_ids).logits
    for threads, chunks in ((1, [300]), (2, [*split_randomly(300, random.Random(3))])):
        harness = PagedHarness(model, native=threads, packed=threads == 2)
        logits = harness.run(token_ids, chunks)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_bits_do_not_depend_on_batch_chunks_drafts_or_threads(
    model: DeepseekV4ForCausalLM,
) -> None:
    """1,000 rows and more, each alone and in ever-changing company."""
    rng = random.Random(11)
    sequences = [random_tokens(rng.randrange(40, 400), seed) for seed in range(10)]
    alone = [PagedHarness(model, native=1).run(ids, [len(ids)]) for ids in sequences]
    for threads in (1, 2):
        harness = PagedHarness(model, num_blocks=900, native=threads)
        requests = [harness.add(ids) for ids in sequences]
        together: list[list[torch.Tensor]] = [[] for _ in sequences]
        while any(request.num_left for request in requests):
            live = [i for i, request in enumerate(requests) if request.num_left]
            chosen = rng.sample(live, rng.randint(1, len(live)))
            work, wrong = [], []
            for i in chosen:
                count = next(split_randomly(requests[i].num_left, rng))
                work.append((requests[i], count))
                wrong.append(rng.randrange(count) if 1 < count <= 8 else 0)
            for i, logits, num_wrong in zip(chosen, harness.step(work, wrong), wrong, strict=True):
                together[i].append(logits[: len(logits) - num_wrong])
        for parts, expected in zip(together, alone, strict=True):
            assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("rope_dim", [2, 6, 12, 14])
def test_vector_builds_give_the_same_bits(rope_dim: int) -> None:
    names = [name for name in builds() if name != "portable"]
    if len(names) < 2:
        pytest.skip("this processor runs one vector build only")
    model = make_model(qk_rope_head_dim=rope_dim, num_hidden_layers=3, hc_mult=2)
    logits = []
    for name in names:
        harness = PagedHarness(model, native=1)
        run = NativeDeepseekV4(model, harness.layout, harness.kv_caches, make_context(1, name))
        harness.steps = replace(harness.steps, model=run)
        logits.append(harness.run(random_tokens(60, 4), [50, 10]))
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


def test_logits_are_near_those_of_torch(model: DeepseekV4ForCausalLM) -> None:
    token_ids = random_tokens(150, 3)
    native, torch_logits = (
        PagedHarness(model, native=threads).run(token_ids, [130, 1, 1, 5, 13]) for threads in (1, 0)
    )
    torch.testing.assert_close(native, torch_logits, atol=1e-4, rtol=1e-5)
    assert not torch.equal(native, torch_logits), "the same bits: was it the same code?"


def test_the_mtp_block_is_that_of_torch(model: DeepseekV4ForCausalLM) -> None:
    token_ids = random_tokens(161, 6)
    drafted = []
    for threads in (0, 1):
        harness = PagedHarness(model, native=threads)
        sequence = harness.add(token_ids[:-1])
        runner, parts = harness.steps, []
        group = harness.layout.group_of["mtp.0.attn.window"]
        own = CacheLayout((harness.layout.groups[group],), {"mtp.0.attn.window": 0})
        for count in (130, 1, 7, 22):
            start = sequence.num_computed
            harness.step([(sequence, count)])
            whole = harness.last_slices[0]
            slices = [replace(whole, tables=(whole.tables[group],), write_from=())]
            with torch.inference_mode():
                streams = runner.model.forward_mtp(
                    harness.last_streams,
                    torch.tensor(token_ids[start + 1 : start + count + 1]),
                    torch.arange(start, start + count),
                    runner.build_metadata(slices, own),
                    harness.kv_caches,
                )
                parts.append(runner.model.compute_mtp_logits(streams))
        drafted.append(torch.cat(parts))
    torch.testing.assert_close(*drafted, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_weights_and_caches() -> None:
    token_ids = random_tokens(200, 2)
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        harness = PagedHarness(make_model(dtype), cache_dtype=dtype, native=2)
        logits.append(harness.run(token_ids, [130, 60, *[1] * 10]).flatten())
    assert torch.corrcoef(torch.stack(logits))[0, 1] > 0.9


def test_a_narrow_cache_rounds_alike_in_chunks_and_pages() -> None:
    model = make_model(compress_ratios=[0, 0], num_hidden_layers=1)
    token_ids = random_tokens(64, 2)
    whole, parts = (
        PagedHarness(model, cache_dtype=torch.bfloat16, native=1).run(token_ids, chunks)
        for chunks in ([64], [1, 30, 1, 32])
    )
    assert torch.equal(whole, parts)


def test_a_missing_row_is_an_invariant_error(model: DeepseekV4ForCausalLM) -> None:
    harness = PagedHarness(model, native=1)
    sequence = harness.add(random_tokens(40, 1))
    harness.step([(sequence, 39)])
    for blocks in sequence.blocks:
        blocks[0] = 0
    with pytest.raises(InvariantError, match=r"needs the row of position \d+ .* table stores none"):
        harness.step([(sequence, 1)])


def test_a_block_outside_the_pool_is_refused(model: DeepseekV4ForCausalLM) -> None:
    harness = PagedHarness(model, native=1)
    sequence = harness.add(random_tokens(40, 1))
    harness.step([(sequence, 39)])
    sequence.blocks[0][0] = 160
    with pytest.raises(InvariantError, match="block 160 of KV group 0 is not one of 160"):
        harness.step([(sequence, 1)])


def test_a_token_outside_the_vocabulary_is_refused(model: DeepseekV4ForCausalLM) -> None:
    harness = PagedHarness(model, native=1)
    with pytest.raises(InvariantError, match="token id 96 is not in a vocabulary of 96"):
        harness.run([5, 96], [2])


def test_no_tokens(model: DeepseekV4ForCausalLM) -> None:
    harness = PagedHarness(model, native=1)
    empty = torch.zeros(0, dtype=torch.long)
    meta = harness.steps.build_metadata([], harness.layout)
    streams = harness.steps.model(empty, empty, meta, harness.kv_caches)
    assert streams.shape == (0, 4, 48)
    assert harness.steps.model.compute_logits(streams).shape == (0, 96)


def test_it_can_be_turned_off(
    model: DeepseekV4ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = PagedHarness(model)
    monkeypatch.setenv("VLLM_NATIVE", "0")
    assert make_native_model(model, harness.layout, harness.kv_caches, 1) is None


def test_what_it_cannot_read_is_left_to_torch(model: DeepseekV4ForCausalLM) -> None:
    harness = PagedHarness(model)
    name = next(iter(harness.kv_caches))
    caches = {**harness.kv_caches, name: harness.kv_caches[name].to(torch.int8)}
    assert make_native_model(model, harness.layout, caches, 1) is None
