"""Every family through ``LLM``: answers equal transformers', with and without hits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    assert_greedy,
    write_checkpoint,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm import LLM, SamplingParams
from vllm.platforms.resolve import get_current_platform
from vllm.v1.messages import PrefillStats

pytestmark = pytest.mark.slow

UNIT = 16
NUM_ANSWER = 6


class Served:
    """A family's engine beside its reference."""

    def __init__(self, llm: LLM, reference: Any) -> None:
        self._llm = llm
        self._reference = reference
        # What was said to prompts, and is the reference's.
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self.last_stats = PrefillStats(0, 0)

    @property
    def has_windows(self) -> bool:
        """Whether some layers attend windows, and others everything."""
        kinds = set(getattr(self._reference.config, "layer_types", None) or [])
        return {"full_attention", "sliding_attention"} <= kinds

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """Returns the answer, which must be the reference's, and the hit's tokens."""
        params = SamplingParams(
            temperature=0.0, max_tokens=NUM_ANSWER, ignore_eos=True, detokenize=False
        )
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        if tuple(prompt) not in self._answers:
            assert len(answer) == NUM_ANSWER
            assert_greedy(self._reference, prompt, answer)
            self._answers[tuple(prompt)] = answer
        assert answer == self._answers[tuple(prompt)]
        assert output.num_cached_tokens is not None
        assert output.prefill_stats is not None
        self.last_stats = output.prefill_stats
        return answer, output.num_cached_tokens


ON_ASCEND = ["qwen3", "qwen3-moe", "qwen3.5", "gemma3", "gpt-oss"]


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(f"{family} on ascend" for family in ON_ASCEND)],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    family, _, platform = request.param.partition(" on ")
    folder: Path = tmp_path_factory.mktemp(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CHECK_INVARIANTS", "1")
        patch.setenv("VLLM_ASCEND_REFERENCE", "1" if platform else "0")
        get_current_platform.cache_clear()  # found once a process otherwise
        assert get_current_platform().device_name == ("ascend-reference" if platform else "cpu")
        reference = write_checkpoint(family, folder)
        with LLM(
            model=str(folder),
            block_size=UNIT,
            max_model_len=512,
            # A prompt in one step: a chunk's end would be kept, and hit.
            max_num_batched_tokens=512,
            num_gpu_blocks_override=300,
        ) as llm:
            yield Served(llm, reference)
    get_current_platform.cache_clear()


def test_a_resend_hits_to_the_unit(served: Served) -> None:
    for length in (1, 16, 17, 300):
        prompt = random_tokens(length, length, VOCAB_SIZE)
        answer, hit = served.ask(prompt)
        assert hit == 0
        assert served.ask(prompt) == (answer, (length - 1) // UNIT * UNIT)


def test_a_next_turn_hits_to_the_unit(served: Served) -> None:
    prompt = random_tokens(150, 7, VOCAB_SIZE)
    answer, _ = served.ask(prompt)
    turn = [*prompt, *answer, *random_tokens(40, 8, VOCAB_SIZE)]
    _, hit = served.ask(turn)
    # The last token of an answer was never computed.
    assert hit == (150 + NUM_ANSWER - 1) // UNIT * UNIT


def test_a_junction_hits_to_the_unit(served: Served) -> None:
    shared = random_tokens(90, 9, VOCAB_SIZE)
    first, second, third = (
        [*shared, *random_tokens(70, seed, VOCAB_SIZE)] for seed in (10, 11, 12)
    )
    served.ask(first)
    # Where the second parts from the first is learnt at the latest now, and hit from then on.
    served.ask(second)
    _, hit = served.ask(third)
    assert hit == 90 // UNIT * UNIT


def test_windows_are_computed_again_where_dense_rows_are_left(served: Served) -> None:
    shared = random_tokens(480, 13, VOCAB_SIZE)
    served.ask(shared)
    rebuilt = []
    # Between the first prompt's checkpoints.
    for cut in (460, 440, 420):
        _, hit = served.ask([*shared[:cut], *random_tokens(25, cut, VOCAB_SIZE)])
        stats = served.last_stats
        rebuilt.append(stats.miss_tokens.get("window_rebuilt", 0))
        assert (rebuilt[-1] > 0) == (stats.rebuild_saved_tokens > 0)
        assert hit + rebuilt[-1] <= cut // UNIT * UNIT
    assert any(rebuilt) == served.has_windows


def test_a_full_pool_changes_no_answer(served: Served) -> None:
    # The pool holds a few of these at a time: prefixes are evicted, and some hit all the same.
    prompts = [random_tokens(200 + 10 * seed, seed, VOCAB_SIZE) for seed in range(20, 25)]
    for prompt in [*prompts, *prompts[::-1]]:
        served.ask(prompt)
