"""Sizes of the parallel groups."""

from typing import Any

import pytest

from vllm.config.parallel import ParallelConfig
from vllm.exceptions import ConfigError


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0 is out of range"),
        ({"data_parallel_size": 65}, "use 1 to 64"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, "data_parallel_backend='ray'"),
        ({"data_parallel_backend": "mpi"}, "use one of mp, ray"),
        ({"data_parallel_routing": "random"}, "use one of prefix, round-robin"),
        ({"data_parallel_restarts": 1}, "needs data_parallel_fault_tolerance"),
        ({"data_parallel_restarts": -1}, "at least 0"),
    ],
)
def test_wrong_values_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ParallelConfig(**given)


def test_cores_of_a_machine_take_devices_side_by_side() -> None:
    sizes = {"data_parallel_size": 3, "tensor_parallel_size": 2}
    firsts = [ParallelConfig(**sizes, data_parallel_rank=r).first_device for r in range(3)]
    assert firsts == [0, 2, 4]
    # An actor of a cluster sees its own alone.
    assert (
        ParallelConfig(**sizes, data_parallel_rank=2, data_parallel_backend="ray").first_device == 0
    )
