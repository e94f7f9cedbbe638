"""What does not go with a recorded cache."""

from types import SimpleNamespace

import pytest

from vllm.config import SchedulerConfig, VllmConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.tenants import Tenant, TenantsConfig
from vllm.exceptions import ConfigError
from vllm.v1.engine.scheduler_choice import make_scheduler


def test_tenants_are_not_recorded() -> None:
    """A replay would admit and evict by other rules, and say what was not so."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(tenants=TenantsConfig.of(Tenant("a"))),
        observability_config=ObservabilityConfig(cache_trace="/tmp/trace"),
    )
    plan = SimpleNamespace(unit=32)
    with pytest.raises(ConfigError, match="with tenants: leave one of them out"):
        make_scheduler(config, plan)  # type: ignore[arg-type]
