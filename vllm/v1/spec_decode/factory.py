"""Which drafter a configuration asks for."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from vllm.config import SpeculativeConfig
from vllm.exceptions import ConfigError
from vllm.v1.attention.metadata import CacheLayout
from vllm.v1.attention.step_model import StepModel
from vllm.v1.spec_decode.interface import Proposer
from vllm.v1.spec_decode.mtp import BlockCache, MTPProposer
from vllm.v1.spec_decode.ngram import NgramProposer

_MTP_CACHE = "mtp.0.attn.window"


def make_proposer(
    config: SpeculativeConfig | None,
    steps: StepModel,
    layout: CacheLayout,
    layers: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Proposer | None:
    """Build the drafter; None when nothing is to be drafted.

    Args:
        config: What was asked for.
        steps: The target, and what it reads a step's tables from.
        layout: Its KV groups.
        layers: Its cache views by name.
        device: Where it runs.

    Raises:
        ConfigError: The method is not offered, or the model has no MTP block.
    """
    if config is None:
        return None
    if config.method == "ngram":
        return NgramProposer(
            config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
        )
    if config.method != "mtp":
        raise ConfigError(f"method {config.method!r} is not supported: use mtp or ngram.")
    if _MTP_CACHE not in layout.group_of:
        raise ConfigError("method 'mtp' needs a model with an MTP block: use method 'ngram'.")
    group_id = layout.group_of[_MTP_CACHE]
    own = replace(layout, groups=(layout.groups[group_id],), group_of={_MTP_CACHE: 0})
    return MTPProposer(
        steps, config.num_speculative_tokens, BlockCache(group_id, own, layers), device
    )
