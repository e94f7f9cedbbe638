"""GGUF files that were made for vectors, against transformers' classes and lines of pooling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.entrypoints.pooling.test_checkpoints import LENGTHS, rows_of, start, unit
from tests.model_executor.model_loader.gguf_families import write_family
from tests.model_executor.model_loader.gguf_files import gguf
from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE
from tests.model_executor.models.decoder.reference import build_hf_model, gemma3, qwen3
from tests.model_executor.models.hf_reference import random_tokens
from tests.tokenizers.family_tokenizers import byte_level
from vllm.entrypoints.pooling.gguf_plan import read_gguf_plan
from vllm.entrypoints.pooling.plan import VectorPlan
from vllm.exceptions import CheckpointError, UnsupportedModelError
from vllm.model_executor.model_loader.gguf_config import read_gguf_config

__all__ = ["start"]  # a fixture

Pooling = gguf.PoolingType
TINY = qwen3(vocab_size=VOCAB_SIZE)


def write(
    arch: str,
    raw: dict[str, Any],
    path: Path,
    write_more: Callable[[gguf.GGUFWriter], None],
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    write_family(arch, raw, state or {}, path, tokenizer=byte_level(), write_more=write_more)


def check_vectors(llm: Any, make_vector: Callable[[list[int]], torch.Tensor]) -> None:
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in LENGTHS]
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        found = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(found, make_vector(ids), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_last_token_of_a_file(start: Any, tmp_path: Path) -> None:
    """As files of Qwen3-Embedding are: the pooling named, an end appended."""
    raw, path = TINY, tmp_path / "model.gguf"
    model = build_hf_model(raw, seed=7)

    def write_more(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(Pooling.LAST)
        writer.add_add_eos_token(True)

    write("qwen3", raw, path, write_more, dict(model.state_dict()))
    llm = start(path)
    check_vectors(llm, lambda ids: unit(rows_of(model, ids)[-1]))
    (text,) = llm.embed("Bergen", use_tqdm=False)
    ids = byte_level().encode("Bergen")
    assert text.prompt_token_ids == [*ids, byte_level().special_token_id("<|im_end|>")]


@pytest.mark.slow
@pytest.mark.parametrize("has_layers", [True, False])
def test_embedding_gemma(has_layers: bool, start: Any, tmp_path: Path) -> None:
    raw = gemma3(
        vocab_size=VOCAB_SIZE,
        use_bidirectional_attention=True,
        sliding_window_pattern=6,
        rope_scaling=None,
        query_pre_attn_scalar=16,
        head_dim=16,
    )
    path = tmp_path / "model.gguf"
    model = build_hf_model(raw, seed=7)
    size = model.config.hidden_size
    torch.manual_seed(2)
    layers = [torch.randn(40, size), torch.randn(size, 40)] if has_layers else []

    def write_more(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(Pooling.MEAN)
        writer.add_causal_attention(False)
        for number, weight in enumerate(layers, 2):
            writer.add_tensor(f"dense_{number}.weight", weight.numpy())

    write("gemma-embedding", raw, path, write_more, dict(model.state_dict()))

    def make_vector(ids: list[int]) -> torch.Tensor:
        vector = rows_of(model, ids).mean(0)
        for weight in layers:
            vector = weight @ vector
        return unit(vector)

    check_vectors(start(path), make_vector)


@pytest.mark.parametrize(
    ("kind", "poolings"),
    [(Pooling.MEAN, ("mean",)), (Pooling.CLS, ("cls",)), (Pooling.LAST, ("lasttoken",))],
)
def test_poolings(kind: Pooling, poolings: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write("qwen3", TINY, path, lambda writer: writer.add_pooling_type(kind))
    plan, ranks = read_gguf_plan(str(path), VectorPlan(size=8))
    assert (plan.poolings, plan.is_trained, plan.normalises, ranks) == (poolings, True, True, False)


def test_what_says_nothing_and_what_ranks(tmp_path: Path) -> None:
    plain = VectorPlan(size=8)
    path = tmp_path / "m.gguf"
    for kind, ranks in ((None, False), (Pooling.NONE, False), (Pooling.RANK, True)):
        write("qwen3", TINY, path, lambda w, k=kind: k is not None and w.add_pooling_type(k))
        assert read_gguf_plan(str(path), plain) == (plain, ranks)
    write("llama", TINY, path, lambda writer: writer.add_pooling_type(Pooling.RANK))
    with pytest.raises(UnsupportedModelError, match="head of its own"):
        read_gguf_plan(str(path), plain)
    write("qwen3", TINY, path, lambda writer: writer.add_uint32("qwen3.pooling_type", 9))
    with pytest.raises(UnsupportedModelError, match="pooling_type=9"):
        read_gguf_plan(str(path), plain)


def test_layers_in_other_types(tmp_path: Path) -> None:
    path, values = tmp_path / "m.gguf", np.arange(64, dtype=np.float32).reshape(2, 32) - 7

    def write_as(kind: gguf.GGMLQuantizationType) -> None:
        def write_more(writer: gguf.GGUFWriter) -> None:
            writer.add_pooling_type(Pooling.MEAN)
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor("dense_2.weight", data, raw_dtype=kind)

        write("qwen3", TINY, path, write_more)

    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.F32, kinds.F16, kinds.BF16, kinds.Q8_0):
        write_as(kind)
        plan, _ = read_gguf_plan(str(path), VectorPlan(size=32))
        assert plan.size == 2
        made = plan.layers[0](np.eye(32, dtype=np.float32)[9])
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)[:, 9]
        np.testing.assert_array_equal(made, expected)
    with pytest.raises(CheckpointError, match=r"\[2, 32\]"):
        read_gguf_plan(str(path), VectorPlan(size=31))
    write_as(kinds.Q4_0)
    with pytest.raises(UnsupportedModelError, match="Q4_0"):
        read_gguf_plan(str(path), VectorPlan(size=32))


def test_other_files_that_see_both_ways_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write("qwen3", TINY, path, lambda writer: writer.add_causal_attention(False))
    with pytest.raises(UnsupportedModelError, match=r"attention\.causal=false"):
        read_gguf_config(path)
