"""What configs say about quantised weights: read, or refused by name and reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm.exceptions import ConfigError, UnsupportedFeatureError
from vllm.model_executor.model_loader.quantization_config import (
    WeightScheme,
    check_named_method,
    read_quantization,
)

WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
}


def compressed(weights: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **(weights or {})}}
    group |= {k: fields.pop(k) for k in ("input_activations", "output_activations") if k in fields}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **fields,
    }


NVFP4: dict[str, Any] = {"type": "float", "strategy": "tensor_group", "group_size": 16}


def modelopt(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.0.self_attn*", "*.mlp.gate", "model.vision"],
        **fields,
    }


def find(declared: dict[str, Any], name: str = "model.layers.0.mlp.down_proj") -> Any:
    config = read_quantization({"quantization_config": declared})
    assert config is not None
    return config.find_scheme(name)


def test_compressed_groups_say_their_own_formats() -> None:
    mixed = compressed(
        format="mixed-precision", ignore=["lm_head", "re:.*self_attn\\.k_proj$", "model.layers.1.x"]
    )
    own = {"targets": ["Linear"], "weights": WEIGHTS, "format": "pack-quantized"}
    eight = {"num_bits": 8, "strategy": "channel", "type": "int", "group_size": None}
    mixed["config_groups"] = {
        "group_0": own,
        "group_1": {
            "targets": ["re:.*down_proj$"],
            "weights": eight,
            "format": "int-quantized",
            "input_activations": {"num_bits": 8, "dynamic": True},
        },
    }
    assert find(mixed) == WeightScheme("int8", 8, inputs="bytes by row")
    assert find(mixed, "model.layers.0.self_attn.q_proj") == WeightScheme("packed", 4, 128)
    for name in ("lm_head", "model.layers.3.self_attn.k_proj", "model.layers.1.x"):
        assert find(mixed, name) is None


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, None),
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, "bytes by row"),
        ({"num_bits": 8, "dynamic": True, "strategy": "tensor"}, "bytes by row"),
        (
            {"num_bits": 8, "dynamic": True, "strategy": "group", "group_size": 128},
            "bytes by group",
        ),
        # Coarser than what is done: taken whole.
        ({"num_bits": 8, "dynamic": True, "strategy": "group", "group_size": 64}, None),
        ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}, None),
        ({"num_bits": 4, "type": "int", "dynamic": True, "strategy": "token"}, None),
        ({"num_bits": 8, "type": "int", "dynamic": True, "symmetric": False}, None),
        ({"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}, None),
    ],
)
def test_what_inputs_are_rounded_to(inputs: dict[str, Any] | None, expected: str | None) -> None:
    declared = compressed()
    declared["config_groups"]["group_0"]["input_activations"] = inputs
    assert find(declared).inputs == expected
    config = read_quantization({"quantization_config": declared})
    assert config is not None
    # What is asked for and not done is said.
    assert bool(config.notes) == (inputs is not None and expected is None)


@pytest.mark.parametrize(
    ("declared", "scheme"),
    [
        (compressed(), WeightScheme("packed", 4, 128)),
        (compressed({"symmetric": False, "group_size": 32}), WeightScheme("packed", 4, 32, False)),
        (compressed({"num_bits": 8, "strategy": "channel"}), WeightScheme("packed", 8)),
        (
            compressed(
                {"num_bits": 8, "type": "float", "strategy": "tensor"}, format="float-quantized"
            ),
            WeightScheme("fp8", 8),
        ),
        (
            compressed(
                {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 64]},
                format="float-quantized",
            ),
            WeightScheme("fp8", 8, block=(128, 64)),
        ),
        (
            compressed(
                NVFP4,
                format="nvfp4-pack-quantized",
                input_activations={"num_bits": 4, "type": "float", "dynamic": "local"},
            ),
            WeightScheme("nvfp4", 4, 16),
        ),
        (
            compressed({"type": "float", "group_size": 32}, format="mxfp4-pack-quantized"),
            WeightScheme("mxfp4", 4, 32),
        ),
        (
            compressed(
                {"type": "float", "num_bits": 8, "group_size": 32}, format="mxfp8-quantized"
            ),
            WeightScheme("mxfp8", 8, 32),
        ),
        (modelopt(), WeightScheme("nvfp4", 4, 16)),
        ({**modelopt(), "quant_method": "modelopt_fp4"}, WeightScheme("nvfp4", 4, 16)),
        (modelopt(quant_algo="FP8", kv_cache_quant_algo="FP8"), WeightScheme("fp8", 8)),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"},
            WeightScheme("awq", 4, 64),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True},
            WeightScheme("gptq", 8, 0, False, adds_one=True),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"},
            WeightScheme("gptq", 4, 128, False),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            WeightScheme("fp8", 8, block=(128, 128)),
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, WeightScheme("fp8", 8)),
    ],
)
def test_schemes(declared: dict[str, Any], scheme: WeightScheme) -> None:
    assert find(declared) == scheme


def test_gptq_patterns_override_or_leave_out() -> None:
    declared = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "dynamic": {"-:.*k_proj": {}, "+:.*v_proj": {"bits": 8, "group_size": 32}},
    }
    assert find(declared, "model.layers.0.self_attn.k_proj") is None
    value = find(declared, "model.layers.0.self_attn.v_proj")
    assert (value.bits, value.group) == (8, 32)
    assert find(declared, "model.layers.0.self_attn.q_proj").bits == 4
    assert find(declared, "lm_head") is None
    assert find({**declared, "lm_head": True}, "lm_head").bits == 4


def auto_round(**values: Any) -> dict[str, Any]:
    own = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    return {**own, "data_type": "int", "packing_format": "auto_round:auto_gptq", **values}


@pytest.mark.parametrize(
    ("values", "scheme"),
    [
        ({}, WeightScheme("gptq", 4, 128, False, adds_one=True)),
        ({"packing_format": "auto_round"}, WeightScheme("gptq", 4, 128, False)),
        ({"packing_format": None}, WeightScheme("gptq", 4, 128, False)),
        (
            {"packing_format": None, "backend": "auto_round:gptq:exllamav2", "bits": 8},
            WeightScheme("gptq", 8, 128, False, adds_one=True),
        ),
        (
            {"packing_format": None, "backend": "auto_round:exllamav2"},
            WeightScheme("gptq", 4, 128, False),
        ),
        ({"packing_format": "auto_round:auto_awq"}, WeightScheme("awq", 4, 128)),
        ({"data_type": "mx_fp", "group_size": 32}, WeightScheme("mxfp4", 4, 32)),
        ({"data_type": "mx_fp", "bits": 8, "group_size": 32}, WeightScheme("mxfp8", 8, 32)),
        ({"data_type": "nv_fp", "group_size": 16}, WeightScheme("nvfp4", 4, 16)),
        ({"data_type": "fp", "bits": 8, "group_size": -1}, WeightScheme("fp8", 8)),
        (
            {"data_type": "fp", "bits": 8, "group_size": [128, 64]},
            WeightScheme("fp8", 8, block=(128, 64)),
        ),
        (
            {
                "packing_format": "auto_round:llm_compressor",
                "bits": 8,
                "group_size": -1,
                "act_bits": 8,
            },
            WeightScheme("int8", 8, inputs="bytes by row"),
        ),
    ],
)
def test_auto_round_packs_as_others_do(values: dict[str, Any], scheme: WeightScheme) -> None:
    assert find(auto_round(**values)) == scheme


def test_auto_round_has_modules_that_differ() -> None:
    own = {
        "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32},
        r".*layers\.1\..*proj": {"bits": 16},
    }
    declared = auto_round(extra_config=own)
    down = find(declared, "model.layers.0.mlp.down_proj")
    assert (down.bits, down.group) == (8, 32)
    assert find(declared, "model.layers.0.mlp.up_proj").bits == 4
    assert find(declared, "model.layers.1.self_attn.q_proj") is None
    assert find(declared, "model.layers.11.self_attn.q_proj").bits == 4
    assert find(declared, "lm_head") is None
    assert find(auto_round(extra_config={"lm_head": {"bits": 4}}), "lm_head").bits == 4


def test_auto_round_inputs_are_taken_as_they_are_and_said_so() -> None:
    rounded = auto_round(data_type="mx_fp", act_bits=4, act_data_type="mx_fp")
    found = read_quantization({"quantization_config": rounded})
    assert found is not None
    assert [note for note in found.notes if "floats of 4 bits" in note] == list(found.notes)
    plain = read_quantization({"quantization_config": auto_round(act_bits=16)})
    assert plain is not None
    assert plain.notes == ()


def test_awq_leaves_modules_out_by_their_names() -> None:
    declared = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["mlp.gate", "visual"]}
    assert find(declared, "model.layers.2.mlp.gate") is None
    assert find(declared, "model.visual.blocks.0.qkv") is None
    assert find(declared, "model.layers.2.mlp.gate_proj") is None, "a part of a name, as AutoAWQ"
    assert find(declared).format == "awq"


def test_older_releases_put_it_beside_the_config(tmp_path: Path) -> None:
    assert read_quantization({}, tmp_path) is None
    old = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    found = read_quantization({}, tmp_path)
    assert found is not None
    assert found.method == "gptq"
    (tmp_path / "quantize_config.json").unlink()
    old = {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}
    (tmp_path / "quant_config.json").write_text(json.dumps(old))
    found = read_quantization({}, tmp_path)
    assert found is not None
    assert found.find_scheme("a.b") == WeightScheme("awq", 4, 64)
    (tmp_path / "quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"quant_config\.json cannot be read"):
        read_quantization({}, tmp_path)


def test_modelopt_names_layers_that_differ() -> None:
    layers = {
        "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    declared = modelopt(quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert find(declared) == WeightScheme("fp8", 8)
    assert find(declared, "model.layers.0.mlp.up_proj") == WeightScheme("nvfp4", 4, 16)
    assert find(declared, "model.layers.1.mlp.up_proj") is None


@pytest.mark.parametrize(
    "declared",
    [
        compressed(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}),
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
        modelopt(kv_cache_scheme={"num_bits": 8}),
    ],
)
def test_a_quantised_cache_is_left_out_and_said_so(declared: dict[str, Any]) -> None:
    # As a release with a vision part has it.
    found = read_quantization({"text_config": {"quantization_config": declared}})
    assert found is not None
    assert sum("KV cache" in note for note in found.notes) == 1
    for left in ("attn.k_scale", "attn.v_scale", "attn.k_proj.output_scale", "mlp.x.input_scale"):
        assert found.leaves_out(f"model.layers.0.{left}")


def test_modelopt_leaves_modules_and_cache_scales_out(tmp_path: Path) -> None:
    left_out = (
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.3.mlp.gate",
        "model.vision.blocks.0.qkv",
    )
    for name in left_out:
        assert find(modelopt(), name) is None, name
    for name in ("model.layers.10.self_attn.q_proj", "model.layers.3.mlp.gate_proj"):
        assert find(modelopt(), name) is not None, name
    below = {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        },
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(below))
    found = read_quantization({}, tmp_path)
    assert found is not None
    assert found == read_quantization({"quantization_config": {"quant_method": "modelopt"} | below})
    assert found.find_scheme("lm_head") is None
    assert found.find_scheme("model.layers.0.mlp.up_proj") == WeightScheme("nvfp4", 4, 16)
    assert found.leaves_out("model.layers.0.self_attn.k_proj.k_scale")
    assert not found.leaves_out("model.layers.0.self_attn.k_proj.weight_scale")
    assert [("inputs" in note, "KV cache" in note) for note in found.notes] == [
        (True, False),
        (False, True),
    ]
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json holds \[\]"):
        read_quantization({}, tmp_path)


def test_other_descriptions_are_left_to_the_tensors() -> None:
    assert read_quantization({"quantization_config": {"quant_method": "mxfp4"}}) is None


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (compressed(format="marlin-24"), r"the format 'marlin-24' \(served: int-quantized"),
        (compressed(format="mxfp6-pack-quantized"), "the format 'mxfp6-pack-quantized'"),
        (compressed(format="nvfp4-pack-quantized"), r"type 'int' as nvfp4-.* \(served: 'float'"),
        (compressed(NVFP4 | {"group_size": 32}, format="nvfp4-pack-quantized"), "group_size 32"),
        (
            compressed(NVFP4, format="nvfp4-pack-quantized", output_activations={"num_bits": 8}),
            "rounded outputs",
        ),
        (modelopt(quant_algo="NVFP4_AWQ"), r"ModelOpt's 'NVFP4_AWQ' \(served: NVFP4, FP8"),
        (
            modelopt(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8"}}),
            r"quantized_layers\.a asks for ModelOpt's 'W4A8'",
        ),
        (modelopt(group_size=32), "NVFP4 in groups of 32"),
        (compressed({"num_bits": 3}), r"3 bits \(served: 4 and 8\)"),
        (compressed({"actorder": "group"}), "actorder 'group'"),
        (compressed({"group_size": 12}), "groups of 12 inputs"),
        (compressed({"strategy": "tensor_group"}), "scales by 'tensor_group'"),
        (compressed(transform_config={"config_groups": {"R4": {}}}), "turned while it runs"),
        (compressed(quantization_status="frozen"), "weights of status 'frozen'"),
        (compressed(sparsity_config={"format": "sparse-24"}), r"sparse weights \(sparse-24\)"),
        (compressed(output_activations={"num_bits": 8}), "rounded outputs"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's layout 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv"}, "AWQ's layout 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "AWQ of 3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "GPTQ of 2 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "GPTQ's layout 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 100}, "groups of 100 inputs"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "GPTQ's layout 'marlin'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 of the kind 'e5m2'"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            r"bitsandbytes' 'fp4' \(served: nf4\)",
        ),
        (
            {
                "quant_method": "bitsandbytes",
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_quant_storage": "bfloat16",
            },
            "codes stored as bfloat16",
        ),
        (auto_round(bits=2), "AutoRound of 2 bits of the kind 'int'"),
        (auto_round(data_type="mx_int"), "of 4 bits of the kind 'mx_int'"),
        (auto_round(packing_format="auto_round:auto_awq", bits=8), "AWQ of 8 bits"),
        (auto_round(packing_format="marlin"), "AutoRound's packing 'marlin'"),
        (auto_round(rotation_config={"block_size": 32}), "turned while it runs .'rotation_config'"),
        (auto_round(spinquant_config={"r1": True}), "turned while it runs .'spinquant_config'"),
        (
            auto_round(extra_config={"model.layers.0.mlp.up_proj": {"bits": 3}}),
            r"extra_config\.model\.layers\.0\.mlp\.up_proj asks for AutoRound of 3 bits",
        ),
    ],
)
def test_what_is_not_served_is_named(declared: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=reason):
        read_quantization({"quantization_config": declared})


@pytest.mark.parametrize(
    "declared",
    [
        7,
        compressed(config_groups={}),
        compressed(config_groups={"group_0": 3}),
        compressed(ignore=["re:("]),
        compressed(ignore=[4]),
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "gptq", "bits": True},
        {"quant_method": "fp8", "weight_block_size": [128]},
        auto_round(extra_config={"lm_head": 4}),
        auto_round(extra_config={"(": {"bits": 16}}),
        auto_round(group_size=[128, 128]),
        auto_round(data_type="fp", bits=8, group_size=[0, 128]),
    ],
)
def test_what_makes_no_sense_is_named(declared: Any) -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        read_quantization({"quantization_config": declared})


def test_names_people_type() -> None:
    check_named_method("awq_marlin", "awq")
    check_named_method("modelopt_fp4", "modelopt")
    check_named_method("inc", "auto-round")
    with pytest.raises(ConfigError, match="the checkpoint holds weights quantised by gptq"):
        check_named_method("awq", "gptq")
