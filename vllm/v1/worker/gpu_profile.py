"""The profile run: the largest step once, over a pool just large enough for it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.step_model import StepModel
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.sample.metadata import RowSampling, SamplingMetadata
from vllm.v1.sample.sampler import sample_on_device
from vllm.v1.worker.one_request import MakeStepModel, OneRequest

# Tokens of steps that kernels treat otherwise than long ones.
_OTHER_COUNTS = (5, 1)


@torch.inference_mode()
def run_largest_step(
    model: Any,
    specs: Mapping[str, KVCacheSpec],
    platform: Platform,
    device: torch.device,
    make_step_model: MakeStepModel,
    *,
    num_tokens: int,
    num_logit_rows: int,
    num_drafts: int = 0,
) -> None:
    """Run one prefill chunk, the logits of a full batch and draws from them; frees what it took.

    Steps of a few tokens and of one follow, with drafts if there will be any: what compiles kernels
    at their first use does so now, not while requests wait.

    Args:
        model: With its weights.
        specs: Of its caches.
        platform: Allocates the pages.
        device: Where.
        make_step_model: Makes what later runs the model's steps.
        num_tokens: Tokens of the largest step.
        num_logit_rows: Requests of the largest batch.
        num_drafts: Most drafts of a request in a step.
    """
    request = OneRequest(model, specs, platform, device, make_step_model, num_tokens=num_tokens)

    def run(count: int, num_drafts: int = 0) -> torch.Tensor:
        token_ids = torch.zeros(count, dtype=torch.int64, device=device)
        streams = request.run(token_ids, num_drafts)
        rows = streams[: min(num_logit_rows, count)]
        logits: torch.Tensor = request.steps.model.compute_logits(rows)
        return logits

    logits = run(num_tokens)
    for is_mixed in (False, True):
        _draw(request.steps, logits, is_mixed=is_mixed)
    for count in _OTHER_COUNTS:
        fewer = min(count, num_tokens)
        run(fewer, min(num_drafts, fewer - 1))


def _draw(steps: StepModel, logits: torch.Tensor, *, is_mixed: bool) -> None:
    """Samples rows of which all are drawn, or all but one, which is greedy."""
    drawn = RowSampling(SamplingParams(temperature=0.7, top_k=20, top_p=0.9), 0, 0)
    greedy = RowSampling(SamplingParams(temperature=0.0), 0, 0)
    rows = [greedy if is_mixed and not row else drawn for row in range(len(logits))]
    metadata = SamplingMetadata.build(rows, logits.shape[1], logits.device)
    sample_on_device(logits, metadata, np.ones(len(rows), np.int64), None, steps.draw_tokens)
