"""How many embeddings one multimodal item takes at most, by model."""

from __future__ import annotations

from typing import Protocol

from vllm.multimodal.families import ImageFamily


class _HasImageTower(Protocol):
    @property
    def image_tower(self) -> dict[str, int]: ...

    @property
    def image_family(self) -> ImageFamily | None: ...

    @property
    def max_picture_tokens(self) -> int: ...


class MultiModalRegistry:
    """Knows the largest item of each modality; a scheduler makes room for one."""

    def get_max_tokens_per_item_by_modality(self, model_config: _HasImageTower) -> dict[str, int]:
        """Return the most embeddings of one item by modality; empty for text models.

        Where nothing says how a model sees them, an image becomes one embedding per patch of its
        square, whatever its size was.

            image 336, patch 14:   24 x 24 = 576
        """
        if model_config.image_family is not None:
            return {"image": model_config.max_picture_tokens}
        tower = model_config.image_tower
        if not tower:
            return {}
        return {"image": (tower["image_size"] // tower["patch_size"]) ** 2}


MULTIMODAL_REGISTRY = MultiModalRegistry()
