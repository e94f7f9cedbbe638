"""gpt-oss's MXFP4 experts: kept as stored, equal to their decoded twin."""

from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import build_hf_model, gpt_oss, run_reference
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import ConfigError, UnsupportedFeatureError
from vllm.model_executor.models.gpt_oss import read_gpt_oss

_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def decode_plainly(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decodes [E, out, groups, 16] bytes value by value into [E, in, out]."""
    low, high = blocks & 15, blocks >> 4
    codes = torch.stack([low, high], -1).flatten(-2).long()
    values = torch.tensor(_VALUES + [-value for value in _VALUES])[codes]
    return (values * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(-2).mT.contiguous()


def quantise(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors with random MXFP4 experts, and their decoded twin."""
    generator = torch.Generator().manual_seed(3)
    stored, decoded = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = decoded[name] = tensor
            continue
        num_experts, in_size, out_size = tensor.shape
        shape = (num_experts, out_size, in_size // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        decoded[name] = decode_plainly(blocks, scales)
    return stored, decoded


@pytest.mark.slow
def test_a_stored_model_equals_its_decoded_twin_and_transformers() -> None:
    raw = gpt_oss(**SIZES)
    reference = build_hf_model(raw, seed=7)
    stored, decoded = quantise(reference.state_dict())
    reference.load_state_dict(decoded)
    token_ids = random_tokens(200, 2)
    run = run_reference(reference, token_ids)
    assert run.margins.min() > 1e-5
    model = build_model({**raw, **MXFP4}, stored)
    logits = make_harness(model).run(token_ids, [120, 1, 9, 70])
    torch.testing.assert_close(logits, run.logits, atol=1e-3, rtol=0)
    twin = make_harness(build_model(raw, decoded)).run(token_ids, [120, 1, 9, 70])
    torch.testing.assert_close(logits, twin, atol=1e-4, rtol=0)


def test_experts_stay_as_stored() -> None:
    raw = {**gpt_oss(**SIZES), **MXFP4}
    reference = build_hf_model(gpt_oss(**SIZES), seed=7)
    stored, _ = quantise(reference.state_dict())
    slots = build_model(raw, stored).weight_slots()
    experts = [name for name in slots if name.endswith(("_blocks", "_scales"))]
    assert len(experts) == 4 * raw["num_hidden_layers"]
    assert all(slots[name].dtype == torch.uint8 for name in experts)
    # Four bits a value, and a byte for each 32.
    layer = [slots[name].numel() for name in experts if ".layers.0." in name]
    num_values = 8 * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert sum(layer) == num_values // 2 + num_values // 32


def test_what_cannot_be_loaded_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="bitsandbytes"):
        read_gpt_oss({**gpt_oss(), "quantization_config": {"quant_method": "bitsandbytes"}})
    with pytest.raises(ConfigError, match="multiples of 32"):
        read_gpt_oss({**gpt_oss(hidden_size=48), **MXFP4})
