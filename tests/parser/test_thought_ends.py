"""Tokens by which a call ends a thought."""

import numpy as np
import pytest
from tokenizers import AddedToken

from tests.parser.reading import D
from tests.tokenizers.family_tokenizers import byte_level
from vllm.parser.thought_ends import call_marks, spell_marks
from vllm.sampling_params import ReasoningSpan, SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.sample.history import TokenHistory

SPECIAL = ("<think>", "</think>", "<tool_call>", D, "[TOOL_CALLS]", "<|tool_call>")
# What a model writes in a thought, and whether a parser reads a call there.
CALLS = [
    ("deepseek_v4", f"hm\n\n<{D}tool_calls>", True),
    ("deepseek_v4", f"hm.<{D}tool_calls>", True),
    ("qwen3_coder", "hm\n<tool_call>\n<function=f>", True),
    ("qwen3_coder", "hm.\n\n<function=f>", True),
    ("qwen3_coder", "hm <function=f>", True),
    ("qwen3_coder", "hm <function of x", False),
    ("glm", "hm<tool_call>f", True),
    ("mistral", "hm[TOOL_CALLS][", True),
    ("gemma4", "hm<|tool_call>call:f", True),
    ("hermes", 'hm<tool_call>{"name"', False),
    ("llama3_json", '{"name"', False),
    ("pythonic", "[f()", False),
    ("openai", "hm<tool_call>", False),
    ("none", "hm<tool_call>", False),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = byte_level()
    made.backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return Tokenizer(made.backend, {"eos_token": "<|im_end|>"})


@pytest.mark.parametrize(("tools", "said", "calls"), CALLS)
def test_a_budget_ends_with_the_thought_that_a_call_ends(tokenizer, tools, said, calls):
    rows = spell_marks(tokenizer, call_marks(tools, ["f", "g"]))
    (end,) = tokenizer.encode("</think>", False)
    span = ReasoningSpan(end_token_ids=[end], call_token_ids=rows)
    said_ids = tokenizer.encode(said, False)
    params = SamplingParams(thinking_token_budget=len(said_ids) + 4, reasoning=span)
    history = TokenHistory(params, 1)
    tokens = [0, *said_ids, *tokenizer.encode("one two three four five six", False)]
    drawn = [history.make_rows(np.array(tokens[:n]), [])[0].forced_id
             for n in range(1, len(tokens) + 1)]  # fmt: skip
    assert (end in drawn) is not calls
