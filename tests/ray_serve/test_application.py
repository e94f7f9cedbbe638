"""What Serve is told of a fleet: numbers and resources."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from ray.serve.config import AutoscalingConfig
from ray.serve.scripts import run as serve_run

from vllm import platforms
from vllm.exceptions import ConfigError
from vllm.ray_serve import room
from vllm.ray_serve.application import _number, app
from vllm.ray_serve.arguments import FleetArgs, FleetArgumentError
from vllm.utils import ray_room
from vllm.utils.ray_room import RoomWatch


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


@pytest.mark.parametrize(("where", "taken"), [("head", True), ("any", False)])
def test_a_machine_that_dies_takes_no_ingress_along_unless_asked(where: Any, taken: bool) -> None:
    ingress = app(FleetArgs(ingress_on=where))._bound_deployment._replica_config
    assert ("node:__internal_head__" in ingress.resource_dict) == taken
    assert ingress.resource_dict.get("CPU", 0) == 0


def run(*words: str) -> Result:
    """The command ``serve run vllm.ray_serve:app``."""
    # No cluster: wrong arguments are found before one is joined.
    return CliRunner().invoke(serve_run, ["vllm.ray_serve:app", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replcas=2"], "there is no argument replcas='2': did you mean replicas?"),
        (["replicas=65"], "replicas='65': Input should be less than or equal to 64"),
        (["num_cpus=many"], "num_cpus='many': Input should be a valid number"),
        (["replicas=3", "max_replicas=2"], "min_replicas=3, replicas=3, max_replicas=2: each"),
        (["flags=--block-size 33"], "block_size"),
        (["flags=-dp 2"], "flags: --data-parallel-size is not for a fleet"),
        (["model=/nowhere"], "/nowhere"),
    ],
)
def test_a_wrong_argument_ends_the_command_with_one_line(words: list[str], message: str) -> None:
    result = run(*words)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert message in result.output
    assert "Traceback" not in result.output
    assert result.output.count("Error:") == 1


def test_a_wrong_argument_is_an_error_of_configuration() -> None:
    with pytest.raises(ConfigError, match="replicas=0: Input should be greater than or equal to 1"):
        FleetArgs.model_validate({"replicas": 0})
    with pytest.raises(FleetArgumentError, match="block_size"):
        app(FleetArgs(flags="--block-size 33"))


async def test_an_ingress_waits_for_a_replica_only_as_long_as_one_may_get_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_POLL_S", 0.001)
    is_ready = asyncio.Event()
    checks: list[bool] = []

    async def start() -> None:
        try:
            await is_ready.wait()
        finally:
            checks.append(False)

    def check() -> None:
        checks.append(True)
        if len(checks) == 3:
            raise ConfigError("no room")

    watch = cast(RoomWatch, SimpleNamespace(check=check))
    with pytest.raises(ConfigError, match="no room"):
        await room.start_with_room(start(), watch)
    await asyncio.sleep(0)
    # What waited was ended, too.
    assert checks == [True, True, True, False]
    is_ready.set()
    await room.start_with_room(start(), watch)
    assert checks[4:] == [False]


def test_machines_that_are_too_small_are_refused_where_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 3.0}}] * 2
    cluster = SimpleNamespace(
        is_initialized=lambda: True,
        nodes=lambda: nodes,
        available_resources=lambda: {"CPU": 5.0},
    )
    monkeypatch.setattr(room, "ray", cluster)
    monkeypatch.setattr(ray_room, "may_grow", lambda _: False)
    monkeypatch.setattr(room.time, "sleep", lambda _: None)
    monkeypatch.setenv("VLLM_RAY_ROOM_TIMEOUT", "0")
    app(FleetArgs(replicas=2, num_cpus=3))
    message = r"no room for replicas=3 of the fleet.* takes 3 x \[CPU: 2\].* have 2 x \[CPU: 3\]"
    with pytest.raises(FleetArgumentError, match=message):
        app(FleetArgs(replicas=3, num_cpus=2))
    # As many as there is room for, and more later.
    app(FleetArgs(replicas=2, max_replicas=3, num_cpus=2))
    monkeypatch.setattr(cluster, "is_initialized", lambda: False)
    app(FleetArgs(replicas=3, num_cpus=2))
