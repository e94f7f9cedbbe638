"""The structs of ``csrc/vllm_native.h`` in the same order, and of ``csrc/towers.h``.

``ABI_VERSION``, which is that of ``csrc/interface_version.h``, guards both sides.
"""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

ABI_VERSION = 29

F32, BF16, MXFP4, FP8, PARTS, PANELS, BF16_PANELS, F16, INT8 = range(9)
WINDOW, ALL_ENTRIES, CHOSEN_ENTRIES = 0, 1, 2
CANDIDATES = {"": 0, "names": 1, "within": 2}
MLP, EXPERTS = 0, 1
SILU, GELU_TANH, CLAMPED, LIMITED_SILU = range(4)
MAX_SHARED_OWNERS = 2
"""Layers whose rows of a step others read."""


def _int32s(names: str) -> list[tuple[str, type[c_int32]]]:
    return [(name, c_int32) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type[c_void_p]]]:
    return [(name, c_void_p) for name in names.split()]


def _floats(names: str) -> list[tuple[str, type[c_float]]]:
    return [(name, c_float) for name in names.split()]


class Matrix(ctypes.Structure):
    """``vn_matrix``."""

    _fields_ = (
        *_pointers("data scales"),
        ("rows", c_int64),
        ("cols", c_int64),
        ("row_stride", c_int64),
        *_int32s("kind group rows_per_scale has_byte_scales"),
    )


class Panels(ctypes.Structure):
    """``vn_panels``."""

    _fields_ = (
        *_pointers("codes scales scale_factors offsets offset_factors order scale_steps"),
        *_int32s("code_kind scale_kind offset_kind group factor_groups input_kind"),
        ("scale_step", c_float),
        ("unused", c_int32),
        ("codebook", c_void_p),
    )


class Cache(ctypes.Structure):
    """``vn_cache``."""

    _fields_ = (
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("block_stride", c_int64),
        *_int32s("rows_per_block width block_size group kind head_dim"),
    )


class Step(ctypes.Structure):
    """``vn_step``."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_requests", "num_groups")),
        *_pointers("token_ids positions row_starts starts counts"),
        *_pointers("read_from wanted_from output_from"),
        *_pointers("write_from table_offsets table_lengths table_bases block_ids input_rows"),
        *_pointers("num_drafts"),
        ("total_drafts", c_int64),
        *_pointers("drafts"),
        ("num_soft", c_int64),
        *_pointers("soft_rows soft_values axes sees_to"),
    )


class Hyper(ctypes.Structure):
    """``vn_hyper``."""

    _fields_ = _pointers("fn base scale")


class Compressor(ctypes.Structure):
    """``vn_compressor``."""

    _fields_ = (
        ("ape", c_void_p),
        ("norm", c_void_p),
        ("state", Cache),
        ("entries", Cache),
        *_int32s("row_width width"),
    )


class V4Sharing(ctypes.Structure):
    """``vn_v4_sharing``."""

    _fields_ = (
        *_int32s("makes_entries chooses candidates unused"),
        ("key_proj", Matrix),
        ("key_norm", c_void_p),
    )


class NgramGate(ctypes.Structure):
    """``vn_ngram_gate``."""

    _fields_ = (("wkv", Matrix), *_pointers("q_weight k_weight"), ("index", c_int64))


class V4Layer(ctypes.Structure):
    """``vn_v4_layer``."""

    _fields_ = (
        *_int32s("kind ratio overlap unused"),
        ("attn_hyper", Hyper),
        ("ffn_hyper", Hyper),
        ("attn_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("in_proj", Matrix),
        ("q_norm", c_void_p),
        ("kv_norm", c_void_p),
        ("wq_b", Matrix),
        ("wo_a", Matrix),
        ("wo_b", Matrix),
        ("sinks", c_void_p),
        ("window", Cache),
        ("compressor", Compressor),
        ("index_compressor", Compressor),
        ("index_wq_b", Matrix),
        ("router", Matrix),
        ("router_bias", c_void_p),
        ("expert_of_token", c_void_p),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("sharing", POINTER(V4Sharing)),
        ("ngrams", POINTER(NgramGate)),
    )


class V4Model(ctypes.Structure):
    """``vn_v4_model``."""

    _fields_ = (
        ("embed", Matrix),
        ("head", Matrix),
        ("head_hyper", Hyper),
        ("norm", c_void_p),
        ("layers", POINTER(V4Layer)),
        ("mtp", POINTER(V4Layer)),
        ("mtp_e_proj", Matrix),
        ("mtp_h_proj", Matrix),
        ("mtp_enorm", c_void_p),
        ("mtp_hnorm", c_void_p),
        ("mtp_norm", c_void_p),
        ("mtp_head_hyper", Hyper),
        ("main_frequencies", c_void_p),
        ("compress_frequencies", c_void_p),
        *_int32s(
            "num_layers vocab_size hidden_size num_streams num_heads head_dim rope_dim q_lora_rank "
            "o_groups o_lora_rank window index_heads index_dim index_topk num_experts num_chosen "
            "expert_width sinkhorn_iterations"
        ),
        *_floats("routed_scale swiglu_limit hyper_eps norm_eps"),
        *_int32s("has_plain_queries cut candidate_blocks candidate_block_size"),
        ("image_token_id", c_int64),
    )


class ExpertsBeside(ctypes.Structure):
    """``vn_experts_beside``."""

    _fields_ = (
        ("norms", c_void_p * 3),
        *_pointers("router_norm expert_scales"),
        ("router", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        *_int32s("num_experts num_chosen inner unused"),
    )


class SharedExpert(ctypes.Structure):
    """``vn_shared_expert``."""

    _fields_ = (
        ("gate_up", Matrix),
        ("down", Matrix),
        ("gate", Matrix),
        *_int32s("inner unused"),
    )


class SigmoidRouter(ctypes.Structure):
    """``vn_sigmoid_router``."""

    _fields_ = (
        *_pointers("bias"),
        *_int32s("num_groups num_chosen_groups"),
        ("factor", c_float),
        *_int32s("is_softmax"),
    )


class Latents(ctypes.Structure):
    """``vn_latents``."""

    _fields_ = (
        ("key_maps", Matrix),
        ("value_maps", Matrix),
        ("queries", Matrix),
        *_pointers("norm query_norm"),
        *_int32s("latent_dim shared_dim key_dim value_dim query_rank"),
        ("eps", c_float),
    )


class PoolIndexer(ctypes.Structure):
    """``vn_pool_indexer``."""

    _fields_ = (
        ("queries", Matrix),
        ("inputs", Matrix),
        ("gate", Matrix),
        *_pointers("place_bias key_norm"),
        ("state", Cache),
        ("keys", Cache),
        *_int32s("num_heads width pool_size num_chosen turns_pairs unused"),
    )


class Recurrence(ctypes.Structure):
    """``vn_recurrence``."""

    _fields_ = (
        ("in_proj", Matrix),
        ("output", Matrix),
        ("decays", Matrix),
        ("gates", Matrix),
        *_pointers("conv decay_rates dt_bias norm"),
        ("states", Cache),
        *_int32s("number num_channels num_key_heads num_heads key_dim value_dim conv_width"),
        *_int32s("is_interleaved has_sigmoid_gate"),
        *_int32s("heads_per_block channels_per_block num_head_pieces num_pieces"),
        *_int32s("has_channel_decays"),
        ("decay_bound", c_float),
        *_int32s("unused"),
    )


class DecoderLayer(ctypes.Structure):
    """``vn_decoder_layer``."""

    _fields_ = (
        ("norms", c_void_p * 4),
        ("qkv", Matrix),
        ("output", Matrix),
        *_pointers("qkv_bias output_bias q_norm k_norm sinks frequencies"),
        ("cache", Cache),
        ("magnitude", c_float),
        *_int32s("window feed_forward activation num_experts num_chosen inner normalises"),
        ("alpha", c_float),
        ("limit", c_float),
        ("router", Matrix),
        ("router_bias", c_void_p),
        ("gate_up", Matrix),
        ("down", Matrix),
        *_pointers("gate_up_bias down_bias"),
        *_int32s("num_heads num_kv_heads head_dim"),
        *_floats("scale soft_cap"),
        *_int32s("has_own_rows shared_slot has_value_norm"),
        ("scalar", c_float),
        *_int32s("num_turned has_output_gate norms_whole_rows"),
        ("position_beta", c_float),
        *_int32s("position_length"),
        ("recurrence", POINTER(Recurrence)),
        ("latents", POINTER(Latents)),
        ("indexer", POINTER(PoolIndexer)),
        ("scores", POINTER(SigmoidRouter)),
        ("shared_expert", POINTER(SharedExpert)),
        ("beside", POINTER(ExpertsBeside)),
        ("input_gate", Matrix),
        ("input_output", Matrix),
        *_pointers("input_norm"),
        ("attn_hyper", Hyper),
        ("ffn_hyper", Hyper),
        *_pointers("axis_of_pair"),
        *_int32s("sees_pictures keeps_choice"),
        *_pointers("key_sizes noted_queries"),
    )


class DecoderModel(ctypes.Structure):
    """``vn_decoder_model``."""

    _fields_ = (
        ("embed", Matrix),
        ("head", Matrix),
        ("norm", c_void_p),
        ("layers", POINTER(DecoderLayer)),
        *_int32s("num_layers vocab_size hidden_size last_owner"),
        ("input_table", Matrix),
        ("input_projection", Matrix),
        *_pointers("input_norm"),
        *_int32s("input_width unused"),
        *_floats("input_table_scale input_projection_scale"),
        *_floats("embedding_scale final_soft_cap norm_eps"),
        *_int32s("num_streams sinkhorn_iterations"),
        *_floats("hyper_eps"),
    )


class DecoderDrafter(ctypes.Structure):
    """``vn_decoder_drafter``."""

    _fields_ = (
        ("block", DecoderModel),
        ("fc", Matrix),
        *_pointers("embedding_norm stream_norm"),
        *_int32s("skips_first unused"),
    )


class DeltaScan(ctypes.Structure):
    """``vn_delta_scan``."""

    _fields_ = (
        *_pointers("queries keys values logs betas state outputs"),
        ("num_tokens", c_int64),
        *_int32s("num_key_heads num_heads key_dim value_dim has_channel_decays unused"),
    )


class Bounds(ctypes.Structure):
    """``vn_bounds``."""

    _fields_ = _floats("low high")


class TowerMatrix(ctypes.Structure):
    """``vn_tower_matrix``."""

    _fields_ = (
        *_pointers("words scales bias"),
        ("rows", c_int64),
        ("cols", c_int64),
        ("inputs", Bounds),
        ("outputs", Bounds),
    )


class TowerLayer(ctypes.Structure):
    """``vn_tower_layer``."""

    _fields_ = (
        ("norms", c_void_p * 4),
        ("norm_biases", c_void_p * 4),
        *((name, TowerMatrix) for name in ("queries", "keys", "values", "output")),
        *((name, TowerMatrix) for name in ("gate", "up", "down")),
        *_pointers("query_norm key_norm"),
    )


class TowerShape(ctypes.Structure):
    """``vn_tower``."""

    _fields_ = (
        *_int32s("width num_heads num_kv_heads head_dim is_rms norms_values num_turned_parts"),
        *_floats("eps scale"),
        *_int32s("unused"),
    )


class Draws(ctypes.Structure):
    """``vn_draws``."""

    _fields_ = (
        ("num_draws", c_int64),
        *_pointers("rows temperature min_p top_k top_p uniforms"),
    )
