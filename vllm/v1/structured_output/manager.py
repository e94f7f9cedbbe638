"""Which requests follow a grammar, and where in it they stand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from vllm.exceptions import UserInputError, VllmError
from vllm.logger import init_logger
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.v1.structured_output.compiler import GrammarCompiler
from vllm.v1.structured_output.grammar import CompiledGrammar, Grammar
from vllm.v1.structured_output.limits import DEADLINE_S, make_contradiction_error
from vllm.v1.structured_output.mask_bits import BITS, allow_tokens, forbid_tokens
from vllm.v1.structured_output.masks import GrammarMasks, MaskWork
from vllm.v1.structured_output.trial import TrialOrder, TrialProcess

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend import Backend
    from vllm.v1.structured_output.request import StructuredOutputRequest

logger = init_logger(__name__)

# Rows that are filled beside the model, which needs them last of all; a thread costs some 0.1 ms.
_MIN_BESIDE = 4
_NO_DRAFTS: tuple[int, ...] = ()


class StructuredOutputManager:
    """The scheduler's view of grammars.

    Owns: the compiler, made when the first request asks for it, the requests whose grammars are
    being compiled or have ruled themselves out, and the thread that fills masks. Between
    ``make_masks`` and the reading of its bits that thread alone touches the matchers.

    Args:
        vllm_config: All configuration.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._pending: dict[str, tuple[Request, Future[CompiledGrammar], float]] = {}
        self._compiler: GrammarCompiler | None = None
        self._contradictions: list[tuple[str, VllmError]] = []

    def should_advance(self, request: Request) -> bool:
        """Whether the request's grammar must accept the tokens it just got.

        False without structured output, and while a reasoning part, which its grammar does not
        cover, has not ended.
        """
        structured = request.structured_output_request
        if structured is None or structured.grammar is None:
            return False
        return structured.reasoning_ended is not False

    # ---- compiling ---------------------------------------------------------------------------

    def warm_up(self) -> Future[CompiledGrammar]:
        """Have the library and its child loaded before a request waits for them.

        Returns:
            What is ready then; nobody has to look: a first request meets the same error.
        """
        return self._get_compiler().submit(StructuredOutputsParams(regex="x"))

    def start(self, request: Request) -> None:
        """Begin to compile a request's grammar; it stays blocked until that is done."""
        structured = request.structured_output_request
        assert structured is not None
        future = self._get_compiler().submit(structured.params)
        self._pending[request.request_id] = (request, future, time.monotonic() + DEADLINE_S)

    def _get_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._make_backend, self._make_trial)
        return self._compiler

    @property
    def is_compiling(self) -> bool:
        """Whether requests wait for their grammars."""
        return bool(self._pending)

    def settle(self) -> list[tuple[str, VllmError]]:
        """Give requests the grammars that are ready.

        Returns:
            Requests that cannot have one, and why.
        """
        refused: list[tuple[str, VllmError]] = []
        for request_id, (request, future, deadline) in list(self._pending.items()):
            if request.is_finished():
                del self._pending[request_id]
            elif future.done():
                del self._pending[request_id]
                error = future.exception()
                if error is None:
                    structured = request.structured_output_request
                    assert structured is not None
                    structured.grammar = Grammar(future.result(), self._end_ids)
                elif isinstance(error, VllmError):
                    refused.append((request_id, error))
                else:
                    raise error
            elif time.monotonic() > deadline:
                del self._pending[request_id]
                refused.append((request_id, _make_deadline_error()))
        return refused

    def note_refusal(self, request: Request, tokens: Sequence[int]) -> None:
        """Note that a request has ended because its grammar refused tokens, or rules itself out."""
        structured = request.structured_output_request
        assert structured is not None
        if structured.grammar.rules_itself_out:
            error = make_contradiction_error(structured.params)
            self._contradictions.append((request.request_id, error))
            return
        reason = structured.grammar.error or f"it refuses tokens {list(tokens)}"
        logger.error("Request %s ends with its grammar: %s.", request.request_id, reason)

    def take_contradictions(self) -> list[tuple[str, VllmError]]:
        """Drain the requests that ended so, and what is wrong with them."""
        contradictions, self._contradictions = self._contradictions, []
        return contradictions

    def shutdown(self) -> None:
        """Stop compiling."""
        if self._compiler is not None:
            self._compiler.shutdown()
        if "_filler" in self.__dict__:
            self._filler.shutdown()

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ids = set(self.vllm_config.model_config.end_token_ids)
        if self._tokenizer.eos_token_id is not None:
            ids.add(self._tokenizer.eos_token_id)
        return frozenset(ids)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self._tokenizer_path)

    @property
    def _tokenizer_path(self) -> str:
        model = self.vllm_config.model_config
        return str(model.tokenizer or model.path or model.model)

    @cached_property
    def _vocab_size(self) -> int:
        return int(self.vllm_config.model_config.hf_config["vocab_size"])

    def _make_backend(self) -> Backend:
        # Here: most engines never see a grammar, and need not wait for the library.
        from vllm.v1.structured_output.backend import Backend  # noqa: PLC0415

        return Backend(self._tokenizer, self._vocab_size, self._end_ids)

    def _make_trial(self) -> TrialProcess:
        order = TrialOrder(self._tokenizer_path, self._vocab_size, sorted(self._end_ids))
        return TrialProcess(order)

    # ---- steps -------------------------------------------------------------------------------

    def filter_drafts(self, request: Request, drafts: list[int]) -> list[int]:
        """Return the first drafts that the request's grammar allows one after another.

        Drafts of reasoning all stand, up to its end.
        """
        structured = request.structured_output_request
        assert structured is not None
        num_free = _count_free(structured, drafts)
        if num_free is None or structured.grammar is None:
            return drafts
        allowed: list[int] = structured.grammar.validate_tokens(drafts[num_free:])
        return drafts[:num_free] + allowed

    def make_masks(
        self,
        requests: Mapping[str, Request],
        scheduled_ids: Sequence[str],
        drafts_by_id: Mapping[str, list[int]],
    ) -> GrammarMasks | None:
        """Return what grammars allow in the rows of a step.

        Args:
            requests: By id.
            scheduled_ids: The step's requests.
            drafts_by_id: The drafts that it verifies.

        Returns:
            None when no row follows a grammar.
        """
        first_rows: dict[str, int] = {}
        work: list[MaskWork] = []
        openings: list[tuple[MaskWork, int]] = []
        reasoning: list[tuple[range, frozenset[int]]] = []
        num_rows = 0
        for request_id in scheduled_ids:
            request = requests[request_id]
            structured = request.structured_output_request
            if structured is None or request.is_prefill_chunk or structured.grammar is None:
                continue
            drafts = drafts_by_id.get(request_id, _NO_DRAFTS)
            num_free: int | None = 0
            opening_id: int | None = None
            if structured.reasoning_ended is False:
                num_free, opening_id = _count_free(structured, drafts), _find_opening(structured)
            grammar = structured.grammar
            # An answer that ends while it reasons is none, and its grammar asks for one.
            must_answer = num_free != 0 and not grammar.may_end
            # Nor is one that calls while it reasons: its grammar waits for the reasoning's end.
            banned = grammar.end_ids if must_answer else frozenset[int]()
            banned |= _find_call_ids(structured) if num_free != 0 else frozenset()
            if not grammar.is_open or (num_free is None and opening_id is None and not banned):
                continue
            first_rows[request_id] = num_rows
            if opening_id is not None:
                # It may begin to reason, or with what the grammar allows first.
                openings.append((MaskWork(grammar, num_rows), opening_id))
            if banned:
                num_reasoning = len(drafts) + 1 if num_free is None else num_free
                first_row = num_rows + (opening_id is not None)
                rows = range(first_row, num_rows + num_reasoning)
                reasoning.append((rows, banned))
            if num_free is not None:
                behind = drafts[num_free:] if drafts else _NO_DRAFTS
                work.append(MaskWork(grammar, num_rows + num_free, behind))
            num_rows += len(drafts) + 1
        if not num_rows:
            return None
        bits = np.full((num_rows, -(-self._vocab_size // BITS)), -1, dtype=np.int32)
        for rows, banned in reasoning:
            forbid_tokens(bits, rows, banned)
        if num_rows < _MIN_BESIDE:
            self._fill(bits, work, openings)
            return GrammarMasks(first_rows, bits)
        return GrammarMasks(first_rows, bits, self._filler.submit(self._fill, bits, work, openings))

    def _fill(
        self, bits: np.ndarray, work: Sequence[MaskWork], openings: Sequence[tuple[MaskWork, int]]
    ) -> None:
        assert self._compiler is not None
        # In turn: a grammar may stand in both lists.
        self._compiler.backend.fill(work, bits)
        if openings:
            self._compiler.backend.fill([item for item, _ in openings], bits)
            rows, token_ids = np.array([(item.row, token_id) for item, token_id in openings]).T
            allow_tokens(bits, rows, token_ids)
            for item, _ in openings:
                item.grammar.forget_mask()

    @cached_property
    def _filler(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar-masks")


def _count_free(structured: StructuredOutputRequest, drafts: Sequence[int]) -> int | None:
    """Return how many drafts belong to the reasoning; None: all, and what follows does too."""
    if structured.reasoning_ended is not False:
        return 0
    if structured.reasoning is None:
        return None
    return structured.reasoning.find_end(drafts)


def _find_opening(structured: StructuredOutputRequest) -> int | None:
    if structured.reasoning_ended is not False or structured.reasoning is None:
        return None
    return structured.reasoning.opening_id


def _find_call_ids(structured: StructuredOutputRequest) -> frozenset[int]:
    """Tokens by which an answer that reasons would call."""
    return frozenset() if structured.reasoning is None else structured.reasoning.call_ids


def _make_deadline_error() -> UserInputError:
    return UserInputError(
        f"structured_outputs could not be compiled within {DEADLINE_S:g} s: make the grammar "
        "smaller, or try again when fewer new ones arrive.",
        "structured_outputs",
    )
