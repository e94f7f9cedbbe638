"""What a fleet is told."""

import shlex
from dataclasses import replace
from typing import NoReturn

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm.config import VllmConfig
from vllm.config.parallel import MAX_DATA_PARALLEL_SIZE, ParallelConfig
from vllm.entrypoints.cli.serve import add_serve_flags, prepare
from vllm.entrypoints.openai.operations_args import OperationsArgs, TlsArgs
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import ConfigError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.data_parallel.ranks import agree_on_hashes
from vllm.v1.engine.tenant_limits import check_parts

# What to do instead of flags that nothing here heeds.
_OWN_PORT = (
    "Serve's own HTTP proxy listens and logs: set it up with `serve start` or http_options in "
    "Serve's configuration file"
)
_OWN_CORES = "Serve starts the fleet's cores and replaces lost ones: say replicas=N"
_OWN_WORKERS = "a replica's workers are processes of one machine: leave it out"
_OWN_CACHE = "a replica's core neither prefills for others nor keeps its cache on host or disk yet"


class _FlagsParser(FlexibleArgumentParser):
    """Raises what a command would print; here is no program to end."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"flags: {message}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise ConfigError("flags: --help is not one of them: `vllm serve --help` explains them.")


class FleetArgs(BaseModel):
    """Arguments of the application, as ``serve run vllm.ray_serve:app name=value ...``.

    Attributes:
        model: As of ``vllm serve``.
        flags: Further flags of ``vllm serve``, in one string.
        replicas: Engine cores; where ``max_replicas`` is larger, those to begin with.
        min_replicas: Fewest, when load is low; None: ``replicas``.
        max_replicas: Most, when it is high; None: ``replicas``.
        target_requests: Requests that a replica should have, for scaling.
        target_prefill_tokens: Prompt tokens that it should have yet to compute, for scaling.
        num_cpus: Of the cluster's CPUs, for each worker of a replica.
        drain_timeout_s: How long a replica that goes may finish what it has.
        ingress_replicas: Processes that answer HTTP.

    Raises:
        pydantic.ValidationError: An argument is unknown, of another type or out of its limits.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = "deepseek-v4"
    flags: str = ""
    replicas: int = Field(1, ge=1, le=MAX_DATA_PARALLEL_SIZE)
    min_replicas: int | None = Field(None, ge=1)
    max_replicas: int | None = Field(None, ge=1, le=MAX_DATA_PARALLEL_SIZE)
    target_requests: float = Field(8.0, gt=0)
    target_prefill_tokens: float = Field(16_384.0, gt=0)
    num_cpus: float = Field(1.0, ge=0)
    drain_timeout_s: float = Field(600.0, ge=0)
    ingress_replicas: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> "FleetArgs":
        if not self.fewest <= self.replicas <= self.most:
            raise ValueError(
                f"min_replicas={self.fewest}, replicas={self.replicas}, max_replicas={self.most}: "
                "each must not be above the next (one that is not given is as replicas)."
            )
        return self

    @property
    def fewest(self) -> int:
        """Replicas when load is low."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """Replicas when it is high."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def scales(self) -> bool:
        """Whether their number follows the load."""
        return self.fewest < self.most

    def prepare(self) -> tuple[VllmConfig, ServerArgs]:
        """Check the model and the flags, and resolve what is derived.

        Returns:
            The configuration of all replicas, with a place for each that there may be, and the
            server's.

        Raises:
            ConfigError: Something is wrong.
        """
        parser = _FlagsParser(prog="vllm.ray_serve")
        add_serve_flags(parser)
        try:
            words = shlex.split(self.flags)
        except ValueError as error:
            raise ConfigError(f"flags={self.flags!r} cannot be parted: {error}.") from error
        parsed = parser.parse_args([self.model, *words])
        config, server = prepare(parsed)
        parallel = config.parallel_config
        _refuse_unfit(config, server)
        check_parts(config.scheduler_config.tenants, self.ingress_replicas, "ingress_replicas")
        # A place for each; two at least, since one core alone tells nobody of its cache.
        places = replace(
            parallel,
            data_parallel_size=max(2, self.most),
            data_parallel_fault_tolerance=True,
            # Ray shows each actor the devices that it took.
            cores_see_all_devices=False,
        )
        return agree_on_hashes(replace(config, parallel_config=places)), server


def _refuse_unfit(config: VllmConfig, server: ServerArgs) -> None:
    """Refuse flags that a server heeds and a fleet does not.

    Raises:
        ConfigError: One was given, and its value is not the one without it.
    """
    parallel, operations = config.parallel_config, server.operations
    plain, usual, operated = ParallelConfig(), ServerArgs(), OperationsArgs()
    heeded_elsewhere = {
        "--data-parallel-size": (parallel.data_parallel_size > 1, _OWN_CORES),
        "--data-parallel-backend": (
            parallel.data_parallel_backend != plain.data_parallel_backend,
            _OWN_CORES,
        ),
        "--data-parallel-address": (
            parallel.data_parallel_address != plain.data_parallel_address,
            _OWN_CORES,
        ),
        "--data-parallel-restarts": (parallel.data_parallel_restarts > 0, _OWN_CORES),
        "--distributed-executor-backend ray": (
            parallel.distributed_executor_backend == "ray",
            _OWN_WORKERS,
        ),
        "--host": (server.host != usual.host, _OWN_PORT),
        "--port": (server.port != usual.port, _OWN_PORT),
        "--uds": (operations.uds is not None, _OWN_PORT),
        "--api-server-count": (
            operations.api_server_count > 1,
            "say ingress_replicas=N",
        ),
        "--ssl-*": (operations.tls != TlsArgs(), _OWN_PORT),
        "--uvicorn-log-level": (server.uvicorn_log_level != usual.uvicorn_log_level, _OWN_PORT),
        "--disable-uvicorn-access-log": (operations.disable_access_log, _OWN_PORT),
        "--disable-access-log-for-endpoints": (
            operations.quiet_endpoints != operated.quiet_endpoints,
            _OWN_PORT,
        ),
        "--kv-transfer-config, --prefix-cache-dir or --kv-offloading-size": (
            config.kv_transfer_config is not None,
            f"{_OWN_CACHE}: leave it out",
        ),
    }
    for flag, (is_given, cure) in heeded_elsewhere.items():
        if is_given:
            raise ConfigError(f"flags: {flag} is not for a fleet: {cure}.")
