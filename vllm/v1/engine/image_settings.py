"""What a server was told of the sizes of pictures, checked before anything reads one."""

from vllm.config import ModelConfig, MultiModalConfig
from vllm.exceptions import ConfigError, UserInputError
from vllm.logger import init_logger
from vllm.multimodal.families import KNOWN_SETTINGS, ImageFamily, SizeRule

logger = init_logger(__name__)


def check_settings(model: ModelConfig, settings: MultiModalConfig) -> None:
    """Refuse ``mm_processor_kwargs`` that mean nothing, at start and not with the first picture.

    A server without eyes may be started with another's flags. What some family knows, and
    ``mm_encoder_cache_dir``, have no effect there, and the log says so.

    Raises:
        ConfigError: A setting means nothing to this model, or to any.
    """
    if settings.mm_encoder_cache_dir is not None and model.image_family is None:
        logger.warning("--mm-encoder-cache-dir has no effect: %s.", model.no_images_reason)
    given = settings.mm_processor_kwargs
    if not given:
        return
    if model.image_family is not None:
        find_sizes(model.image_family, settings)
        return
    unknown = sorted(set(map(str, given)) - KNOWN_SETTINGS)
    if unknown:
        raise ConfigError(
            f"--mm-processor-kwargs has {', '.join(unknown)[:100]}, which mean nothing to any "
            f"model; known are {', '.join(sorted(KNOWN_SETTINGS))}. This one is shown no pictures: "
            f"{model.no_images_reason}."
        )
    logger.warning("--mm-processor-kwargs has no effect: %s.", model.no_images_reason)


def find_sizes(family: ImageFamily, settings: MultiModalConfig) -> SizeRule:
    """Return the sizes of pictures, as a server was told.

    Raises:
        ConfigError: A setting means nothing to this model.
    """
    try:
        return family.sizes.with_settings(settings.mm_processor_kwargs)
    except UserInputError as error:
        raise ConfigError(f"--mm-processor-kwargs: {error}") from error
