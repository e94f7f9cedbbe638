"""Ranks as actors of a Ray cluster."""

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError
from vllm.v1.executor.ranked_executor import Ranks


def start_ray_ranks(config: VllmConfig) -> Ranks:
    """Start the ranks that a configuration asks for."""
    raise ConfigError("ray is not installed")
