"""Our decoder with a reference's weights."""

from typing import Any

import torch

from tests.model_executor.models.harness import PagedHarness
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op


def build_model(
    raw: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    ops: OpResolver = get_reference_op,
) -> DecoderForCausalLM:
    """Builds our model of a config.json and fills every slot, as the loader does."""
    config = resolve_model(raw["architectures"]).parse_config(raw)
    model = DecoderForCausalLM(config, ops=ops, dtype=dtype, device="cpu")
    slots = model.weight_slots()
    filled = set()
    with torch.no_grad():
        for name, tensor in tensors.items():
            for part in model.tensor_parts(name, tensor.shape):
                if part.name.startswith(model.ignored_weight_prefixes):
                    continue
                source = tensor if part.expert is None else tensor[part.expert]
                source = source if part.rows is None else source[slice(*part.rows)]
                assert slots[part.name].shape == source.shape, part.name
                if slots[part.name].is_meta:
                    model.map_weight(part.name, source)
                else:
                    slots[part.name].copy_(source)
                filled.add(part.name)
    assert filled == set(slots), filled ^ set(slots)
    return model


def make_harness(
    model: DecoderForCausalLM, block_size: int = 16, num_blocks: int = 160, **kwargs: Any
) -> PagedHarness:
    """Returns pages for it."""
    return PagedHarness(model, block_size, num_blocks, find_specs=decoder_kv_cache_specs, **kwargs)
