"""Engines whose steps with drafts are replayed: tokens, drafts that stand and hits are a CPU's."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.accelerators.asking import Answers, ask, find_few_kernels
from tests.accelerators.graph_recorder import GraphRecorder, Recording
from tests.accelerators.test_engine import CPU, on_platform
from tests.model_executor.models.decoder.checkpoints import FAMILIES, write_model
from tests.model_executor.models.decoder.drafting import write_drafting_model
from tests.tokenizers.family_tokenizers import byte_level
from vllm.gpu.settle_graphs import SettleGraphs
from vllm.gpu.step_model import count_graphs, make_graphed_step_model
from vllm.platforms.cuda import CudaReferencePlatform
from vllm.v1.attention.step_tables import RequestSlice
from vllm.v1.worker import gpu_worker

pytestmark = pytest.mark.slow

MOST_REQUESTS = 3


class RecordingPlatform(CudaReferencePlatform):
    """Has steps recorded, most ops the reference's."""

    def get_op(self, name: str) -> Any:
        """Return an op."""
        return find_few_kernels(name)

    def make_graph_device(self) -> GraphRecorder:
        """Return what captures."""
        return GraphRecorder()


class Steps:
    """What became of an engine's steps with drafts, and of those that its block drafts by.

    Attributes:
        taken: By whether they are the block's, and tokens of each request -> how many.
        replayed: Likewise, of those that were replayed.
        settling: What settles drafts.
        num_settled: How often it was replayed.
    """

    def __init__(self) -> None:
        self.settling: list[Recording] = []
        self.num_settled = 0
        self.taken: Counter[tuple[bool, tuple[int, ...]]] = Counter()
        self.replayed: Counter[tuple[bool, tuple[int, ...]]] = Counter()
        self._last: tuple[bool, tuple[int, ...]] | None = None

    def see(self, slices: list[RequestSlice], *, is_block: bool) -> None:
        """Note a step that is about to run."""
        self._last = None
        if is_block or any(item.num_drafts for item in slices):
            self._last = is_block, tuple(item.num_tokens for item in slices if item.num_tokens)
            self.taken[self._last] += 1

    def see_replay(self, recording: Recording) -> None:
        """Note that the step was replayed, or that its drafts were settled."""
        if any(recording is other for other in self.settling):
            self.num_settled += 1
        elif self._last is not None:
            self.replayed[self._last] += 1

    def check(self, most_tokens: int) -> set[tuple[bool, tuple[int, ...]]]:
        """Sees that all were replayed that have no chunk of a prompt; returns which there were."""
        short = {step: n for step, n in self.taken.items() if max(step[1]) <= most_tokens}
        assert self.replayed == short
        return set(short)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Has every engine's steps recorded."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    seen, replay = Steps(), Recording.replay

    def count(self: Recording) -> None:
        seen.see_replay(self)
        replay(self)

    def record(model: Any, groups: Any, caches: Any, device: Any, _: Any, **settings: Any) -> Any:
        recorder = GraphRecorder(model, caches)
        made = make_graphed_step_model(model, groups, caches, device, recorder, **settings)
        # The profile run sets memory aside for so many.
        told = {name: settings[name] for name in ("num_drafts", "has_block", "max_rows")}
        count = count_graphs(model, MOST_REQUESTS, settings["max_tokens"], **told)
        assert len(recorder.recordings) == count
        if isinstance(made.settle_drafts, SettleGraphs):
            seen.settling = recorder.recordings[-len(made.settle_drafts) :]

        def build(slices: list[RequestSlice], layout: Any) -> Any:
            seen.see(slices, is_block=layout is not groups)
            return made.build_metadata(slices, layout)

        return replace(made, build_metadata=build)

    monkeypatch.setattr(Recording, "replay", count)
    monkeypatch.setattr(gpu_worker, "make_graphed_step_model", record)
    return seen


def answer_on_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: Any, **settings: Any
) -> Answers:
    """Returns a CPU's answers, and sees that they are those of replayed steps."""
    settings |= {"max_num_seqs": MOST_REQUESTS}
    with on_platform(RecordingPlatform(), monkeypatch):
        answers = ask(folder, *arguments, **settings)
    with on_platform(CPU, monkeypatch):
        assert answers == ask(folder, *arguments, **settings)
    assert sum(accepted for *_, accepted in answers), "no draft stands: nothing is settled"
    assert answers[-1][1], "nothing was hit"
    return answers


def test_a_recurrent_model_with_its_own_block(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers = ["linear_attention", "full_attention"]
    write_drafting_model("qwen 3.5", tmp_path, num_hidden_layers=2, layer_types=layers)
    answer_on_both(tmp_path, monkeypatch, 16, 2, lengths=(5, 9, 35))
    taken = steps.check(3)
    assert len({len(counts) for _, counts in taken}) > 1, "no request leaves before the others"
    assert steps.num_settled
    assert {(True, (1,)), (False, (3,)), (True, (3,))} <= taken


def test_drafts_that_are_looked_up(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model({**FAMILIES["gemma3"], "num_hidden_layers": 2}, tmp_path, byte_level())
    answer_on_both(tmp_path, monkeypatch, 16, 4, lengths=(5, 9, 35), method="ngram")
    assert any(len(set(counts)) > 1 for _, counts in steps.check(5)), "no mixed step"
