"""Descriptions: what is read, and what each broken one says."""

import json

import pytest

from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm_ascend.quantization.description import (
    DESCRIPTION_FILE,
    parse_description,
    read_description,
)

MATRIX = {
    "layers.0.attn.wq_b.weight": "W8A8_DYNAMIC",
    "layers.0.attn.wq_b.weight_scale": "W8A8_DYNAMIC",
    "layers.0.attn.wq_b.weight_offset": "W8A8_DYNAMIC",
}


def test_a_folder_without_one_is_plain(tmp_path):
    assert read_description(tmp_path) is None


def test_schemes_by_published_name(tmp_path):
    raw = {
        "model_quant_type": "W8A8_DYNAMIC",
        "group_size": 0,
        **MATRIX,
        "model.layers.1.self_attn.q_a_proj.weight": "W8A8_DYNAMIC",
        "model.layers.1.self_attn.q_a_proj.weight_scale": "W8A8_DYNAMIC",
        "mtp.0.e_proj.weight": "FLOAT",
    }
    (tmp_path / DESCRIPTION_FILE).write_text(json.dumps(raw))
    description = read_description(tmp_path)
    assert description is not None
    assert description.is_quantised("layers.0.attn.wq_b")
    assert description.has_offset("layers.0.attn.wq_b")
    assert description.is_quantised("layers.1.attn.wq_a")
    assert not description.has_offset("layers.1.attn.wq_a")
    assert not description.is_quantised("mtp.0.e_proj")
    assert not description.is_quantised("layers.7.attn.wq_a")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not readable JSON"), ("[1]", "holds a list"), ("\xff", "not readable JSON")],
)
def test_broken_files(tmp_path, text, message):
    (tmp_path / DESCRIPTION_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        read_description(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"a.weight": 8}, "a.weight is 8, but must name a scheme"),
        (
            {"layers.0.attn.wkv.weight": "FLOAT", "model.layers.0.attn.wkv.weight": "W8A8_DYNAMIC"},
            "gives layers.0.attn.wkv.weight two schemes",
        ),
        ({"a.weight": "W8A8_DYNAMIC"}, "a.weight_scale must be too, but it is absent"),
        ({"a.weight_scale": "W8A8_DYNAMIC"}, "a.weight must be too, but it is absent"),
        (
            {"a.weight": "W8A8_DYNAMIC", "a.weight_scale": "FLOAT"},
            "a.weight_scale must be too, but it is FLOAT",
        ),
        ({"a.bias": "W8A8_DYNAMIC"}, "only matrices can be"),
    ],
)
def test_contradictions(raw, message):
    with pytest.raises(CheckpointError, match=message):
        parse_description(raw, "d.json")


def test_unsupported_schemes_are_named():
    raw = {"a.weight": "W4A8_DYNAMIC", "b.weight": "W8A8", "c.weight": "FLOAT"}
    with pytest.raises(UnsupportedFeatureError, match=r"W4A8_DYNAMIC, W8A8 for a.weight, b.weight"):
        parse_description(raw, "d.json")
