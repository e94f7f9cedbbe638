"""What a fleet is told."""

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, NoReturn, Self

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

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


class FleetArgumentError(ConfigError, click.ClickException):
    """An argument of the application is wrong.

    One of click's, too: ``serve run`` is a command of click's, which then prints the message and
    ends with status 1, where it would show a traceback of Ray's own.

    Args:
        message: Names the value, the limit and what to do.
    """

    def __init__(self, message: str) -> None:
        # The first one's base class does not go on to the second.
        click.ClickException.__init__(self, message)


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
        ingress_on: Where they run: on the "head", which nothing in the cluster outlives, or on
            "any" machine, which takes the streams of all replicas along when it dies.

    Raises:
        pydantic.ValidationError: An argument is out of its limits; what ``serve run`` is given is
            checked by ``model_validate``, which raises FleetArgumentError.
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
    ingress_on: Literal["head", "any"] = "head"

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Make them of names and values, as Serve does.

        Raises:
            FleetArgumentError: An argument is unknown, of another type or out of its limits.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            told = (_describe(fault, cls.model_fields) for fault in error.errors())
            raise FleetArgumentError("; ".join(told)) from error

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


def _describe(fault: ErrorDetails, known: Iterable[str]) -> str:
    """Return what is wrong with an argument, in a sentence."""
    name = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        (meant,) = difflib.get_close_matches(name, known, 1) or [""]
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}."
        return f"there is no argument {name}={fault['input']!r}: {hint}"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{name}={fault['input']!r}: {message}" if name else message


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
        "--batch-dir": (server.batch.folder is not None, "its replicas share no folder"),
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
