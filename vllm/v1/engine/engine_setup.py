"""What both engines do while and after their core starts."""

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.wire import KVCacheInfo, Ready

logger = init_logger(__name__)


def load_tokenizer(vllm_config: VllmConfig) -> Tokenizer | None:
    """Read the tokenizer; None with ``skip_tokenizer_init``.

    Raises:
        ConfigError: Its files are absent or broken.
    """
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return None
    return Tokenizer.from_folder(model.tokenizer or model.path or model.model)


def adopt_ready(vllm_config: VllmConfig, ready: Ready) -> KVCacheInfo:
    """Take over what only the core could find out, and say that it is ready.

    Mutates:
        ``cache_config.num_gpu_blocks`` and ``model_config.max_model_len`` (when it was -1).
    """
    info = ready.kv_cache
    vllm_config.cache_config.num_gpu_blocks = info.num_blocks
    vllm_config.model_config.max_model_len = info.max_model_len
    logger.info(
        "Engine core ready (process %d) in %.2f s, of which %.2f s loading the model.",
        ready.pid,
        ready.start_s,
        ready.load_s,
    )
    return info
