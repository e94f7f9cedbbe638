"""Which model is served, from where, in which precision."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from vllm.config.options import Limit, check_options, option
from vllm.exceptions import ConfigError

# Without a config.json to ask (outsiders build a ModelConfig from a bare name).
_UNKNOWN_CONTEXT_LEN = 2048
MAX_SEED = 2**63 - 1
# Compressed entries beside window state: hybrids whose prefix cache hits at one unit.
_UNIT_HIT_MODEL_TYPES = ("deepseek_v4", "deepseek_v41", "deepseek_v41_text")
QUANTIZATIONS = (
    "none",
    "int8",
    "int8_per_channel_weight_only",
    "w8a8_int8",
    "compressed-tensors",
    "awq",
    "auto_awq",
    "awq_marlin",
    "gptq",
    "auto_gptq",
    "gptq_marlin",
    "fp8",
    "modelopt",
    "modelopt_fp4",
    "auto-round",
    "auto_round",
    "inc",
    "bitsandbytes",
    "gguf",
    "ascend",
)
QUANTIZED_INPUTS = ("auto", "int8", "int16", "exact")
DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")
# Image towers of models that code written for the scheduler's interface names without a folder.
_NAMED_IMAGE_TOWERS = {"llava-1.5-": {"image_size": 336, "patch_size": 14}}
_GROUP = "model"


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
        aliases: What else clients may call it: names of its file.
        hf_config: The checkpoint's config.json, as read.
        generation_config: The checkpoint's generation_config.json, or empty.
        generates: Whether it has an output matrix, so that it generates text.
        placeholder_ids: Token ids that stand for images and the like, which prompts cannot have.
        image_family: How it sees pictures, an ``ImageFamily``; None: it sees none.
        no_images_reason: Why it is.
        tower_fingerprint: Names the tower that reads them, and how it does: part of a picture's
            identity.
        pictures_are_whole: Whether the rows of a picture see each other both ways, so that a step
            holds all of one.
        max_picture_tokens: Soft tokens of the largest one that is served; 0: none is.
        picture_row_bytes: Of what the tower makes of a soft token.
        max_model_len: Longest prompt + answer in tokens.
        original_max_model_len: What the user passed: None when nothing, -1 for "what fits".
    """

    model: str = "Qwen/Qwen3-0.6B"
    _: KW_ONLY
    runner: str = "auto"
    tokenizer: str | None = None
    dtype: Any = option(
        "auto", "auto: float32 on a CPU, else the model's.", group=_GROUP, choices=DTYPES
    )
    quantization: str | None = option(
        None,
        "int8: round plain weights to eight bits as they load (docs/native.md); w8a8_int8: the "
        "inputs of their products, too. What the "
        "checkpoint quantises itself stays so without this flag; a format's name is held against "
        "it (docs/quantisation.md).",
        group=_GROUP,
        also=("-q",),
        choices=QUANTIZATIONS,
    )
    quantized_inputs: str = option(
        "auto",
        "Inputs of products with GGUF's and other four-bit matrices: exact, as they are (auto); "
        "int16, by which one request is decoded faster and answers change next to nothing; or "
        "int8, which is faster and changes answers a little (docs/quantisation.md).",
        group=_GROUP,
        choices=QUANTIZED_INPUTS,
        more="`auto` with `VLLM_CPU_INT4_W4A8=1` is `int8`.",
    )
    seed: int = option(
        0,
        group=_GROUP,
        limit=Limit(
            lambda seed: 0 <= seed <= MAX_SEED, f"must be between 0 and {MAX_SEED} (2**63 - 1)."
        ),
        more="Seed of requests without their own.",
    )
    max_model_len: int = None  # type: ignore[assignment]
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    is_embedded: bool = False
    served_model_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    hf_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    generates: bool = True
    placeholder_ids: tuple[int, ...] = ()
    image_family: Any = None
    no_images_reason: str = "the model has no tower for pictures"
    tower_fingerprint: str = ""
    pictures_are_whole: bool = False
    max_picture_tokens: int = 0
    picture_row_bytes: int = 0
    max_logprobs: int = option(
        20,
        "Most a request may ask for; -1: all.",
        group=_GROUP,
        limit=Limit(lambda most: most >= -1, "must be at least 0, or -1 for no limit."),
    )
    enforce_eager: bool = option(
        False,
        "Never capture a decode step as a graph (docs/gpu.md, docs/ascend.md).",
        group=_GROUP,
    )
    enable_return_routed_experts: bool = False
    is_encoder_decoder: bool = False
    original_max_model_len: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_options(self)
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
                "tokens (max_position_embeddings in its config.json): give a smaller one, or "
                "stretch the context by --hf-overrides (docs/models.md)."
            )
        if not self.served_model_names:
            self.served_model_names = (self.model,)
        if not all(name.strip() for name in self.served_model_names):
            raise ConfigError("served_model_name holds an empty name: leave it out or give one.")

    @property
    def derived_max_model_len(self) -> int:
        """The context length of the checkpoint, in tokens."""
        return int(self.hf_config.get("max_position_embeddings", _UNKNOWN_CONTEXT_LEN))

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end an answer, for whoever stops there and for whoever forces one.

        generation_config.json names them, or else config.json; the tokenizer's own is another.
        """
        eos = self.generation_config.get("eos_token_id")
        eos = self.hf_config.get("eos_token_id") if eos is None else eos
        return [] if eos is None else eos if isinstance(eos, list) else [eos]

    @property
    def architectures(self) -> list[str]:
        """The checkpoint's architecture names."""
        return list(self.hf_config.get("architectures") or ())

    @property
    def sees_both_ways(self) -> bool:
        """Whether tokens attend to those behind them: prompts are whole, and nothing is cached."""
        return self.hf_config.get("use_bidirectional_attention") is True

    @property
    def hits_at_units(self) -> bool:
        """Whether the model's prefix cache hits at one unit, ``--block-size`` tokens."""
        return self.hf_config.get("model_type") in _UNIT_HIT_MODEL_TYPES

    @property
    def served_model_name(self) -> str:
        """The name responses carry."""
        return self.served_model_names[0]

    @property
    def image_tower(self) -> dict[str, Any]:
        """What config.json says of the tower whose patches become tokens; empty: there is none."""
        if self.hf_config:
            is_llava = self.hf_config.get("model_type") == "llava"
            return dict(self.hf_config.get("vision_config") or {}) if is_llava else {}
        name = self.model.rpartition("/")[2].lower()
        known = _NAMED_IMAGE_TOWERS.items()
        return next((dict(tower) for prefix, tower in known if name.startswith(prefix)), {})

    @property
    def is_multimodal_model(self) -> bool:
        """Whether the model takes images."""
        return self.image_family is not None or bool(self.image_tower)
