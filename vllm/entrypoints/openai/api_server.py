"""From a resolved configuration to a running server: socket, engine core, then web server.

The port is taken before anything slow begins. The engine core starts in its own process while this
one imports the web framework, so that both are ready at about the same time.
"""

from collections.abc import Awaitable, Callable

from vllm.config import VllmConfig
from vllm.entrypoints.openai.listener import bind_socket, bind_unix_socket
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.utils.collector import lasting_imports
from vllm.v1.engine.launch import DEFAULT_CORE_FACTORY, launch_engine_core


def run_server(
    config: VllmConfig,
    args: ServerArgs,
    job: Callable[[], Awaitable[None]] | None = None,
    *,
    core_factory: str = DEFAULT_CORE_FACTORY,
) -> int:
    """Serve until told to stop; return the exit code: 0, or 1 when the engine failed.

    Args:
        config: The engine's.
        args: The server's.
        job: What to do with the server once it is up; it stops when that has ended, and stops that
            when it is told to stop before. None: it serves others.
        core_factory: ``module:function`` that makes the engine core.

    Raises:
        ConfigError: The address is taken, or the tokenizer is unusable.
        VllmError: The engine core cannot start.
    """
    uds = args.operations.uds
    with bind_socket(args.host, args.port) if uds is None else bind_unix_socket(uds) as listener:
        if job is None and args.operations.api_server_count > 1:
            from vllm.entrypoints.openai.api_processes import (  # noqa: PLC0415  (seldom needed)
                run_api_processes,
            )

            return run_api_processes(config, args, listener)
        core = launch_engine_core(config, core_factory=core_factory)
        try:
            # Deliberately late: a third of a second of imports, in the engine core's shadow.
            with lasting_imports():
                from vllm.entrypoints.openai.http_server import HttpServer  # noqa: PLC0415

            return HttpServer(config, args, core, listener, job).run()
        finally:
            core.shutdown()
