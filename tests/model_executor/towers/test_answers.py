"""Answers about pictures: transformers' own, and the same in any batch, chunk and hit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_executor.towers.checkpoints import (
    FAMILIES,
    draw_picture,
    reference_logits,
    write_checkpoint,
)
from tests.model_executor.towers.engine import Answer, PictureEngine, Prompt
from vllm.exceptions import UserInputError
from vllm.v1.engine.engine_args import EngineArgs

GRIDS = {"gemma3": ((4, 4), (4, 4))}
WHOLE = ("gemma3", "gemma4v", "gemma4unified")


class Served:
    """A family's checkpoint, its reference and an engine of ours."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.folder = folder
        self.reference = write_checkpoint(family, folder)
        self.engine = PictureEngine(folder)

    def picture(self, number: int, seed: int) -> tuple[np.ndarray, tuple[int, int]]:
        grid = GRIDS.get(self.family, ((5, 7), (8, 4)))[number]
        return draw_picture(self.family, *grid, seed=seed), grid

    def check(self, prompt: Prompt, answer: Answer) -> None:
        """Hold an answer against the reference's logits behind the same tokens."""
        ids, _ = prompt.lay_out()
        logits = reference_logits(self.family, self.reference, ids + answer.tokens, prompt.pictures)
        expected = torch.log_softmax(logits[len(ids) - 1 : -1].float(), -1)
        assert answer.tokens == expected.argmax(-1).tolist()
        found = torch.tensor(answer.logprobs)
        chosen = expected.gather(1, torch.tensor(answer.tokens).unsqueeze(1))[:, 0]
        torch.testing.assert_close(found, chosen, atol=5e-3, rtol=0)


@pytest.fixture(scope="module", params=list(FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    own = Served(request.param, tmp_path_factory.mktemp(request.param))
    yield own
    own.engine.close()


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, count).tolist()


@pytest.mark.slow
def test_answers_are_the_references(served: Served) -> None:
    one = Prompt([text(0, 21), served.picture(0, 1), text(1, 9)])
    other = Prompt([text(0, 21), served.picture(0, 2), text(1, 9)])
    two = Prompt([served.picture(1, 3), text(2, 5), served.picture(0, 1), text(3, 40)])
    answers = served.engine.run(one, other, two)
    for prompt, answer in zip((one, other, two), answers, strict=True):
        served.check(prompt, answer)
    # What is seen decides: the same words about another picture.
    assert answers[0].logprobs != answers[1].logprobs


@pytest.mark.slow
def test_hits_to_the_unit_and_the_same_answers(served: Served) -> None:
    """Cold, hit, in company: the same bits; another picture shares what stands before it."""
    engine, seen = served.engine, served.picture(0, 11)
    length = seen[1][0] * seen[1][1]
    begin = 40
    asked = Prompt([text(10, begin), seen, text(11, 30)])
    total = begin + length + 30
    (cold,) = engine.run(asked)
    assert cold.num_cached == 0
    (again,) = engine.run(asked)
    assert again.num_cached == (total - 1) // 32 * 32
    assert (again.tokens, again.logprobs) == (cold.tokens, cold.logprobs)
    # A second question about it, and the same question about another picture of its size.
    second = Prompt([text(10, begin), seen, text(12, 30)])
    (answer,) = engine.run(second)
    served.check(second, answer)
    assert answer.num_cached == (begin + length) // 32 * 32
    other = Prompt([text(10, begin), served.picture(0, 12), text(11, 30)])
    (answer,) = engine.run(other)
    assert answer.num_cached == begin // 32 * 32
    served.check(other, answer)
    salted = Prompt(asked.parts, salt="mine")
    (answer,) = engine.run(salted)
    assert answer.num_cached == 0
    assert (answer.tokens, answer.logprobs) == (cold.tokens, cold.logprobs)
    company = engine.run(*[Prompt(asked.parts, salt=f"{i}") for i in range(3)], other, second)
    assert [(own.tokens, own.logprobs) for own in company[:3]] == [(cold.tokens, cold.logprobs)] * 3


@pytest.mark.slow
def test_every_size_that_the_family_gives_is_read(served: Served) -> None:
    """Thin pictures are made as long as they can be: they are refused, or the tower reads them."""
    if served.family == "gemma4unified":
        pytest.skip("its window here is shorter than any picture")
    config = EngineArgs(str(served.folder)).create_vllm_config()
    sizes = config.model_config.image_family.sizes
    prompts = []
    for width, height in ((1, 10_000), (10_000, 1), (1, 190), (190, 1), (9, 1200), (1, 1)):
        try:
            size = sizes.fit(width, height)
        except UserInputError:
            continue
        pixels = np.zeros((size.height, size.width, 3), np.uint8)
        prompts.append(Prompt([text(1, 9), (pixels, (size.rows, size.columns))]))
    answers = served.engine.run(*prompts, max_tokens=1)
    assert [len(answer.tokens) for answer in answers] == [1] * len(prompts)
    assert prompts


@pytest.mark.slow
def test_hits_inside_a_picture(served: Served) -> None:
    """A prompt that ends with a picture is hit inside it: the rest is computed behind that."""
    seen = served.picture(0, 31)
    length = seen[1][0] * seen[1][1]
    for begin in (30, 40 - length % 16):
        ended = Prompt([text(30, begin), seen])
        (cold,) = served.engine.run(ended)
        served.check(ended, cold)
        (again,) = served.engine.run(ended)
        assert again.num_cached == (begin + length - 1) // 32 * 32
        assert (again.tokens, again.logprobs) == (cold.tokens, cold.logprobs)
        # A question behind it, from inside as well.
        asked = Prompt([*ended.parts, text(31, 20)])
        (fresh,) = served.engine.run(Prompt(asked.parts, salt=f"fresh {begin}"))
        (found,) = served.engine.run(asked)
        assert found.num_cached > 0
        assert (found.tokens, found.logprobs) == (fresh.tokens, fresh.logprobs)
        served.check(asked, found)


@pytest.mark.slow
def test_text_is_served_as_without_a_tower(served: Served) -> None:
    prompts = [Prompt([text(seed, count)]) for seed, count in ((1, 70), (1, 90), (2, 33), (1, 70))]
    blind = PictureEngine(served.folder, has_eyes=False)
    seeing = PictureEngine(served.folder)
    try:
        for prompt in prompts:
            assert blind.run(prompt) == seeing.run(prompt)
        assert blind.run(*prompts) == seeing.run(*prompts)
    finally:
        blind.close()
        seeing.close()


@pytest.mark.slow
def test_windows_made_again_are_exact(served: Served) -> None:
    """Rows of lost windows are computed from inside a picture, too."""
    num_rebuilt = 0
    # Only Gemma 3's windows are short enough here to be made again.
    begins = range(150, 262, 7) if served.family == "gemma3" else (199,)
    for begin in begins:
        seen = served.picture(0, begin)
        head, tail = text(begin, begin), text(begin + 1, 420 - begin)
        parted = [head, seen, tail[: 300 - begin - seen[1][0] * seen[1][1]] + text(5, 12)]
        (fresh,) = served.engine.run(Prompt(parted, salt=f"fresh {begin}"), max_tokens=3)
        served.engine.run(Prompt([head, seen, tail]), max_tokens=2)
        (answer,) = served.engine.run(Prompt(parted), max_tokens=3)
        assert answer.num_cached > 150
        assert (answer.tokens, answer.logprobs) == (fresh.tokens, fresh.logprobs)
        num_rebuilt += answer.num_rebuilt
    assert served.family != "gemma3" or num_rebuilt > 0


@pytest.mark.slow
def test_a_pool_too_small_changes_no_answer(served: Served) -> None:
    prompts = [
        Prompt([text(60 + i, 20 + 7 * i), served.picture(0, i % 3), text(70 + i, 25 - 2 * i)])
        for i in range(5)
    ]
    alone = [served.engine.run(prompt, max_tokens=12)[0] for prompt in prompts]
    small = PictureEngine(
        served.folder,
        chunk=32,
        num_gpu_blocks_override=24,
        kv_cache_memory_bytes=None,
        max_model_len=160,
    )
    try:
        answers = small.run(*prompts, max_tokens=12)
    finally:
        small.close()
    assert [own.tokens for own in answers] == [own.tokens for own in alone]
    assert [own.logprobs for own in answers] == [own.logprobs for own in alone]


@pytest.mark.slow
def test_random_weights_have_a_tower_too(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    drawn = PictureEngine(served.folder, load_format="dummy")
    try:
        answers = drawn.run(*(Prompt([text(1, 9), served.picture(0, seed)]) for seed in (1, 1, 2)))
        assert answers[0].logprobs == answers[1].logprobs != answers[2].logprobs
    finally:
        drawn.close()
    caplog.clear()
    caplog.set_level("INFO", logger="vllm")
    blind = PictureEngine(served.folder, language_model_only=True)
    try:
        # That was asked for, and is nothing to be warned of.
        assert "tensors are left out: the server was started with --language" in caplog.text
        assert "Ignoring" not in caplog.text
        with pytest.raises(UserInputError, match="largest that is served has 0"):
            blind.run(Prompt([served.picture(0, 1)]))
        assert blind.core.executor._worker._tower is None  # type: ignore[attr-defined]
    finally:
        blind.close()


@pytest.mark.slow
def test_drafts_change_no_answer(served: Served) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    prompts = [
        Prompt([text(40, 30), served.picture(0, 41), text(41, 20)]),
        Prompt([served.picture(1, 42), text(40, 30)]),
    ]
    expected = served.engine.run(*prompts, max_tokens=12)
    drafting = PictureEngine(served.folder, speculative_config=drafts)
    try:
        for _ in range(2):  # cold, then hit
            answers = drafting.run(*prompts, max_tokens=12)
            assert [own.tokens for own in answers] == [own.tokens for own in expected]
            assert [own.logprobs for own in answers] == [own.logprobs for own in expected]
        assert any(len(own.chunks) < 14 for own in answers)
    finally:
        drafting.close()


@pytest.mark.slow
def test_chunks_of_any_size_give_the_same_answer(served: Served) -> None:
    """Steps of few tokens cut a causal picture anywhere, and one that sees itself nowhere."""
    seen = served.picture(0, 21)
    asked = Prompt([text(20, 13), seen, text(21, 50), served.picture(1, 22), text(22, 3)])
    (cold,) = served.engine.run(asked)
    served.check(asked, cold)
    for budget in (16, 40):
        engine = PictureEngine(served.folder, chunk=budget)
        try:
            (answer,) = engine.run(asked)
            assert (answer.tokens, answer.logprobs) == (cold.tokens, cold.logprobs)
            assert len(answer.chunks) > len(cold.chunks)
            if served.family in WHOLE:
                ends = np.cumsum(answer.chunks)
                for feature in asked.lay_out()[1]:
                    place = feature.mm_position
                    first, behind = place.offset, place.offset + place.length
                    assert not any(first < end < behind for end in ends)
            # The rest of a prompt behind a hit inside a picture.
            (answer,) = engine.run(asked)
            assert answer.num_cached > 0
            assert (answer.tokens, answer.logprobs) == (cold.tokens, cold.logprobs)
        finally:
            engine.close()


def test_steps_begun_ahead_wait_for_no_tower(served: Served) -> None:
    """With a step in flight, too, a text goes on while a picture is read, and answers are equal."""
    engine = PictureEngine(served.folder, async_scheduling=True)
    try:
        assert engine.core.scheduler._encoder.orders is not None
        seen, words = served.picture(0, 51), Prompt([text(50, 30)])
        shown = Prompt([text(51, 21), seen, text(52, 9)])
        (alone,) = served.engine.run(Prompt(words.parts, salt="ahead"), max_tokens=20)
        (expected,) = served.engine.run(Prompt(shown.parts, salt="ahead"))
        gone_on, answer = engine.run(words, shown, max_tokens=20)
        assert (gone_on.tokens, gone_on.logprobs) == (alone.tokens, alone.logprobs)
        assert answer.tokens[:6] == expected.tokens
        assert answer.logprobs[:6] == expected.logprobs
        # What was read once is kept.
        engine.run(Prompt(shown.parts, salt="ahead"))
    finally:
        engine.close()
