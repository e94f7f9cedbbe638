"""Which drafter a configuration asks for."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from vllm.config import SpeculativeConfig
from vllm.config.speculative import ASSISTANT, NO_DRAFTS
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.model_executor.models.decoder.kv_cache import drafter_cache_names
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.deepseek_v4.kv_cache import MTP_WINDOW
from vllm.model_executor.models.gemma4_assistant import Gemma4Assistant, read_assistant
from vllm.v1.attention.metadata import CacheLayout, build_step_metadata
from vllm.v1.attention.step_model import StepModel
from vllm.v1.spec_decode.assistant import AssistantProposer
from vllm.v1.spec_decode.interface import Proposer
from vllm.v1.spec_decode.mtp import BlockCache, FindPictures, MTPProposer
from vllm.v1.spec_decode.ngram import NgramProposer, WeighedNgramProposer

logger = init_logger(__name__)


def make_proposer(
    config: SpeculativeConfig | None,
    steps: StepModel,
    layout: CacheLayout,
    layers: Mapping[str, torch.Tensor],
    device: torch.device,
    target: Any = None,
    find_pictures: FindPictures | None = None,
) -> Proposer | None:
    """Build the drafter; None when nothing is to be drafted.

    Args:
        config: What was asked for.
        steps: The target, and what it reads a step's tables from.
        layout: Its KV groups.
        layers: Its cache views by name.
        device: Where it runs.
        target: The loaded model itself, for a drafter that uses its embedding.
        find_pictures: Finds pictures in what drafters read; None: there are none.

    Raises:
        ConfigError: The method is not offered, or the model has no MTP block.
    """
    if config is None or (config.is_unasked and not steps.has_same_bits):
        return None
    if config.method == "ngram":
        lookup = NgramProposer(
            config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
        )
        if not config.weighs_drafts:
            return lookup
        if config.is_unasked:
            logger.info(
                "Drafts: as many tokens as pay are looked up in the text while at most %d requests "
                "run; answers are the same. --speculative-config '%s': none.",
                config.most_requests,
                json.dumps(dict(NO_DRAFTS)),
            )
        return WeighedNgramProposer(lookup, most_requests=config.most_requests)
    if config.method == ASSISTANT:
        return _make_assistant(config, target, layout, layers, device)
    if config.method != "mtp":
        raise ConfigError(f"method {config.method!r} is not supported: use mtp or ngram.")
    count = config.num_speculative_tokens
    if isinstance(target, DecoderForCausalLM) and target.drafter is not None:
        if not steps.runs_drafter:
            steps = StepModel(target, partial(build_step_metadata, device=device))
        cache = _find_block_cache(drafter_cache_names(target.config), layout, layers)
        # Its rows lie in blocks that requests share, so the stale one is left as it is.
        return MTPProposer(
            steps,
            count,
            cache,
            device,
            prepare=steps.model.norm_streams,
            keeps_boundaries=False,
            find_pictures=find_pictures,
        )
    if MTP_WINDOW not in layout.group_of:
        raise ConfigError("method 'mtp' needs a model with an MTP block: use method 'ngram'.")
    cache = _find_block_cache((MTP_WINDOW,), layout, layers)
    return MTPProposer(steps, count, cache, device)


def _find_block_cache(
    names: Sequence[str], layout: CacheLayout, layers: Mapping[str, torch.Tensor]
) -> BlockCache:
    """Return where the rows of the block that drafts lie, each cache in a group of its own."""
    group_ids = tuple(layout.group_of[name] for name in names)
    groups = tuple(layout.groups[group_id] for group_id in group_ids)
    own = CacheLayout(groups, {name: index for index, name in enumerate(names)})
    return BlockCache(tuple(map(layout.find_table, group_ids)), own, layers)


def _make_assistant(
    config: SpeculativeConfig,
    target: Any,
    layout: CacheLayout,
    layers: Mapping[str, torch.Tensor],
    device: torch.device,
) -> AssistantProposer:
    if not isinstance(target, DecoderForCausalLM) or not target.config.has_layer_scalars:
        raise ConfigError(f"method {ASSISTANT!r} needs a Gemma 4 model: use method 'ngram'.")
    if device.type != "cpu" or target.share.size > 1:
        raise ConfigError(f"method {ASSISTANT!r} is served by one worker on a CPU: leave it out.")
    path = resolve_checkpoint(str(config.model)).path
    assistant = Gemma4Assistant(read_assistant(read_hf_config(path)), target.norm.dtype)
    load_model_weights(assistant, path, use_tqdm=False)
    return AssistantProposer(assistant, target, config.num_speculative_tokens, layout, layers)
