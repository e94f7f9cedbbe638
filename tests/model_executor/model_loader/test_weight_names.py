import pytest

from tools.checkpoints.deepseek_v4_tensors import tensor_specs
from tools.checkpoints.make_deepseek_v4 import CONFIG
from vllm.model_executor.model_loader.weight_names import (
    TensorPart,
    published_name,
    published_parts,
)

# Module name -> published name, within "layers.0.": every row of the block.
BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": ("attn.indexer.weights_proj.weight"),
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
}
TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}


def published_names() -> list[str]:
    return list(tensor_specs(CONFIG))


@pytest.mark.parametrize(("module", "published"), BLOCK.items())
@pytest.mark.parametrize("layer", [0, 7, 60])
def test_module_names(module, published, layer):
    assert published_name(f"model.layers.{layer}.{module}") == f"layers.{layer}.{published}"


@pytest.mark.parametrize(("module", "published"), TOP.items())
def test_module_names_of_the_top_level(module, published):
    assert published_name(module) == published


def test_the_tables_cover_every_published_name():
    experts = ".ffn.experts."
    targets = set(BLOCK.values())
    for name in published_names():
        if name.startswith("layers.") and experts not in name:
            assert name.split(".", 2)[2] in targets
    assert set(TOP.values()) == {
        n for n in published_names() if not n.startswith(("layers", "mtp"))
    }


def test_published_names_stay():
    for name in published_names():
        assert published_name(name) == name
        assert published_parts(name, (3, 4)) == (TensorPart(name),)


def test_saved_names_are_published_ones_with_a_prefix():
    for name in published_names():
        if name.startswith("layers.") and "kv_norm" not in name:
            assert published_name(f"model.{name}") == name


@pytest.mark.parametrize(
    ("saved", "published"),
    [
        ("model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.attn.compressor.norm.weight", "layers.3.attn.compressor.norm.weight"),
        (
            "model.layers.3.attn.indexer.compressor.norm.weight",
            "layers.3.attn.indexer.compressor.norm.weight",
        ),
        ("model.embed_tokens.weight", "embed.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.hc_head.hc_fn", "hc_head_fn"),
        ("head.weight", "head.weight"),
        ("mtp.0.norm.weight", "mtp.0.norm.weight"),
        ("mtp.0.hc_head_fn", "mtp.0.hc_head_fn"),
        ("model.mtp.0.attn.norm.weight", "mtp.0.attn.kv_norm.weight"),
    ],
)
def test_saved_names(saved, published):
    assert published_name(saved) == published


@pytest.mark.parametrize(
    "name",
    ["", "model", "layers", "layers.0", "layers.x.mlp.gate", "layers.0.norm", "foo.bar", "model."],
)
def test_foreign_names_do_not_become_known_ones(name):
    assert published_name(name) not in published_names()


def test_stacked_gate_and_up():
    name = "model.layers.2.mlp.experts.gate_up_proj"
    prefix = "layers.2.ffn.experts."
    assert published_parts(name, (2, 6, 5)) == (
        TensorPart(f"{prefix}0.w1.weight", 0, (0, 3)),
        TensorPart(f"{prefix}0.w3.weight", 0, (3, 6)),
        TensorPart(f"{prefix}1.w1.weight", 1, (0, 3)),
        TensorPart(f"{prefix}1.w3.weight", 1, (3, 6)),
    )


def test_stacked_down():
    parts = published_parts("model.layers.2.mlp.experts.down_proj", (3, 5, 4))
    assert parts == tuple(TensorPart(f"layers.2.ffn.experts.{e}.w2.weight", e) for e in range(3))


@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 4), (2, 6, 5, 1), ()])
def test_malformed_stack_is_left_for_the_loader_to_report(shape):
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert published_parts(name, shape) == (TensorPart("layers.2.ffn.experts.gate_up_proj"),)
