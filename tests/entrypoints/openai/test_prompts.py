"""Forms of a prompt."""

from typing import Any

import pytest

from vllm.entrypoints.openai.prompts import TokenizedPrompt, split_prompts, tokenize_prompts
from vllm.entrypoints.openai.text_workers import TextWorkers
from vllm.exceptions import UserInputError
from vllm.tokenizers import Tokenizer


def test_forms() -> None:
    assert split_prompts("a") == ["a"]
    assert split_prompts(["a", "b"]) == ["a", "b"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1], [2, 3]]) == [[1], [2, 3]]
    assert split_prompts([[1], "b"]) == [[1], "b"]


@pytest.mark.parametrize("prompt", [None, 5, {}, [], [1, "a"], [[1, "a"]], [True], [1.0], [None]])
def test_no_form(prompt: Any) -> None:
    with pytest.raises(UserInputError) as caught:
        split_prompts(prompt)
    assert caught.value.param == "prompt"


async def test_texts_and_ids_keep_their_order(tokenizer: Tokenizer) -> None:
    long = "word " * 1000
    prompts = await tokenize_prompts(
        tokenizer, ["a", [5, 6], long], 2048, True, workers=TextWorkers()
    )
    assert [prompt.text for prompt in prompts] == ["a", None, long]
    assert prompts[0].token_ids == tokenizer.encode("a")
    assert prompts[1].token_ids == [5, 6]
    assert prompts[2].token_ids == tokenizer.encode(long)


@pytest.mark.parametrize("prompt", ["", ["a", ""], [-1], [2048], [[1], [10**30]]])
async def test_wrong_content(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(UserInputError):
        await tokenize_prompts(tokenizer, prompt, 2048, True, workers=TextWorkers())


def test_marks_of_a_client_stand_before_those_of_the_format():
    prompt = TokenizedPrompt([1] * 99, cache_boundaries=tuple(range(1, 17)))
    marked = prompt.with_breakpoints({50: None, 3: 300.0})
    assert marked.cache_boundaries[:4] == (50, 3, 1, 2)
    assert len(marked.cache_boundaries) == 16
    assert marked.cache_ttls == {3: 300.0}
