"""An answer has the same bits in company, in chunks, behind hits, with drafts, after preemption."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.reference import gemma4_small, qwen3_5
from tests.model_executor.models.deepseek_v41.tiny import tiny_v41
from tests.model_executor.models.tiny_config import tiny_config
from tests.v1.metrics.values import values_of
from vllm import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.slow

NUM_CASES = 50
VOCAB_SIZE = 96
# Windows and compressed entries, own or shared; recurrent states; keys and values that layers
# share, with inputs by layer.
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v4": tiny_config(vocab_size=VOCAB_SIZE),
    "deepseek-v4.1": tiny_v41(vocab_size=VOCAB_SIZE, image_token_id=None),
    "qwen 3.5": qwen3_5(vocab_size=VOCAB_SIZE, max_position_embeddings=2048, eos_token_id=1),
    "gemma 4": gemma4_small(vocab_size=VOCAB_SIZE, eos_token_id=1),
}
# Greedy or drawn, prompt by prompt.
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.01},
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is run.

    Attributes:
        flags: Its arguments.
        threads: That compute.
        together: Whether all requests come at once.
        num_tokens: Of an answer; the first are compared.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    together: bool = True
    num_tokens: int = 4


ALONE = Setting({"max_num_seqs": 1, "enable_prefix_caching": False}, together=False)
SETTINGS = {
    "batch": Setting({"max_num_seqs": 64, "enable_prefix_caching": False}),
    "chunks": Setting({"max_num_batched_tokens": 48, "enable_prefix_caching": False}),
    "hits": Setting({"max_num_seqs": 16}),
    "drafts": Setting(
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_min": 1,
            },
            "enable_prefix_caching": False,
        }
    ),
    "preemption": Setting({"max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 20}, num_tokens=40),
    "two threads": Setting({"max_num_seqs": 64, "enable_prefix_caching": False}, threads=2),
}


def make_prompts() -> list[list[int]]:
    """Return prompts of 2 to 270 tokens, many behind a common prefix."""
    rng = random.Random(16)

    def draw(length: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(length)]

    prefixes = [draw(rng.randrange(40, 230)) for _ in range(5)]
    return [
        (rng.choice(prefixes) if rng.random() < 0.6 else []) + draw(rng.randrange(2, 40))
        for _ in range(NUM_CASES)
    ]


def choose_params(index: int, num_tokens: int) -> SamplingParams:
    """Return those of a prompt.

    They ask for every log probability of every token, which the whole row of logits decides.
    """
    return SamplingParams(
        seed=index,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=-1,
        detokenize=False,
        **DRAWS[index % len(DRAWS)],
    )


class Answers:
    """What one engine says to all prompts."""

    def __init__(self, folder: Path, setting: Setting, prompts: Sequence[list[int]]) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(setting.threads)
        try:
            with LLM(
                str(folder),
                load_format="dummy",
                skip_tokenizer_init=True,
                block_size=32,
                max_model_len=512,
                max_logprobs=-1,
                disable_log_stats=False,
                **{"kv_cache_memory_bytes": 1 << 26, **setting.flags},
            ) as llm:
                self.outputs = self._ask(llm, setting, prompts)
                counted = values_of(llm.get_metrics())
                self.num_drafted = counted.get("vllm:spec_decode_num_draft_tokens", 0)
                self.num_preempted = counted.get("vllm:num_preemptions", 0)
        finally:
            torch.set_num_threads(threads)

    def _ask(self, llm: LLM, setting: Setting, prompts: Sequence[list[int]]) -> list[RequestOutput]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [choose_params(index, setting.num_tokens) for index in range(len(prompts))]
        if setting.together:
            return llm.generate(asked, params, use_tqdm=False)
        return [
            llm.generate(one, own, use_tqdm=False)[0]
            for one, own in zip(asked, params, strict=True)
        ]

    @property
    def bits(self) -> list[Any]:
        """Token ids and log probabilities of every answer's beginning."""
        answers = [output.outputs[0] for output in self.outputs]
        return [
            (
                list(answer.token_ids)[: ALONE.num_tokens],
                [
                    {token: found.logprob for token, found in row.items()}
                    for row in (answer.logprobs or ())[: ALONE.num_tokens]
                ],
            )
            for answer in answers
        ]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = json.dumps(MODELS[request.param])
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Answers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield Answers(folder, ALONE, make_prompts())


@pytest.mark.parametrize("name", list(SETTINGS))
def test_answers_equal_those_given_alone(folder: Path, alone: Answers, name: str) -> None:
    found = Answers(folder, SETTINGS[name], make_prompts())
    assert len(alone.bits[0][1][0]) == VOCAB_SIZE
    assert found.bits == alone.bits
    has_hits = sum(output.num_cached_tokens or 0 for output in found.outputs) > 0
    assert has_hits == (name in ("hits", "preemption"))
    assert (found.num_preempted > 0) == (name == "preemption")
    assert (found.num_drafted > 0) == (name == "drafts")
