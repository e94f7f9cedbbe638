"""Towers of GGUF files: the same rows as a release's, and clear refusals."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.model_executor.model_loader.gguf_files import write_gguf
from tests.model_executor.towers.checkpoints import (
    FAMILIES,
    IMAGE_ID,
    VOCAB_SIZE,
    draw_picture,
    write_checkpoint,
)
from tests.model_executor.towers.engine import PictureEngine, Prompt
from tests.model_executor.towers.mmproj_files import PROJECTORS, write_mmproj
from vllm.exceptions import ConfigError, VllmError
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files, read_headers
from vllm.model_executor.models.registry import resolve_model
from vllm.model_executor.towers.files import find_obstacle
from vllm.model_executor.towers.mmproj import add_mmproj, describe_tower
from vllm.model_executor.towers.mmproj_values import read_mmproj_tensors
from vllm.model_executor.towers.plans import ImagesPlan
from vllm.model_executor.towers.tower import Tower

_SOFT = {"gemma3": "<image_soft_token>", "gemma4": "<|image|>", "qwen35": "<|image_pad|>"}
_GRIDS = {"gemma3": (4, 4)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of families with the states they hold, each made once."""
    known: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def make(family: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if family not in known:
            folder = tmp_path_factory.mktemp(family)
            known[family] = folder, write_checkpoint(family, folder).state_dict()
        return known[family]

    return make


def vocabulary(family: str) -> list[str]:
    soft = next(text for name, text in _SOFT.items() if family.startswith(name))
    return [soft if i == IMAGE_ID else f"<{i}>" for i in range(VOCAB_SIZE)]


def read_plan(family: str, path: Path, **text: Any) -> ImagesPlan:
    config = add_mmproj({**FAMILIES[family]()["text_config"], **text}, vocabulary(family), path)
    plan = resolve_model(config["architectures"]).parse_config(config).images
    assert isinstance(plan, ImagesPlan)
    return plan


def find_fault(family: str, path: Path) -> str:
    """Why a file is refused; "": it is read."""
    try:
        plan = read_plan(family, path)
        return find_obstacle(plan.tower, describe_tower(path))
    except VllmError as error:
        return str(error)


def encode(plan: ImagesPlan, stored: Any, family: str) -> torch.Tensor:
    pixels = draw_picture(family, *_GRIDS.get(family, (5, 7)), seed=3)
    return Tower(plan.tower, stored, torch.float32).encode(torch.from_numpy(pixels))


@pytest.mark.parametrize("family", list(PROJECTORS))
def test_rows_are_those_of_the_release(family: str, made: Any, tmp_path: Path) -> None:
    folder, state = made(family)
    path = write_mmproj(family, state, tmp_path / "mmproj.gguf")
    plan = read_plan(family, path)
    assert plan.family.placeholder_id == IMAGE_ID
    assert set(describe_tower(path)) == set(plan.tower.tensors())
    expected = encode(plan, read_headers(find_weight_files(folder)), family)
    assert torch.equal(encode(plan, read_mmproj_tensors(path), family), expected)
    halves = write_mmproj(family, state, tmp_path / "half.gguf", gguf.GGMLQuantizationType.F16)
    near = encode(read_plan(family, halves), read_mmproj_tensors(halves), family)
    torch.testing.assert_close(near, expected, rtol=0.02, atol=0.02)


def test_blocks_and_heads_apart_are_read(made: Any, tmp_path: Path) -> None:
    _, state = made("qwen35")
    whole = {name: value.clone() for name, value in state.items()}
    # Rows of 64 values are two blocks.
    coded = write_mmproj("qwen35", state, tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q8_0)
    plan = read_plan("qwen35", coded)
    tower = Tower(plan.tower, read_mmproj_tensors(coded), torch.float32)
    name = "visual.blocks.0.mlp.linear_fc2.weight"
    expected = whole[f"model.{name}"]
    assert not torch.equal(tower._weights[name], expected)
    torch.testing.assert_close(tower._weights[name], expected, rtol=0, atol=0.01)
    apart = write_mmproj("qwen35", state, tmp_path / "b.gguf", splits_heads=True)
    tower = Tower(plan.tower, read_mmproj_tensors(apart), torch.float32)
    for leaf in ("weight", "bias"):
        name = f"visual.blocks.1.attn.qkv.{leaf}"
        assert torch.equal(tower._weights[name], whole[f"model.{name}"])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [("gemma4v", "gemma4"), ("qwen35", "qwen3.5")])
def test_a_language_model_and_its_tower_answer_as_one(
    family: str, kind: str, made: Any, tmp_path: Path
) -> None:
    folder, state = made(family)
    written = json.loads((folder / "config.json").read_text())["text_config"]
    raw = {**written, **FAMILIES[family]()["text_config"]}
    if kind == "qwen3.5":
        raw["rope_theta"] = raw["rope_parameters"]["rope_theta"]
    text = {
        name.replace("model.language_model.", "model."): value
        for name, value in state.items()
        if name.startswith("model.language_model.")
    }
    model = tmp_path / "model.gguf"
    write_gguf(kind, raw, text, model, [gguf.GGMLQuantizationType.F32], tokens=vocabulary(family))
    tower = write_mmproj(family, state, tmp_path / "mmproj.gguf")
    seen = draw_picture(family, 5, 7, seed=5), (5, 7)
    words = np.random.default_rng(0).integers(3, 256, 30).tolist()
    prompts = [Prompt([words, seen, words[:9]]), Prompt([words])]
    answers = []
    for path, settings in ((folder, {}), (model, {"mmproj": str(tower)})):
        engine = PictureEngine(path, **settings)
        try:
            answers.append([engine.run(prompt)[0] for prompt in prompts])
        finally:
            engine.close()
    for released, ours in zip(*answers, strict=True):
        assert ours.tokens == released.tokens
        np.testing.assert_allclose(ours.logprobs, released.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projector_type": "pixtral"}, "holds a tower of type 'pixtral'; served are gemma3"),
        ({"projector_type": None}, "holds a tower of type 'none'"),
        ({"image_mean": [0.4, 0.5, 0.6]}, r"image_mean .* allowed: 0.5 for each colour"),
        ({"embedding_length": 96}, r"has the shape \[48, 3, 14, 14\], not \[96"),
        ({"block_count": 4}, "lack the tower's vision_tower.encoder.layers.3"),
        ({"block_count": None}, "lacks the key clip.vision.block_count"),
    ],
)
def test_other_towers_are_refused(
    changes: dict[str, Any], message: str, made: Any, tmp_path: Path
) -> None:
    _, state = made("gemma3")
    path = write_mmproj("gemma3", state, tmp_path / "mmproj.gguf", **changes)
    assert re.search(message, find_fault("gemma3", path))


def test_files_that_do_not_go_together_are_refused(made: Any, tmp_path: Path) -> None:
    _, state = made("gemma3")
    path = write_mmproj("gemma3", state, tmp_path / "mmproj.gguf")
    text = FAMILIES["gemma3"]()["text_config"]
    with pytest.raises(ConfigError, match="the tower of a model of type gemma3_text, and this"):
        add_mmproj({**text, "model_type": "qwen3_5_text"}, vocabulary("gemma3"), path)
    with pytest.raises(ConfigError, match="vocabulary has no <image_soft_token>"):
        add_mmproj(text, vocabulary("qwen35"), path)
    writer = gguf.GGUFWriter(tmp_path / "text.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="is a file of the architecture 'gemma3': give the one"):
        add_mmproj(text, vocabulary("gemma3"), tmp_path / "text.gguf")


def test_damaged_files_are_refused(made: Any, tmp_path: Path) -> None:
    """Whatever becomes of the header: it is read, or refused as what it is."""
    _, state = made("gemma3")
    path = write_mmproj("gemma3", state, tmp_path / "mmproj.gguf")
    whole = path.read_bytes()
    draws = np.random.default_rng(0)
    refused = 0
    for number in range(200):
        changed = bytearray(whole)
        for at in draws.integers(0, 4096, int(draws.integers(1, 4))):
            changed[at] ^= int(draws.integers(1, 256))
        if number % 4 == 0:
            del changed[int(draws.integers(8, len(changed))) :]
        own = tmp_path / f"{number}.gguf"
        own.write_bytes(changed)
        refused += bool(find_fault("gemma3", own))
        own.unlink()
    assert refused > 100
