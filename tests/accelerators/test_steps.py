"""Every family's steps on kernels that read pages, and decode steps as recorded graphs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerators.asking import find_few_kernels
from tests.accelerators.comparing import assert_near
from tests.accelerators.graph_recorder import (
    GraphRecorder,
    Guarded,
    HostReadError,
    NoHostReads,
)
from tests.distributed.rank_threads import Meeting, ThreadGroup
from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import (
    PARITY_CONFIGS,
    build_hf_model,
    config_as_saved,
    gemma4_small,
    glm5_next,
    gpt_oss,
    kimi_linear,
    published_tensors,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.models.harness import build_model as build_v4_model
from tests.model_executor.models.hf_reference import PARITY_CONFIGS as V4_CONFIGS
from tests.model_executor.models.hf_reference import build_hf_model as build_v4
from tests.model_executor.models.hf_reference import published_tensors as v4_tensors
from tests.model_executor.models.hf_reference import random_tokens
from tests.model_executor.published import load_stored, write_published
from tools.checkpoints.published_spelling import Spelling
from vllm.gpu.decode_graphs import DecodeGraphs, choose_shapes, choose_sizes
from vllm.gpu.step_model import (
    can_replay,
    count_draft_bytes,
    count_gathered_bytes,
    make_gpu_step_model,
    make_graphed_step_model,
    stack_experts,
)
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention import entry_tables
from vllm.v1.attention.entry_tables import LaidOutStep
from vllm.v1.attention.ops.triton import pages
from vllm.v1.attention.ops.triton.registry import get_triton_op
from vllm.v1.attention.paged_tables import PagedTablesBuilder, StepShape

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
VOCAB = 96


def make_pair(raw: dict[str, Any], **kwargs: Any) -> tuple[PagedHarness, PagedHarness]:
    """Returns the torch reference and the kernels over the same weights, on pages of their own."""
    reference = build_hf_model(raw, seed=3)
    saved, tensors = config_as_saved(reference), published_tensors(reference)
    saved["architectures"] = raw["architectures"]
    if saved.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    torch_harness = make_harness(build_model(saved, tensors), **kwargs)
    harness = make_harness(build_model(saved, tensors, ops=get_triton_op), **kwargs)
    steps = make_gpu_step_model(harness.model, harness.layout, harness.kv_caches, CPU)
    harness.steps = replace(steps, model=Guarded(steps.model))
    return torch_harness, harness


SCRIPT = [
    # (request, tokens, wrong drafts of them): a prompt in chunks beside decodes, and beside drafts
    # of which none stand, or some.
    [(0, 40, 0), (1, 9, 0)],
    [(0, 20, 0), (2, 3, 2), (1, 4, 2)],
    [(0, 1, 0), (1, 1, 0), (2, 1, 0)],
]


def run_script(harness: PagedHarness) -> list[torch.Tensor]:
    requests = [harness.add(random_tokens(90, seed, VOCAB)) for seed in range(3)]
    logits: list[torch.Tensor] = []
    for work in SCRIPT:
        pairs = [(requests[index], count) for index, count, _ in work]
        logits += harness.step(pairs, [wrong for _, _, wrong in work])
    return logits


SHORT: dict[str, dict[str, Any]] = {
    "qwen3": {**PARITY_CONFIGS["qwen3"], "num_hidden_layers": 2},
    "gemma3": {**PARITY_CONFIGS["gemma3-small-window"], "num_hidden_layers": 3},
    "gpt-oss": gpt_oss(num_hidden_layers=2),
    # Shared keys and values, heads of two widths, inputs of each layer.
    "gemma4": gemma4_small(
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_kv_shared_layers=1,
    ),
    "qwen3.5": qwen3_5(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    "kimi": kimi_linear(
        num_hidden_layers=2,
        linear_attn_config={
            **kimi_linear()["linear_attn_config"],
            "full_attn_layers": [2],
            "kda_layers": [1],
        },
    ),
    # Bounded decays, keys that are chosen.
    "glm": glm5_next(
        num_hidden_layers=2,
        layer_types=["linear_attention", "indexed_attention"],
        mlp_layer_types=["dense", "sparse"],
        index_topk=32,
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_family_gives_the_references_logits(name: str) -> None:
    expected, harness = make_pair(SHORT[name], packed=name in ("qwen3", "qwen3.5"))
    # No kernel chooses keys.
    assert isinstance(harness.steps.build_metadata, PagedTablesBuilder) is (name != "glm")
    for found, wanted in zip(run_script(harness), run_script(expected), strict=True):
        assert_near(found, wanted, 1e-4)


def test_a_row_has_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    _, harness = make_pair(qwen3(num_hidden_layers=2))
    prompts = [random_tokens(length, length, VOCAB) for length in (12, 30)]

    def decode(chosen: list[int]) -> dict[int, torch.Tensor]:
        requests = {index: harness.add(prompts[index]) for index in chosen}
        for index, request in requests.items():
            harness.step([(request, len(prompts[index]) - 1)])
        logits = harness.step([(request, 1) for request in requests.values()])
        for request in requests.values():
            harness.release(request)
        return dict(zip(chosen, logits, strict=True))

    together = decode([0, 1])
    for index in (0, 1):
        assert torch.equal(decode([index])[index], together[index])


def make_graphs(
    harness: PagedHarness, size: int = 2, num_drafts: int = 0, max_rows: int = 0
) -> tuple[DecodeGraphs, GraphRecorder]:
    recorder = GraphRecorder(harness.model, harness.kv_caches)
    harness.steps = make_graphed_step_model(
        harness.model,
        harness.layout,
        harness.kv_caches,
        CPU,
        recorder,
        sizes=(size,),
        max_tokens=160,
        num_drafts=num_drafts,
        max_rows=max_rows,
    )
    return harness.steps.model, recorder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the bytes of each read of pages by addresses."""
    found: list[int] = []
    move = pages._move_rows

    def see(*args: torch.Tensor, is_write: bool) -> None:
        if not is_write:
            found.append(args[3].nbytes)
        move(*args, is_write=is_write)

    monkeypatch.setattr(pages, "_move_rows", see)
    return found


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4", "qwen3.5", "kimi"])
def test_decode_graphs_replay_what_the_model_computes(name: str) -> None:
    pair = make_pair(SHORT[name])
    graphs, recorder = make_graphs(pair[1])
    assert [shape.num_requests for shape in graphs.shapes] == [2]
    assert len(recorder.recordings) == 1
    requests = []
    for harness in pair:
        own = [harness.add(random_tokens(90, seed, VOCAB)) for seed in range(2)]
        harness.step(list(zip(own, (33, 17), strict=True)))
        requests.append(own)
    # One request is filled up to two; nobody's row must not harm anybody.
    for batch in ([0, 1], [1]):
        wanted, found = (
            harness.step([(own[index], 1) for index in batch])
            for harness, own in zip(pair, requests, strict=True)
        )
        for row, expected in zip(found, wanted, strict=True):
            assert_near(row, expected, 1e-4)


# (request, tokens, wrong drafts of them): requests with many drafts, few and none in one step, of
# which one is a chunk over the end of a unit; some leave; all have one token; more than a graph's.
DRAFTED = [
    ([(0, 4, 2), (1, 1, 0), (2, 3, 1)], StepShape(4, 12, 3)),
    ([(2, 4, 0), (0, 2, 1), (1, 1, 0)], StepShape(4, 12, 3)),
    ([(2, 1, 0), (1, 1, 0)], StepShape(1, 3, 3)),
    ([(0, 4, 3), (2, 4, 3)], StepShape(4, 12, 3)),
    ([(1, 5, 2), (0, 1, 0)], None),
    ([(1, 1, 0), (2, 4, 1)], StepShape(4, 12, 3)),
    ([(2, 1, 0), (1, 1, 0)], StepShape(1, 3, 3)),
]


@pytest.mark.parametrize(("name", "bound"), [("qwen3.5", 0.0), ("kimi", 1e-5)])
def test_steps_with_drafts_are_replayed_as_if_they_were_not(
    name: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bound:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    pair = [make_pair(SHORT[name])[1] for _ in range(2)]
    _, recorder = make_graphs(pair[1], 3, 3)
    # Of steps with drafts, of plain ones, of drafts that are settled.
    drafted, plain, settled = recorder.recordings
    num_settled = 0
    requests = []
    for harness in pair:
        own = [harness.add(random_tokens(90, seed, VOCAB)) for seed in range(3)]
        harness.step(list(zip(own, (33, 17, 28), strict=True)))
        requests.append(own)
    for number, (work, shape) in enumerate(DRAFTED):
        before = drafted.num_replays + plain.num_replays
        wanted, found = (
            harness.step([(own[r], count) for r, count, _ in work], [wrong for *_, wrong in work])
            for harness, own in zip(pair, requests, strict=True)
        )
        assert pair[1].last_meta.shape == shape
        replays = drafted.num_replays + plain.num_replays - before
        assert replays == (shape is not None)
        stand = zip(pair[1].last_slices, work, strict=True)
        num_settled += any(item.num_drafts > wrong for item, (*_, wrong) in stand)
        for (index, *_), row, expected in zip(work, found, wanted, strict=True):
            is_same = (row - expected).norm() <= bound * expected.norm()
            assert is_same, f"request {index} of step {number}"
    assert settled.num_replays == num_settled > 0


def test_deepseek_v4s_decode_graphs_replay_what_the_model_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reads: list[int]
) -> None:
    monkeypatch.setattr(entry_tables, "_LEAST_LIMIT", 128)
    # As it is released: FP8, its experts FP4.
    raw = {
        **V4_CONFIGS["hc4-yarn-4-128"],
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128, 0],
    }
    spelling = Spelling(block_shape=(8, 16))
    folder = write_published(raw, tmp_path, spelling)
    expected = PagedHarness(load_stored(folder))
    harness = PagedHarness(load_stored(folder, ops=find_few_kernels))
    assert not can_replay(harness.model, harness.layout), "experts are multiplied one by one"
    stack_experts(harness.model)
    recorder = GraphRecorder(harness.model, harness.kv_caches)
    assert can_replay(harness.model, harness.layout)
    harness.steps = make_graphed_step_model(
        harness.model, harness.layout, harness.kv_caches, CPU, recorder, sizes=(2,), max_tokens=256
    )
    # Contexts up to 128 and up to 256 tokens.
    assert len(recorder.recordings) == 2
    # What entries are chosen by; only a window is more, of these few.
    assert count_gathered_bytes(harness.model, 2, 256) in reads
    prompts = [random_tokens(300, 1)[:140], random_tokens(300, 2)[:140]]
    pairs = [[own.add(prompt) for prompt in prompts] for own in (expected, harness)]
    for own, requests in zip((expected, harness), pairs, strict=True):
        own.step([(requests[0], 127), (requests[1], 3)])
    # In the first step one request ends windows of 4 and of 128 tokens, the other its first of 4;
    # then the first is in the longer shape, filled up to two.
    for batch in ([0, 1], [0]):
        wanted, found = (
            own.step([(requests[index], 1) for index in batch])
            for own, requests in zip((expected, harness), pairs, strict=True)
        )
        assert isinstance(harness.last_meta, LaidOutStep)
        for row, right in zip(found, wanted, strict=True):
            assert_near(row, right, 1e-4)


@pytest.mark.parametrize("raw", [qwen3_moe(), gpt_oss()], ids=["gated", "clamped"])
def test_experts_of_other_ranks_are_waited_for(raw: dict[str, Any]) -> None:
    """Which of a step's choices are this rank's is known on the device alone."""
    entry = resolve_model(raw["architectures"])
    group = ThreadGroup(0, Meeting(2))
    for spreads_experts in (False, True):
        model = entry.load_model_class()(
            entry.parse_config(raw),
            ops=get_triton_op,
            dtype=torch.float32,
            device="cpu",
            group=group,
            spreads_experts=spreads_experts,
        )
        layout = make_harness(model).layout
        assert can_replay(model, layout) is not spreads_experts


def test_the_recorder_refuses_what_a_graph_would_get_wrong() -> None:
    weight = torch.ones(3)
    recorder = GraphRecorder(weight)
    passing = torch.ones(3)
    with pytest.raises(AssertionError, match=r"aten\.mul\.Tensor reads"):
        recorder.capture(lambda: weight * passing, ())
    with pytest.raises(HostReadError, match="nonzero"):
        recorder.capture(lambda: weight.nonzero(), ())
    with pytest.raises(HostReadError, match="tolist"), NoHostReads():
        weight.tolist()
    with pytest.raises(HostReadError, match="lift_fresh"):
        Guarded(lambda: torch.tensor([1.0]))()
    # A value that Python kept is the recorded one for ever; one in a buffer is not.
    buffer, kept = torch.zeros(3), [2.0]
    graph, result = recorder.capture(lambda: weight * buffer + kept[0], (buffer,))
    buffer.fill_(5)
    kept[0] = 7.0
    graph.replay()
    assert result.tolist() == [7.0, 7.0, 7.0]


def test_sizes_of_graphs() -> None:
    assert choose_sizes(1) == (1,)
    assert choose_sizes(20) == (20, 16, 8, 4, 2, 1)
    assert choose_sizes(64) == (64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1)


def test_what_is_chosen_is_counted(reads: list[int]) -> None:
    _, harness = make_pair(SHORT["glm"])
    make_graphs(harness)
    assert count_gathered_bytes(harness.model, 2, 160) == max(reads)
    _, plain = make_pair(SHORT["qwen3"])
    assert count_gathered_bytes(plain.model, 2, 160) == 0


# A step of five rows has fewer drafts than two requests of three.
@pytest.mark.parametrize("max_rows", [0, 5])
def test_what_drafts_hold_is_counted(max_rows: int) -> None:
    _, harness = make_pair(SHORT["qwen3.5"])
    make_graphs(harness, 2, 3, max_rows)
    _, kept = harness.steps.model._steps._builder.buffers
    shape = harness.model.config.attention
    # In one part here: sums of each query's heads.
    parts = 2 * 4 * shape.num_heads * shape.head_dim * 4
    assert count_draft_bytes(harness.model, 2, 3) == kept.nbytes + parts
    assert count_draft_bytes(harness.model, 2, 0) == 0


def test_shapes_of_graphs() -> None:
    assert choose_shapes((1, 4)) == (StepShape(1, 1, 1), StepShape(1, 4, 4))
    # Plain steps keep theirs.
    plain = choose_shapes((1, 4), 2)[:2]
    assert plain == choose_shapes((1, 4))
    assert choose_shapes((1, 4), 2)[2:] == (StepShape(3, 3, 1), StepShape(3, 12, 4))
    # Many drafts: fewer rows where most requests have none; never more than a step may have.
    rows = [shape.num_rows for shape in choose_shapes((4,), 32, 100)]
    assert rows == [4, 8, 32, 100]


def test_deepseek_v4_gives_the_references_logits() -> None:
    raw = V4_CONFIGS["hc4-yarn-4-128"]
    config = DeepseekV4Config.from_dict(raw)
    tensors = v4_tensors(build_v4(raw, seed=7).state_dict())
    # A sequence whose routers and indexers have no near-ties.
    token_ids = random_tokens(300, 1)[:70]
    chunks = [64, 4, 1]
    expected = PagedHarness(build_v4_model(config, tensors)).run(token_ids, chunks)
    model = build_v4_model(config, tensors, ops=get_triton_op)
    harness = PagedHarness(model)
    harness.steps = replace(harness.steps, model=Guarded(harness.steps.model))
    found = harness.run(token_ids, chunks)
    assert_near(found, expected, 1e-4)
