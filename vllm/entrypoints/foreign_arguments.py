"""Arguments of vLLM's ``LLM`` that this engine has no field for: the same verdicts as for flags."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm.entrypoints.cli.ignored_flags import IGNORED_SERVE_FLAGS
from vllm.entrypoints.cli.refused_flags import REFUSED_SERVE_FLAGS
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.v1.engine.engine_args import EngineArgs

logger = init_logger(__name__)


def take_engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that ``EngineArgs`` takes.

    A warning names each other one that has no effect here and changes no answer.

    Raises:
        ConfigError: An argument is not supported, or not known at all.
    """
    own = {field.name for field in fields(EngineArgs) if field.init}
    for name in sorted(given.keys() - own):
        _judge(name, given[name], own)
    return {name: value for name, value in given.items() if name in own}


def _judge(name: str, value: Any, own: set[str]) -> None:
    flag = "--" + name.replace("_", "-")
    for ignored in IGNORED_SERVE_FLAGS:
        if flag in ignored.names:
            logger.warning("%s is accepted and has no effect: %s.", name, ignored.why)
            return
    for refused in REFUSED_SERVE_FLAGS:
        if flag in refused.names:
            # None and false are what leaving it out means.
            if value is not None and value is not False and str(value) not in refused.harmless:
                raise ConfigError(f"{name}={value!r} is not supported yet: {refused.advice}.")
            return
    near = difflib.get_close_matches(name, own, 1, 0.7)
    advice = f"did you mean {near[0]}?" if near else "EngineArgs has the names."
    raise ConfigError(f"{name}={value!r} is no argument of the engine: {advice}")
