"""What a served model's pictures go through, made from its configuration."""

from collections.abc import Mapping
from typing import Any

from vllm.config import MultiModalConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.registry import read_architectures, resolve_model
from vllm.model_executor.towers.plans import ImagesPlan
from vllm.multimodal.decode import MAX_PIXELS, DecodeRules
from vllm.multimodal.fetch import ImageFetcher
from vllm.multimodal.image_input import ImageInput
from vllm.multimodal.reader import ImageReader
from vllm.v1.engine.image_settings import find_sizes

logger = init_logger(__name__)


def make_images_alone(config: Mapping[str, Any], settings: Mapping[str, Any]) -> ImageInput:
    """Return what pictures go through where only a prompt is wanted, and no tower is there.

    Args:
        config: A checkpoint's config.json.
        settings: A server's ``mm_processor_kwargs``.

    Raises:
        ConfigError: A setting means nothing to this model.
    """
    parsed = resolve_model(read_architectures(config)).parse_config(config)
    plan: ImagesPlan | None = getattr(parsed, "images", None)
    if plan is None:
        return ImageInput()
    given = MultiModalConfig(mm_processor_kwargs=settings)
    family = plan.family.for_cpu()
    reader = ImageReader(
        family,
        find_sizes(family, given),
        "",
        rules=DecodeRules(),
        fetcher=ImageFetcher(()),
    )
    return ImageInput(family, reader, given.max_images)


def make_image_input(config: VllmConfig, *, is_apart: bool = False) -> ImageInput:
    """Return what pictures go through; no picture library is loaded yet.

    Args:
        config: The engine's.
        is_apart: Whether files are decoded in processes of their own, beside an event loop.

    Raises:
        ConfigError: A setting means nothing to this model.
    """
    model, settings = config.model_config, config.multimodal_config
    family = model.image_family
    if family is None:
        return ImageInput(why_none=model.no_images_reason)
    sizes = find_sizes(family, settings)
    logger.info(
        "A photo of 12 million pixels becomes %d tokens (--mm-processor-kwargs, docs/images.md).",
        sizes.fit(4000, 3000).num_tokens,
    )
    reader = ImageReader(
        family,
        sizes,
        f"{model.tower_fingerprint}|{model.dtype}",
        rules=DecodeRules(
            max_pixels=settings.max_image_pixels or MAX_PIXELS, background=settings.background
        ),
        fetcher=ImageFetcher(settings.allowed_media_domains),
        folder=settings.allowed_local_media_path,
        memo_bytes=settings.memo_bytes,
        is_apart=is_apart,
    )
    return ImageInput(family, reader, settings.max_images)
