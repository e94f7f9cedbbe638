"""From a step's requests to the edits that their tokens, drafts included, ask of the logits."""

from functools import partial

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.edits import ForbidTokens, GrammarRows, PackedMask, RowMask, StepEdits
from vllm.v1.sample.history import RowHistory
from vllm.v1.structured_output.masks import GrammarMasks
from vllm.v1.worker.step_input import StepInput


def build_step_edits(
    step: StepInput,
    masks: GrammarMasks | None,
    vocab_size: int,
    device: torch.device,
    forbid: ForbidTokens | None = None,
) -> StepEdits | None:
    """Collect the edits of the sampled rows.

    Args:
        step: The step; drafts stand behind its requests' known tokens.
        masks: What grammars allow.
        vocab_size: V.
        device: Of the logits.
        forbid: What applies masks as they are; None: torch does, unpacked.

    Returns:
        None when no row asks for anything.

    Raises:
        InvariantError: A row is sampled by its own tokens, not all of which are known here yet.
    """
    histories: list[tuple[int, RowHistory, SamplingParams]] = []
    row = 0
    for state, count, drafts in zip(step.requests, step.sampled_counts, step.drafts, strict=True):
        if count and state.history is not None:
            if state.tokens_in_flight:
                raise InvariantError(
                    f"request {state.req_id} is sampled by its own tokens, one of which is still "
                    "on the device"
                )
            tokens = state.get_tokens(0, state.num_tokens)
            rows = state.history.make_rows(tokens, drafts)
            histories += [(row + i, item, state.sampling.params) for i, item in enumerate(rows)]
        row += count
    found = None if masks is None else _find_grammar_rows(step, masks)
    grammar: GrammarRows | None = None
    if found is not None:
        unpack = partial(RowMask.from_bits, *found, vocab_size, device)
        grammar = unpack() if forbid is None else PackedMask(*found, forbid, unpack)
    return StepEdits.build(histories, grammar, device)


def _find_grammar_rows(
    step: StepInput, masks: GrammarMasks
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the rows that follow a grammar, rising, and their masks."""
    rows: list[int] = []
    sources: list[int] = []
    row = 0
    for state, count in zip(step.requests, step.sampled_counts, strict=True):
        source = masks.first_rows.get(state.req_id) if count else None
        if source is not None and count == 1:
            rows.append(row)
            sources.append(source)
        elif source is not None:
            rows += range(row, row + count)
            sources += range(source, source + count)
        row += count
    if not rows:
        return None
    bits = masks.bits
    # Mostly all of them, in their order.
    is_whole = sources == list(range(len(bits)))
    return np.array(rows, dtype=np.int64), bits if is_whole else bits[sources]
