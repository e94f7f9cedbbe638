import pytest
import torch

from tests.model_executor.model_loader.fakes import FakeModel
from vllm.model_executor.model_loader.dummy import fill_with_dummy_weights


def filled(seed: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    slots = FakeModel(dtype=dtype).slots
    fill_with_dummy_weights(slots, seed)
    return slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_and_finite(dtype):
    first, second = filled(3, dtype), filled(3, dtype)
    for name, slot in first.items():
        assert torch.isfinite(slot.float()).all(), name
        assert torch.equal(slot, second[name]), name


def test_order_of_the_slots_does_not_matter():
    slots = FakeModel().slots
    fill_with_dummy_weights(dict(reversed(slots.items())), 3)
    for name, slot in filled(3).items():
        assert torch.equal(slot, slots[name])


def test_seed_and_name_matter():
    a, b = filled(1), filled(2)
    name = "layers.0.attn.wkv.weight"
    assert not torch.equal(a[name], b[name])
    assert not torch.equal(a[name], a["layers.1.attn.wkv.weight"])


def test_values():
    slots = filled(0)
    assert (slots["layers.0.attn.kv_norm.weight"] == 1).all()
    assert (slots["mtp.0.enorm.weight"] == 1).all()
    assert 0.01 < slots["layers.1.attn.wkv.weight"].std() < 0.03


def test_routing_table_names_different_experts():
    table = filled(0)["layers.0.ffn.gate.tid2eid"]
    assert table.min() >= 0
    assert table.max() <= 3
    assert all(len(set(row)) == len(row) for row in table.tolist())
    assert len({tuple(row) for row in table.tolist()}) > 1


def test_strided_views_are_filled_in_place():
    base = torch.zeros(4, 6)
    fill_with_dummy_weights({"w": base[:, ::2]}, 0)
    assert (base[:, ::2] != 0).all()
    assert (base[:, 1::2] == 0).all()
