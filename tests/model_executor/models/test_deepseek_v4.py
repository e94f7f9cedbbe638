"""Parity with transformers in fp32, whatever the chunking and the batch mix.

Random models have near-ties, and one flipped choice spoils everything after it. So sequences are
chosen whose least margin (router, indexer, argmax; measured in the reference) exceeds 1e-5, which
is asserted; the long ones are compared up to the first smaller margin.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.model_executor.models.harness import PagedHarness, build_model, run_with_mtp
from tests.model_executor.models.hf_reference import (
    PARITY_CONFIGS,
    YARN,
    ReferenceRun,
    build_hf_model,
    published_tensors,
    random_tokens,
    randomize_,
    run_reference,
    sixteen_rate,
)
from tests.model_executor.models.tiny_config import tiny_config
from vllm.exceptions import InvariantError
from vllm.model_executor.models.deepseek_v4 import attention, entries
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.v1.attention.metadata import RequestSlice, build_step_metadata
from vllm.v1.attention.ops.registry import get_reference_op

TOLERANCE = 1e-3
MIN_MARGIN = 1e-5
LENGTH = 300
LONG_LENGTH = 1500

SEEDS = {
    "hc4-yarn-4-128": (1, 4, 9, 10),
    "hc2-plain-4-128": (1, 7, 9, 8),
    "hc2-yarn-4-16": (1, 4, 5, 13),
    "hc4-plain-4-16": (8, 9, 10, 12),
}
LONG_SEEDS = {
    "hc4-yarn-4-128": 1002,
    "hc2-plain-4-128": 1000,
    "hc2-yarn-4-16": 1009,
    "hc4-plain-4-16": 1000,
}


@dataclass
class Case:
    """One config: our model, and sequences with the reference's logits."""

    name: str
    model: DeepseekV4ForCausalLM
    sequences: list[list[int]]
    references: list[ReferenceRun]
    long_sequence: list[int]
    long_reference: ReferenceRun


@pytest.fixture(scope="module", params=list(PARITY_CONFIGS))
def case(request: pytest.FixtureRequest) -> Case:
    raw = PARITY_CONFIGS[request.param]
    reference = build_hf_model(raw, seed=7)
    sequences = [random_tokens(LENGTH, seed) for seed in SEEDS[request.param]]
    references = [run_reference(reference, token_ids) for token_ids in sequences]
    long_sequence = random_tokens(LONG_LENGTH, LONG_SEEDS[request.param])
    return Case(
        request.param,
        build_model(DeepseekV4Config.from_dict(raw), published_tensors(reference.state_dict())),
        sequences,
        references,
        long_sequence,
        run_reference(reference, long_sequence),
    )


def split(total: int, size: int) -> list[int]:
    return [min(size, total - first) for first in range(0, total, size)]


def random_split(total: int, rng: random.Random) -> list[int]:
    chunks = []
    while total:
        chunks.append(min(total, rng.choice([1, 1, 2, 3, 5, 7, 31, 64, 100, 128, 200])))
        total -= chunks[-1]
    return chunks


def test_the_reference_has_no_near_ties(case: Case) -> None:
    for reference in case.references:
        assert reference.margins.min() > MIN_MARGIN


@pytest.mark.slow
def test_every_length_up_to_300_in_one_chunk(case: Case) -> None:
    # The model is causal: row i of one forward of n > i tokens is the answer for length i + 1.
    # Chunks that end at each length are covered by the one-token steps below.
    harness = PagedHarness(case.model)
    for token_ids, reference in zip(case.sequences, case.references, strict=True):
        logits = harness.run(token_ids, [LENGTH])
        torch.testing.assert_close(logits, reference.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 7, 127, 129, 256])
def test_chunk_sizes(case: Case, chunk: int) -> None:
    harness = PagedHarness(case.model, block_size=(32, 64, 128)[chunk % 3])
    # Few tokens at a time take longest; behind window and compressor it is the same again.
    length = 160 if chunk < 10 else LENGTH
    logits = harness.run(case.sequences[0][:length], split(length, chunk))
    expected = case.references[0].logits[:length]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_every_first_chunk_length(case: Case) -> None:
    # Prefill n tokens, then one more: resuming at n must find everything it needs, for each n.
    harness = PagedHarness(case.model, num_blocks=600)
    token_ids, reference = case.sequences[1], case.references[1].logits
    # All to the first boundary of every cache and around the second, else one of each five.
    lengths = [*range(1, 140), *range(140, 250, 5), *range(250, 262), *range(262, LENGTH, 5)]
    for first in range(0, len(lengths), 16):
        group = lengths[first : first + 16]
        live = [harness.add(token_ids) for _ in group]
        ends = harness.step([(sequence, n) for sequence, n in zip(live, group, strict=True)])
        nexts = harness.step([(sequence, 1) for sequence in live])
        for n, end, following in zip(group, ends, nexts, strict=True):
            torch.testing.assert_close(end[-1], reference[n - 1], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(following[0], reference[n], atol=TOLERANCE, rtol=0)
        for sequence in live:
            harness.release(sequence)


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "packed"), [(32, False), (64, True), (128, False)])
def test_batch_mix(case: Case, block_size: int, packed: bool) -> None:
    # Decode rows beside prefill rows, requests of different lengths, in random steps.
    rng = random.Random(block_size)
    harness = PagedHarness(case.model, block_size, num_blocks=800, packed=packed)
    lengths = [LENGTH, 177, 40, 261, 5, 1, 130, 3]
    pick = [index % len(case.sequences) for index in range(len(lengths))]
    live = [
        harness.add(case.sequences[p][:length]) for p, length in zip(pick, lengths, strict=True)
    ]
    while any(sequence.num_left for sequence in live):
        work = [
            (sequence, min(sequence.num_left, rng.choice([1, 1, 1, 2, 3, 7, 64, 127, 128, 129])))
            for sequence in live
            if sequence.num_left and rng.random() < 0.8
        ]
        for (sequence, count), logits in zip(work, harness.step(work), strict=True):
            end = sequence.num_computed
            expected = case.references[pick[live.index(sequence)]].logits[end - count : end]
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_rejected_drafts_leave_no_trace(case: Case) -> None:
    # Prefill chunks, decode rows and drafts, some of them wrong, in random steps.
    rng = random.Random(6)
    harness = PagedHarness(case.model, num_blocks=800, packed=True)
    live = [harness.add(token_ids) for token_ids in case.sequences]
    num_wrong = 0
    while any(sequence.num_left for sequence in live):
        work, rejected = [], []
        for sequence in live:
            count = min(sequence.num_left, rng.choice([1, 1, 2, 3, 4, 5, 8, 9, 64, 129]))
            if count and rng.random() < 0.8:
                work.append((sequence, count))
                rejected.append(rng.randrange(count) if count < 10 else 0)
        num_wrong += sum(rejected)
        logits = harness.step(work, rejected)
        for (sequence, count), wrong, rows in zip(work, rejected, logits, strict=True):
            end = sequence.num_computed
            expected = case.references[live.index(sequence)].logits[end - count + wrong : end]
            kept = rows[: count - wrong]
            torch.testing.assert_close(kept, expected, atol=TOLERANCE, rtol=0)
    assert num_wrong > 50


@pytest.mark.slow
@pytest.mark.parametrize("boundary", [16, 128, 256])
def test_drafts_across_a_boundary_accepted_and_rejected(case: Case, boundary: int) -> None:
    # Entries of 4, 16 and 128 tokens are completed inside the drafted rows, or by rejected ones.
    harness = PagedHarness(case.model, num_blocks=1000)
    token_ids, reference = case.sequences[2], case.references[2].logits
    starts = [start for start in range(boundary - 5, boundary + 1) for _ in range(5)]
    # Beside them, requests that see fewer entries than the indexer chooses.
    starts += range(20, 25)
    live = [harness.add(token_ids) for _ in starts]
    harness.step(list(zip(live, starts, strict=True)))
    for num_rejected in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2], [2, 2, 2, 2, 2]):
        rejected = num_rejected * (len(starts) // 5)
        firsts = [sequence.num_computed for sequence in live]
        # Alone in a padded batch, then ragged: requests with one row less at odd indices.
        counts = [max(5 - i % 2, wrong + 1) for i, wrong in enumerate(rejected)]
        logits = harness.step(list(zip(live, counts, strict=True)), rejected)
        for first, count, wrong, rows in zip(firsts, counts, rejected, logits, strict=True):
            num_kept = count - wrong
            expected = reference[first : first + num_kept]
            torch.testing.assert_close(rows[:num_kept], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("chunking", ["whole", "512", "random", "then decode", "then drafts"])
def test_long_sequences(
    case: Case, chunking: str, record_property: Callable[[str, object], None]
) -> None:
    ties = (case.long_reference.margins <= MIN_MARGIN).nonzero()
    num_compared = int(ties[0]) if len(ties) else LONG_LENGTH
    record_property("share_compared", num_compared / LONG_LENGTH)
    print(f"{case.name}: {num_compared} of {LONG_LENGTH} positions before the first near-tie")
    assert num_compared >= 0.95 * LONG_LENGTH
    chunks = {
        "whole": [LONG_LENGTH],
        "512": split(LONG_LENGTH, 512),
        "random": random_split(LONG_LENGTH, random.Random(3)),
        "then decode": [LONG_LENGTH - 150, *[1] * 150],
        "then drafts": [LONG_LENGTH - 150, *[4, 5, 1, 8, 2] * 7, 4, 4, 2],
    }[chunking]
    logits = PagedHarness(case.model, num_blocks=400).run(case.long_sequence, chunks)
    torch.testing.assert_close(
        logits[:num_compared],
        case.long_reference.logits[:num_compared],
        atol=TOLERANCE,
        rtol=0,
    )


@pytest.mark.slow
def test_drafts_of_long_requests_choose_their_own_entries(case: Case) -> None:
    harness = PagedHarness(case.model, num_blocks=900)
    firsts = [1200, 1203, 1206]
    live = [harness.add(case.long_sequence) for _ in firsts]
    for sequence, first in zip(live, firsts, strict=True):
        harness.step([(sequence, first)])
    for counts in ([4, 3, 4], [8, 8, 5], [1, 2, 2]):
        starts = [sequence.num_computed for sequence in live]
        logits = harness.step(list(zip(live, counts, strict=True)))
        for start, count, rows in zip(starts, counts, logits, strict=True):
            assert case.long_reference.margins[start : start + count].min() > MIN_MARGIN
            expected = case.long_reference.logits[start : start + count]
            torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def mtp_model() -> DeepseekV4ForCausalLM:
    config = DeepseekV4Config.from_dict(tiny_config(num_nextn_predict_layers=1))
    model = DeepseekV4ForCausalLM(config, ops=get_reference_op, dtype=torch.float32, device="cpu")
    randomize_(model.weight_slots(), config.n_routed_experts, seed=3)
    return model


@pytest.mark.slow
def test_mtp_block_does_not_depend_on_chunking(mtp_model: DeepseekV4ForCausalLM) -> None:
    token_ids = random_tokens(161, 5)
    whole = run_with_mtp(mtp_model, token_ids, [160])[1]
    assert whole.isfinite().all()
    assert whole.std() > 0.1
    mixed = run_with_mtp(mtp_model, token_ids, [128, 1, 1, 29, 1])[1]
    torch.testing.assert_close(mixed, whole, atol=TOLERANCE, rtol=0)


def test_slots_are_views_under_published_names(mtp_model: DeepseekV4ForCausalLM) -> None:
    slots = mtp_model.weight_slots()
    assert slots["layers.1.ffn.experts.3.w3.weight"].shape == (24, 48)
    assert slots["layers.1.attn.indexer.compressor.wgate.weight"].shape == (32, 48)
    assert slots["mtp.0.hc_head_scale"].shape == (1,)
    assert slots["layers.0.ffn.gate.tid2eid"].dtype == torch.int64
    assert "layers.0.ffn.gate.bias" not in slots
    owned = {parameter.untyped_storage().data_ptr() for parameter in mtp_model.parameters()}
    assert {slot.untyped_storage().data_ptr() for slot in slots.values()} == owned
    assert sum(slot.numel() for slot in slots.values()) == sum(
        parameter.numel() for parameter in mtp_model.parameters()
    )


def test_no_tokens(mtp_model: DeepseekV4ForCausalLM) -> None:
    harness = PagedHarness(mtp_model)
    meta = build_step_metadata([], harness.layout, "cpu")
    empty = torch.zeros(0, dtype=torch.long)
    with torch.inference_mode():
        streams = mtp_model(empty, empty, meta, harness.kv_caches)
        assert streams.shape == (0, 4, 48)
        assert mtp_model.compute_logits(streams).shape == (0, 96)


def test_a_missing_row_is_an_invariant_error(mtp_model: DeepseekV4ForCausalLM) -> None:
    harness = PagedHarness(mtp_model)
    sequence = harness.add(random_tokens(40, 1))
    harness.step([(sequence, 39)])
    window = next(
        index for index, group in enumerate(harness.layout.groups) if group.kind == "window"
    )
    held = harness.find_slice(sequence, 1)
    tables = list(held.tables)
    tables[window].block_ids[0] = 0
    with pytest.raises(InvariantError, match=r"I5.*position 0 .*window"):
        build_step_metadata([RequestSlice(39, 1, tuple(tables))], harness.layout, "cpu")


@pytest.mark.slow
def test_bfloat16_runs_every_path() -> None:
    config = DeepseekV4Config.from_dict(tiny_config())
    token_ids = random_tokens(200, 2)
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = DeepseekV4ForCausalLM(config, ops=get_reference_op, dtype=dtype, device="cpu")
        randomize_(model.weight_slots(), config.n_routed_experts, seed=5)
        harness = PagedHarness(model, cache_dtype=dtype)
        logits[dtype] = harness.run(token_ids, [1, 1, 130, 60, *[1] * 8])
    assert logits[torch.bfloat16].dtype == torch.float32
    # bf16 flips near-ties of routers, so only most of the output resembles fp32's.
    stacked = torch.stack([logits[torch.float32].flatten(), logits[torch.bfloat16].flatten()])
    assert torch.corrcoef(stacked)[0, 1] > 0.9


def test_a_narrow_cache_rounds_alike_in_chunks_and_pages() -> None:
    config = DeepseekV4Config.from_dict(tiny_config(compress_ratios=[0, 0], num_hidden_layers=1))
    model = DeepseekV4ForCausalLM(config, ops=get_reference_op, dtype=torch.float32, device="cpu")
    randomize_(model.weight_slots(), config.n_routed_experts, seed=5)
    token_ids = random_tokens(64, 2)
    whole, parts = (
        PagedHarness(model, cache_dtype=torch.bfloat16).run(token_ids, chunks)
        for chunks in ([64], [1, 30, 1, 32])
    )
    torch.testing.assert_close(whole, parts, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_listing_chosen_entries_equals_masking_the_others(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = case.long_sequence[:700]
    listed = PagedHarness(case.model).run(token_ids, [350, 350])
    monkeypatch.setattr(attention, "_MAX_KEY_VALUES", 1)
    one_by_one = PagedHarness(case.model).run(token_ids, [350, 350])
    monkeypatch.setattr(entries, "_LISTED_ENTRIES_FACTOR", 1 << 30)
    masked = PagedHarness(case.model).run(token_ids, [350, 350])
    torch.testing.assert_close(listed, masked, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(one_by_one, masked, atol=TOLERANCE, rtol=0)
    # Other sums in another order: bit-equal results would mean that one path never ran.
    assert not torch.equal(listed, masked)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("shape", ["one stream, rates 8 and 32", "three streams, window of 5"])
def test_unusual_shapes(shape: str, block_size: int) -> None:
    if shape.startswith("one"):
        raw = sixteen_rate(tiny_config(hc_mult=1))
        raw["compress_rates"] = {
            "compressed_sparse_attention": 8,
            "heavily_compressed_attention": 32,
        }
    else:
        raw = tiny_config(
            hc_mult=3,
            compress_ratios=[4, 128, 4, 0],
            sliding_window=5,
            index_topk=4,
            rope_scaling=YARN,
            swiglu_limit=0.5,
            hc_sinkhorn_iters=3,
        )
    reference = build_hf_model(raw, seed=7)
    token_ids = random_tokens(190, 4)
    expected = run_reference(reference, token_ids)
    assert expected.margins.min() > MIN_MARGIN
    model = build_model(DeepseekV4Config.from_dict(raw), published_tensors(reference.state_dict()))
    for chunks in ([190], [40, 1, 1, 60, 88], [129, *[1] * 61]):
        logits = PagedHarness(model, block_size, num_blocks=300).run(token_ids, chunks)
        torch.testing.assert_close(logits, expected.logits, atol=TOLERANCE, rtol=0)
