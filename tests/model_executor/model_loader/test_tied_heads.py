"""Output matrices beside a tied embedding: the same values, or a head after all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm.model_executor.model_loader.loader import read_stored_tensors
from vllm.model_executor.model_loader.tied_heads import has_own_head

EMBEDDING = torch.randn(9000, 4, generator=torch.Generator().manual_seed(0))
OTHER = EMBEDDING.clone()
OTHER[-1, -1] += 1


def ask(folder: Path, *files: dict[str, torch.Tensor]) -> bool:
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"part-{number}.safetensors")
    return has_own_head(read_stored_tensors(folder))


@pytest.mark.parametrize(
    ("head", "embedding"),
    [
        ("lm_head.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
        ("head.weight", "embed.weight"),
    ],
)
@pytest.mark.parametrize("is_apart", [False, True])
def test_equal_values_are_one_matrix(
    head: str, embedding: str, is_apart: bool, tmp_path: Path
) -> None:
    own = OTHER if is_apart else EMBEDDING.clone()
    assert ask(tmp_path, {embedding: EMBEDDING}, {head: own}) is is_apart


def test_types_may_differ(tmp_path: Path) -> None:
    shared = EMBEDDING.bfloat16()
    tensors = {"model.embed_tokens.weight": shared, "lm_head.weight": shared.float()}
    assert not ask(tmp_path, tensors)
    assert ask(tmp_path, {**tensors, "lm_head.weight": EMBEDDING})


def test_another_shape_is_another_matrix(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": EMBEDDING[:-1].clone()}
    assert ask(tmp_path, tensors)


def test_what_belongs_to_other_parts_is_no_head(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": EMBEDDING,
        "mtp.lm_head.weight": OTHER,
        "model.embed_tokens_per_layer.weight": OTHER.clone(),
    }
    assert not ask(tmp_path, tensors)
    assert not ask(tmp_path, {**tensors, "lm_head.weight": OTHER.byte()})
