"""What each architecture of GGUF files is here: one table. Torch-free.

An entry says which model of which config a file holds, which of its keys are which fields, and how
its tensors are called in the family's releases. What no field says is a function of
``gguf_readers``; what conversion did to values is ``gguf_conversion``'s.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from vllm.exceptions import UnsupportedModelError
from vllm.model_executor.model_loader import gguf_readers as readers
from vllm.model_executor.model_loader.gguf_keys import Keys
from vllm.utils.gguf_file import GgufFile

Rows = Literal["as released", "pairs", "tiled heads"]


@dataclass(frozen=True, slots=True)
class Take:
    """A field of config.json that is a key of the file.

    Attributes:
        name: The field.
        key: The key, without the architecture.
        kind: How it is read: see ``Keys``.
        default: What an absent key means; None: see ``is_optional``.
        is_optional: Whether an absent key leaves the field out; else it is refused.
    """

    name: str
    key: str
    kind: Literal["integer", "number", "count", "boolean"] = "integer"
    default: int | float | None = None
    is_optional: bool = False

    def read(self, keys: Keys) -> dict[str, Any]:
        """Return the field, or nothing.

        Raises:
            ConfigError: The key is missing or of the wrong type.
        """
        if self.is_optional and not keys.has(self.key):
            return {}
        if self.kind == "number":
            return {self.name: keys.number(self.key, self.default)}
        if self.kind == "count":
            return {self.name: keys.count(self.key)}
        if self.kind == "boolean":
            return {self.name: keys.boolean(self.key, bool(self.default))}
        return {
            self.name: keys.integer(self.key, None if self.default is None else int(self.default))
        }


@dataclass(frozen=True, slots=True)
class Cut:
    """A matrix of a file that is several of a release's.

    Attributes:
        names: What they are called in a release's layer.
        find_rows: Function (keys, rows) -> for each of them, which rows of it are its own.
    """

    names: tuple[str, ...]
    find_rows: Callable[[Keys, int], list[list[int]]]


@dataclass(frozen=True, slots=True)
class DraftNames:
    """How the tensors of a block that drafts are called in releases.

    Attributes:
        layer: Prefix of those that every layer has.
        parts: Other parts of the block -> names.
        top: Tensors outside blocks that a file of drafts alone has for them -> names.
        pair: What ``nextn.eh_proj``, the embedding's columns first, is; two names: each its half.
        count: The field that says how many there are.
    """

    layer: str
    parts: Mapping[str, str]
    pair: tuple[str, ...]
    count: str
    top: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of GGUF files.

    Attributes:
        model: The release's class, in ``models.registry``.
        model_type: The release's type.
        read: What the other fields of the config are.
        takes: Fields that are keys.
        said: Fields that no key says, as every file has them.
        parts: Parts of a block -> their names in a release's layer.
        shapes: Ends of names -> shape in the release, where files have it otherwise: -1 stands for
            all that is left, 0 for the file's last axis.
        cuts: Parts that are several of a release's.
        vectors: The same, of tensors whose names end otherwise on one side.
        top: Tensors outside blocks, without their ends -> names; "": left out.
        layer: What stands before the number of a layer.
        experts: Where a layer's experts are, and the names of their gate, up and down matrices.
        text_type: Where the release is a wrapper, the type of its text part, which a file is; else
            empty.
        rows: How the rows of queries and keys, or of value heads, lie.
        drafts: Of a block behind the layers that drafts tokens; None: it is left out.
    """

    model: str
    model_type: str
    read: Callable[[Keys], dict[str, Any]] = readers.read_plain
    takes: tuple[Take, ...] = ()
    said: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    vectors: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layer: str = "model.layers"
    experts: tuple[str, str, str, str] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    text_type: str = ""
    rows: Rows = "as released"
    drafts: DraftNames | None = None


_TOP: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
_PLAIN = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA3 = {
    **_PLAIN,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_GEMMA3,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_QWEN35 = {
    **_PLAIN,
    **_SHARED_EXPERT,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35_VECTORS = {"ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log"}
_GPT_OSS = {
    **_PLAIN,
    "post_attention_norm": "post_attention_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_V4 = {
    "hc_attn_fn": "hc_attn_fn",
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_a": "attn.wq_a",
    "attn_q_a_norm": "attn.q_norm",
    "attn_q_b": "attn.wq_b",
    "attn_kv": "attn.wkv",
    "attn_kv_a_norm": "attn.kv_norm",
    "attn_output_a": "attn.wo_a",
    "attn_output_b": "attn.wo_b",
    "attn_compressor_kv": "attn.compressor.wkv",
    "attn_compressor_gate": "attn.compressor.wgate",
    "attn_compressor_norm": "attn.compressor.norm",
    "indexer.attn_q_b": "attn.indexer.wq_b",
    "indexer.proj": "attn.indexer.weights_proj",
    "indexer_compressor_kv": "attn.indexer.compressor.wkv",
    "indexer_compressor_gate": "attn.indexer.compressor.wgate",
    "indexer_compressor_norm": "attn.indexer.compressor.norm",
    "ffn_gate_inp": "ffn.gate",
    "ffn_gate_shexp": "ffn.shared_experts.w1",
    "ffn_up_shexp": "ffn.shared_experts.w3",
    "ffn_down_shexp": "ffn.shared_experts.w2",
}
_HYPER_VECTORS = {
    f"hc_{half}_{part}.weight": f"hc_{half}_{part}"
    for half in ("attn", "ffn")
    for part in ("fn", "base", "scale")
}
_V4_VECTORS = {
    **_HYPER_VECTORS,
    "attn_sinks.weight": "attn.attn_sink",
    "attn_sinks": "attn.attn_sink",
    "attn_compressor_ape.weight": "attn.compressor.ape",
    "indexer_compressor_ape.weight": "attn.indexer.compressor.ape",
    "exp_probs_b.bias": "ffn.gate.bias",
    "ffn_gate_tid2eid.weight": "ffn.gate.tid2eid",
}
_HYPER_HEAD = {f"output_hc_{part}.weight": f"hc_head_{part}" for part in ("fn", "base", "scale")}
_V4_DRAFTS = DraftNames(
    layer="mtp.0",
    parts={
        "nextn.enorm.weight": "mtp.0.enorm.weight",
        "nextn.hnorm.weight": "mtp.0.hnorm.weight",
        "nextn.shared_head_norm.weight": "mtp.0.norm.weight",
        **{part: f"mtp.0.{part}" for part in ("e_proj.weight", "h_proj.weight")},
        **{part: f"mtp.0.{part}" for part in ("enorm.weight", "hnorm.weight", "norm.weight")},
        **{f"hc_head_{part}.weight": f"mtp.0.hc_head_{part}" for part in ("fn", "base", "scale")},
    },
    pair=("mtp.0.e_proj.weight", "mtp.0.h_proj.weight"),
    count="num_nextn_predict_layers",
    top={stored: f"mtp.0.{name}" for stored, name in _HYPER_HEAD.items()},
)
_DRAFTS = DraftNames(
    layer="mtp.layers.0",
    parts={
        "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "nextn.shared_head_norm.weight": "mtp.norm.weight",
    },
    pair=("mtp.fc.weight",),
    count="mtp_num_hidden_layers",
)

# Of recurrent layers with a decay a channel.
_CHANNELS = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
_CHANNEL_VECTORS = {"ssm_dt.bias": "self_attn.dt_bias", "ssm_a": "self_attn.A_log"}
_OWN_DRAFTS = replace(_DRAFTS, count="num_nextn_predict_layers")
_SCORED = {
    **_PLAIN,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_SCORE_VECTORS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_INDEXER = {
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}

# The norm behind the last layer is called after the embedding.
_LFM2_TOP = {**_TOP, "token_embd_norm": "model.norm"}
_LFM2 = {
    **_PLAIN,
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_LFM2_SHAPES = {".conv.conv.weight": (-1, 1, 0)}
# Files give the width that there is, not what it is computed from.
_LFM2_SAID = {"block_auto_adjust_ff_dim": False}

_WIDTH = Take("intermediate_size", "feed_forward_length")
_WINDOW = Take("sliding_window", "attention.sliding_window")
_SOFT_CAP = Take("final_logit_softcapping", "final_logit_softcapping", "number", is_optional=True)
_CHOSEN = Take("num_experts_per_tok", "expert_used_count")
_EXPERT_WIDTH = Take("moe_intermediate_size", "expert_feed_forward_length")
_EXPERTS = (Take("num_experts", "expert_count"), _CHOSEN, _EXPERT_WIDTH)
_RECURRENT = (
    Take("linear_conv_kernel_dim", "ssm.conv_kernel"),
    Take("linear_key_head_dim", "ssm.state_size"),
    Take("linear_num_key_heads", "ssm.group_count"),
)
_SCORED_TAKES = (
    _WIDTH,
    Take("n_routed_experts", "expert_count"),
    _CHOSEN,
    _EXPERT_WIDTH,
    Take("n_shared_experts", "expert_shared_count", "count"),
    Take("first_k_dense_replace", "leading_dense_block_count", "count"),
    Take("routed_scaling_factor", "expert_weights_scale", "number", 1.0),
    Take("norm_topk_prob", "expert_weights_norm", "boolean", False),
    Take("n_group", "expert_group_count", is_optional=True),
    Take("topk_group", "expert_group_used_count", is_optional=True),
)
_LATENT_TAKES = (
    *_SCORED_TAKES,
    Take("kv_lora_rank", "attention.kv_lora_rank"),
    Take("q_lora_rank", "attention.q_lora_rank", is_optional=True),
    Take("rope_theta", "rope.freq_base", "number", 10_000.0),
)
_INDEXER_TAKES = (
    Take("index_n_heads", "attention.indexer.head_count"),
    Take("index_head_dim", "attention.indexer.key_length"),
    Take("index_topk", "attention.indexer.top_k"),
)
# Files store norms with one added, as they are multiplied by.
_WHOLE_NORMS = {"norm_weights_are_factors": True}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            "LlamaForCausalLM",
            "llama",
            readers.read_llama,
            (_WIDTH,),
            parts=_PLAIN,
            rows="pairs",
        ),
        "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", takes=(_WIDTH,), parts=_PLAIN),
        "qwen2moe": Architecture(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            readers.read_qwen2_moe,
            _EXPERTS,
            # No key says so: no release normalises.
            {"norm_topk_prob": False},
            {**_PLAIN, **_SHARED_EXPERT},
        ),
        "mistral3": Architecture(
            "Ministral3ForCausalLM",
            "ministral3",
            readers.read_mistral3,
            (_WIDTH,),
            parts=_PLAIN,
            rows="pairs",
        ),
        "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", takes=(_WIDTH,), parts=_PLAIN),
        "qwen3moe": Architecture(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            readers.read_experts_of_any_width,
            _EXPERTS,
            # No key says so: every release does.
            {"norm_topk_prob": True},
            _PLAIN,
        ),
        "phi3": Architecture(
            "Phi3ForCausalLM",
            "phi3",
            readers.read_phi3,
            (_WIDTH,),
            parts=_PLAIN,
            cuts={
                "attn_qkv": Cut(
                    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    readers.find_head_rows,
                ),
                "ffn_up": Cut(("mlp.gate_proj", "mlp.up_proj"), readers.find_half_rows),
            },
        ),
        "gemma2": Architecture(
            "Gemma2ForCausalLM",
            "gemma2",
            readers.read_gemma2,
            # The first files lack what all models of the family have.
            (
                _WIDTH,
                replace(_WINDOW, default=4096),
                Take("final_logit_softcapping", "final_logit_softcapping", "number", 30.0),
                Take("attn_logit_softcapping", "attn_logit_softcapping", "number", 50.0),
            ),
            _WHOLE_NORMS,
            _GEMMA3,
        ),
        "gemma3": Architecture(
            "Gemma3ForCausalLM",
            "gemma3_text",
            readers.read_gemma3,
            (_WIDTH, _WINDOW, _SOFT_CAP),
            _WHOLE_NORMS,
            _GEMMA3,
        ),
        "gemma-embedding": Architecture(
            "Gemma3ForCausalLM",
            "gemma3_text",
            readers.read_gemma3,
            (_WIDTH, _WINDOW),
            {**_WHOLE_NORMS, "use_bidirectional_attention": True},
            _GEMMA3,
        ),
        "gemma4": Architecture(
            "Gemma4ForCausalLM",
            "gemma4_text",
            readers.read_gemma4,
            (_WINDOW, _SOFT_CAP),
            parts=_GEMMA4,
            vectors={
                "layer_output_scale.weight": "layer_scalar",
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
            },
            experts=("experts", "gate_proj", "up_proj", "down_proj"),
        ),
        "gpt-oss": Architecture(
            "GptOssForCausalLM",
            "gpt_oss",
            readers.read_gpt_oss,
            (
                Take("intermediate_size", "expert_feed_forward_length"),
                Take("num_local_experts", "expert_count"),
                _CHOSEN,
                _WINDOW,
            ),
            parts=_GPT_OSS,
            vectors={"attn_sinks": "self_attn.sinks", "attn_sinks.weight": "self_attn.sinks"},
        ),
        "qwen35": Architecture(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            readers.read_qwen35,
            (_WIDTH, *_RECURRENT),
            _WHOLE_NORMS,
            _QWEN35,
            _QWEN35_VECTORS,
            rows="tiled heads",
            drafts=_DRAFTS,
        ),
        "qwen35moe": Architecture(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            readers.read_qwen35_experts,
            (*_EXPERTS, *_RECURRENT),
            _WHOLE_NORMS,
            _QWEN35,
            _QWEN35_VECTORS,
            rows="tiled heads",
            drafts=_DRAFTS,
        ),
        "qwen3next": Architecture(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            readers.read_qwen35_experts,
            (*_EXPERTS, *_RECURRENT),
            # Conversion parts the projections that releases have by key head.
            {**_WHOLE_NORMS, "projections_are_apart": True, "norm_topk_prob": True},
            _QWEN35,
            _QWEN35_VECTORS,
            cuts={
                "ssm_ba": Cut(
                    ("linear_attn.in_proj_b", "linear_attn.in_proj_a"), readers.find_gate_rows
                )
            },
            drafts=_DRAFTS,
        ),
        "deepseek2": Architecture(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            readers.read_deepseek2,
            _LATENT_TAKES,
            parts={**_SCORED, **_LATENT},
            vectors=_SCORE_VECTORS,
            drafts=_OWN_DRAFTS,
        ),
        "deepseek32": Architecture(
            "DeepseekV32ForCausalLM",
            "deepseek_v32",
            readers.read_deepseek32,
            (*_LATENT_TAKES, *_INDEXER_TAKES),
            parts={**_SCORED, **_LATENT, **_INDEXER},
            vectors=_SCORE_VECTORS,
            drafts=_OWN_DRAFTS,
        ),
        "glm-dsa": Architecture(
            "GlmMoeDsaForCausalLM",
            "glm_moe_dsa",
            readers.read_glm_dsa,
            (*_LATENT_TAKES, *_INDEXER_TAKES),
            parts={**_SCORED, **_LATENT, **_INDEXER},
            vectors=_SCORE_VECTORS,
            drafts=_OWN_DRAFTS,
        ),
        "kimi-linear": Architecture(
            "KimiLinearForCausalLM",
            "kimi_linear",
            readers.read_kimi_linear,
            (
                _WIDTH,
                Take("num_experts", "expert_count"),
                Take("num_experts_per_token", "expert_used_count"),
                _EXPERT_WIDTH,
                Take("num_shared_experts", "expert_shared_count", "count"),
                Take("first_k_dense_replace", "leading_dense_block_count", "count"),
                Take("routed_scaling_factor", "expert_weights_scale", "number", 1.0),
                Take("moe_renormalize", "expert_weights_norm", "boolean", True),
                Take("num_expert_group", "expert_group_count", is_optional=True),
                Take("topk_group", "expert_group_used_count", is_optional=True),
                Take("kv_lora_rank", "attention.kv_lora_rank"),
                Take("v_head_dim", "attention.value_length_mla"),
            ),
            {"q_lora_rank": None},
            {
                **_PLAIN,
                **_LATENT,
                **_CHANNELS,
                "ffn_gate_inp": "block_sparse_moe.gate",
                **{
                    f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj"
                    for part in ("gate", "up", "down")
                },
            },
            {
                **_CHANNEL_VECTORS,
                "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
            },
            {"_conv1d.weight": (-1, 1, 0), ".A_log": (1, 1, -1, 1)},
            experts=("block_sparse_moe.experts", "w1", "w3", "w2"),
        ),
        "lfm2": Architecture(
            "Lfm2ForCausalLM",
            "lfm2",
            readers.read_lfm2,
            (_WIDTH,),
            _LFM2_SAID,
            _LFM2,
            shapes=_LFM2_SHAPES,
            top=_LFM2_TOP,
        ),
        "lfm2moe": Architecture(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            readers.read_lfm2_moe,
            (
                _WIDTH,
                *_EXPERTS,
                Take("num_dense_layers", "leading_dense_block_count", "count"),
                Take("norm_topk_prob", "expert_weights_norm", "boolean", True),
                Take("routed_scaling_factor", "expert_weights_scale", "number", 1.0),
            ),
            _LFM2_SAID,
            _LFM2,
            _SCORE_VECTORS,
            _LFM2_SHAPES,
            top=_LFM2_TOP,
        ),
        "glm5-next": Architecture(
            "Glm5NextForConditionalGeneration",
            "glm5_next",
            readers.read_glm5_next,
            (
                *_SCORED_TAKES,
                Take("kv_lora_rank", "attention.kv_lora_rank"),
                Take("q_lora_rank", "attention.q_lora_rank"),
                Take("v_head_dim", "attention.value_length_mla"),
                Take("qk_nope_head_dim", "attention.key_length_mla"),
                *_INDEXER_TAKES,
                Take("index_kpool", "attention.indexer.kpool"),
                Take("linear_head_dim", "kda.head_dim"),
                Take("linear_conv_kernel_dim", "ssm.conv_kernel"),
                Take("hc_mult", "hyper_connection.count"),
                Take("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations"),
                Take("hc_eps", "hyper_connection.epsilon", "number"),
            ),
            {"qk_rope_head_dim": 0},
            {
                **_SCORED,
                **_LATENT,
                **_CHANNELS,
                **_INDEXER,
            },
            {
                **_CHANNEL_VECTORS,
                **_SCORE_VECTORS,
                **_HYPER_VECTORS,
                **{
                    f"indexer_compressor_{part}.weight": (
                        f"self_attn.indexer.index_kpool_compress_{part}"
                    )
                    for part in ("gate", "ape")
                },
            },
            {"_conv1d.weight": (-1, 1, 0), ".A_log": (-1,)},
            text_type="glm5_next_text",
            drafts=_OWN_DRAFTS,
        ),
        "glm4moe": Architecture(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            readers.read_glm4_moe,
            _SCORED_TAKES,
            parts=_SCORED,
            vectors=_SCORE_VECTORS,
            drafts=_OWN_DRAFTS,
        ),
        "minimax-m2": Architecture(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            readers.read_minimax_m2,
            (
                Take("intermediate_size", "expert_feed_forward_length"),
                Take("num_local_experts", "expert_count"),
                _CHOSEN,
                Take("rotary_dim", "rope.dimension_count", is_optional=True),
            ),
            parts=_SCORED,
            vectors=_SCORE_VECTORS,
        ),
        "deepseek4": Architecture(
            "DeepseekV4ForCausalLM",
            "deepseek_v4",
            readers.read_deepseek4,
            (
                Take("head_dim", "attention.key_length"),
                Take("q_lora_rank", "attention.q_lora_rank"),
                Take("o_groups", "attention.output_group_count"),
                Take("o_lora_rank", "attention.output_lora_rank"),
                _WINDOW,
                Take("compress_rope_theta", "attention.compress_rope_freq_base", "number"),
                *_INDEXER_TAKES,
                Take("qk_rope_head_dim", "rope.dimension_count"),
                Take("rope_theta", "rope.freq_base", "number", 10_000.0),
                Take("n_routed_experts", "expert_count"),
                _CHOSEN,
                _EXPERT_WIDTH,
                Take("n_shared_experts", "expert_shared_count"),
                Take("routed_scaling_factor", "expert_weights_scale", "number"),
                Take("norm_topk_prob", "expert_weights_norm", "boolean", True),
                Take("hc_mult", "hyper_connection.count"),
                Take("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations"),
                Take("hc_eps", "hyper_connection.epsilon", "number"),
                Take("num_hash_layers", "hash_layer_count", "count"),
            ),
            parts=_V4,
            vectors=_V4_VECTORS,
            top={
                "token_embd": "embed",
                "output_norm": "norm",
                "output": "head",
                **{name.removesuffix(".weight"): ours for name, ours in _HYPER_HEAD.items()},
            },
            layer="layers",
            experts=("ffn.experts", "w1", "w3", "w2"),
            drafts=_V4_DRAFTS,
        ),
    }
)
# Other kinds of files than models: what they are.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "adapter": "a LoRA adapter, which is not served: merge it into its model",
        "mmproj": "a vision tower, which is not served: give the model's own file",
        "imatrix": "an importance matrix, which is no model: give the model that it was used for",
    }
)


def find_architecture(file: GgufFile) -> Architecture:
    """Return what a file's architecture is here.

    Raises:
        UnsupportedModelError: It is not served, or the file holds no model.
    """
    kind = str(file.keys.get("general.type", "model"))
    if kind in _KINDS:
        raise UnsupportedModelError(f"{file.path} holds {_KINDS[kind]}.")
    name = str(file.keys.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {name!r}, which is not served from "
            f"GGUF: served are {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]
