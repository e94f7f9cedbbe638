"""How weights are read."""

from dataclasses import dataclass

from vllm.exceptions import ConfigError

LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True)
class LoadConfig:
    """The weights' format; "dummy" makes random ones and reads no file."""

    load_format: str = "auto"
    use_tqdm: bool = True

    def __post_init__(self) -> None:
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(
                f"load_format={self.load_format!r} is unknown: use one of "
                f"{', '.join(LOAD_FORMATS)}."
            )
