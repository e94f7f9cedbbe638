"""Compiles grammars beside the step loop, and keeps what it compiled."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.v1.structured_output.grammar import shorten
from vllm.v1.structured_output.grammar_text import make_grammar_text

_NUM_THREADS = 2
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 16 << 20
# A tenth of a second of compiling, about 10 ms of one mask, and 64 MiB of states for one answer.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=32_768,
    max_grammar_size=500_000,
    verbose_errors=False,
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What compiling needs of a tokenizer.

    Attributes:
        tokenizer: For llguidance.
        special_tokens: Ids of the tokens that no text is made of, by their text.
    """

    tokenizer: LLTokenizer
    special_tokens: dict[str, int]

    @classmethod
    def read(cls, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> "Vocabulary":
        """Take over a tokenizer; a model's vocabulary may be larger."""
        backend = tokenizer.backend
        made = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=sorted(end_ids))
        # The library takes <tool_call> for special, whatever the vocabulary says.
        added = backend.get_added_tokens_decoder().items()
        return cls(made, {t.content: i for i, t in added if made.is_special_token(i)})


class GrammarCompiler:
    """Turns what requests ask for into compiled grammars, each once.

    Owns: its threads, the vocabulary (read at the first grammar), the latest results, failures
    included. One thread may call it.

    Args:
        read_vocabulary: Reads the vocabulary.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._read_vocabulary = read_vocabulary
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._results: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._num_bytes = 0

    def submit(self, params: StructuredOutputsParams) -> "Future[LLMatcher]":
        """Return the compiled grammar when it is ready; the result must be copied, not advanced.

        The future fails with UserInputError for what is no grammar, or too large a one.
        """
        key = msgspec.msgpack.encode(params)
        known = self._results.get(key)
        if known is not None:
            self._results.move_to_end(key)
            return known
        future = self._pool.submit(self._compile, params)
        self._results[key] = future
        self._num_bytes += len(key)
        while len(self._results) > _MAX_CACHED or (
            self._num_bytes > _MAX_CACHED_BYTES and len(self._results) > 1
        ):
            oldest, _ = self._results.popitem(last=False)
            self._num_bytes -= len(oldest)
        return future

    def shutdown(self) -> None:
        """Stop the threads when what they compile is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._read_vocabulary()

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        with self._lock:
            vocabulary = self._vocabulary
        text = make_grammar_text(params, vocabulary.special_tokens)
        matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask costs most, and shows grammars that can never make one.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise UserInputError(
                f"structured_outputs.{params.kind} cannot be compiled: "
                f"{shorten(matcher.get_error())}",
                "structured_outputs",
            )
        return matcher
