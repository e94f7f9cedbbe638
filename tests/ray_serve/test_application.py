"""What Serve is told of a fleet's number."""

from ray.serve.config import AutoscalingConfig

from vllm.ray_serve.application import _number
from vllm.ray_serve.arguments import FleetArgs


def test_serve_waits_for_nothing_beside_the_policy() -> None:
    """By itself it adds replicas after half a minute and removes them after ten."""
    told = AutoscalingConfig(**_number(FleetArgs(replicas=2, max_replicas=3))["autoscaling_config"])
    assert (told.min_replicas, told.initial_replicas, told.max_replicas) == (2, 2, 3)
    assert (told.upscale_delay_s, told.downscale_delay_s) == (0, 0)
