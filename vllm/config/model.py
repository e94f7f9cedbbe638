"""Which model is served, from where, in which precision."""

from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import ConfigError

# Without a config.json to ask (outsiders build a ModelConfig from a bare name).
_UNKNOWN_CONTEXT_LEN = 2048
MAX_SEED = 2**63 - 1
# Compressed entries beside window state: hybrids whose prefix cache hits at one unit.
_UNIT_HIT_MODEL_TYPES = ("deepseek_v4",)
QUANTIZATIONS = (
    "none",
    "int8",
    "compressed-tensors",
    "awq",
    "auto_awq",
    "awq_marlin",
    "gptq",
    "auto_gptq",
    "gptq_marlin",
    "fp8",
    "gguf",
)
DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")


@dataclass
class ModelConfig:
    """The model and how it is read.

    Not frozen: outsiders set ``max_model_len`` and ``original_max_model_len`` after construction.

    Attributes:
        model: The name or path the user gave.
        tokenizer: Folder of the tokenizer; None: the model's.
        path: Local folder of the checkpoint, once resolved.
        is_embedded: Whether that folder is the checkpoint inside this package.
        served_model_names: Names clients may use; the first is canonical.
        hf_config: The checkpoint's config.json, as read.
        generation_config: The checkpoint's generation_config.json, or empty.
        quantization: "int8": plain weights are rounded as they load; a format's name: the
            checkpoint must be of it; None: as stored.
        max_model_len: Longest prompt + answer in tokens.
        original_max_model_len: What the user passed: None when nothing, -1 for "what fits".
    """

    model: str = "Qwen/Qwen3-0.6B"
    runner: str = field(default="auto", kw_only=True)
    tokenizer: str | None = field(default=None, kw_only=True)
    dtype: Any = field(default="auto", kw_only=True)
    quantization: str | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    max_model_len: int = field(default=None, kw_only=True)  # type: ignore[assignment]
    trust_remote_code: bool = field(default=False, kw_only=True)
    skip_tokenizer_init: bool = field(default=False, kw_only=True)
    hf_overrides: dict[str, Any] = field(default_factory=dict, kw_only=True)
    path: str | None = field(default=None, kw_only=True)
    is_embedded: bool = field(default=False, kw_only=True)
    served_model_names: tuple[str, ...] = field(default=(), kw_only=True)
    hf_config: dict[str, Any] = field(default_factory=dict, kw_only=True)
    generation_config: dict[str, Any] = field(default_factory=dict, kw_only=True)
    max_logprobs: int = field(default=20, kw_only=True)
    enforce_eager: bool = field(default=False, kw_only=True)
    enable_return_routed_experts: bool = field(default=False, kw_only=True)
    is_encoder_decoder: bool = field(default=False, kw_only=True)
    original_max_model_len: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str) and self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown: use one of {', '.join(DTYPES)}.")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(
                f"quantization={self.quantization!r} is unknown: use one of "
                f"{', '.join(QUANTIZATIONS)}, or leave it out for what the checkpoint holds."
            )
        self.original_max_model_len = self.max_model_len
        derived = self.derived_max_model_len
        if self.max_model_len is None or self.max_model_len == -1:
            self.max_model_len = derived
        elif self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len={self.max_model_len} must be at least 2 (a token of prompt and one "
                "of answer), or -1 for what fits in memory."
            )
        elif self.hf_config and self.max_model_len > derived:
            raise ConfigError(
                f"max_model_len={self.max_model_len} exceeds the model's context of {derived} "
                "tokens (max_position_embeddings in its config.json): give a smaller one."
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed={self.seed} must be between 0 and {MAX_SEED} (2**63 - 1).")
        if not self.served_model_names:
            self.served_model_names = (self.model,)
        if not all(name.strip() for name in self.served_model_names):
            raise ConfigError("served_model_name holds an empty name: leave it out or give one.")

    @property
    def derived_max_model_len(self) -> int:
        """The context length of the checkpoint, in tokens."""
        return int(self.hf_config.get("max_position_embeddings", _UNKNOWN_CONTEXT_LEN))

    @property
    def architectures(self) -> list[str]:
        """The checkpoint's architecture names."""
        return list(self.hf_config.get("architectures") or ())

    @property
    def hits_at_units(self) -> bool:
        """Whether the model's prefix cache hits at one unit, ``--block-size`` tokens."""
        return self.hf_config.get("model_type") in _UNIT_HIT_MODEL_TYPES

    @property
    def served_model_name(self) -> str:
        """The name responses carry."""
        return self.served_model_names[0]

    @property
    def is_multimodal_model(self) -> bool:
        """Whether the model takes images or sound; no served architecture does."""
        return False
