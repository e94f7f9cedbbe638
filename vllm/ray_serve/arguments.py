"""What a fleet is told."""

import shlex
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm.config import VllmConfig
from vllm.config.parallel import MAX_DATA_PARALLEL_SIZE
from vllm.entrypoints.cli.serve import add_serve_flags, prepare
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import ConfigError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.data_parallel.ranks import agree_on_hashes
from vllm.v1.engine.tenant_limits import check_parts

# Flags of a server that make no sense here, by what parsing leaves of them.
_OWN_PORT = "Serve's own HTTP proxy listens: set host and port with `serve start` or http_options."


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
    """

    model_config = ConfigDict(extra="forbid")

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
                "each must not be above the next."
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
        parser = FlexibleArgumentParser(prog="vllm.ray_serve")
        add_serve_flags(parser)
        parsed = parser.parse_args([self.model, *shlex.split(self.flags)])
        config, server = prepare(parsed)
        parallel = config.parallel_config
        if parallel.data_parallel_size > 1:
            raise ConfigError(
                f"--data-parallel-size {parallel.data_parallel_size} among the flags: a fleet's "
                "cores are its replicas, so say replicas=N."
            )
        if server.operations.api_server_count > 1 or server.operations.uds is not None:
            raise ConfigError(f"--api-server-count and --uds are not for a fleet: {_OWN_PORT}")
        if config.kv_transfer_config is not None:
            raise ConfigError(
                "--kv-transfer-config is not for a fleet: its replicas do not prefill for others."
            )
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
