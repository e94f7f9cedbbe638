"""What families' readers of config.json have in common (torch-free)."""

from vllm.exceptions import UnsupportedFeatureError
from vllm.model_executor.model_loader.quantization_config import METHODS
from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
LAYER_TYPES = ("full_attention", "sliding_attention")
# Until 2024 config.json did not say that "gelu" meant another function than its name.
_DEFAULT_LENGTH = 2048


def read_activation(fields: FieldReader, name: str = "hidden_act") -> Activation:
    """Reads an activation's name.

    Raises:
        ConfigError: It is not supported.
    """
    spelled = fields.text(name, "silu")
    if spelled not in _ACTIVATIONS:
        raise fields.error(name, spelled, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[spelled]


def read_head_dim(fields: FieldReader, num_heads: int) -> int:
    """Reads a head's size; unset, heads share the hidden size out."""
    return fields.positive_int("head_dim", fields.positive_int("hidden_size") // num_heads)


def read_length(fields: FieldReader) -> int:
    """Reads the context length in tokens."""
    return fields.positive_int("max_position_embeddings", _DEFAULT_LENGTH)


def read_layer_types(
    fields: FieldReader, default: list[str], allowed: tuple[str, ...] = LAYER_TYPES
) -> list[str]:
    """Reads what kind each layer is of.

    Args:
        fields: config.json, or its text part.
        default: What an absent ``layer_types`` means; one entry a layer.
        allowed: Kinds that the family has.

    Raises:
        ConfigError: A kind of layer that is not supported.
    """
    if not fields.has("layer_types"):
        return default
    names = [str(name) for name in fields.sequence("layer_types", len(default))]
    for name in names:
        if name not in allowed:
            raise fields.error("layer_types", name, f"one of {', '.join(allowed)}")
    return names


def refuse_quantization(fields: FieldReader) -> None:
    """Refuses a checkpoint whose weights are stored in a way that the family does not load.

    Raises:
        UnsupportedFeatureError: It is one.
    """
    if fields.has("quantization_config"):
        method = fields.sub_reader("quantization_config").text("quant_method", "unnamed")
        if method in METHODS:
            return
        raise UnsupportedFeatureError(
            f"the checkpoint is quantised ({method}), which this model family does not load (it "
            f"loads {', '.join(METHODS)}): use its BF16 or F32 release."
        )
