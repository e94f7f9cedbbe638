"""Where ranks stand; what they do on a cluster is in ``tests/ray_serve/test_ranks.py``."""

import pytest

from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.utils.ray_cluster import describe_environment
from vllm.v1.executor.ray_actor import NodeInfo
from vllm.v1.executor.ray_ranks import find_places, start_ray_ranks

CONFIG = VllmConfig(
    model_config=ModelConfig("m"), parallel_config=ParallelConfig(tensor_parallel_size=2)
)


def test_places_follow_machines() -> None:
    nodes = [
        NodeInfo("a", "10.0.0.1", 4000, describe_environment("10.0.0.1")),
        NodeInfo("b", "10.0.0.2", 5000, describe_environment("10.0.0.2")),
    ]
    places = find_places([nodes[0], nodes[0], nodes[1]])
    assert [place.local_size for place in places] == [2, 2, 1]
    assert {place.rendezvous for place in places} == {"tcp://10.0.0.1:4000"}
    assert [(place.rank, place.size) for place in places] == [(0, 3), (1, 3), (2, 3)]


def test_without_ray_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.ray_cluster.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'vllm\[ray\]', or use mp"):
        start_ray_ranks(CONFIG)
