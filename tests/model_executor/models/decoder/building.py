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
    *,
    drafts: bool = False,
) -> DecoderForCausalLM:
    """Builds our model of a config.json and fills every slot, as the loader does.

    Args:
        raw: The config.json.
        tensors: The checkpoint's.
        dtype: Of the weights.
        ops: What the model computes with.
        drafts: Whether its block that drafts runs.
    """
    config = resolve_model(raw["architectures"]).parse_config(raw).for_drafts(drafts)
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


def wrap_text(
    text: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    architecture: str,
    model_type: str,
    prefix: str,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the config.json and the tensors of a model with vision whose text part is given.

    Args:
        text: The text part's config.json.
        tensors: Its tensors; the head, where it has one of its own, keeps its name.
        architecture: Of the wrapper.
        model_type: Of the wrapper.
        prefix: What the wrapper's files put in the place of "model.".
    """
    raw = {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {k: v for k, v in text.items() if k != "architectures"},
        "vision_config": {"hidden_size": 8},
    }
    nested = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    return raw, nested


def assert_same_weights(model: DecoderForCausalLM, expected: DecoderForCausalLM) -> None:
    """Holds that every slot of a model has the values of another one's."""
    slots = expected.weight_slots()
    for name, slot in model.weight_slots().items():
        torch.testing.assert_close(slot, slots[name], atol=0, rtol=0)


def make_harness(
    model: DecoderForCausalLM, block_size: int = 16, num_blocks: int = 160, **kwargs: Any
) -> PagedHarness:
    """Returns pages for it."""
    return PagedHarness(model, block_size, num_blocks, find_specs=decoder_kv_cache_specs, **kwargs)
