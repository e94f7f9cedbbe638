"""A decoder's block that drafts, natively: the same bits in any company, behind wrong drafts."""

import random
from dataclasses import replace
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
from tests.model_executor.models.decoder.test_gated_delta import OTHERS
from tests.model_executor.models.hf_reference import random_tokens
from tests.native.test_library import builds, make_context
from vllm.exceptions import InvariantError
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.native.decoder import NativeDecoder

BLOCKS: dict[str, tuple[dict[str, Any], type[Oracle]]] = {
    "qwen 3.5": (qwen3_5(tie_word_embeddings=True), BlockOracle),
    "qwen3-next": (OTHERS["qwen3-next"], BlockOracle),
    # Of most sequences a part of the keys is chosen.
    "glm": (glm5_next(index_topk=16), GlmBlockOracle),
    "glm 5": (glm_moe_dsa(), DeepseekBlockOracle),
}
MAX_BLOCKS = 8


def make_runner(model: DecoderForCausalLM, threads: int, vectors: str | None = None) -> BlockRunner:
    harness = make_harness(model, 16, native=threads, packed=True)
    if vectors is not None:
        context = make_context(threads, vectors)
        own = NativeDecoder(model, harness.layout, harness.kv_caches, context)
        harness.steps = replace(harness.steps, model=own)
    return BlockRunner(harness, MAX_BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BLOCKS)
def test_bits_do_not_depend_on_company_chunks_threads_wrong_tokens_or_builds(
    name: str, dtype: torch.dtype
) -> None:
    model, _ = build_block_model(*BLOCKS[name], dtype)
    rng = random.Random(13)
    sequences = [random_tokens(rng.randrange(40, 120), seed) for seed in range(4)]
    generator = torch.Generator().manual_seed(1)
    width = model.config.hidden_size
    streams = [torch.randn(len(ids) - 1, width, generator=generator) for ids in sequences]
    whole = [
        BlockRows(i, 0, own, ids[1:])
        for i, (own, ids) in enumerate(zip(streams, sequences, strict=True))
    ]
    alone = [[part[0] for part in make_runner(model, 1).run([rows])] for rows in whole]
    for threads, vectors in ((1, None), (2, None), (2, "avx2")):
        if vectors is not None and vectors not in builds():
            continue
        runner, done = make_runner(model, threads, vectors), [0] * len(whole)
        while live := [i for i, rows in enumerate(whole) if done[i] < len(rows.next_ids)]:
            picked = rng.sample(live, rng.randint(1, len(live)))
            batch = []
            for i in picked:
                rows, start = whole[i], done[i]
                end = min(len(rows.next_ids), start + rng.choice([1, 2, 4, 5, 33]))
                batch.append(BlockRows(i, start, rows.streams[start:end], rows.next_ids[start:end]))
            if rng.random() < 0.4:  # as after rejected drafts: other tokens were there before
                runner.run([replace(rows, next_ids=[3] * len(rows.next_ids)) for rows in batch])
            outputs, logits = runner.run(batch)
            for rows, *found in zip(batch, outputs, logits, strict=True):
                end = rows.start + len(rows.next_ids)
                for part, expected in zip(found, alone[rows.request], strict=True):
                    assert torch.equal(part, expected[rows.start : end])
                done[rows.request] = end


def test_it_reads_the_normed_stream() -> None:
    model, _ = build_block_model(*BLOCKS["qwen 3.5"])
    harness = make_harness(model, 16, native=1)
    stream = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    normed = harness.steps.model.norm_streams(stream)
    torch.testing.assert_close(normed, model.norm_streams(stream), atol=1e-5, rtol=1e-5)
    logits = harness.steps.model.compute_logits(stream)
    assert torch.equal(harness.steps.model.compute_mtp_logits(normed), logits)


def test_rows_that_no_table_stores_are_an_invariant_error() -> None:
    model, _ = build_block_model(*BLOCKS["qwen 3.5"])
    runner = make_runner(model, 1)
    beyond = 16 * MAX_BLOCKS
    rows = BlockRows(0, beyond + 1, torch.zeros(1, model.config.hidden_size), [1])
    with pytest.raises(InvariantError, match=f"needs the row of position {beyond} "):
        runner.run([rows])
