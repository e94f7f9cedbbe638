"""What decides about a simulated cache."""

from dataclasses import replace

import pytest

from tests.cachelab.sim.small_chat import SETTINGS
from vllm.exceptions import ConfigError


@pytest.mark.parametrize("pool_bytes", [0, 1 << 20])
def test_a_pool_that_is_too_small_names_the_commands_own_flag(pool_bytes: int) -> None:
    with pytest.raises(ConfigError, match="--pool-gib") as error:
        replace(SETTINGS, pool_bytes=pool_bytes).prepare()
    assert "kv_cache_memory_bytes" not in str(error.value)
