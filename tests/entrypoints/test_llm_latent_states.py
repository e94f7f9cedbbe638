"""Kimi Linear and GLM 5.3 through ``LLM``: answers as transformers', hits to the unit, drafts.

A pass of the reference checks a whole answer at once.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model_executor.models.decoder.checkpoints import (
    VOCAB_SIZE,
    assert_greedy,
    write_model,
)
from tests.model_executor.models.decoder.reference import glm5_next, kimi_linear
from tests.model_executor.models.hf_reference import random_tokens
from tests.tokenizers.family_tokenizers import byte_level
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.ngram import NgramProposer

pytestmark = pytest.mark.slow

MODELS = {"kimi": kimi_linear(vocab_size=VOCAB_SIZE), "glm": glm5_next(vocab_size=VOCAB_SIZE)}
NUM_ANSWER = 24
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module", params=list(MODELS))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return folder, write_model(MODELS[request.param], folder, byte_level())


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")


def open_llm(folder: Path, unit: int = 16, **settings: Any) -> LLM:
    return LLM(
        model=str(folder),
        block_size=unit,
        max_model_len=512,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=300,
        **settings,
    )


def ask(llm: LLM, prompt: list[int], num_tokens: int = NUM_ANSWER) -> tuple[list[int], int | None]:
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


@pytest.mark.parametrize("unit", [16, 32, 64, 128])
def test_hits_end_at_the_unit(checkpoint: tuple[Path, Any], unit: int) -> None:
    folder, reference = checkpoint
    with open_llm(folder, unit) as llm:

        def served(prompt: list[int]) -> tuple[list[int], int | None]:
            answer, hit = ask(llm, prompt, 6)
            assert_greedy(reference, prompt, answer)
            assert len(answer) == 6
            return answer, hit

        for length in (unit, unit + 1, 150):
            prompt = random_tokens(length, length, VOCAB_SIZE)
            answer, hit = served(prompt)
            assert hit == 0
            assert served(prompt) == (answer, (length - 1) // unit * unit)
        turn = [*prompt, *answer, *random_tokens(40, 8, VOCAB_SIZE)]
        # The last token of an answer was never computed.
        assert served(turn)[1] == (150 + 6 - 1) // unit * unit
        shared = random_tokens(140, 9, VOCAB_SIZE)
        hits = [served([*shared, *random_tokens(70, seed, VOCAB_SIZE)])[1] for seed in (10, 11, 12)]
        assert hits[2] == 140 // unit * unit


def test_drafts_cost_no_answer_and_no_hit(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = checkpoint
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in (4, 75)]
    with open_llm(folder) as llm:
        texts = [[*prompt, *ask(llm, prompt)[0]] for prompt in prompts]

    def find(_proposer: Any, tokens: np.ndarray) -> list[int]:
        """Drafts the answer, at times with a wrong last token, at times nothing."""
        known = tokens.tolist()
        count = len(known)
        # A last step may go beyond the answer.
        text = next(text for text in texts if text[:count] == known[: len(text)])
        drafts = text[count : count + 3]
        if count % 7 == 0:
            return []
        if count % 7 == 1:
            drafts[-1:] = [(token + 1) % VOCAB_SIZE for token in drafts[-1:]]
        return drafts

    monkeypatch.setattr(NgramProposer, "find", find)
    with open_llm(folder, speculative_config=NGRAM) as llm:
        for prompt, text in zip(prompts, texts, strict=True):
            answer, hit = ask(llm, prompt)
            assert [*prompt, *answer] == text
            assert hit == 0
            assert_greedy(reference, prompt, answer)
        accepted = "vllm:spec_decode_num_accepted_tokens"
        assert sum(m.value for m in llm.get_metrics() if m.name == accepted) > 20  # type: ignore[attr-defined]
        for text in texts:
            turn = [*text, *random_tokens(5, 1, VOCAB_SIZE)]
            monkeypatch.setattr(NgramProposer, "find", lambda *_args: [])
            answer, hit = ask(llm, turn)
            assert_greedy(reference, turn, answer)
            assert hit == (len(text) - 1) // 16 * 16
