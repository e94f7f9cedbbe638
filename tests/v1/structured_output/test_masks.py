"""Masks of rows with drafts, across the end of the reasoning and of the answer."""

import random
import string
from types import SimpleNamespace
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from tests.v1.structured_output.conftest import EOS, VOCAB, Reader
from vllm.config import ModelConfig, VllmConfig
from vllm.sampling_params import ReasoningSpan, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager, StructuredOutputRequest
from vllm.v1.structured_output.grammar import CompiledGrammar, Grammar
from vllm.v1.structured_output.grammar_text import make_grammar_text
from vllm.v1.structured_output.masks import GrammarMasks
from vllm.v1.structured_output.reasoning import ReasoningTracker
from vllm.v1.structured_output.special_texts import SpecialTexts

SCHEMA = {
    "type": "object",
    "properties": {
        "a_long_name_of_a_property": {"type": "string", "maxLength": 4},
        "another": {"enum": ["first of all", "first of some", "none"]},
        "constant": {"const": "  the same  text\n\n, always 12345"},
    },
    "required": ["a_long_name_of_a_property", "another", "constant"],
    "additionalProperties": False,
}
A, B, C = 66, 67, 68
END = 500


class Fixture:
    """A manager with requests whose grammar allows exactly the tokens A B C."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.requests: dict[str, Any] = {}
        model = ModelConfig("test", hf_config={"vocab_size": VOCAB, "eos_token_id": EOS})
        self.manager = StructuredOutputManager(VllmConfig(model_config=model))
        self.manager._compiler = SimpleNamespace(backend=reader.backend)  # type: ignore[assignment]
        lark = f"start: <[{A}]> <[{B}]> <[{C}]>"
        self.compiled = reader.backend.compile(StructuredOutputsParams(grammar=lark))

    def add(self, request_id: str, span: ReasoningSpan | None = None, **fields: Any) -> Any:
        structured = StructuredOutputRequest(
            StructuredOutputsParams(regex="a"),
            grammar=Grammar(self.compiled, frozenset([EOS])),
            reasoning=None if span is None else ReasoningTracker(span),
            reasoning_ended=None if span is None else False,
        )
        state = {"is_prefill_chunk": False, **fields}
        request = SimpleNamespace(structured_output_request=structured, **state)
        self.requests[request_id] = request
        return request

    def masks(self, **drafts: list[int]) -> GrammarMasks | None:
        return self.manager.make_masks(self.requests, list(self.requests), drafts)


def allowed(masks: GrammarMasks | None, request_id: str, depth: int = 0) -> list[int] | None:
    """The tokens a row allows; None: all."""
    assert masks is not None
    row = masks.bits[masks.first_rows[request_id] + depth]
    token_ids = bits_of(row.view(np.uint8))
    return None if len(token_ids) == VOCAB else token_ids


def forbidden(masks: GrammarMasks | None, request_id: str, depth: int = 0) -> list[int]:
    """The tokens a row does not allow."""
    token_ids = allowed(masks, request_id, depth)
    return [] if token_ids is None else sorted({*range(VOCAB)} - {*token_ids})


def bits_of(mask: np.ndarray) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(mask, count=VOCAB, bitorder="little")).tolist()
    return found


def test_a_row_for_each_draft_and_one_more(reader: Reader) -> None:
    made = Fixture(reader)
    made.add("plain")
    made.add("drafted")
    made.add("wrong")
    made.add("chunk", is_prefill_chunk=True)
    masks = made.masks(drafted=[A, B, C], wrong=[A, A])
    assert masks is not None
    assert set(masks.first_rows) == {"plain", "drafted", "wrong"}
    assert len(masks.bits) == 1 + 4 + 3
    assert allowed(masks, "plain") == [A]
    assert [allowed(masks, "drafted", i) for i in range(4)] == [[A], [B], [C], [EOS]]
    assert [allowed(masks, "wrong", i) for i in range(2)] == [[A], [B]]
    # Nothing has been advanced.
    assert allowed(made.masks(), "drafted") == [A]


def test_the_grammar_begins_behind_the_reasoning(reader: Reader) -> None:
    made = Fixture(reader)
    request = made.add("q", ReasoningSpan([END]))
    made.add("other", ReasoningSpan([END]))
    masks = made.masks(q=[7, END, A, B])
    assert [allowed(masks, "q", i) for i in range(2, 5)] == [[A], [B], [C]]
    assert made.manager.filter_drafts(request, [7, END, A, C, B]) == [7, END, A]
    assert made.manager.filter_drafts(request, [A, A, A]) == [A, A, A]
    assert not made.manager.should_advance(request)
    structured = request.structured_output_request
    assert structured.pass_reasoning([7, END, A]) == [A]
    assert made.manager.should_advance(request)
    assert structured.grammar.accept_tokens("q", [A])
    assert allowed(made.masks(), "q") == [B]


def test_an_answer_may_begin_with_reasoning_or_with_the_grammar(reader: Reader) -> None:
    made = Fixture(reader)
    made.add("q", ReasoningSpan([END], start_token_ids=[99]))
    assert allowed(made.masks(), "q") == [A, 99]
    masks = made.masks(q=[A, B])
    assert [allowed(masks, "q", i) for i in range(3)] == [[A, 99], [B], [C]]
    masks = made.masks(q=[99, 5, END])
    assert [allowed(masks, "q", i) for i in (0, 3)] == [[A, 99], [A]]
    assert [forbidden(masks, "q", i) for i in (1, 2)] == [[EOS], [EOS]]


def test_an_answer_that_must_come_does_not_end_in_its_reasoning(reader: Reader) -> None:
    made = Fixture(reader)
    made.add("q", ReasoningSpan([END]))
    made.add("alone", ReasoningSpan([END]))
    masks = made.masks(q=[7, END, A])
    assert [forbidden(masks, "q", i) for i in range(2)] == [[EOS], [EOS]]
    assert [allowed(masks, "q", i) for i in range(2, 4)] == [[A], [B]]
    assert forbidden(masks, "alone") == [EOS]
    masks = made.masks(q=[7, 8])
    assert [forbidden(masks, "q", i) for i in range(3)] == [[EOS]] * 3


def test_an_answer_does_not_call_in_the_reasoning_that_its_grammar_waits_behind(
    reader: Reader,
) -> None:
    made = Fixture(reader)
    # One token calls; two in a row do so only together.
    made.add("q", ReasoningSpan([END], call_token_ids=[[C], [A, B]]))
    masks = made.masks(q=[7, END, A])
    assert [C in forbidden(masks, "q", i) for i in range(2)] == [True, True]
    assert [A in forbidden(masks, "q", i) for i in range(2)] == [False, False]
    assert [allowed(masks, "q", i) for i in range(2, 4)] == [[A], [B]]


def test_an_answer_that_may_be_empty_may_end_in_its_reasoning(reader: Reader) -> None:
    made = Fixture(reader)
    made.compiled = reader.backend.compile(StructuredOutputsParams(grammar=f"start: <[{A}]>?"))
    structured = made.add("q", ReasoningSpan([END])).structured_output_request
    assert made.masks() is None
    assert allowed(made.masks(q=[7, END]), "q", 0) is None
    assert structured.pass_reasoning([END]) == []
    assert allowed(made.masks(), "q") == [EOS, A]


def test_an_ended_answer_is_free(reader: Reader) -> None:
    made = Fixture(reader)
    grammar = made.add("q").structured_output_request.grammar
    assert grammar.validate_tokens([A, B, C, EOS]) == [A, B, C]
    assert grammar.accept_tokens("q", [A, B, C])
    assert allowed(made.masks(), "q") == [EOS]
    assert grammar.accept_tokens("q", [EOS, 5])
    assert made.masks() is None
    assert grammar.validate_tokens([3, 4]) == [3, 4]


def test_a_refused_token_says_so(reader: Reader) -> None:
    made = Fixture(reader)
    grammar = made.add("q").structured_output_request.grammar
    assert not grammar.accept_tokens("q", [A, C])
    assert not grammar.is_open
    assert grammar.error
    assert made.masks() is None


def test_a_grammar_that_grows_too_large_says_so(reader: Reader) -> None:
    made = Fixture(reader)
    params = StructuredOutputsParams(regex="(a|b)*a(a|b){9}")
    text = make_grammar_text(params, SpecialTexts({})).text
    few = LLParserLimits(max_lexer_states=15, verbose_errors=False)
    matcher = LLMatcher(reader.backend._tokenizer, text, log_level=0, limits=few)
    made.compiled = CompiledGrammar(matcher)
    assert not matcher.is_error()
    grammar = made.add("q").structured_output_request.grammar
    (letter,) = reader.encode("a")
    for _ in range(8):
        token_ids = allowed(made.masks(), "q")
        if not grammar.is_open:
            break
        assert letter in (token_ids or ())
        assert grammar.accept_tokens("q", [letter])
    assert "too many states" in grammar.error
    assert token_ids == [EOS]
    assert made.masks() is None
    assert not grammar.accept_tokens("q", [EOS])


def test_a_mask_does_not_let_through_more_than_the_grammar(reader: Reader) -> None:
    made = Fixture(reader)
    pattern = StructuredOutputsParams(grammar=f"start: (<[{A}]> | <[{B}]>) <[{C}]>")
    made.compiled = reader.backend.compile(pattern)
    for token_ids in ([C], [EOS], [A, A], [A, EOS], [A, C, A]):
        grammar = made.add("q").structured_output_request.grammar
        for token_id in token_ids[:-1]:
            masks = made.masks()
            assert token_id in (allowed(masks, "q") or ())
            assert grammar.accept_tokens("q", [token_id])
        assert allowed(made.masks(), "q")
        assert not grammar.accept_tokens("q", token_ids[-1:])
        assert grammar.error
    # Here the mask says more: reasoning may begin too, of which the grammar knows nothing.
    grammar = made.add("q", ReasoningSpan([END], start_token_ids=[99])).structured_output_request
    assert allowed(made.masks(), "q") == [A, B, 99]
    assert grammar.grammar is not None
    assert not grammar.grammar.accept_tokens("q", [99])


def test_between_two_steps_the_matcher_is_not_asked(reader: Reader) -> None:
    made = Fixture(reader)
    made.compiled = reader.backend.compile(StructuredOutputsParams(regex="[a-z]{3}"))
    grammar = made.add("q").structured_output_request.grammar
    letter, *_ = reader.encode("k")
    assert letter in (allowed(made.masks(), "q") or ())
    matcher, grammar._matcher = grammar._matcher, None
    assert grammar.accept_tokens("q", [letter])
    grammar._matcher = matcher
    assert grammar.validate_tokens([letter] * 3) == [letter] * 2


def test_forced_tokens_are_those_the_library_forces_one_by_one(reader: Reader) -> None:
    made = Fixture(reader)
    made.compiled = reader.backend.compile(StructuredOutputsParams(json=SCHEMA))
    rng = random.Random(3)
    expected: list[list[int]] = []
    answer: list[int] = []
    plain = made.compiled.matcher.deep_copy()
    grammar = made.add("q").structured_output_request.grammar
    while grammar.is_open:
        expected.append(bits_of(np.frombuffer(plain.deep_copy().compute_bitmask(), np.uint8)))
        assert allowed(made.masks(), "q") == expected[-1]
        answer.append(rng.choice(expected[-1]))
        assert grammar.accept_tokens("q", answer[-1:])
        assert answer[-1] == EOS or plain.consume_token(answer[-1])
    assert sum(len(token_ids) == 1 for token_ids in expected) > 10
    # As drafts, from wherever they begin and to wherever they go.
    again = made.add("q").structured_output_request
    for i, token_id in enumerate(answer):
        drafts = answer[i : i + 4]
        masks = made.masks(q=drafts)
        rows = [allowed(masks, "q", depth) for depth in range(len(drafts))]
        assert rows == expected[i : i + 4]
        assert made.manager.filter_drafts(made.requests["q"], drafts) == [
            draft for draft in drafts if draft != EOS
        ]
        assert again.grammar is not None
        assert again.grammar.accept_tokens("q", [token_id])


def test_another_spelling_of_forced_text_is_of_the_grammar(reader: Reader) -> None:
    made = Fixture(reader)
    made.compiled = reader.backend.compile(StructuredOutputsParams(regex="The answer is 123[a-z]"))
    for taken in range(3):
        grammar = made.add("q").structured_output_request.grammar
        offered = allowed(made.masks(), "q")
        run = []
        for _ in range(taken):
            run += [token_id for token_id in [grammar.find_forced()] if token_id is not None]
            assert grammar.accept_tokens("q", run[-1:])
        rest = "The answer is 123"[len(reader.tokenizer.decode(run)) :]
        by_letter = [token_id for letter in rest for token_id in reader.encode(letter)]
        assert [by_letter[0]] != offered
        assert grammar.validate_tokens(by_letter) == by_letter
        assert grammar.accept_tokens("q", by_letter)
        made.requests["q"].structured_output_request.grammar = grammar
        letters = allowed(made.masks(), "q")
        assert letters == sorted(reader.encode(letter)[0] for letter in string.ascii_lowercase)
