from pathlib import Path

import pytest
import torch

from tests.model_executor.model_loader.fakes import TINY, FakeModel
from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm.model_executor.model_loader.load_plan import LoadPlan, part_bytes, part_shape, plan_load
from vllm.model_executor.model_loader.safetensors_header import StoredTensor

FILE = Path("model.safetensors")
NO_MTP = TINY | {"num_nextn_predict_layers": 0}


def stored_like(config=TINY) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            name, tuple(slot.shape), "F32" if slot.is_floating_point() else "I64", FILE
        )
        for name, slot in FakeModel(config).slots.items()
    }


def plan(stored: dict[str, StoredTensor], config=TINY) -> LoadPlan:
    model = FakeModel(config)
    return plan_load(
        list(stored.values()),
        model.slots,
        "the test",
        optional_prefixes=model.optional_weight_prefixes,
        ignored_prefixes=model.ignored_weight_prefixes,
    )


def change(stored: dict[str, StoredTensor], name: str, **changes) -> None:
    old = stored[name]
    fields = {"name": old.name, "shape": old.shape, "dtype": old.dtype, "file": old.file}
    stored[name] = StoredTensor(**(fields | changes))


def refusal(stored: dict[str, StoredTensor], config=TINY) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan(stored, config)
    return str(caught.value)


def test_exact_fit():
    stored = stored_like()
    result = plan(stored)
    assert {copy.part.name for copy in result.copies} == set(stored)
    assert result.mtp_present
    assert result.ignored == ()
    assert result.ignored_reason == ""


def test_all_kinds_of_problems_come_in_one_error():
    stored = stored_like()
    del stored["layers.0.attn.wkv.weight"]
    del stored["norm.weight"]
    stored["layers.9.attn.wkv.weight"] = StoredTensor("layers.9.attn.wkv.weight", (1,), "F32", FILE)
    change(stored, "head.weight", shape=(3, 4))
    change(stored, "layers.0.ffn.gate.tid2eid", dtype="F32")
    change(stored, "embed.weight", dtype="I64")
    message = refusal(stored)
    assert "2 missing: layers.0.attn.wkv.weight, norm.weight" in message
    assert "1 unexpected: layers.9.attn.wkv.weight" in message
    assert "1 misshapen: head.weight is [3, 4], must be [12, 16]" in message
    assert "2 wrong type: embed.weight is I64" in message
    assert "layers.0.ffn.gate.tid2eid is F32, must be one of I32/I64" in message
    assert "the test" in message


def test_long_lists_are_cut_and_counted():
    message = refusal({})
    num_slots = len([n for n in FakeModel().slots if not n.startswith("mtp.")])
    assert f"{num_slots} missing" in message
    assert f"and {num_slots - 20} more" in message


def test_one_tensor_in_two_spellings():
    stored = stored_like()
    double = "model.layers.0.self_attn.kv_proj.weight"
    stored[double] = StoredTensor(double, stored["layers.0.attn.wkv.weight"].shape, "F32", FILE)
    assert "1 stored twice: layers.0.attn.wkv.weight" in refusal(stored)


@pytest.mark.parametrize("num_experts", [3, 5])
def test_stack_with_another_number_of_experts(num_experts):
    stored = stored_like()
    for name in [n for n in stored if n.startswith("layers.1.ffn.experts.") and ".w2." in n]:
        del stored[name]
    stacked = "model.layers.1.mlp.experts.down_proj"
    stored[stacked] = StoredTensor(stacked, (num_experts, 16, 6), "F32", FILE)
    kind = "missing" if num_experts == 3 else "unexpected"
    expert = 3 if num_experts == 3 else 4
    assert f"1 {kind}: layers.1.ffn.experts.{expert}.w2.weight" in refusal(stored)


def test_misshapen_part_of_a_stack():
    stored = stored_like()
    for name in [n for n in stored if n.startswith("layers.1.ffn.experts.") and ".w2." not in n]:
        del stored[name]
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    stored[stacked] = StoredTensor(stacked, (4, 12, 16), "BF16", FILE)
    result = plan(stored)
    of_stack = [copy for copy in result.copies if copy.stored.name == stacked]
    assert len(of_stack) == 8
    assert {part_shape(copy) for copy in of_stack} == {(6, 16)}
    assert sum(map(part_bytes, of_stack)) == 4 * 12 * 16 * 2
    stored[stacked] = StoredTensor(stacked, (4, 14, 16), "BF16", FILE)
    assert "8 misshapen: layers.1.ffn.experts.0.w1.weight is [7, 16]" in refusal(stored)


def test_no_mtp_at_all_is_tolerated():
    stored = {n: t for n, t in stored_like().items() if not n.startswith("mtp.")}
    result = plan(stored)
    assert not result.mtp_present
    assert result.ignored == ()


def test_half_an_mtp_block_is_not():
    stored = stored_like()
    del stored["mtp.0.enorm.weight"]
    assert "1 missing: mtp.0.enorm.weight" in refusal(stored)


def test_mtp_that_the_config_does_not_ask_for_is_ignored():
    result = plan(stored_like(), NO_MTP)
    assert not result.mtp_present
    assert "mtp.0.enorm.weight" in result.ignored
    assert "no part of the model that runs" in result.ignored_reason


def test_other_parts_are_neither_optional_nor_ignored():
    stored = {n: t for n, t in stored_like().items() if not n.startswith("layers.2.")}
    assert "missing: layers.2." in refusal(stored)


@pytest.mark.parametrize("config", [TINY, NO_MTP])
def test_dspark_is_ignored(config):
    stored = {n: t for n, t in stored_like().items() if not n.startswith("mtp.")}
    dspark = ("mtp.0.main_proj.weight", "mtp.2.markov_head.weight", "mtp.1.attn.wkv.weight")
    for name in dspark:
        stored[name] = StoredTensor(name, (2, 2), "BF16", FILE)
    result = plan(stored, config)
    assert not result.mtp_present
    assert result.ignored == tuple(sorted(dspark))
    assert "DSpark" in result.ignored_reason


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("layers.0.attn.wq_a.weight", "F8_E4M3"),
        ("layers.0.ffn.experts.1.w1.weight", "I8"),
        ("layers.0.attn.wq_a.scale", "F8_E8M0"),
        ("layers.0.attn.wq_a.scale", "F32"),
        ("model.layers.0.attn.wq_a.scale", "F32"),
        ("model.layers.0.self_attn.q_a_proj.weight_scale_inv", "F32"),
    ],
)
def test_quantised_checkpoints_are_refused(name, dtype):
    stored = stored_like()
    stored[name] = StoredTensor(name, (1, 1), dtype, FILE)
    with pytest.raises(
        UnsupportedFeatureError, match=rf"{name}.*config does not say how.*not supported"
    ):
        plan(stored)


def test_scale_of_a_hyper_connection_is_no_quantisation():
    assert any(name.endswith("hc_attn_scale") for name in stored_like())
    plan(stored_like())


@pytest.mark.parametrize("dtype", ["BOOL", "I16", "C64"])
def test_odd_types(dtype):
    stored = stored_like()
    change(stored, "norm.weight", dtype=dtype)
    assert f"norm.weight is {dtype}" in refusal(stored)


def test_torch_types_of_the_slots_decide():
    slots = {"t": torch.zeros(2, dtype=torch.int32)}
    assert plan_load([StoredTensor("t", (2,), "I64", FILE)], slots, "s").copies


def test_int8_goes_into_int8_slots_only(tmp_path):
    int8s = StoredTensor("a.weight", (2, 3), "I8", tmp_path / "f.safetensors")
    floats = StoredTensor("a.weight", (2, 3), "F32", tmp_path / "f.safetensors")
    slot = {"a.weight": torch.empty(2, 3, dtype=torch.int8)}
    (copy,) = plan_load([int8s], slot, "c").copies
    assert part_bytes(copy) == 6
    with pytest.raises(CheckpointError, match=r"a\.weight is F32, must be one of I8"):
        plan_load([floats], slot, "c")
    with pytest.raises(UnsupportedFeatureError, match="quantised"):
        plan_load([int8s], {"a.weight": torch.empty(2, 3)}, "c")
