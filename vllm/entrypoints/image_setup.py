"""What a served model's pictures go through, made from its configuration."""

from pathlib import Path

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError, UserInputError
from vllm.logger import init_logger
from vllm.multimodal.decode import MAX_PIXELS, DecodeRules
from vllm.multimodal.families import QWEN_CPU_TOKENS
from vllm.multimodal.fetch import ImageFetcher
from vllm.multimodal.image_input import NO_IMAGES, ImageInput
from vllm.multimodal.reader import ImageReader
from vllm.platforms.resolve import get_current_platform

logger = init_logger(__name__)

_WEIGHTS = (".safetensors", ".gguf", ".bin")


def make_image_input(config: VllmConfig) -> ImageInput:
    """Return what pictures go through; no picture library is loaded yet.

    Raises:
        ConfigError: A setting means nothing to this model.
    """
    model, settings = config.model_config, config.multimodal_config
    family = model.image_family
    if family is None:
        return NO_IMAGES
    if settings.language_model_only:
        return ImageInput(why_none="it was started with --language-model-only")
    if not settings.max_images:
        return ImageInput(why_none="it was started with --limit-mm-per-prompt image=0")
    is_cpu = get_current_platform().device_type == "cpu"
    usual = family.for_cpu() if is_cpu else family
    try:
        sizes = usual.sizes.with_settings(settings.mm_processor_kwargs)
    except UserInputError as error:
        raise ConfigError(f"--mm-processor-kwargs: {error}") from error
    if usual != family and sizes == usual.sizes:
        logger.info(
            "Pictures become at most %d tokens each: a processor reads 2,000 in a minute or two "
            "(--mm-processor-kwargs raises it).",
            QWEN_CPU_TOKENS,
        )
    reader = ImageReader(
        family,
        sizes,
        _describe_weights(model.path, str(model.dtype)),
        rules=DecodeRules(
            max_pixels=settings.max_image_pixels or MAX_PIXELS, background=settings.background
        ),
        fetcher=ImageFetcher(settings.allowed_media_domains),
        folder=settings.allowed_local_media_path,
        memo_bytes=settings.memo_bytes,
    )
    return ImageInput(family, reader, settings.max_images)


def _describe_weights(path: str | None, dtype: str) -> str:
    """What tells a checkpoint's tower from others, alike on every machine that has its files."""
    if path is None:
        return dtype
    place = Path(path)
    files = [place] if place.is_file() else sorted(place.iterdir())
    named = [f"{f.name}:{f.stat().st_size}" for f in files if f.suffix in _WEIGHTS]
    return "|".join((dtype, *named))
