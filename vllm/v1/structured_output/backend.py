"""llguidance with one vocabulary: compiles grammars and fills masks.

Imported by the thread that compiles the first grammar: the library takes longer to import than all
else that the scheduler needs.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from msgspec.structs import replace

from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.v1.structured_output.grammar import CompiledGrammar, Grammar, shorten
from vllm.v1.structured_output.grammar_text import GrammarText, make_grammar_text
from vllm.v1.structured_output.json_rules import (
    JsonRules,
    JsonTokens,
    TaggedKeys,
    UsedKeys,
    has_free_keys,
    may_ask_for_digits,
)
from vllm.v1.structured_output.limits import (
    find_named_parts,
    make_part_error,
    read_structural_tag,
)
from vllm.v1.structured_output.mask_bits import BITS, allow_only
from vllm.v1.structured_output.masks import MaskWork
from vllm.v1.structured_output.repeats import CallTokens, RepeatedCalls
from vllm.v1.structured_output.special_texts import SpecialTexts

# Bits of masks that one thread fills before several would have begun.
_MIN_PARALLEL_BITS = 1 << 18
# A tenth of a second of compiling, about 10 ms of one mask, and 64 MiB of states for one answer.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=32_768,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class Backend:
    """Safe to use from several threads, one matcher by one at a time.

    Args:
        tokenizer: The model's.
        vocab_size: V of its logits, which may be larger than the tokenizer's.
        end_ids: Tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        backend = tokenizer.backend
        made = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=sorted(end_ids))
        # The library takes <tool_call> for special, whatever the vocabulary says.
        added = backend.get_added_tokens_decoder().items()
        self._specials = SpecialTexts({t.content: i for i, t in added if made.is_special_token(i)})
        self._tokenizer = made
        self._executor = LLExecutor()
        self._token_ids, self._vocab_size = backend.get_vocab, vocab_size

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Return a grammar.

        Raises:
            UserInputError: It is no grammar, or too large a one.
        """
        made = self._make_text(params)
        return CompiledGrammar(self._check(params, made), self._make_rules(params, made))

    def check(self, params: StructuredOutputsParams) -> LLMatcher:
        """Return what the library makes of a grammar; raises as ``compile``."""
        return self._check(params, self._make_text(params))

    def _check(self, params: StructuredOutputsParams, made: GrammarText) -> LLMatcher:
        matcher = self._compile(made)
        if matcher.is_error():
            of, reason = self._find_fault(params) or (
                f"structured_outputs.{params.kind}",
                shorten(matcher.get_error()),
            )
            raise make_part_error(of, f"cannot be compiled: {reason}")
        return matcher

    @cached_property
    def _json_tokens(self) -> JsonTokens:
        return JsonTokens(self._tokenizer, self._token_ids(), self._vocab_size)

    @cached_property
    def _call_tokens(self) -> CallTokens:
        return CallTokens(self._tokenizer, self._specials, self._token_ids, self._vocab_size)

    def _make_rules(self, params: StructuredOutputsParams, made: GrammarText) -> JsonRules | None:
        """What JSON may not go on to; None: the request wrote its grammar itself."""
        if made.schema is not None:
            is_free = has_free_keys(made.schema)
            return JsonRules(self._json_tokens, UsedKeys(), has_free_keys=is_free)
        if made.tag is None or params.structural_tag is None:
            return None
        # Between tags may stand anything: keys are followed behind what stands before JSON.
        tokens, heads, repeats = self._call_tokens, made.tag.json_heads, made.tag.repeats
        return JsonRules(
            self._json_tokens,
            TaggedKeys([tokens.spell(tokens.tokenize(head)) for head in heads]) if heads else None,
            has_free_keys=bool(heads),
            bars_digits=not may_ask_for_digits(json.loads(params.structural_tag)),
            calls=RepeatedCalls(tokens, repeats) if repeats else None,
        )

    def _make_text(self, params: StructuredOutputsParams) -> GrammarText:
        return make_grammar_text(params, self._specials)

    def _compile(self, made: GrammarText) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, made.text, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask costs most, and shows grammars that can never make one.
            matcher.compute_bitmask()
        return matcher

    def _find_fault(self, params: StructuredOutputsParams) -> tuple[str, str] | None:
        """The part that alone cannot be compiled, and why; None: there is none with a name."""
        if params.structural_tag is None:
            return None
        for of, part in find_named_parts(read_structural_tag(params.structural_tag)):
            matcher = self._compile(self._make_text(_alone(params, part)))
            if matcher.is_error():
                return of, shorten(matcher.get_error())
        return None

    def fill(self, work: Sequence[MaskWork], bits: np.ndarray) -> None:
        """Write masks; many at a time, outside the interpreter's lock.

        Args:
            work: Each grammar once.
            bits: int32 ``[N, ceil(V / 32)]``, all ones; a row behind a draft that its grammar
                refuses, or that ends it, stays so.
        """
        self._fill_rows(work, bits)
        # Forks: the requests' own grammars stay where they are.
        ways = [(item, item.grammar.fork()) for item in work if item.drafts]
        depth = 0
        while ways:
            ways = [
                (item, fork)
                for item, fork in ways
                if depth < len(item.drafts)
                and fork.accept_tokens("", [item.drafts[depth]])
                and fork.is_open
            ]
            depth += 1
            self._fill_rows([MaskWork(fork, item.row + depth) for item, fork in ways], bits)

    def _fill_rows(self, work: Sequence[MaskWork], bits: np.ndarray) -> None:
        """Write one mask of each grammar."""
        address, row_bytes = bits.ctypes.data, bits.strides[0]
        is_small = len(work) * bits.shape[1] * BITS < _MIN_PARALLEL_BITS
        branching: list[tuple[Grammar, int]] = []
        for grammar, row, _ in work:
            token_id = grammar.find_forced()
            if token_id is not None:
                allow_only(bits, row, token_id)
                continue
            grammar.note_mask(bits, row)
            if is_small:
                # At once: what the matcher reads is in the processor's cache now.
                grammar.matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
                grammar.finish_mask(bits, row)
            else:
                branching.append((grammar, row))
        if branching:
            matchers = [(grammar.matcher, row) for grammar, row in branching]
            fill_next_token_bitmask_par(self._executor, matchers, bits)
            for grammar, row in branching:
                grammar.finish_mask(bits, row)


def _alone(params: StructuredOutputsParams, part: Mapping[str, Any]) -> StructuredOutputsParams:
    """A part as a grammar of its own; what is said of a schema alone is for its author."""
    if part.get("type") == "json_schema":
        return replace(params, structural_tag=None, json=part.get("json_schema"))
    return replace(params, structural_tag=json.dumps({"format": part}))
