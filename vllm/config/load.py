"""How weights are read."""

from dataclasses import dataclass

from vllm.config.options import check_options, option

LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True)
class LoadConfig:
    """The weights' format; "dummy" makes random ones and reads no file."""

    load_format: str = option(
        "auto",
        group="model",
        choices=LOAD_FORMATS,
        more="`dummy` makes random weights and reads no file.",
    )
    weights_cache_dir: str | None = option(
        None,
        "Folder for the packed weights of a GGUF file, from which the next start takes them.",
        group="model",
        more="See [quantisation.md](quantisation.md#a-second-start).",
    )
    use_tqdm: bool = True

    def __post_init__(self) -> None:
        check_options(self)
