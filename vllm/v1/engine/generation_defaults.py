"""What a checkpoint's generation_config.json sets for requests: pure functions over its fields."""

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import ConfigError, UserInputError
from vllm.sampling_params import SamplingParams

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LIMIT = "max_new_tokens"
_INTEGERS = ("top_k", _LIMIT)
_REMEDY = "mend the file, or set another value with --override-generation-config"


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a request that does not set them; null is unset."""
    return {name: config[name] for name in _SAMPLING_FIELDS if config.get(name) is not None}


def answer_limit(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of an answer (``max_new_tokens``); None: no limit of its own."""
    limit: int | None = config.get(_LIMIT)
    return limit


def check_generation_config(config: Mapping[str, Any]) -> None:
    """Refuse values that no request could be answered with.

    Args:
        config: generation_config.json, with what overrides it.

    Raises:
        ConfigError: One has the wrong type or is out of its range; the message names it.
    """
    for name in (*_SAMPLING_FIELDS, _LIMIT):
        value = config.get(name)
        kind: type | tuple[type, ...] = int if name in _INTEGERS else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            wanted = "a whole number" if name in _INTEGERS else "a number"
            raise ConfigError(
                f"generation config: {name} must be {wanted}, got {value!r}: {_REMEDY}."
            )
    limit = answer_limit(config)
    if limit is not None and limit < 1:
        raise ConfigError(
            f"generation config: {_LIMIT} must be at least 1, got {limit}: {_REMEDY}."
        )
    try:
        SamplingParams(**sampling_defaults(config))
    except UserInputError as error:
        raise ConfigError(f"generation config: {str(error).rstrip('.')}: {_REMEDY}.") from error
    check_ends(config.get("eos_token_id"), "generation config")


def check_ends(eos_token_id: object, source: str) -> None:
    """Refuse ids of end tokens that are none.

    Args:
        eos_token_id: A token id, a list of them, or None.
        source: Where it stands, for the message.

    Raises:
        ConfigError: It is something else.
    """
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if eos_token_id is not None and not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(
            f"{source}: eos_token_id must be a token id or a list of them, got {eos_token_id!r}."
        )
