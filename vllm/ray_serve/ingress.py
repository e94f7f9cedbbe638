"""The HTTP side of a fleet: the server's application, with all its routes, over all replicas."""

from functools import partial
from typing import Any

import ray

from vllm.config import VllmConfig
from vllm.entrypoints.openai.app import build_app
from vllm.entrypoints.openai.http_server import make_stat_sinks, start_context
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger, setup_logging
from vllm.ray_serve.cores import FleetCores
from vllm.ray_serve.placement import open_fleet
from vllm.ray_serve.room import is_placed, start_with_room
from vllm.utils.ray_room import Asked, RoomWatch
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.prometheus import add_process_metrics
from vllm.v1.metrics.prometheus_sink import SharedRegistry

logger = init_logger(__name__)


class Ingress:
    """Answers HTTP; Serve's proxy brings the requests.

    Owns: the application, the engine that stands for all replicas.

    Args:
        engines: Serve's handle of the replicas.
        config: Of all replicas.
        args: The server's.
        fleet: Name by which Serve's request router finds the fleet.
        asked: What the replicas take of the cluster.
        tenant_share: The part of tenants' limits that holds here.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        engines: Any,
        config: VllmConfig,
        args: ServerArgs,
        fleet: str,
        asked: Asked,
        tenant_share: float = 1.0,
    ) -> None:
        observability = config.observability_config
        setup_logging(
            "(Ingress) ",
            log_format=observability.log_format,
            config_file=observability.logging_config,
        )
        registry = SharedRegistry()
        add_process_metrics(registry)
        self._state = ServerState()
        self._args = args
        self._app = build_app(self._state, args, registry, config.scheduler_config.tenants)
        finish = start_context(config, args, self._state, self._app.state.client_metrics)
        places = open_fleet(fleet, config.parallel_config.data_parallel_size)
        cores = FleetCores(config, engines, places)
        deployment, app = engines.deployment_name, engines.app_name
        watch = RoomWatch(ray, asked, partial(is_placed, app, deployment))
        await start_with_room(cores.start(), watch)
        ready = cores.wait_ready()
        sinks = make_stat_sinks(config, registry, ready)
        self._engine = AsyncLLM(
            config,
            cores,
            stat_loggers=sinks[0],
            further_stat_loggers=sinks[1:],
            tenant_share=tenant_share,
        )
        self._app.state.context = finish(self._engine)
        self._state.set_ready()
        logger.info("The fleet serves.")

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, for Serve."""
        return self._app

    def check_health(self) -> None:
        """Return while it serves.

        Raises:
            EngineDeadError: It does not: Serve starts another one.
        """
        if self._engine.errored:
            raise EngineDeadError(str(self._engine.dead_error))

    async def __del__(self) -> None:
        """Let running requests finish, when Serve stops this one."""
        if not hasattr(self, "_engine"):
            # It never served: no replica became ready.
            return
        self._state.start_drain()
        await self._state.wait_idle(self._args.shutdown_timeout_s)
        self._engine.shutdown()
