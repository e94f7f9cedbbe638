"""The coordinator registry: later registrations win where they apply."""

import pytest

from tests.v1.core.cache_helpers import make_config
from tests.v1.core.specs import full, swa
from vllm.exceptions import ConfigError
from vllm.v1.core import coordinator_registry
from vllm.v1.core.coordinator_registry import find_coordinator, register_coordinator
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator


class Mine(HybridKVCacheCoordinator):
    """A platform's own."""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        coordinator_registry, "_COORDINATORS", dict(coordinator_registry._COORDINATORS)
    )


def test_built_ins() -> None:
    one, two = make_config(4, [full()]), make_config(4, [full(), swa()])
    assert find_coordinator(one, True).name == "unitary"
    assert find_coordinator(two, True).name == "hybrid"
    assert find_coordinator(two, False).name == "no_prefix_cache"
    two.hit_unit = 32
    assert find_coordinator(two, True).name == "unit"
    assert find_coordinator(two, False).name == "unit"


def test_a_platforms_own_wins_where_it_applies() -> None:
    register_coordinator(
        "mine", Mine, lambda config, caching: caching and len(config.kv_cache_groups) == 2
    )
    assert find_coordinator(make_config(4, [full(), swa()]), True).factory is Mine
    assert find_coordinator(make_config(4, [full(), swa()]), False).name == "no_prefix_cache"
    assert find_coordinator(make_config(4, [full()]), True).name == "unitary"


def test_names_are_unique() -> None:
    register_coordinator("mine", Mine, lambda config, caching: False)
    register_coordinator("mine", Mine, lambda config, caching: False)
    with pytest.raises(ConfigError, match="'mine'"):
        register_coordinator("mine", dict, lambda config, caching: False)


def test_nothing_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_registry, "_COORDINATORS", {})
    with pytest.raises(ConfigError, match="registered: none"):
        find_coordinator(make_config(4, [full()]), True)
