"""What a served model's pictures go through, made from its configuration."""

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError, UserInputError
from vllm.logger import init_logger
from vllm.multimodal.decode import MAX_PIXELS, DecodeRules
from vllm.multimodal.fetch import ImageFetcher
from vllm.multimodal.image_input import ImageInput
from vllm.multimodal.reader import ImageReader

logger = init_logger(__name__)


def make_image_input(config: VllmConfig) -> ImageInput:
    """Return what pictures go through; no picture library is loaded yet.

    Raises:
        ConfigError: A setting means nothing to this model.
    """
    model, settings = config.model_config, config.multimodal_config
    family = model.image_family
    if family is None:
        return ImageInput(why_none=model.no_images_reason)
    try:
        sizes = family.sizes.with_settings(settings.mm_processor_kwargs)
    except UserInputError as error:
        raise ConfigError(f"--mm-processor-kwargs: {error}") from error
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
    )
    return ImageInput(family, reader, settings.max_images)
