"""How many tokens of an answer are reasoning, however its outputs are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.entrypoints.openai.pipeline.reasoning_count import ReasoningCounter
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.parser.interface import ParseOptions
from vllm.parser.registry import ParserChoice
from vllm.tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
THOUGHT = "Let me think — 1 + 1.\n"


def encode(text: str) -> list[int]:
    """Tokens of a text as a model says it."""
    return TOKENIZER.encode(text, add_special_tokens=False)


def count(parts: list[list[int]], format_name: str, in_reasoning: bool) -> int:
    """The counter's number after some outputs."""
    parser = ParserChoice(reasoning=format_name).make_parser(
        ParseOptions(in_reasoning=in_reasoning)
    )
    counter = ReasoningCounter(TOKENIZER, in_reasoning)
    seen: list[int] = []
    num_told = 0
    for i, ids in enumerate(parts):
        seen += ids
        # Characters come when they are whole.
        text = TOKENIZER.decode(seen).rstrip("\ufffd")
        pieces = parser.feed(text[num_told:], ids)
        num_told = len(text)
        if i == len(parts) - 1:
            pieces += parser.finish("stop")
        counter.add(ids, pieces)
    return counter.num_tokens


@pytest.mark.parametrize("format_name", ["deepseek_v4", "qwen3"])
@pytest.mark.parametrize("thought", [THOUGHT, "x", "\n\nx\n\n"])
def test_the_count_is_that_of_the_tokens_up_to_the_mark(format_name: str, thought: str) -> None:
    reasoning = encode(thought + "</think>")
    for rest in ("", "Yes.", "\n\nYes."):
        ids = [*reasoning, *encode(rest)]
        expected = len(reasoning) if rest else len(ids)
        assert count([ids], format_name, True) == expected
        assert count([[token] for token in ids], format_name, True) == expected


def test_nothing_is_reasoning_where_the_model_does_not_reason() -> None:
    ids = encode("Yes, I do.")
    assert count([ids], "deepseek_v4", False) == 0
    assert count([[token] for token in ids], "deepseek_v4", False) == 0


def test_a_model_that_opens_its_reasoning_itself() -> None:
    reasoning = encode("<think>" + THOUGHT + "</think>")
    ids = [*reasoning, *encode("Yes.")]
    assert count([ids], "qwen3", False) == len(reasoning)
    assert count([[token] for token in ids], "qwen3", False) == len(reasoning)


def test_an_answer_cut_in_its_reasoning_is_all_reasoning() -> None:
    ids = encode(THOUGHT)
    assert count([[token] for token in ids], "deepseek_v4", True) == len(ids)


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), max_size=5))
@settings(deadline=None)
def test_cuts_change_nothing(cuts: list[int]) -> None:
    ids = encode(THOUGHT + "</think>Yes, it is 2.")
    bounds = sorted({0, *(cut for cut in cuts if cut < len(ids))})
    parts = [ids[a:b] for a, b in zip(bounds, [*bounds[1:], len(ids)], strict=True)]
    number = count(parts, "deepseek_v4", True)
    assert number == len(encode(THOUGHT + "</think>"))
