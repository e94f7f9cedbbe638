"""Recurrent layers natively: the same bits in any company, behind every state, with any drafts."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.recurrent_checks import resume_at
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    glm5_next,
    published_tensors,
    qwen3_5,
)
from tests.model_executor.models.decoder.test_gated_delta import OTHERS, SHAPES
from tests.model_executor.models.decoder.test_glm5_next import CONFIGS as GLM
from tests.model_executor.models.decoder.test_kimi_linear import CONFIGS as KIMI
from tests.model_executor.models.harness import PagedHarness, Request
from tests.model_executor.models.hf_reference import random_tokens
from tests.native.test_library import builds, make_context
from vllm.exceptions import InvariantError
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.native.decoder import NativeDecoder, can_run_decoder

MODELS = {
    "qwen 3.5": qwen3_5(),
    "a recurrent layer last": qwen3_5(**SHAPES["a recurrent layer last"]),
    **OTHERS,
    "kimi, a recurrent layer last": KIMI["one group"],
    "kimi, latent attention last": KIMI["groups"],
    # Of most sequences a part of the keys is chosen.
    "glm, chosen keys last": glm5_next(index_topk=16),
    "glm, a recurrent layer last": GLM["pools of sixteen"],
}
GLM_NAMES = [name for name in MODELS if name.startswith("glm")]
UNIT = 16


def build(name: str) -> DecoderForCausalLM:
    raw = MODELS[name]
    return build_model(raw, published_tensors(build_hf_model(raw, seed=7)))


def make_native(
    model: DecoderForCausalLM, threads: int, vectors: str | None = None
) -> PagedHarness:
    harness = make_harness(model, UNIT, 400, native=threads, packed=True)
    if vectors is not None:
        context = make_context(threads, vectors)
        own = NativeDecoder(model, harness.layout, harness.kv_caches, context)
        harness.steps = replace(harness.steps, model=own, settle_drafts=own.settle_drafts)
    return harness


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_company_chunks_threads_drafts_or_builds(name: str) -> None:
    model = build(name)
    rng = random.Random(13)
    sequences = [random_tokens(rng.randrange(30, 150), seed) for seed in range(5)]
    first = make_native(model, 1)
    alone = [first.run(ids, [len(ids)]) for ids in sequences]
    for threads, vectors in ((1, None), (2, None), (2, "avx2")):
        if vectors is not None and vectors not in builds():
            continue
        harness = make_native(model, threads, vectors)
        requests = [harness.add(ids) for ids in sequences]
        while any(request.num_left for request in requests):
            live = [i for i, request in enumerate(requests) if request.num_left]
            picked = rng.sample(live, rng.randint(1, len(live)))
            counts = [min(rng.choice([1, 2, 4, 5, 33]), requests[i].num_left) for i in picked]
            rejected = [rng.randrange(count) if count <= 5 else 0 for count in counts]
            starts = [requests[i].num_computed for i in picked]
            work = [(requests[i], count) for i, count in zip(picked, counts, strict=True)]
            found = harness.step(work, rejected)
            rows = zip(picked, starts, counts, rejected, found, strict=True)
            for i, start, count, wrong, logits in rows:
                right = count - wrong
                assert torch.equal(logits[:right], alone[i][start : start + right])
        if rng.random() < 0.5:
            requests.reverse()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen 3.5", "qwen3-next", "kimi, latent attention last", *GLM_NAMES]
)
def test_who_resumes_at_a_state_gets_the_bits_of_who_left_it(name: str) -> None:
    model = build(name)
    token_ids = random_tokens(150, 5)
    harness = make_native(model, 2)
    first = harness.add(token_ids)
    first.keeps_states = True
    expected = harness.step([(first, 150)])[0]
    for boundary in range(UNIT, 150, UNIT):
        resumed = resume_at(harness, first, boundary)
        logits = harness.step([(resumed, 150 - boundary)])[0]
        assert torch.equal(logits, expected[boundary:])


def test_a_state_without_blocks_is_an_invariant_error() -> None:
    harness = make_native(build("qwen 3.5"), 1)
    sequence = harness.add(random_tokens(40, 1))
    harness.step([(sequence, 20)])
    forget_states(harness, sequence)
    with pytest.raises(InvariantError, match=r"I5: .* needs the recurrent state behind 20 tokens"):
        harness.step([(sequence, 1)])


def forget_states(harness: PagedHarness, sequence: Request) -> None:
    for group_id, group in enumerate(harness.layout.groups):
        if group.kind == "recurrent":
            sequence.blocks[group_id] = dict.fromkeys(sequence.blocks[group_id], 0)


def test_drafts_that_are_all_of_a_request_are_refused() -> None:
    model = build("qwen 3.5")
    harness = make_native(model, 1)
    sequence = harness.add(random_tokens(40, 1))
    item = replace(harness.find_slice(sequence, 3), num_drafts=3)
    tables = harness.steps.build_metadata([item], harness.layout)
    ids: Any = torch.ones(3, dtype=torch.long)
    with pytest.raises(InvariantError, match="drafts are all of its tokens"):
        harness.steps.model(ids, torch.arange(3), tables, harness.kv_caches)


def test_settled_drafts_that_the_step_had_not_are_refused() -> None:
    harness = make_native(build("qwen 3.5"), 1)
    sequence = harness.add(random_tokens(40, 1))
    item = replace(harness.find_slice(sequence, 6, 2), num_drafts=2)
    tables = harness.steps.build_metadata([item], harness.layout)
    ids = torch.ones(6, dtype=torch.long)
    harness.steps.model(ids, torch.arange(6), tables, harness.kv_caches)
    assert harness.steps.settle_drafts is not None
    with pytest.raises(InvariantError, match="accepted drafts are not the step's"):
        harness.steps.settle_drafts([item], [3])


def test_states_of_another_type_are_left_to_torch() -> None:
    model = build("qwen 3.5")
    caches = dict(make_harness(model, UNIT).kv_caches)
    assert can_run_decoder(model, caches)
    states = caches["model.recurrent_states"]
    caches["model.recurrent_states"] = states.bfloat16()
    assert not can_run_decoder(model, caches)
