"""The application: replicas that are engine cores, and an ingress over them."""

import secrets
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from vllm import platforms
from vllm.config import VllmConfig
from vllm.exceptions import VllmError
from vllm.ray_serve.arguments import FleetArgs, FleetArgumentError
from vllm.ray_serve.ingress import Ingress
from vllm.ray_serve.replica import EngineReplica
from vllm.ray_serve.request_router import FleetRequestRouter
from vllm.ray_serve.room import await_machines
from vllm.utils.ray_room import Asked, needs_of
from vllm.v1.engine.launch import DEFAULT_CORE_FACTORY

# Requests wait in the cores' own queues, by their own rules; Serve shall never hold one back.
_MAX_ONGOING = 100_000
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
# Ray gives its first machine one of these.
_INGRESS_ON: dict[str, dict[str, float]] = {"head": {"node:__internal_head__": 0.001}, "any": {}}


def app(args: FleetArgs) -> Any:
    """Return the application that ``serve run vllm.ray_serve:app name=value ...`` runs.

    Args:
        args: Checked; Serve makes them of the names and values.

    Raises:
        FleetArgumentError: The model or a flag is wrong, or the cluster too small.
    """
    try:
        return build(args, DEFAULT_CORE_FACTORY)
    except VllmError as error:
        raise FleetArgumentError(str(error)) from error


def build(args: FleetArgs, core_factory: str, replica: type[EngineReplica] = EngineReplica) -> Any:
    """Return the application with engine cores, and replicas around them, of a kind."""
    config, server = args.prepare()
    asked = _ask_for(args, config)
    await_machines(asked)
    fleet = secrets.token_hex(8)
    engines = serve.deployment(replica).options(
        name="engines",
        max_ongoing_requests=_MAX_ONGOING,
        request_router_config=RequestRouterConfig(
            request_router_class=FleetRequestRouter, request_router_kwargs={"fleet": fleet}
        ),
        # Front ends ask each replica for updates all the time: a line for each would fill the log.
        logging_config=LoggingConfig(enable_access_log=False),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        graceful_shutdown_wait_loop_s=1.0,
        ray_actor_options=_make_options(asked),
        **_number(args),
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=args.ingress_replicas,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0, "resources": _INGRESS_ON[args.ingress_on]},
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=server.shutdown_timeout_s + _HEALTH_TIMEOUT_S,
    )
    return ingress.bind(
        engines.bind(config, core_factory, fleet),
        config,
        server,
        fleet,
        asked,
        1 / args.ingress_replicas,
    )


def _ask_for(args: FleetArgs, config: VllmConfig) -> Asked:
    """Return what replicas take: a replica's actor stands for all its workers, which it starts.

    An actor is on one machine, so the workers are; and Ray shows it the devices of all of them.
    """
    num_workers = config.parallel_config.world_size
    needs = needs_of(num_workers, platforms.current_platform.ray_device_key)
    return Asked(
        f"replicas={args.replicas} of the fleet, with num_cpus={args.num_cpus:g} for each of "
        f"{num_workers} workers",
        {**needs, "CPU": args.num_cpus * num_workers},
        args.replicas,
        "ask for fewer replicas (with max_replicas=N their number grows later) or a smaller "
        "num_cpus",
    )


def _make_options(asked: Asked) -> dict[str, Any]:
    """Return Ray's options of an actor that takes so much."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus"}
    options: dict[str, Any] = {
        named[key]: amount for key, amount in asked.each.items() if key in named
    }
    others = {key: amount for key, amount in asked.each.items() if key not in named}
    return {**options, "resources": others} if others else options


def _number(args: FleetArgs) -> dict[str, Any]:
    if not args.scales:
        return {"num_replicas": args.replicas}
    policy = {
        "policy_function": "vllm.ray_serve.scaling:LoadPolicy",
        "policy_kwargs": {
            "target_requests": args.target_requests,
            "target_prefill_tokens": args.target_prefill_tokens,
        },
    }
    return {
        "autoscaling_config": {
            "min_replicas": args.fewest,
            "initial_replicas": args.replicas,
            "max_replicas": args.most,
            "policy": policy,
            # Serve would wait by itself, half a minute and ten minutes; the policy knows how long.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
        }
    }
