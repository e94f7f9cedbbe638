"""``vllm serve``: flags of the server, and the way to it."""

import argparse
import dataclasses
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.cli.ignored_flags import IGNORED_SERVE_FLAGS
from vllm.entrypoints.cli.needed_packages import check_needed_packages
from vllm.entrypoints.cli.operations_flags import add_operations_flags, make_operations_args
from vllm.entrypoints.cli.refused_flags import REFUSED_SERVE_FLAGS
from vllm.entrypoints.openai.server_args import GENERATION_CONFIGS, ServerArgs
from vllm.exceptions import ConfigError
from vllm.logger import init_logger, setup_logging
from vllm.utils.argparse_utils import human_int, json_object, json_string_list
from vllm.v1.engine.engine_args import EngineArgs
from vllm.version import BANNER

logger = init_logger(__name__)

_SECRETS = ("api_keys", "admin_key")
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        usage="vllm serve [model] [flags]",
        help="Serve a model over HTTP, as OpenAI's API.",
        description="Serve a model over HTTP, as OpenAI's API.",
        epilog="--help=FLAG or --help=GROUP explains one, --help=all lists every known flag. "
        "Flags may be written with _ for -. Other flags of vLLM are accepted with a warning where "
        "ignoring them is harmless, else refused by name.",
    )
    add_serve_flags(parser)
    parser.set_defaults(run=run)


def add_serve_flags(parser: Any) -> None:
    """Add every flag that ``prepare`` reads."""
    parser.add_argument(
        "model_positional",
        metavar="model",
        nargs="?",
        help="A folder, a hub id, or deepseek-v4: the small checkpoint inside this package (the "
        "default).",
    )
    parser.add_argument("--model", help="The same, as a flag.")
    group = parser.add_argument_group("server")
    _add_server_args(group)
    _add_chat_args(group)
    add_operations_flags(parser)
    EngineArgs.add_cli_args(parser)
    parser.add_ignored_flags(IGNORED_SERVE_FLAGS)
    parser.add_refused_flags(REFUSED_SERVE_FLAGS)


def _add_server_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", help="Address to listen on. Default: all.")
    group.add_argument("--port", type=int, default=8000, help="0: any free one. Default: 8000.")
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="Keys that open everything but health, readiness, version and metrics. "
        "Default: VLLM_API_KEY, if set.",
    )
    group.add_argument(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        default="auto",
        help="auto: the checkpoint's sampling defaults; vllm: neutral ones.",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="How long running requests may finish after SIGTERM or Ctrl-C. Default: 30.",
    )
    _add_switch(group, "--enable-log-requests", "Log every request.")
    group.add_argument(
        "--max-log-len", type=human_int, help="Characters of a prompt to log. Default: all."
    )
    _add_switch(
        group,
        "--enable-prompt-tokens-details",
        "Say in usage.prompt_tokens_details why prompt tokens had to be computed; cached_tokens is "
        "always there.",
    )
    group.add_argument(
        "--enable-request-id-headers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Send X-Request-Id with every response: the request's own, or a new one. Default: on.",
    )
    _add_switch(group, "--enable-force-include-usage", "Send the usage in every chunk of a stream.")
    for name, default in (("origins", []), ("methods", ["*"]), ("headers", ["*"])):
        group.add_argument(
            f"--allowed-{name}",
            type=json_string_list,
            default=default,
            metavar="JSON",
            help=f"CORS: {name}, as a JSON list. Default: {default or 'none'}.",
        )
    _add_switch(group, "--allow-credentials", "CORS: allow credentials.")
    group.add_argument("--uvicorn-log-level", choices=_LOG_LEVELS, default="info")


def _add_chat_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--chat-template", help="A Jinja file, or the template itself.")
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="Used where a request does not set them: '{\"thinking\": false}'.",
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="Format of tool calls in answers: deepseek_v4, hermes, qwen3, llama3_json, openai, "
        "none. Default: the model's.",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="Format of reasoning in answers: deepseek_v4, qwen3, openai_gptoss, none. Default: "
        "the model's.",
    )
    _add_switch(group, "--enable-auto-tool-choice", "Accepted: tool_choice auto is always served.")
    _add_switch(
        group,
        "--allow-special-tokens-in-content",
        "Let special tokens that a client spells in a chat message become special; by default they "
        "stay text.",
    )


def _add_switch(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=False, help=text)


def make_server_args(args: argparse.Namespace) -> ServerArgs:
    """Take the server's flags out of parsed arguments.

    Raises:
        ConfigError: A value is wrong.
    """
    keys = args.api_key
    if keys is None:
        keys = [envs.VLLM_API_KEY] if envs.VLLM_API_KEY else []
    return ServerArgs(
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        chat_template=args.chat_template,
        allow_special_tokens_in_content=args.allow_special_tokens_in_content,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        generation_config=args.generation_config,
        enable_log_requests=args.enable_log_requests,
        max_log_len=args.max_log_len,
        enable_prompt_tokens_details=args.enable_prompt_tokens_details,
        enable_request_id_headers=args.enable_request_id_headers,
        enable_force_include_usage=args.enable_force_include_usage,
        shutdown_timeout_s=args.shutdown_timeout,
        allowed_origins=tuple(args.allowed_origins),
        allowed_methods=tuple(args.allowed_methods),
        allowed_headers=tuple(args.allowed_headers),
        allow_credentials=args.allow_credentials,
        uvicorn_log_level=args.uvicorn_log_level,
        operations=make_operations_args(args),
    )


def run(args: argparse.Namespace) -> int:
    """Check everything, then serve until told to stop; return the exit code.

    Raises:
        ConfigError: A flag or the model is wrong.
    """
    config, server_args = prepare(args)
    from vllm.entrypoints.openai.api_server import run_server  # noqa: PLC0415

    return run_server(config, server_args)


def prepare(args: argparse.Namespace) -> tuple[VllmConfig, ServerArgs]:
    """Set up logging, check everything and resolve what is derived.

    Raises:
        ConfigError: A flag or the model is wrong.
    """
    envs.check_values()
    check_needed_packages()
    setup_logging(log_format=args.log_format, config_file=args.logging_config)
    args.model = _choose_model(args.model_positional, args.model, args.config_model)
    server_args = make_server_args(args)
    engine_args = EngineArgs.from_cli_args(args)
    logger.info(BANNER)
    _log_non_defaults(engine_args, server_args)
    for flag in args.ignored_flags:
        logger.warning("%s is accepted and has no effect: %s.", flag.names[0], flag.why)
    config = engine_args.create_vllm_config()
    derived = engine_args.describe_derived(config)
    if derived:
        logger.info("derived defaults: %s", _shown(derived))
    # Late, as --help must not wait for these; the server's imports also wait for the checks.
    from vllm.parser.registry import check_parser_names  # noqa: PLC0415
    from vllm.tokenizers.chat_encoder import check_chat_flags  # noqa: PLC0415

    check_chat_flags(
        config.model_config.hf_config,
        server_args.chat_template,
        server_args.default_chat_template_kwargs,
    )
    check_parser_names(server_args.tool_call_parser, server_args.reasoning_parser)
    return config, server_args


def _choose_model(positional: str | None, flag: str | None, from_file: str | None) -> str:
    if positional is not None and flag is not None and positional != flag:
        raise ConfigError(
            f"the model is given twice, as {positional!r} and as --model {flag!r}: give it once."
        )
    return positional or flag or from_file or EngineArgs.model


def _log_non_defaults(engine_args: EngineArgs, server_args: ServerArgs) -> None:
    changed = {**_find_changed(engine_args), **_find_changed(server_args)}
    logger.info("non-default args: %s", _shown(changed) or "none")


def _find_changed(given: Any) -> dict[str, Any]:
    """Return the fields that are not as by default, those of nested settings among them."""
    changed: dict[str, Any] = {}
    default = type(given)()
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if dataclasses.is_dataclass(value):
            changed.update(_find_changed(value))
        elif value != getattr(default, field.name):
            changed[field.name] = "(hidden)" if field.name in _SECRETS else value
    return changed


def _shown(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
