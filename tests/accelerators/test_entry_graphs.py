"""Recorded decode steps of DeepSeek-V4 with drafts compute and store what torch's steps do."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.tiny_checkpoint import make_tensors, tiny_config
from tests.accelerators.asking import SHORT_V4, Answers, find_few_kernels
from tests.accelerators.comparing import assert_near
from tests.accelerators.graph_recorder import GraphRecorder
from tests.accelerators.test_engine import run
from tests.model_executor.models.decoder.building import build_model as build_decoder
from tests.model_executor.models.decoder.building import make_harness
from tests.model_executor.models.decoder.drafting import write_drafting_model
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    config_as_saved,
    glm5_next,
    published_tensors,
)
from tests.model_executor.models.harness import PagedHarness, Request, build_model
from tests.model_executor.models.hf_reference import random_tokens
from tests.v1.spec_decode.tiny_engine import write_tiny
from vllm.gpu import entry_graphs
from vllm.gpu.decode_graphs import CapturedSteps, GraphDevice, choose_sizes
from vllm.gpu.entry_graphs import StepSizes, block_layout
from vllm.gpu.step_model import count_draft_bytes, count_graphs, make_graphed_step_model
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaReferencePlatform
from vllm.v1.attention import entry_tables
from vllm.v1.attention.entry_tables import (
    DecodeShape,
    EntryTables,
    LaidOutStep,
    choose_reaches,
)
from vllm.v1.attention.metadata import StepMetadata, build_step_metadata
from vllm.v1.attention.ops.registry import Op
from vllm.v1.attention.ops.triton.registry import get_triton_op
from vllm.v1.attention.step_tables import RequestSlice
from vllm.v1.worker import gpu_worker

pytestmark = pytest.mark.slow

__all__ = ["run"]  # the fixture

CPU = torch.device("cpu")
MAX_TOKENS = 500


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[PagedHarness, PagedHarness]:
    """Two models on pages of their own: torch runs one, the other's decode steps are recorded."""
    monkeypatch.setattr(entry_tables, "_LEAST_LIMIT", 128)
    raw = tiny_config(**SHORT_V4)
    config, tensors = DeepseekV4Config.from_dict(raw), make_tensors(raw)
    expected = PagedHarness(build_model(config, tensors))
    harness = PagedHarness(build_model(config, tensors, ops=find_few_kernels))
    recorder = GraphRecorder(harness.model, harness.kv_caches)
    harness.steps = make_graphed_step_model(
        harness.model,
        harness.layout,
        harness.kv_caches,
        CPU,
        recorder,
        sizes=(3,),
        max_tokens=MAX_TOKENS,
        num_drafts=4,
        has_block=True,
    )
    # Five rows of each request, by contexts of 128, 256 and 512 tokens; the block's steps of five
    # rows and of one.
    assert len(recorder.recordings) == 5
    return expected, harness


def run_block(
    harness: PagedHarness, work: list[tuple[Request, int]], wrong: list[int]
) -> list[torch.Tensor]:
    """Runs the block on the rows that stand and once more, as its proposer does."""
    layout = block_layout(harness.layout)
    group_id = harness.layout.group_of["mtp.0.attn.window"]
    own, rows, first = [], [], 0
    for item, (_, count), num_wrong in zip(harness.last_slices, work, wrong, strict=True):
        tables = (item.tables[group_id],)
        own.append(replace(item, num_tokens=count - num_wrong, tables=tables))
        rows += range(first, first + count - num_wrong)
        first += count
    found, streams = [], harness.last_streams[rows]
    for _ in range(2):
        positions = np.concatenate([item.start + np.arange(item.num_tokens) for item in own])
        meta = harness.steps.build_metadata(own, layout)
        if isinstance(harness.last_meta, LaidOutStep):
            most = max(item.num_tokens for item in own)
            assert meta == LaidOutStep(DecodeShape(5 if most > 1 else 1, 3, 500))
        next_ids = [
            request.token_ids[position + 1]
            for (request, _), item in zip(work, own, strict=True)
            for position in range(item.start, item.start + item.num_tokens)
        ]
        with torch.inference_mode():
            streams = harness.steps.model.forward_mtp(
                streams,
                torch.tensor(next_ids),
                torch.from_numpy(positions),
                meta,
                harness.kv_caches,
            )
            found.append(harness.steps.model.compute_mtp_logits(streams))
        ends = np.cumsum([item.num_tokens for item in own]) - 1
        streams = streams[torch.from_numpy(ends)]
        own = [replace(item, start=item.start + item.num_tokens, num_tokens=1) for item in own]
    return found


def assert_same_pages(found: PagedHarness, expected: PagedHarness) -> None:
    """Sees that the same rows of pages were written, and what they hold."""
    for name, wanted in expected.kv_caches.items():
        pages = found.kv_caches[name]
        assert torch.equal(pages.isnan(), wanted.isnan()), name
        assert_near(pages.nan_to_num(), wanted.nan_to_num(), 1e-5)


STEPS = [
    # (request, its tokens, how many of them are wrong), and the longest context of the shape.
    # The first ends a window of 4 and then, in a draft that is rejected, one of 4 and of 128; the
    # second has fewer drafts, and ends its first one.
    ([(0, 5, 4), (1, 2, 0)], 128),
    # They end in the middle of its drafts, the last of which is beyond the shorter shape.
    ([(0, 5, 0), (1, 3, 1)], 256),
    # The others have dropped out; of this context entries are chosen.
    ([(2, 5, 3)], 512),
    ([(1, 1, 0), (2, 3, 1), (0, 2, 0)], 512),
    ([(1, 1, 0), (0, 1, 0)], 256),
]


def test_steps_with_drafts_are_replayed(pair: tuple[PagedHarness, PagedHarness]) -> None:
    expected, harness = pair
    requests = [[own.add(random_tokens(400, n)) for n in range(3)] for own in pair]
    for own, (first, second, third) in zip(pair, requests, strict=True):
        work = [(first, 123), (second, 2), (third, 381)]
        own.step(work)
        run_block(own, work, [0, 0, 0])
    for batch, limit in STEPS:
        wrong = [num_wrong for *_, num_wrong in batch]
        found, wanted = [], []
        for own, results, known in zip(pair, (wanted, found), requests, strict=True):
            work = [(known[index], count) for index, count, _ in batch]
            results += own.step(work, wrong)
            results += run_block(own, work, wrong)
        assert harness.last_meta == LaidOutStep(DecodeShape(5, 3, limit))
        for row, right in zip(found, wanted, strict=True):
            assert_near(row, right, 1e-4)
        assert_same_pages(harness, expected)


class RecordedPlatform(CudaReferencePlatform):
    """The CUDA platform on CPU tensors, with few kernels and decode steps that are recorded."""

    def get_op(self, name: str) -> Op:
        """Return the kernels that a graph needs."""
        return find_few_kernels(name)

    def make_graph_device(self) -> GraphDevice | None:
        """Return a recorder."""
        return GraphRecorder()


def write_glm(folder: Path) -> Path:
    write_drafting_model(
        "glm",
        folder,
        num_hidden_layers=2,
        layer_types=["linear_attention", "indexed_attention"],
        mlp_layer_types=["dense", "sparse"],
    )
    return folder


@pytest.mark.parametrize(
    ("write", "unit", "num_drafts", "lengths"),
    [(partial(write_tiny, **SHORT_V4), 32, 2, (5, 35)), (write_glm, 16, 2, (5, 35))],
    ids=["drafts", "chosen keys"],
)
def test_an_engine_answers_on_graphs_as_on_a_cpu(
    write: Callable[[Path], Path],
    unit: int,
    num_drafts: int,
    lengths: tuple[int, ...],
    run: Callable[..., Answers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = write(tmp_path)
    asked: dict[str, Any] = {"num_drafts": num_drafts, "lengths": lengths, "max_num_seqs": 2}
    answers = run(source, CpuPlatform(), unit, **asked)
    replayed: list[DecodeShape] = []
    eager: list[int] = []
    replay = CapturedSteps.replay

    def count(self: CapturedSteps, shape: Hashable, *rows: torch.Tensor) -> torch.Tensor | None:
        assert isinstance(shape, DecodeShape)
        replayed.append(shape)
        return replay(self, shape, *rows)

    def build(slices: Sequence[RequestSlice], *rest: Any) -> StepMetadata:
        eager.append(max(item.num_tokens for item in slices))
        return build_step_metadata(slices, *rest)

    def record(model: Any, layout: Any, caches: Any, device: Any, _: Any, **settings: Any) -> Any:
        recorder = GraphRecorder(model, caches)
        steps = make_graphed_step_model(model, layout, caches, device, recorder, **settings)
        has_block = num_drafts > 0
        expected = count_graphs(model, 2, 256, num_drafts, has_block=has_block)
        assert len(recorder.recordings) == expected
        return steps

    monkeypatch.setattr(CapturedSteps, "replay", count)
    monkeypatch.setattr(entry_graphs, "build_step_metadata", build)
    monkeypatch.setattr(gpu_worker, "make_graphed_step_model", record)
    assert run(source, RecordedPlatform(), unit, **asked) == answers
    assert answers[-1][1] == 32
    assert bool(sum(accepted for *_, accepted in answers)) is (num_drafts > 0)
    # With drafts three tokens of a request, and the block behind it.
    assert {shape.num_queries for shape in replayed} == {1, 1 + num_drafts}
    assert {shape.num_requests for shape in replayed} == {1, 2}
    # Prompts alone ran as they are.
    assert min(eager) > 1 + num_drafts


def test_many_requests_of_which_one_is_long_have_no_shape() -> None:
    """Each would read as much as the longest: they run as they are, by like lengths."""
    sizes, most = choose_sizes(128), 1 << 20
    reaches = choose_reaches(sizes, most)
    assert {size for size, limit in reaches if limit == most} == {1, 2, 4, 8, 16}
    assert {size for size, limit in reaches if limit == 1 << 17} == set(sizes)
    # Whatever is asked for, a request alone has all lengths, and all numbers the shortest.
    longer = choose_reaches(sizes, 1 << 26)
    assert (1, 1 << 26) in longer
    assert {(size, 4096) for size in sizes} <= set(longer)
    _, harness = make_choosing(0)
    shapes = StepSizes(sizes, (1,), most).find_shapes(harness.layout)
    assert len(shapes) == count_graphs(harness.model, 128, most)
    # Tables take what a shape's contexts do, not what the longest would.
    tables = EntryTables(harness.layout, harness.kv_caches, shapes, CPU)
    num_blocks = most // min(group.block_size for group in harness.layout.groups)
    assert len(tables.buffer) < 128 * num_blocks


GLM = glm5_next(
    num_hidden_layers=2,
    layer_types=["linear_attention", "indexed_attention"],
    mlp_layer_types=["dense", "sparse"],
)


def find_choosing_kernels(name: str) -> Op:
    """Returns those kernels too that choose keys and attend to them."""
    chosen = ("index_scores", "select_entries", "attend_keys")
    return get_triton_op(name) if name in chosen else find_few_kernels(name)


def make_choosing(num_drafts: int) -> tuple[PagedHarness, PagedHarness]:
    """As ``pair``, of a model that chooses keys: 16 pools of four tokens."""
    hf_model = build_hf_model(GLM, seed=3)
    saved, tensors = config_as_saved(hf_model), published_tensors(hf_model)
    saved["architectures"] = GLM["architectures"]
    expected = make_harness(build_decoder(saved, tensors))
    harness = make_harness(build_decoder(saved, tensors, ops=find_choosing_kernels))
    recorder = GraphRecorder(harness.model, harness.kv_caches)
    harness.steps = make_graphed_step_model(
        harness.model,
        harness.layout,
        harness.kv_caches,
        CPU,
        recorder,
        sizes=(3,),
        max_tokens=250,
        num_drafts=num_drafts,
    )
    assert len(recorder.recordings) == count_graphs(harness.model, 1, 250, num_drafts)
    settling = harness.steps.model._settling
    kept = 0 if settling is None else settling.drafts.kept.nbytes
    assert count_draft_bytes(harness.model, 3, num_drafts) == kept
    return expected, harness


CHOOSING_STEPS = [
    # (request, its tokens, how many of them are wrong), and its shape.
    ([(0, 1, 0), (1, 1, 0)], DecodeShape(1, 3, 64)),
    # A pool, a block and a unit's state end with a draft that stands; the second has no drafts.
    ([(0, 4, 2), (1, 1, 0)], DecodeShape(4, 3, 128)),
    ([(0, 4, 2), (1, 4, 2), (2, 2, 1)], DecodeShape(4, 3, 252)),
    # Of two tokens that are no drafts there may be two states.
    ([(2, 4, 1)], None),
    ([(2, 4, 2), (0, 1, 0)], DecodeShape(4, 3, 252)),
    ([(0, 1, 0), (1, 1, 0)], DecodeShape(1, 3, 128)),
]


def test_steps_that_choose_keys_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A token of each request and four, of contexts of 64 tokens, of which none is left out, of 128
    # and of 252; and what settles drafts.
    monkeypatch.setattr(entry_tables, "_LEAST_LIMIT", 64)
    expected, harness = choosing = make_choosing(3)
    requests = [[own.add(random_tokens(200, n)) for n in range(3)] for own in choosing]
    for own, known in zip(choosing, requests, strict=True):
        own.step(list(zip(known, (61, 2, 130), strict=True)))
    for batch, shape in CHOOSING_STEPS:
        wrong = [num_wrong for *_, num_wrong in batch]
        wanted, found = (
            own.step([(known[index], count) for index, count, _ in batch], wrong)
            for own, known in zip(choosing, requests, strict=True)
        )
        if shape is None:
            assert isinstance(harness.last_meta, StepMetadata)
        else:
            assert harness.last_meta == LaidOutStep(shape)
        for row, right in zip(found, wanted, strict=True):
            assert_near(row, right, 1e-4)
        assert_same_pages(harness, expected)


def test_a_row_that_chooses_keys_has_the_same_bits_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entry_tables, "_LEAST_LIMIT", 64)
    _, harness = make_choosing(0)
    rows = []
    for others in ([], [(1, 40), (2, 200)]):
        work = [(harness.add(random_tokens(250, seed)), length) for seed, length in others]
        work.insert(len(work) // 2, (harness.add(random_tokens(250, 0)), 60))
        for request, length in work:
            harness.step([(request, length)])
        for _ in range(3):
            logits = harness.step([(request, 1) for request, _ in work])
        rows.append(logits[len(others) // 2])
        assert harness.last_meta == LaidOutStep(DecodeShape(1, 3, 252 if others else 64))
    assert torch.equal(*rows)


def test_a_row_has_the_same_bits_alone_and_replayed_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    raw = tiny_config(num_hidden_layers=1, compress_ratios=[4, 0])
    model = build_model(DeepseekV4Config.from_dict(raw), make_tensors(raw), ops=get_triton_op)
    rows = []
    for others in ([], [(1, 6, 1)]):
        harness = PagedHarness(model)
        if others:
            recorder = GraphRecorder(model, harness.kv_caches)
            harness.steps = make_graphed_step_model(
                model,
                harness.layout,
                harness.kv_caches,
                CPU,
                recorder,
                sizes=(2,),
                max_tokens=250,
                num_drafts=1,
            )
        # Of its 17 entries 12 are chosen, which the graph, with 63 of them, lists in any case.
        asked = [(0, 68, 2), *others][::-1]
        work = [(harness.add(random_tokens(100, seed)), count) for seed, _, count in asked]
        for (request, _), (_, length, _) in zip(work, asked, strict=True):
            harness.step([(request, length)])
        harness.step(work)
        assert isinstance(harness.last_meta, LaidOutStep) is bool(others)
        rows.append(harness.last_streams[-2:])
    assert torch.equal(*rows)
