"""Choice of the attention backend."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionConfig:
    """The attention backend by name; None: the platform's."""

    backend: str | None = None
