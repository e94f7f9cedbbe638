import pytest

from tests.v1.core.specs import full, swa
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups


def test_sharing_layers_join_their_target():
    groups = [KVCacheGroupSpec(["l0", "l2"], full()), KVCacheGroupSpec(["l1"], swa())]
    runner_only: set[str] = set()
    add_kv_sharing_layers_to_kv_cache_groups(
        {"l3": "l1", "l4": "l0", "l5": "l1"}, groups, runner_only
    )
    assert [group.layer_names for group in groups] == [["l0", "l2", "l4"], ["l1", "l3", "l5"]]
    assert runner_only == {"l3", "l4", "l5"}


def test_without_runner_set():
    groups = [KVCacheGroupSpec(["l0"], full())]
    add_kv_sharing_layers_to_kv_cache_groups({"l1": "l0"}, groups)
    add_kv_sharing_layers_to_kv_cache_groups({}, groups)
    assert groups[0].layer_names == ["l0", "l1"]


def test_unknown_target():
    with pytest.raises(KeyError, match="nowhere"):
        add_kv_sharing_layers_to_kv_cache_groups({"l1": "nowhere"}, [])
