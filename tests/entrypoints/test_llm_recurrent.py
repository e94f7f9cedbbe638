"""Recurrent states under drafts and preemption, through ``LLM``: same answers, same hits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model_executor.models.decoder.checkpoints import (
    VOCAB_SIZE,
    assert_greedy,
    write_checkpoint,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.ngram import NgramProposer

pytestmark = pytest.mark.slow

UNIT = 16
NUM_ANSWER = 40
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder: Path = tmp_path_factory.mktemp("qwen3.5")
    return folder, write_checkpoint("qwen3.5", folder)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")


def ask(llm: LLM, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[int | None]]:
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_ANSWER, ignore_eos=True, detokenize=False
    )
    tokens: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(tokens, params, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return answers, [output.num_cached_tokens for output in outputs]


class Foresight:
    """Drafts what is answered, in part: none, wrong at once, wrong at last, all right."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def find(self, _proposer: Any, tokens: np.ndarray) -> list[int]:
        known = tokens.tolist()
        count = len(known)
        text = next(text for text in self.texts if text[:count] == known)
        drafts = text[count : count + 3]
        if count % 5 == 0:
            return []
        if count % 5 == 1:
            drafts = [(token + 1) % VOCAB_SIZE for token in drafts]
        if count % 5 == 2:
            drafts[-1:] = [(token + 1) % VOCAB_SIZE for token in drafts[-1:]]
        return drafts


def test_drafts_cost_no_answer_and_no_hit(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What accepted drafts complete is hit: a prompt of k + 1 tokens, and steps without drafts."""
    folder, reference = checkpoint
    foresight = Foresight()
    monkeypatch.setattr(NgramProposer, "find", lambda *args: foresight.find(*args))
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in (4, 19, 74)]
    sizes = {"max_model_len": 512, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 300}
    turns: list[tuple[list[list[int]], list[list[int]]]] = []
    with LLM(model=str(folder), block_size=UNIT, **sizes) as llm:
        for _ in range(3):
            expected, _ = ask(llm, prompts)
            for prompt, answer in zip(prompts, expected, strict=True):
                assert_greedy(reference, prompt, answer)
            turns.append((prompts, expected))
            prompts = [[*p, *e, 1] for p, e in zip(prompts, expected, strict=True)]
    with LLM(model=str(folder), block_size=UNIT, speculative_config=NGRAM, **sizes) as llm:
        for turn, (prompts, expected) in enumerate(turns):
            foresight.texts = [[*p, *e] for p, e in zip(prompts, expected, strict=True)]
            answers, hits = ask(llm, prompts)
            assert answers == expected
            # The last token of an answer was never computed, nor the one behind it.
            ends = [len(p) - 2 if turn else 0 for p in prompts]
            assert hits == [end // UNIT * UNIT for end in ends]
        assert _count(llm, "vllm:spec_decode_num_accepted_tokens") > 100


def test_preempted_requests_go_on_from_their_states(checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    prompts = [random_tokens(40 + 7 * i, i, VOCAB_SIZE) for i in range(8)]
    with LLM(
        model=str(folder),
        block_size=UNIT,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        num_gpu_blocks_override=40,
    ) as llm:
        answers, _ = ask(llm, prompts)
        assert _count(llm, "vllm:num_preemptions") > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_ANSWER
        assert_greedy(reference, prompt, answer)


def _count(llm: LLM, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)  # type: ignore[attr-defined]
