"""From what an operator wrote to a policy."""

import importlib
from typing import cast

from vllm.config.retention import POLICIES, read_interval
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.fixed import FixedPolicy
from vllm.v1.core.retention.policy import RetentionPolicy


def make_policy(
    value: str | int | None, geometry: CacheGeometry, num_blocks: int
) -> RetentionPolicy:
    """Build the policy that an operator names.

    Args:
        value: A name of ``vllm.config.retention.POLICIES``; 0: where prompts and answers end and
            part; N: also every N tokens; None: "auto".
        geometry: The model's groups.
        num_blocks: Blocks of the pool, the null block left out.

    Raises:
        ConfigError: The value is none of those, or N is no multiple of the unit.
    """
    read = read_interval(value, geometry.unit)
    if isinstance(read, int):
        return FixedPolicy(geometry, read)
    module_name, _, attributes = POLICIES[read].partition(":")
    maker = importlib.import_module(module_name)
    for attribute in attributes.split("."):
        maker = getattr(maker, attribute)
    return cast("RetentionPolicy", maker(geometry, num_blocks))  # type: ignore[operator]
