"""Attention by units of 256 keys: a row's bits do not depend on who meets its keys with it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_executor.models.decoder.building import build_model
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    gemma3,
    glm5_next,
    gpt_oss,
    kimi_linear,
    llama,
    published_tensors,
)
from tests.model_executor.models.harness import PagedHarness, Request
from tests.model_executor.models.hf_reference import random_tokens
from tests.native.test_deepseek_v4 import make_model
from vllm import LLM, SamplingParams
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.native.step_tables import build_native_tables

UNIT = 256
PREFIX = 640  # two units and a half, whole blocks of every group
F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
WIDE = {"max_position_embeddings": 2048}
# Groups of heads, windows that begin within units, sinks, latents, and chosen keys of two units.
CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "grouped": (llama(**WIDE), F32),
    "grouped, fp16": (llama(**WIDE, head_dim=36), F16),
    "windows, bf16": (gemma3(**WIDE, sliding_window=300), BF16),
    "sinks": (gpt_oss(**WIDE, sliding_window=128, num_key_value_heads=1, hidden_size=64), F32),
    "grouped, int8": (llama(**WIDE, head_dim=40), I8),
    "windows and sinks, int8": (gpt_oss(**WIDE, sliding_window=128), I8),
    "latents, fp16": (kimi_linear(), F16),
    "chosen keys": (glm5_next(index_kpool=4, index_topk=300), F32),
}


class SharingHarness(PagedHarness):
    """One whose requests may hold the same blocks, so that none is given back."""

    def _free_dead(self, sequence: Request) -> None:
        pass

    def fork(self, other: Request, token_ids: list[int], start: int) -> Request:
        """Returns a request that hits another's first tokens, whole blocks; states are copied."""
        request = Request(token_ids, start, keeps_states=True)
        for group_id, group in enumerate(self.layout.groups):
            held = other.blocks[group_id]
            if group.state is None:
                end = start // group.block_size
                request.blocks.append({i: block for i, block in held.items() if i < end})
                continue
            own = {index: self._free[group_id].pop() for index in held}
            request.blocks.append(own)
            for name, owner in self.layout.group_of.items():
                if owner == group_id:
                    self.kv_caches[name][list(own.values())] = self.kv_caches[name][
                        list(held.values())
                    ]
        return request


def make_decoder(raw: dict[str, Any]) -> Any:
    reference = build_hf_model(raw, seed=7)
    is_own = raw["model_type"] in ("kimi_linear", "glm5_next")
    return build_model(raw, published_tensors(reference) if is_own else reference.state_dict())


def make(model: Any, dtype: torch.dtype, threads: int) -> SharingHarness:
    return SharingHarness(
        model,
        num_blocks=1500,
        cache_dtype=dtype,
        find_specs=decoder_kv_cache_specs,
        native=threads,
    )


@pytest.mark.parametrize("name", CASES)
def test_rows_that_share_blocks_have_the_bits_of_rows_alone(name: str) -> None:
    raw, dtype = CASES[name]
    model = make_decoder(raw)
    prefix = random_tokens(PREFIX, 1)
    prompts = [[*prefix, *random_tokens(12, seed)] for seed in range(2, 6)]
    alone = [make(model, dtype, 1).run(prompt, [len(prompt)])[PREFIX:] for prompt in prompts]
    harness = make(model, dtype, 2)
    first = harness.add(prompts[0])
    first.keeps_states = True
    for count in (200, 90, 350):  # ends of chunks within units
        harness.step([(first, count)])
    requests = [first, *(harness.fork(first, prompt, PREFIX) for prompt in prompts[1:])]
    together: list[list[torch.Tensor]] = [[] for _ in requests]
    rng = random.Random(3)
    while any(request.num_left for request in requests):
        live = [i for i, request in enumerate(requests) if request.num_left]
        work = [(requests[i], min(requests[i].num_left, rng.choice([1, 1, 2, 9]))) for i in live]
        for i, logits in zip(live, harness.step(work), strict=True):
            together[i].append(logits)
    for parts, expected in zip(together, alone, strict=True):
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize(
    "name", ["grouped, fp16", "windows, bf16", "latents, fp16", "windows and sinks, int8"]
)
def test_numbers_of_narrow_caches_are_those_of_torch(name: str) -> None:
    raw, dtype = CASES[name]
    model = make_decoder(raw)
    token_ids = random_tokens(UNIT + 40, 1)
    by_torch, native = (
        PagedHarness(model, cache_dtype=dtype, find_specs=decoder_kv_cache_specs, native=threads)
        for threads in (0, 1)
    )
    expected = by_torch.run(token_ids, [len(token_ids)])
    found = native.run(token_ids, [250, 1, 45])
    # A value at the middle of two may be rounded to either.
    torch.testing.assert_close(found, expected, atol=2e-2 * float(expected.abs().max()), rtol=0)


def test_rows_of_bytes_are_those_of_torch() -> None:
    raw, dtype = CASES["grouped, int8"]
    model = make_decoder(raw)
    token_ids = random_tokens(40, 1)
    found = []
    for threads in (0, 1):
        harness = make(model, dtype, threads)
        request = harness.add(token_ids)
        for count in (30, 10):
            harness.step([(request, count)])
        found.append(harness.read_rows(request, "model.layers.0.self_attn", range(40)))
    # Codes, then scales.
    width = 2 * raw["num_key_value_heads"] * raw["head_dim"]
    by_torch, native = (rows[:, :width].int() for rows in found)
    assert int(by_torch.abs().max()) == 127
    assert int((native - by_torch).abs().max()) <= 1
    by_torch, native = (rows[:, width:].clone().view(F32) for rows in found)
    torch.testing.assert_close(native, by_torch)


@pytest.mark.parametrize("native", [0, 1])
def test_fp16_rows_saturate(native: int) -> None:
    model = make_decoder(llama(**WIDE))
    with torch.no_grad():
        for block in model.layers:
            block.attention.qkv.weight[-1] = 1e6
    harness = SharingHarness(
        model, cache_dtype=F16, find_specs=decoder_kv_cache_specs, native=native
    )
    logits = harness.run(random_tokens(40, 1), [30, 1, 9])
    assert logits.isfinite().all()


def test_deepseek_v4_keeps_fp16_rows() -> None:
    model = make_model()
    token_ids = random_tokens(300, 1)
    by_torch = PagedHarness(model, cache_dtype=F16).run(token_ids, [300])
    native = PagedHarness(model, cache_dtype=F16, native=1)
    whole = native.run(token_ids, [300])
    assert torch.equal(native.run(token_ids, [100, 1, 150, 49]), whole)
    torch.testing.assert_close(whole, by_torch, atol=2e-2 * float(by_torch.abs().max()), rtol=0)


def test_requests_with_a_common_prompt_hold_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[np.ndarray]] = []

    def note_tables(slices: Any, layout: Any) -> Any:
        steps.append([item.tables[0].block_ids for item in slices if item.num_tokens])
        return build_native_tables(slices, layout)

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr("vllm.native.models.build_native_tables", note_tables)
    build_hf_model(llama(**WIDE), seed=1).config.save_pretrained(tmp_path)
    prompt = random_tokens(2 * UNIT + 5, 1)
    with LLM(
        str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        block_size=32,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 26,
    ) as llm:
        # Their prompts may be computed one after another.
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt}] * 6, params, use_tqdm=False)
    last = max(steps, key=len)
    assert len(last) == 6
    shared = len(prompt) // 32
    assert all((table[:shared] == last[0][:shared]).all() for table in last)
    assert len({int(table[shared]) for table in last}) == 6
