"""Drafts of models' own blocks: same answers, same hits, whatever is accepted when.

Other engines corrupt answers where a state is read that rejected or missing drafts left behind: a
prompt of as many tokens as a step of decoding, steps without drafts between those with some, steps
that mix prompts with drafts, requests that stop or are set back with drafts on the way.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, assert_greedy
from tests.model_executor.models.decoder.drafting import DRAFTING_MODELS, write_drafting_model
from tests.model_executor.models.hf_reference import random_tokens
from vllm import LLM, SamplingParams
from vllm.model_executor.models.decoder.model import DecoderBlock
from vllm.native.loader import load_library

pytestmark = pytest.mark.slow

UNIT = 16
NUM_ANSWER = 24


@pytest.fixture(scope="module", params=list(DRAFTING_MODELS))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return folder, write_drafting_model(request.param, folder)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a step fail that runs a layer in torch, where the kernels are built."""

    def refuse(self: DecoderBlock, *_: Any) -> None:
        raise AssertionError("torch ran a layer")

    if load_library():
        monkeypatch.setattr(DecoderBlock, "forward", refuse)


def start(folder: Path, num_drafts: int, **settings: Any) -> LLM:
    drafts = {"method": "mtp", "num_speculative_tokens": num_drafts}
    return LLM(
        model=str(folder),
        block_size=UNIT,
        max_model_len=256,
        **{"num_gpu_blocks_override": 300, "max_num_batched_tokens": 40, **settings},
        speculative_config=drafts if num_drafts else None,
    )


def ask(
    llm: LLM, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> tuple[list[list[int]], list[int | None]]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    tokens: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(tokens, params, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return answers, [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("weights", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_drafts_change_no_answer_of_narrow_weights(
    checkpoint: tuple[Path, Any], weights: dict[str, str]
) -> None:
    """The head is the same with a block that drafts as without one."""
    folder, _ = checkpoint
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in (3, 70)]
    answers = []
    for num_drafts in (0, 2):
        llm = start(folder, num_drafts, **weights)
        answers.append([ask(llm, prompts, [12, 12])[0] for _ in range(2)])
        if num_drafts:
            assert count(llm, "vllm:spec_decode_num_draft_tokens") > 0
    assert answers[0] == answers[1]


def count(llm: LLM, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_answers_and_hits_are_those_without_drafts(
    checkpoint: tuple[Path, Any], num_drafts: int
) -> None:
    """Prompts of k + 1 tokens among others, in chunks, mixed, over three turns."""
    folder, reference = checkpoint
    lengths = (num_drafts + 1, num_drafts + 2, 19, 74)
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in lengths]
    asked = [NUM_ANSWER, 7, NUM_ANSWER + 1, 13]
    with start(folder, num_drafts) as llm:
        for turn in range(3):
            answers, hits = ask(llm, prompts, asked)
            for prompt, answer, length in zip(prompts, answers, asked, strict=True):
                assert_greedy(reference, prompt, answer)
                assert len(answer) == length
            # The last token of an answer was never computed, nor the one behind it.
            ends = [len(p) - 2 if turn else 0 for p in prompts]
            assert hits == [end // UNIT * UNIT for end in ends]
            prompts = [[*p, *a, 1] for p, a in zip(prompts, answers, strict=True)]
        accepted = count(llm, "vllm:spec_decode_num_accepted_tokens")
        drafted = count(llm, "vllm:spec_decode_num_draft_tokens")
        assert 0.2 * drafted < accepted < 0.9 * drafted


def test_random_traffic_with_too_little_memory(checkpoint: tuple[Path, Any]) -> None:
    """Prompts that begin alike, preempted with drafts on the way."""
    folder, reference = checkpoint
    rng = random.Random(3)
    trunk = random_tokens(120, 1, VOCAB_SIZE)
    prompts = [
        [*trunk[: rng.randint(0, 120)], *random_tokens(rng.randint(1, 40), 50 + i, VOCAB_SIZE)]
        for i in range(14)
    ]
    asked = [rng.randint(20, 60) for _ in prompts]
    num_blocks = {"qwen3_5_text": 44, "glm_moe_dsa": 30}.get(reference.config.model_type, 78)
    with start(folder, 2, num_gpu_blocks_override=num_blocks, max_num_seqs=6) as llm:
        answers, _ = ask(llm, prompts, asked)
        assert count(llm, "vllm:num_preemptions") > 0
        assert count(llm, "vllm:spec_decode_num_accepted_tokens") > 20
    for prompt, answer, length in zip(prompts, answers, asked, strict=True):
        assert_greedy(reference, prompt, answer)
        assert len(answer) == length
