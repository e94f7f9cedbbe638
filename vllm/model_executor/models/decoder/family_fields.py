"""What families' readers of config.json have in common (torch-free)."""

from collections.abc import Sequence

from vllm.exceptions import UnsupportedFeatureError
from vllm.model_executor.model_loader.quantization_config import METHODS, reads_method
from vllm.model_executor.models.config_fields import LARGEST_INT, FieldReader
from vllm.model_executor.models.decoder.config import (
    Activation,
    ExpertsPlan,
    MlpPlan,
    SigmoidRouter,
)
from vllm.model_executor.models.decoder.rope_config import (
    RopeConfig,
    find_original_length,
    find_rope_object,
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# What a layer has behind attention: one MLP, or experts.
DENSE, SPARSE = "dense", "sparse"
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


def read_length(fields: FieldReader, rope: RopeConfig) -> int:
    """Reads the context length in tokens.

    YaRN that is added to a release, as its authors advise for long texts, leaves
    ``max_position_embeddings`` as it was: the context is then what YaRN stretches to.
    """
    length = fields.positive_int("max_position_embeddings", _DEFAULT_LENGTH)
    scaling = find_rope_object(fields)
    if rope.kind != "yarn" or not find_original_length(scaling, fields):
        return length
    stretched = rope.original_length * rope.factor
    if stretched > LARGEST_INT:
        raise scaling.error("factor", rope.factor, f"a stretch to at most {LARGEST_INT} tokens")
    return max(length, int(stretched))


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


def read_mlp_types(fields: FieldReader, num_dense: int) -> Sequence[str]:
    """Reads which layers have experts: all but the first ones, unless they are listed.

    Args:
        fields: config.json, or its text part.
        num_dense: What an absent ``first_k_dense_replace`` means.

    Returns:
        DENSE or SPARSE for each layer.

    Raises:
        ConfigError: Another kind of layer.
    """
    count = fields.positive_int("num_hidden_layers")
    if not fields.has("mlp_layer_types"):
        num_dense = fields.non_negative_int("first_k_dense_replace", num_dense)
        return [DENSE if index < num_dense else SPARSE for index in range(count)]
    names = [str(name) for name in fields.sequence("mlp_layer_types", count)]
    for name in names:
        if name not in (DENSE, SPARSE):
            raise fields.error("mlp_layer_types", name, f"{DENSE} or {SPARSE}")
    return names


def check_expert_groups(
    fields: FieldReader, plan: ExpertsPlan, router: SigmoidRouter, groups: str, chosen: str
) -> None:
    """Refuses groups of experts that a router cannot choose from.

    Args:
        fields: config.json, or its text part.
        plan: The experts as read.
        router: Theirs.
        groups: The name of the field that says how many groups there are.
        chosen: The name of the field that says how many experts a token has.

    Raises:
        ConfigError: Experts do not come in such groups, or are fewer than a token has.
    """
    num_groups, experts = router.num_groups, plan.num_experts
    if experts % num_groups:
        raise fields.error(groups, num_groups, f"a divisor of {experts} experts")
    per_group = experts // num_groups
    if router.num_chosen_groups > num_groups:
        allowed = f"at most {groups} ({num_groups})"
        raise fields.error("topk_group", router.num_chosen_groups, allowed)
    if router.num_chosen_groups < num_groups and per_group < 2:
        raise fields.error(groups, num_groups, "groups of two experts or more")
    most = router.num_chosen_groups * per_group
    if plan.num_chosen > most:
        raise fields.error(
            chosen, plan.num_chosen, f"at most the {most} experts of topk_group groups"
        )


def read_scored_experts(
    fields: FieldReader,
    limit: float = 0.0,
    defaults: tuple[int, int, int, float] | None = None,
) -> ExpertsPlan:
    """Reads experts that a token chooses by their sigmoids, beside a shared one.

    Args:
        fields: config.json, or its text part.
        limit: As an ``ExpertsPlan``'s.
        defaults: Experts, those of a token, the width of one, and the factor; None: they are said.

    Raises:
        ConfigError: A field is missing or wrong.
    """
    count, chosen, width, factor = defaults or (None, None, None, 1.0)
    router = SigmoidRouter(
        fields.positive_int("n_group", 1),
        fields.positive_int("topk_group", 1),
        fields.number("routed_scaling_factor", factor),
    )
    inner_size = fields.positive_int("moe_intermediate_size", width)
    num_shared = fields.non_negative_int("n_shared_experts", 1)
    plan = ExpertsPlan(
        num_experts=fields.positive_int("n_routed_experts", count),
        num_chosen=fields.positive_int("num_experts_per_tok", chosen),
        inner_size=inner_size,
        normalises=fields.boolean("norm_topk_prob", True),
        shared=MlpPlan(num_shared * inner_size, limit=limit) if num_shared else None,
        router=router,
        limit=limit,
    )
    check_expert_groups(fields, plan, router, "n_group", "num_experts_per_tok")
    return plan


def refuse_quantization(fields: FieldReader) -> None:
    """Refuses a checkpoint whose weights are stored in a way that the family does not load.

    Raises:
        UnsupportedFeatureError: It is one.
    """
    if fields.has("quantization_config"):
        method = fields.sub_reader("quantization_config").text("quant_method", "unnamed")
        if reads_method(method):
            return
        raise UnsupportedFeatureError(
            f"the checkpoint is quantised ({method}), which this model family does not load (it "
            f"loads {', '.join(METHODS)}): use its BF16 or F32 release."
        )
