"""Settings of the HTTP server, as opposed to the engine's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config.options import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    Limit,
    check_options,
    option,
    within,
)
from vllm.entrypoints.openai.operations_args import OperationsArgs
from vllm.exceptions import ConfigError
from vllm.utils.argparse_utils import human_int, json_string_list

GENERATION_CONFIGS = ("auto", "vllm")
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_GROUP = "server"


@dataclass(frozen=True, slots=True)
class DecisionArgs:
    """What ``/v1/decisions`` makes of the model's log probabilities."""

    temperature: float = option(
        1.0,
        "Divides the log probabilities of /v1/decisions: above 1 they are less sure. `vllm "
        "decisions fit` finds it. Default: 1.",
        group=_GROUP,
        flag="--decision-temperature",
        limit=Limit(lambda value: 0.01 <= value <= 100.0, "must be between 0.01 and 100."),
    )
    refusal_mass: float = option(
        0.0,
        "Refuse a question of /v1/decisions where all options together are less probable than "
        "this. Default: 0, never.",
        group=_GROUP,
        flag="--decision-refusal-mass",
        metavar="SHARE",
        limit=Limit(lambda value: 0.0 <= value <= 1.0, "must be between 0 and 1."),
    )

    def __post_init__(self) -> None:
        check_options(self, by_flag=True)


@dataclass(frozen=True, slots=True)
class BatchArgs:
    """Files and batches; without a folder there are none."""

    folder: str | None = option(
        None,
        "Serve /v1/files and /v1/batches, and keep both in this folder, also across restarts. "
        "Default: neither is there.",
        group=_GROUP,
        flag="--batch-dir",
        metavar="FOLDER",
    )
    max_bytes: int = option(
        10 * 1024**3,
        "Bytes that the uploaded files of one tenant may take, results included. Default: 10 GiB.",
        group=_GROUP,
        flag="--batch-dir-max-bytes",
        parse=human_int,
        metavar="BYTES",
        limit=AT_LEAST_ONE,
    )
    max_concurrency: int = option(
        16,
        "Lines of batches that are worked on at a time, below all other requests. Default: 16.",
        group=_GROUP,
        flag="--batch-max-concurrency",
        parse=human_int,
        metavar="N",
        limit=within(1, 1024),
    )

    def __post_init__(self) -> None:
        check_options(self, by_flag=True)


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """What ``vllm serve`` was told about the server."""

    host: str | None = option(None, "Address to listen on. Default: all.", group=_GROUP)
    port: int = option(
        8000,
        "0: any free one. Default: 8000.",
        group=_GROUP,
        parse=int,
        limit=Limit(lambda port: 0 <= port <= 65535, "must be between 0 and 65535."),
    )
    api_keys: tuple[str, ...] = option(
        (),
        "Keys that open everything but health, readiness, version and metrics. Default: "
        "VLLM_API_KEY, if set.",
        group=_GROUP,
        flag="--api-key",
        many=True,
        metavar="KEY",
    )
    generation_config: str = option(
        "auto",
        "auto: the checkpoint's sampling defaults, and its max_new_tokens as a limit of every "
        "answer; vllm: neutral ones.",
        group=_GROUP,
        choices=GENERATION_CONFIGS,
    )
    shutdown_timeout_s: float = option(
        30.0,
        "How long running requests may finish after SIGTERM or Ctrl-C. Default: 30.",
        group=_GROUP,
        flag="--shutdown-timeout",
        metavar="SECONDS",
        limit=Limit(
            lambda seconds: 0 <= seconds < math.inf,
            "must be a finite number of seconds, at least 0.",
        ),
    )
    enable_log_requests: bool = option(False, "Log every request.", group=_GROUP)
    max_log_len: int | None = option(
        None, "Characters of a prompt to log. Default: all.", group=_GROUP, limit=NOT_NEGATIVE
    )
    enable_prompt_tokens_details: bool = option(
        False,
        "Say in usage.prompt_tokens_details why prompt tokens had to be computed; cached_tokens is "
        "always there.",
        group=_GROUP,
    )
    enable_request_id_headers: bool = option(
        True,
        "Send X-Request-Id with every response: the request's own, or a new one. Default: on.",
        group=_GROUP,
    )
    enable_tokenizer_info_endpoint: bool = option(
        False,
        "Tell the tokenizer's settings at /tokenizer_info, for clients that encode prompts "
        "through this server.",
        group=_GROUP,
    )
    pooling: bool = option(
        True,
        "Make vectors and scores beside text: /v1/embeddings, /rerank and their like "
        "(docs/embeddings.md). Default: on.",
        group=_GROUP,
    )
    enable_force_include_usage: bool = option(
        False, "Send the usage in every chunk of a stream.", group=_GROUP
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "CORS: origins, as a JSON list. Default: none.",
        group=_GROUP,
        parse=json_string_list,
        metavar="JSON",
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",),
        "CORS: methods, as a JSON list. Default: ['*'].",
        group=_GROUP,
        parse=json_string_list,
        metavar="JSON",
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",),
        "CORS: headers, as a JSON list. Default: ['*'].",
        group=_GROUP,
        parse=json_string_list,
        metavar="JSON",
    )
    allow_credentials: bool = option(False, "CORS: allow credentials.", group=_GROUP)
    uvicorn_log_level: str = option(
        "info", group=_GROUP, choices=_LOG_LEVELS, more="Level of the web server's own log."
    )
    chat_template: str | None = option(
        None,
        "A Jinja file, a folder with chat_template.jinja, or the template itself.",
        group=_GROUP,
    )
    default_chat_template_kwargs: Mapping[str, Any] = option(
        {},
        "Used where a request does not set them: '{\"thinking\": false}'.",
        group=_GROUP,
        metavar="JSON",
    )
    tool_call_parser: str | None = option(
        None,
        "Format of tool calls in answers: deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, "
        "deepseek_v41, functiongemma, gemma4, glm, hermes, kimi_k2, llama3_json, mistral, "
        "mistral_v11, openai, pythonic, qwen3, qwen3_coder, none. Default: the model's.",
        group=_GROUP,
        metavar="NAME",
        more="See `docs/tools.md`.",
    )
    reasoning_parser: str | None = option(
        None,
        "Format of reasoning in answers: deepseek_v32, deepseek_v4, deepseek_v41, gemma4, glm, "
        "kimi_k2, mistral, qwen3, openai_gptoss, none. Default: the model's.",
        group=_GROUP,
        metavar="NAME",
        more="See `docs/reasoning.md`.",
    )
    enable_auto_tool_choice: bool = option(
        False, "Accepted: tool_choice auto is always served.", group=_GROUP
    )
    allow_special_tokens_in_content: bool = option(
        False,
        "Let special tokens that a client spells in a chat message become special; by default they "
        "stay text.",
        group=_GROUP,
    )
    keep_billing_line: bool = option(
        False,
        "Keep the billing line that Claude Code puts in front of system prompts. It differs in "
        "each request, so nothing behind it is found in the prefix cache; by default it is left "
        "out.",
        group=_GROUP,
    )
    operations: OperationsArgs = field(default_factory=OperationsArgs)
    decisions: DecisionArgs = field(default_factory=DecisionArgs)
    batch: BatchArgs = field(default_factory=BatchArgs)

    def __post_init__(self) -> None:
        check_options(self, by_flag=True)
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
