"""What is read of the files of sentence-transformers, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.entrypoints.pooling.test_checkpoints import write_modules, write_settings
from tests.model_executor.models.decoder.reference import qwen3
from tests.tokenizers.family_tokenizers import byte_level
from vllm.config import ModelConfig
from vllm.entrypoints.pooling.find_plan import find_plan
from vllm.entrypoints.pooling.sentence_files import has_sentence_files, read_plan
from vllm.entrypoints.pooling.vectors import (
    cosine,
    encode_base64,
    to_signed_bits,
    to_signed_bytes,
    to_unsigned_bytes,
)
from vllm.exceptions import ConfigError, UnsupportedModelError, UserInputError

SIZE = 6
ROWS = np.random.default_rng(5).normal(size=(7, SIZE)).astype(np.float32)
LAST = ("Pooling", {"embedding_dimension": SIZE, "pooling_mode": "lasttoken"})


def dense(tmp_path: Path, path: str, activation: str, **fields: Any) -> None:
    weight = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
    save_file({"linear.weight": weight}, tmp_path / path / "model.safetensors")
    config = {"in_features": SIZE, "out_features": 4, "bias": False}
    config["activation_function"] = f"torch.nn.modules.activation.{activation}"
    (tmp_path / path / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode": "mean"}, ROWS.mean(0)),
        ({"pooling_mode": "cls"}, ROWS[0]),
        ({"pooling_mode": "max"}, ROWS.max(0)),
        ({"pooling_mode": "lasttoken"}, ROWS[-1]),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, ROWS.sum(0) / 7**0.5),
        (
            {"pooling_mode": "weightedmean"},
            (ROWS * np.arange(1, 8)[:, None]).sum(0) / 28,
        ),
        ({"pooling_mode": ["lasttoken", "cls"]}, np.concatenate([ROWS[-1], ROWS[0]])),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ROWS[-1]),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True},
            np.concatenate([ROWS[0], ROWS[-1]]),
        ),
        ({"pooling_mode": "mean", "include_prompt": False}, ROWS[3:].mean(0)),
        ({"pooling_mode": "max", "include_prompt": False}, ROWS[3:].max(0)),
        (
            {"pooling_mode": "weightedmean", "include_prompt": False},
            (ROWS[3:] * np.arange(4, 8)[:, None]).sum(0) / 22,
        ),
    ],
)
def test_poolings(config: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    write_modules(tmp_path, [("Pooling", config)])
    assert has_sentence_files(tmp_path)
    plan = read_plan(tmp_path, SIZE)
    np.testing.assert_allclose(plan.make_vector(ROWS, 3), expected, atol=1e-6)
    assert plan.size == len(expected)
    # The cache is of use to last tokens alone.
    assert plan.params.all_rows is not np.array_equal(expected, ROWS[-1])


@pytest.mark.parametrize("activation", ["Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU"])
def test_layers(activation: str, tmp_path: Path) -> None:
    write_modules(tmp_path, [LAST, ("Dense", {}), ("Normalize", {})])
    dense(tmp_path, "2_Dense", activation)
    plan = read_plan(tmp_path, SIZE)
    function = getattr(torch.nn, activation)()
    weight = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
    expected = function(weight @ torch.from_numpy(ROWS[-1]))
    np.testing.assert_allclose(
        plan.make_vector(ROWS, 0), (expected / expected.norm()).numpy(), atol=1e-6
    )
    raw = plan.make_vector(ROWS, 0, normalises=False)
    np.testing.assert_allclose(raw, expected.numpy(), atol=1e-6)
    half = plan.cut(plan.make_vector(ROWS, 0), 2)
    assert np.linalg.norm(half) == pytest.approx(1.0, abs=1e-6)


def test_settings(tmp_path: Path) -> None:
    write_modules(tmp_path, [LAST])
    prompts = {"query": "Q: ", "document": ""}
    write_settings(
        tmp_path, prompts=prompts, default_prompt_name="query", similarity_fn_name="dot",
        truncate_dim=3,
    )  # fmt: skip
    limits = {"max_seq_length": 99, "do_lower_case": True}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(limits))
    plan = read_plan(tmp_path, SIZE)
    assert plan.limit(4096) == 99
    assert plan.limit(50) == 50
    assert plan.lowers
    assert not plan.normalises
    assert plan.find_prompt(None, None, "prompt_name") == "Q: "
    assert plan.find_prompt("document", None, "prompt_name") == ""
    assert plan.find_prompt(None, "own", "prompt_name") == "own"
    with pytest.raises(UserInputError, match=r"'nobody'.*'query', 'document'"):
        plan.find_prompt("nobody", None, "prompt_name")
    assert len(plan.cut(ROWS[0], None)) == 3
    one, other = ROWS[0], ROWS[1]
    assert plan.compare(one, other) == pytest.approx(float(one @ other), abs=1e-5)


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [
        (None, cosine(ROWS[0], ROWS[1])),
        ("euclidean", -float(np.linalg.norm(ROWS[0] - ROWS[1]))),
        ("manhattan", -float(np.abs(ROWS[0] - ROWS[1]).sum())),
    ],
)
def test_similarities(similarity: str | None, expected: float, tmp_path: Path) -> None:
    write_modules(tmp_path, [LAST])
    write_settings(tmp_path, similarity_fn_name=similarity)
    plan = read_plan(tmp_path, SIZE)
    assert plan.compare(ROWS[0], ROWS[1]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("modules", "settings", "named"),
    [
        ([("Router", {})], {}, "Router"),
        ([], {}, "no module Pooling"),
        ([("Pooling", {"pooling_mode": "attention"})], {}, "attention"),
        ([("Pooling", {"pooling_mode_mean_tokens": False})], {}, "no kind"),
        ([LAST], {"similarity_fn_name": "own"}, "similarity_fn_name='own'"),
        ([LAST], {"default_prompt_name": "query"}, "default_prompt_name='query'"),
        ([LAST], {"prompts": {"query": 5}}, "prompts must be texts"),
        ([LAST], {"truncate_dim": 7}, "truncate_dim=7"),
        ([LAST], {"truncate_dim": "7"}, "truncate_dim='7'"),
        ([("LogitScore", {"true_token_id": 3})], {}, "false_token_id"),
    ],
)
def test_what_is_not_served_is_named(
    modules: list[Any], settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, modules)
    write_settings(tmp_path, **settings)
    with pytest.raises((ConfigError, UnsupportedModelError), match=named):
        read_plan(tmp_path, SIZE)


@pytest.mark.parametrize(
    ("activation", "fields", "named"),
    [
        ("Softplus", {}, "Softplus"),
        ("Tanh", {"in_features": 5}, "in_features=5"),
        ("Tanh", {"out_features": 5}, "linear.weight"),
        ("Tanh", {"bias": True}, "linear.bias"),
        ("Tanh", {"use_residual": True}, "use_residual"),
        ("Tanh", {"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_layers_that_are_not_served(
    activation: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, [LAST, ("Dense", {})])
    dense(tmp_path, "2_Dense", activation, **fields)
    with pytest.raises((ConfigError, UnsupportedModelError), match=named):
        read_plan(tmp_path, SIZE)


def test_a_reranker(tmp_path: Path) -> None:
    write_modules(tmp_path, [("LogitScore", {"true_token_id": 3, "false_token_id": 4})])
    plan = read_plan(tmp_path, SIZE)
    assert plan.yes_no is not None
    assert (plan.yes_no.yes, plan.yes_no.no) == (3, 4)
    assert plan.is_trained_for_any
    assert not plan.is_trained


def test_bits_and_bytes() -> None:
    assert to_signed_bits(np.array([0, -1, 1, 1, -1, -1, -1, 5], np.float32)) == [0b10110001 - 128]
    assert encode_base64(np.array([1.0], np.float32)) == "AACAPw=="
    assert encode_base64(np.array([1.0], np.float32), "float16", "big") == "PAA="


def test_whole_numbers_keep_the_direction() -> None:
    vector = np.array([0.5, -0.25, 0.0, 0.003], np.float32)
    assert to_signed_bytes(vector) == to_signed_bytes(vector * 3) == [127, -64, 0, 1]
    assert to_unsigned_bytes(vector) == [255, 64, 128, 129]
    assert to_signed_bytes(np.zeros(2, np.float32)) == [0, 0]
    assert to_signed_bytes(-vector)[0] == -127


def test_a_reranker_whose_prompt_is_not_known(tmp_path: Path) -> None:
    write_modules(tmp_path, [("LogitScore", {"true_token_id": 3, "false_token_id": 4})])
    raw = {**qwen3(), "vocab_size": 320}
    model = ModelConfig(str(tmp_path), path=str(tmp_path), hf_config=raw)
    tokenizer = byte_level()
    assert tokenizer.chat_template is not None
    with pytest.raises(UnsupportedModelError, match="LogitScore"):
        find_plan(model, tokenizer)
    (tmp_path / "modules.json").unlink()
    assert find_plan(model, tokenizer).yes_no is None
