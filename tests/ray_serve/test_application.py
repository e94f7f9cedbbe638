"""What Serve is told of a fleet: numbers and resources."""

from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from vllm import platforms
from vllm.ray_serve.application import _number, app
from vllm.ray_serve.arguments import FleetArgs


def test_serve_waits_for_nothing_beside_the_policy() -> None:
    """By itself it adds replicas after half a minute and removes them after ten."""
    told = AutoscalingConfig(**_number(FleetArgs(replicas=2, max_replicas=3))["autoscaling_config"])
    assert (told.min_replicas, told.initial_replicas, told.max_replicas) == (2, 2, 3)
    assert (told.upscale_delay_s, told.downscale_delay_s) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "device", "expected"),
    [
        ({"num_cpus": 0.5}, "CPU", {"CPU": 0.5}),
        ({"flags": "-tp 2"}, "CPU", {"CPU": 2}),
        ({"flags": "-tp 2", "num_cpus": 0}, "CPU", {"CPU": 0}),
        ({"flags": "-tp 2", "num_cpus": 3}, "GPU", {"CPU": 6, "GPU": 2}),
        ({"num_cpus": 3}, "NPU", {"CPU": 3, "NPU": 1}),
    ],
)
def test_a_replica_takes_what_its_workers_need(
    arguments: dict[str, Any],
    device: str,
    expected: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(platforms.current_platform), "ray_device_key", device)
    ingress = app(FleetArgs(**arguments))
    (engines, *_) = ingress._bound_deployment.init_args
    config = engines._bound_deployment._replica_config
    taken = config.resource_dict
    assert {name: taken[name] for name in expected} == expected
    assert config.placement_group_bundles is None
