"""From a step's requests to the edits that their tokens, drafts included, ask of the logits."""

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.edits import RowMask, StepEdits
from vllm.v1.sample.history import RowHistory
from vllm.v1.structured_output.masks import GrammarMasks
from vllm.v1.worker.step_input import StepInput


def build_step_edits(
    step: StepInput, masks: GrammarMasks | None, vocab_size: int, device: torch.device
) -> StepEdits | None:
    """Collect the edits of the sampled rows.

    Args:
        step: The step; drafts stand behind its requests' known tokens.
        masks: What grammars allow.
        vocab_size: V.
        device: Of the logits.

    Returns:
        None when no row asks for anything.
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
    return StepEdits.build(histories, _find_grammar_rows(step, masks, vocab_size, device), device)


def _find_grammar_rows(
    step: StepInput, masks: GrammarMasks | None, vocab_size: int, device: torch.device
) -> RowMask | None:
    if masks is None:
        return None
    rows: list[int] = []
    sources: list[int] = []
    row = 0
    for state, count in zip(step.requests, step.sampled_counts, strict=True):
        source = masks.first_rows.get(state.req_id) if count else None
        if source is not None:
            rows += range(row, row + count)
            sources += range(source, source + count)
        row += count
    if not rows:
        return None
    return RowMask.from_bits(
        np.array(rows, dtype=np.int64), masks.bits[sources], vocab_size, device
    )
