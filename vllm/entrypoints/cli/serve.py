"""``vllm serve``: flags of the server, and the way to it."""

import argparse
import dataclasses
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.config.tenants import with_batch_tenant
from vllm.entrypoints.cli.ignored_flags import IGNORED_SERVE_FLAGS
from vllm.entrypoints.cli.needed_packages import check_needed_packages
from vllm.entrypoints.cli.refused_flags import REFUSED_SERVE_FLAGS
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import ConfigError
from vllm.logger import init_logger, setup_logging
from vllm.utils.config_file import CONFIG_FLAG, CONFIG_MODEL_FLAG
from vllm.utils.flag_text import filled_text
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.option_flags import add_option_flags, take_options
from vllm.version import BANNER

logger = init_logger(__name__)

_SECRETS = ("api_keys", "admin_key")


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
        type=filled_text,
        help="A folder, a hub id, or deepseek-v4: the small checkpoint inside this package (the "
        "default).",
    )
    parser.add_argument("--model", type=filled_text, help="The same, as a flag.")
    parser.add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        help="A YAML file of flags (max-model-len: 4k); the command line goes before it.",
    )
    parser.add_argument(
        CONFIG_MODEL_FLAG, dest="config_model", type=filled_text, help=argparse.SUPPRESS
    )
    add_option_flags(parser, ServerArgs)
    EngineArgs.add_cli_args(parser)
    parser.add_ignored_flags(IGNORED_SERVE_FLAGS)
    parser.add_refused_flags(REFUSED_SERVE_FLAGS)


def make_server_args(args: argparse.Namespace) -> ServerArgs:
    """Take the server's flags out of parsed arguments.

    Raises:
        ConfigError: A value is wrong.
    """
    found = take_options(ServerArgs, args)
    if not found["api_keys"] and envs.VLLM_API_KEY:
        found["api_keys"] = (envs.VLLM_API_KEY,)
    return ServerArgs(**found)


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
    for line in envs.describe_unknown():
        logger.warning(line)
    for flag in args.ignored_flags:
        logger.warning("%s is accepted and has no effect: %s.", flag.names[0], flag.why)
    config = engine_args.create_vllm_config()
    derived = engine_args.describe_derived(config)
    if derived:
        logger.info("derived defaults: %s", _shown(derived))
    # Late, as --help must not wait for these; the server's imports also wait for the checks.
    from vllm.parser.registry import check_parser_names  # noqa: PLC0415
    from vllm.tokenizers.chat_encoder import check_chat_flags  # noqa: PLC0415
    from vllm.v1.engine.tenant_limits import check_parts  # noqa: PLC0415

    check_chat_flags(
        config.model_config.hf_config,
        server_args.chat_template,
        server_args.default_chat_template_kwargs,
    )
    check_parser_names(server_args.tool_call_parser, server_args.reasoning_parser)
    check_parts(
        config.scheduler_config.tenants,
        server_args.operations.api_server_count,
        "--api-server-count",
    )
    if server_args.batch.folder is not None:
        if config.observability_config.cache_trace is not None:
            raise ConfigError(
                "--batch-dir with --cache-trace: a trace does not record which requests run below "
                "others. Leave one of them out."
            )
        tenants = with_batch_tenant(config.scheduler_config.tenants)
        scheduler = dataclasses.replace(config.scheduler_config, tenants=tenants)
        config = dataclasses.replace(config, scheduler_config=scheduler)
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
