"""Settings of the HTTP server, as opposed to the engine's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.openai.operations_args import OperationsArgs
from vllm.exceptions import ConfigError

GENERATION_CONFIGS = ("auto", "vllm")


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """What ``vllm serve`` was told about the server.

    Attributes:
        host: Address to listen on; None: all.
        port: Port to listen on; 0: any free one.
        api_keys: Keys that open the guarded routes; none: everything is open.
        chat_template: A Jinja file, or the template itself; None: the model's own format.
        allow_special_tokens_in_content: Whether special tokens that a client spells in a message
            become special; else they stay text.
        default_chat_template_kwargs: Under the ``chat_template_kwargs`` of a request.
        tool_call_parser: Name of the format of tool calls; None: the model's.
        reasoning_parser: Name of the format of reasoning; None: the model's.
        generation_config: "auto": the checkpoint's sampling defaults; "vllm": neutral ones.
        max_log_len: Characters of a prompt to log; None: all.
        enable_prompt_tokens_details: Whether ``usage`` says why prompt tokens were computed.
        enable_tokenizer_info_endpoint: Whether ``/tokenizer_info`` tells the tokenizer's settings.
        shutdown_timeout_s: How long running requests may finish after SIGTERM.
        operations: Sockets, TLS, logs, keep-alive.
    """

    host: str | None = None
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    allow_special_tokens_in_content: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    generation_config: str = "auto"
    enable_log_requests: bool = False
    max_log_len: int | None = None
    enable_prompt_tokens_details: bool = False
    enable_request_id_headers: bool = True
    enable_tokenizer_info_endpoint: bool = False
    enable_force_include_usage: bool = False
    shutdown_timeout_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    uvicorn_log_level: str = "info"
    operations: OperationsArgs = field(default_factory=OperationsArgs)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} must be between 0 and 65535.")
        if not 0 <= self.shutdown_timeout_s < math.inf:
            raise ConfigError(
                f"--shutdown-timeout {self.shutdown_timeout_s:g} must be a finite number of "
                "seconds, at least 0."
            )
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"--max-log-len {self.max_log_len} must be at least 0.")
        if self.generation_config not in GENERATION_CONFIGS:
            raise ConfigError(
                f"--generation-config {self.generation_config!r} is not supported: use one of "
                f"{', '.join(GENERATION_CONFIGS)}."
            )
        if any(not key for key in self.api_keys):
            raise ConfigError("--api-key holds an empty key: leave it out or give a real one.")
        if self.operations.admin_key in self.api_keys:
            raise ConfigError("--admin-api-key is one of --api-key: it would guard nothing.")
        if self.operations.guards_metrics and not self.api_keys:
            raise ConfigError("--guard-metrics needs --api-key: without a key all is open.")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "--allow-credentials with --allowed-origins '*' would let any site act for its "
                "visitors: list the origins."
            )
