"""Logging: one handler on the ``vllm`` and ``uvicorn`` loggers, configured once per process."""

import logging
import logging.config
import sys
from contextvars import ContextVar

from vllm import envs
from vllm.exceptions import ConfigError

LOG_FORMATS = ("text", "json")

# The HTTP request that the running task answers; empty elsewhere. Every line of the log carries it.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d]%(in_request)s %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"
# What records carry for lines of text: ours, and uvicorn's message in colours.
_OF_TEXT_LINES = ("in_request", "color_message")
_LOGGERS = ("vllm", "vllm_ascend", "uvicorn")


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module; ``name`` is its ``__name__``."""
    return logging.getLogger(name)


class RequestIdFilter(logging.Filter):
    """Notes the request on every record: ``request_id``, and ``in_request`` for a line of text."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        request_id = current_request_id.get()
        record.request_id = request_id
        record.in_request = f" [{request_id}]" if request_id else ""
        return True


def setup_logging(
    prefix: str = "", *, log_format: str = "text", config_file: str | None = None
) -> None:
    """Attach the project's handler to the ``vllm``, ``vllm_ascend`` and ``uvicorn`` loggers.

    Idempotent: calling it again replaces the handler (the engine-core process sets a prefix).

    Args:
        prefix: Text put in front of every line, to tell the processes apart.
        log_format: "text", or "json": one object a line.
        config_file: A JSON or YAML file for ``logging.config.dictConfig``, applied afterwards.

    Raises:
        ConfigError: The file cannot be used.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(_make_formatter(prefix, log_format))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(envs.VLLM_LOGGING_LEVEL)
        logger.propagate = False
    if config_file is not None:
        _apply_file(config_file)


def _make_formatter(prefix: str, log_format: str) -> logging.Formatter:
    if log_format not in LOG_FORMATS:
        raise ConfigError(
            f"--log-format {log_format!r} is unknown: use one of {', '.join(LOG_FORMATS)}."
        )
    if log_format == "text":
        return logging.Formatter(prefix + _FORMAT, _DATE_FORMAT)
    # Only who asks for it pays for the import.
    from pythonjsonlogger.core import RESERVED_ATTRS  # noqa: PLC0415
    from pythonjsonlogger.json import JsonFormatter  # noqa: PLC0415

    return JsonFormatter(
        ["levelname", "filename", "lineno", "message", "request_id"],
        rename_fields={"levelname": "level", "filename": "file", "lineno": "line"},
        static_fields={"process": prefix.strip(" ()") or "APIServer"},
        timestamp="time",
        reserved_attrs=[*RESERVED_ATTRS, *_OF_TEXT_LINES],
    )


def _apply_file(path: str) -> None:
    import yaml  # noqa: PLC0415  # JSON is YAML; only who gives a file pays for the import

    try:
        with open(path, encoding="utf-8") as file:
            logging.config.dictConfig({"disable_existing_loggers": False, **yaml.safe_load(file)})
    except (OSError, UnicodeDecodeError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--logging-config {path}: not usable by logging.config.dictConfig: {error}"
        ) from error
