"""The drafts of a running engine are those of an independent implementation, logit by logit."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tiny_checkpoint import VOCAB_SIZE, make_tensors, tiny_config
from tests.model_executor.models.hf_reference import build_hf_model, published_tensors
from tests.model_executor.models.mtp_reference import MtpReference
from tests.v1.spec_decode.tiny_engine import NOISE, Session, get_runner, make_core, mtp
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.metadata import StepMetadata
from vllm.v1.attention.step_model import StepModel
from vllm.v1.engine.core import EngineCore
from vllm.v1.spec_decode.mtp import MTPModel, MTPProposer
from vllm.v1.worker.step_input import StepInput

TOLERANCE = 1e-3
# Below this gap fp32 sums in another order may choose otherwise.
MIN_MARGIN = 1e-4


class Oracle:
    """transformers' main model and the plain MTP block, with the tiny checkpoint's weights."""

    def __init__(self) -> None:
        config = tiny_config()
        tensors = make_tensors(config, noise=NOISE, mtp_noise=NOISE)
        self._trunk = build_hf_model(config | {"num_nextn_predict_layers": 0}, seed=0)
        with torch.no_grad():
            for name, slot in published_tensors(self._trunk.state_dict()).items():
                slot.copy_(tensors[name])
        self.block = MtpReference(tensors, config)

    def compute_streams(self, token_ids: list[int]) -> torch.Tensor:
        """Return the residual streams ``[T, n, D]`` before the collapse."""
        seen: list[torch.Tensor] = []
        handle = self._trunk.model.hc_head.register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0][0].detach())
        )
        with torch.inference_mode():
            self._trunk(torch.tensor([token_ids]), use_cache=False)
        handle.remove()
        return seen[0]


class RecordingModel:
    """An ``MTPModel`` that remembers the logits it gave."""

    def __init__(self, inner: MTPModel) -> None:
        self._inner = inner
        self.logits: list[torch.Tensor] = []

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        return self._inner.forward_mtp(streams, next_token_ids, positions, meta, kv_caches)

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        logits = self._inner.compute_mtp_logits(streams)
        self.logits.append(logits)
        return logits


@dataclass
class Drafted:
    """One draft: the tokens known before it, the step it followed, its tokens and logits."""

    request_id: str
    token_ids: list[int]
    num_scheduled: int
    num_verified: int
    num_accepted: int
    draft: list[int]
    logits: list[torch.Tensor] = field(default_factory=list)


class RecordingProposer:
    """Runs a real MTP proposer and remembers every draft."""

    reads_all_rows = True

    def __init__(self, inner: MTPProposer) -> None:
        self.model = RecordingModel(inner._model)
        steps = StepModel(self.model, inner._build_metadata)
        self._inner = MTPProposer(steps, inner._num_drafts, inner._cache, inner._device)
        self.drafted: list[Drafted] = []

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        self.model.logits.clear()
        drafts = self._inner.propose(step, streams, rebuilds)
        made = []
        for i, (state, draft) in enumerate(zip(step.requests, drafts, strict=True)):
            tokens = state.get_tokens(0, state.num_tokens).tolist()
            verified = len(step.drafts[i])
            accepted = state.num_tokens - step.slices[i].start - step.slices[i].num_tokens
            made.append(
                Drafted(
                    state.req_id,
                    tokens,
                    step.slices[i].num_tokens,
                    verified,
                    verified + accepted - 1,
                    draft,
                )
            )
        for depth, logits in enumerate(self.model.logits):
            rows = iter(logits)
            for item in made:
                if len(item.draft) > depth:
                    item.logits.append(next(rows))
        self.drafted += [item for item in made if item.draft]
        return drafts


def record(core: EngineCore) -> RecordingProposer:
    runner = get_runner(core)
    assert isinstance(runner._proposer, MTPProposer)
    recorder = RecordingProposer(runner._proposer)
    runner._proposer = recorder
    return recorder


def compare(oracle: Oracle, drafted: list[Drafted], k: int) -> Counter[str]:
    """Check drafts against the oracle's; return how many there were of each kind."""
    kinds: Counter[str] = Counter()
    longest: dict[str, list[int]] = {}
    for item in drafted:
        known = longest.get(item.request_id, [])
        longest[item.request_id] = max(known, item.token_ids, key=len)
    streams = {name: oracle.compute_streams(tokens) for name, tokens in longest.items()}
    for item in drafted:
        assert longest[item.request_id][: len(item.token_ids)] == item.token_ids
        expected = oracle.block.draft(streams[item.request_id], item.token_ids, len(item.draft))
        for depth, logits in enumerate(item.logits):
            if item.draft[:depth] != expected.token_ids[:depth]:
                break
            torch.testing.assert_close(logits, expected.logits[depth], atol=TOLERANCE, rtol=0)
        if expected.margin > MIN_MARGIN:
            kinds["equal"] += item.draft == expected.token_ids
            assert item.draft == expected.token_ids
        kinds["all"] += 1
        kinds["whole"] += len(item.draft) == k
        kinds["after a chunk"] += item.num_scheduled > item.num_verified + 1
        if item.num_verified:
            kinds[f"accepted {item.num_accepted}"] += 1
            kinds["after a rejection"] += item.num_accepted < item.num_verified
    return kinds


def random_prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_draft_of_an_engine_is_the_oracles(k: int, checkpoint: Path, oracle: Oracle) -> None:
    rng = random.Random(k)
    core = make_core(checkpoint, mtp(k), budget=96)
    recorder = record(core)
    session = Session(core)
    prompt = random_prompt(rng, 230)
    first = session.serve(prompt, greedy(40))
    num_before_hits = len(recorder.drafted)
    resent = session.serve(prompt, greedy(12))
    turn = session.serve(prompt + first.tokens + random_prompt(rng, 9), greedy(12))
    assert (resent.num_cached, turn.num_cached) == (224, 256)
    after_hits = recorder.drafted[num_before_hits:]
    for length in (3, 40, 170):
        session.add(random_prompt(rng, length), greedy(24))
    session.run()

    kinds = compare(oracle, recorder.drafted, k)
    assert kinds["equal"] >= 0.95 * kinds["all"], kinds
    assert kinds["whole"] >= 0.8 * kinds["all"], kinds
    assert kinds["after a rejection"] >= 5, kinds
    assert kinds["after a chunk"] >= 4, kinds
    assert len(after_hits) >= 4
    for num_accepted in range(k + 1):
        assert kinds[f"accepted {num_accepted}"] > 0, kinds


def draft_after_parting(
    checkpoint: Path, oracle: Oracle, stale_row: str
) -> tuple[list[int], dict[str, int], int, int]:
    """Serve a prompt, then two at once that leave it at a unit's end.

    Returns:
        Tokens of both answers, the reasons of the first's missed tokens, its hit, and how many
        drafts did not have the oracle's logits.
    """
    rng = random.Random(17)
    core = make_core(checkpoint, mtp(2, stale_row=stale_row), budget=512)
    recorder = record(core)
    session = Session(core)
    prompt = random_prompt(rng, 230)
    session.serve(prompt, greedy(4))
    num_before = len(recorder.drafted)
    for i in range(2):
        session.add(prompt[:224] + random_prompt(rng, 1 + 20 * i), greedy(24), f"parted {i}")
    session.run()
    num_unequal = 0
    for item in recorder.drafted[num_before:]:
        streams = oracle.compute_streams(item.token_ids)
        expected = oracle.block.draft(streams, item.token_ids, 1)
        num_unequal += not torch.allclose(
            item.logits[0], expected.logits[0], atol=TOLERANCE, rtol=0
        )
    answers = [session.answers[f"parted {i}"] for i in range(2)]
    assert core.scheduler.kv_cache_manager.usage == 0
    tokens = [token for answer in answers for token in answer.tokens]
    return (
        tokens,
        answers[0].miss_tokens,
        answers[0].num_cached,
        num_unequal,
    )


@pytest.mark.slow
def test_the_row_before_a_hits_end_is_made_anew(checkpoint: Path, oracle: Oracle) -> None:
    rebuilt = draft_after_parting(checkpoint, oracle, "rebuild")
    kept = draft_after_parting(checkpoint, oracle, "keep")
    dropped = draft_after_parting(checkpoint, oracle, "drop")
    assert rebuilt[0] == kept[0] == dropped[0], "drafts must not change answers"
    assert rebuilt[1:] == ({"above_last_boundary": 1}, 224, 0)
    assert kept[1:3] == rebuilt[1:3]
    assert kept[3] > 4, "a stale row must show, or the two above show nothing"
    # Of the checkpoints below, that of the lean boundary is the next.
    assert dropped[1:] == ({"above_last_boundary": 1, "drafter": 96}, 128, 0)
