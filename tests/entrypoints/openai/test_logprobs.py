"""Both dialects of log probabilities."""

import math

import pytest

from tests.tokenizers.family_tokenizers import byte_level
from vllm.entrypoints.openai.logprobs import (
    CompletionLogprobsBuilder,
    chat_logprobs,
    prompt_logprobs_json,
    token_text,
)
from vllm.outputs import Logprob

TOKENIZER = byte_level()


def _entry(logprob: float, text: bytes, rank: int = 1) -> Logprob:
    return Logprob(logprob, rank, text.decode(errors="replace"), text)


def test_parts_of_characters_are_spelled_by_bytes() -> None:
    assert token_text(5, _entry(0, b"\xe2\x96"), False) == "bytes:\\xe2\\x96"
    assert token_text(5, _entry(0, b"ab"), False) == "ab"
    assert token_text(5, _entry(0, b"ab"), True) == "token_id:5"
    assert token_text(5, Logprob(0.0, 1, "ab", None), False) == "ab"


def test_the_sampled_token_is_there_even_if_unlikely() -> None:
    rows = [{9: _entry(-5, b"z", 7), 1: _entry(-0.1, b"a"), 2: _entry(-1, b"b", 2)}]
    body = CompletionLogprobsBuilder(1, False, TOKENIZER).add([9], list(rows))
    assert body.top_logprobs == [{"a": -0.1, "z": -5}]
    chat = chat_logprobs([9], rows, 2, False)
    assert [top.token for top in chat.content[0].top_logprobs] == ["a", "b"]
    assert chat.content[0].token == "z"


def test_equal_spellings_keep_the_likelier() -> None:
    rows = [{1: _entry(-0.1, b"a"), 2: _entry(-1, b"a", 2)}]
    body = CompletionLogprobsBuilder(2, False, TOKENIZER).add([1], list(rows))
    assert body.top_logprobs == [{"a": -0.1}]


def test_offsets_run_on_over_chunks() -> None:
    builder = CompletionLogprobsBuilder(0, False, TOKENIZER)
    first = builder.add([1], [{1: _entry(-1, b"abc")}])
    second = builder.add([2], [{2: _entry(-math.inf, b"d")}])
    assert (first.text_offset, second.text_offset) == ([0], [3])
    assert second.token_logprobs == [-9999.0]


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_point_into_the_text(as_ids: bool) -> None:
    parts = [b"a", "é".encode()[:1], "é".encode()[1:], "日".encode(), b"\xff", b"z"]
    rows = [{i: _entry(-1, part)} for i, part in enumerate(parts)]
    body = CompletionLogprobsBuilder(0, as_ids, TOKENIZER).add(list(range(len(parts))), rows)
    text = b"".join(parts).decode(errors="replace")
    assert body.text_offset == [0, 1, 1, 2, 3, 4]
    assert text[body.text_offset[-1]] == "z"


def test_all_of_the_vocabulary() -> None:
    rows = [{i: _entry(-i, bytes([97 + i]), i + 1) for i in range(5)}]
    body = CompletionLogprobsBuilder(-1, False, TOKENIZER).add([0], list(rows))
    assert body.top_logprobs[0] is not None
    assert len(body.top_logprobs[0]) == 5


def test_prompt_logprobs() -> None:
    assert prompt_logprobs_json(None) is None
    assert prompt_logprobs_json([None, {7: _entry(-1, b"x", 2)}]) == [
        None,
        {"7": {"logprob": -1, "rank": 2, "decoded_token": "x"}},
    ]
