"""How an operator writes which window state is kept for later requests."""

from collections.abc import Mapping

from vllm.exceptions import ConfigError

# Policies by the name that operators write, and what builds each of the geometry of a model's
# groups and the blocks of the pool: ``docs/how-to/policy.md``. A number is an interval.
POLICIES: Mapping[str, str] = {
    "auto": "vllm.v1.core.retention.auto.policy:make_auto",
    "none": "vllm.v1.core.retention.fixed:FixedPolicy.at_every_end",
}


def read_interval(value: str | int | None, step: int) -> str | int:
    """Return a policy's name, or the tokens between kept boundaries; nothing said is "auto".

    Args:
        value: As written in a flag, a variable or a configuration.
        step: Tokens on whose multiples a kept boundary can lie.

    Raises:
        ConfigError: It is none of those, or no multiple of ``step``.
    """
    text = "auto" if value is None else str(value).strip().lower()
    if text in POLICIES:
        return text
    if not text.isdecimal() or int(text) % step:
        raise ConfigError(
            f"prefix_cache_retention_interval={value!r} is not valid here: use "
            f"{', '.join(POLICIES)}, 0, or a positive multiple of {step} tokens."
        )
    return int(text)
