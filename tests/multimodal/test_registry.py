"""vllm/multimodal/registry.py"""

from typing import Any

import pytest

from vllm.config import ModelConfig
from vllm.multimodal.registry import MULTIMODAL_REGISTRY

LLAVA = {"model_type": "llava", "vision_config": {"image_size": 336, "patch_size": 14}}


@pytest.mark.parametrize(
    ("name", "hf_config", "sizes"),
    [
        ("llava-hf/llava-1.5-7b-hf", {}, {"image": 576}),
        ("folder", LLAVA, {"image": 576}),
        ("facebook/opt-125m", {}, {}),
        # A folder's config.json counts, not its name.
        ("llava-1.5-of-text-alone", {"model_type": "llama"}, {}),
        # Served for its text.
        ("folder", {**LLAVA, "model_type": "gemma3"}, {}),
    ],
)
def test_an_image_has_an_embedding_per_patch(
    name: str, hf_config: dict[str, Any], sizes: dict[str, int]
) -> None:
    config = ModelConfig(name, hf_config=hf_config)
    assert MULTIMODAL_REGISTRY.get_max_tokens_per_item_by_modality(config) == sizes
    assert config.is_multimodal_model is bool(sizes)
