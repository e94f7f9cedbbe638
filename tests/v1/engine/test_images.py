"""Which checkpoints are served with their tower for pictures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm.exceptions import ConfigError
from vllm.model_executor.models.registry import resolve_model
from vllm.model_executor.towers.plans import ImagesPlan
from vllm.v1.engine.images import check_budget, find_images

VISION = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "vocab_size": 32,
}


def read_plan(**changes: Any) -> ImagesPlan | None:
    raw = {
        "model_type": "gemma3",
        "text_config": TEXT,
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        **changes,
    }
    plan = resolve_model(["Gemma3ForConditionalGeneration"]).parse_config(raw).images
    assert plan is None or isinstance(plan, ImagesPlan)
    return plan


def write(folder: Path, prefix: str = "model.", **changes: torch.Tensor | None) -> str:
    plan = read_plan()
    assert plan is not None
    tensors = {name: torch.full(shape, 0.5) for name, shape in plan.tower.tensors().items()}
    for name, tensor in changes.items():
        (key,) = [own for own in tensors if own.endswith(name)]
        del tensors[key]
        if tensor is not None:
            tensors[key] = tensor
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file({**named, "model.embed_tokens.weight": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    return str(folder)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_tower_in_the_files_is_served(tmp_path: Path, prefix: str) -> None:
    images = find_images(read_plan(), write(tmp_path, prefix))
    assert images.family is not None
    assert (images.family.name, images.family.max_tokens, images.are_whole) == ("gemma3", 4, True)
    assert images.reason == ""


def test_the_name_of_a_tower_is_that_of_its_weights(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    bias = {"patch_embedding.bias": torch.ones(8)}
    names = [
        find_images(read_plan(), write(tmp_path / name, **changes)).fingerprint
        for name, changes in (("a", {}), ("b", {}), ("c", bias))
    ]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch_embedding.bias": None}, "lack the tower's vision_tower.embeddings"),
        ({"patch_embedding.bias": torch.ones(9)}, r"has the shape \[9\], not \[8\]"),
        ({"patch_embedding.bias": torch.ones(8).long()}, "stored as I64"),
    ],
)
def test_another_tower_is_left_out(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    images = find_images(read_plan(), write(tmp_path, **changes))
    assert images.family is None
    assert re.search(said, images.reason)


def test_reasons_to_serve_text_alone(tmp_path: Path) -> None:
    assert find_images(None, "").reason == "the model has no tower for pictures"
    assert read_plan(vision_config=None) is None
    assert find_images(read_plan(), "", obstacle="several workers").reason == "several workers"
    assert "GGUF" in find_images(read_plan(), "a.gguf").reason
    drawn = [find_images(read_plan(), "", is_drawn=True, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_step_must_hold_a_picture_beside_the_others() -> None:
    check_budget(256, True, 256 + 7, 8)
    with pytest.raises(ConfigError, match="Raise it to at least 263"):
        check_budget(256, True, 256 + 6, 8)
    check_budget(1120, False, 16, 8)
    check_budget(0, True, 16, 8)
