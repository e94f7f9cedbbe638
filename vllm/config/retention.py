"""How an operator writes which window state is kept for later requests."""

from vllm.exceptions import ConfigError


def read_interval(value: str | int | None, step: int) -> str | int:
    """Return "auto", "none", or the tokens between kept boundaries; nothing said is "auto".

    Args:
        value: As written in a flag, a variable or a configuration.
        step: Tokens on whose multiples a kept boundary can lie.

    Raises:
        ConfigError: It is none of those, or no multiple of ``step``.
    """
    text = "auto" if value is None else str(value).strip().lower()
    if text in ("auto", "none"):
        return text
    if not text.isdecimal() or int(text) % step:
        raise ConfigError(
            f"prefix_cache_retention_interval={value!r} is not valid here: use auto, none, 0, or a "
            f"positive multiple of {step} tokens."
        )
    return int(text)
