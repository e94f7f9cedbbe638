"""Checkpoints of the packed formats, written value by value from their descriptions.

``encode`` rounds one matrix; what it returns holds the tensors as a release stores them and,
spelled out from the format's definition, the values that they mean.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# What releases in blocks of FP8 keep plain besides: rows fewer than a block has.
_PLAIN = ("in_proj_a", "in_proj_b", "in_proj_ba", "b_proj", "weights_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    """One way of storing matrices."""

    method: str
    bits: int = 4
    group: int = 32  # 0: all inputs
    is_symmetric: bool = True
    adds_one: bool = True
    has_order: bool = False
    scale_type: torch.dtype = torch.float16
    rounds_inputs: bool = False
    block: int = 0  # rows and columns under one scale, by the name of fp8 alone
    is_whole: bool = False  # one scale for the matrix, and scales fixed beforehand for its inputs
    is_nested: bool = False  # scales of NF4 are rounded too
    by_auto_round: bool = False  # described, and packed, as AutoRound does

    @property
    def by_bitsandbytes(self) -> bool:
        """Whether bitsandbytes stores matrices so: in one piece."""
        return self.method in ("nf4", "LLM.int8()")

    def config(self) -> dict[str, Any]:
        """Returns the quantization_config."""
        if self.by_auto_round:
            return self._auto_round_config()
        if self.block:
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [self.block, self.block],
                "modules_to_not_convert": list(_PLAIN),
            }
        if self.method == "modelopt":
            return {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                "ignore": ["lm_head", "*.mlp.gate"],
            }
        if self.by_bitsandbytes:
            return {
                "quant_method": "bitsandbytes",
                "load_in_4bit": self.bits == 4,
                "load_in_8bit": self.bits == 8,
                "bnb_4bit_quant_type": self.method,
                "bnb_4bit_use_double_quant": self.is_nested,
            }
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group or -1,
                "zero_point": True,
                "version": "gemm",
            }
        if self.method == "gptq":
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group or -1,
                "sym": self.is_symmetric,
                "desc_act": self.has_order,
                "checkpoint_format": "gptq" if self.adds_one else "gptq_v2",
            }
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.is_symmetric,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
        }
        spelled = {
            "packed": "pack-quantized",
            "int8": "int-quantized",
            "fp8": "float-quantized",
            "nvfp4": "nvfp4-pack-quantized",
            "mxfp4": "mxfp4-pack-quantized",
            "mxfp8": "mxfp8-quantized",
        }
        inputs = None
        if self.is_whole:
            weights["strategy"] = "tensor"
            inputs = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}
        if self.method in ("nvfp4", "mxfp4", "mxfp8"):
            weights["type"] = "float"
        if self.method == "nvfp4":
            weights["strategy"] = "tensor_group"
            inputs = {**weights, "dynamic": "local"}
        if self.rounds_inputs:
            inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
        if self.method == "fp8":
            weights["type"] = "float"
            inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
        return {
            "quant_method": "compressed-tensors",
            "format": spelled[self.method],
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
            },
        }

    def _auto_round_config(self) -> dict[str, Any]:
        own = "auto_round:auto_gptq" if self.adds_one else "auto_round"
        packing, kind = {
            "gptq": (own, "int"),
            "awq": ("auto_round:auto_awq", "int"),
            "fp8": ("auto_round:fp8_static", "fp"),
            "mxfp4": ("auto_round:llm_compressor", "mx_fp"),
            "nvfp4": ("auto_round:llm_compressor", "nv_fp"),
        }[self.method]
        return {
            "quant_method": "auto-round",
            "packing_format": packing,
            "bits": self.bits,
            "group_size": self.group or -1,
            "sym": self.is_symmetric,
            "data_type": kind,
            "block_name_to_quantize": "model.layers",
            "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
        }


FORMATS = {
    "w4a16": Format("packed", scale_type=torch.bfloat16),
    "w4a16-asymmetric": Format("packed", is_symmetric=False, group=16),
    "w4a16-fp32-scales": Format("packed", is_symmetric=False, scale_type=torch.float32),
    "w4a16-channel": Format("packed", group=0),
    "w8a16": Format("packed", bits=8, group=16, scale_type=torch.bfloat16),
    "w8a16-asymmetric": Format("packed", bits=8, group=16, is_symmetric=False),
    "w8a16-channel": Format("int8", bits=8, group=0, scale_type=torch.float32),
    "w8a8-static": Format("int8", bits=8, group=0, scale_type=torch.float32, is_whole=True),
    "fp8": Format("fp8", bits=8, group=0, scale_type=torch.bfloat16),
    "fp8-blocks": Format("fp8", bits=8, block=16, scale_type=torch.float32),
    "nvfp4": Format("nvfp4", group=16),
    "nvfp4-modelopt": Format("modelopt", group=16),
    "mxfp4": Format("mxfp4", group=32),
    "mxfp8": Format("mxfp8", bits=8, group=32),
    "awq": Format("awq", group=16, is_symmetric=False),
    "gptq": Format("gptq", group=16),
    "gptq-asymmetric": Format("gptq", group=16, is_symmetric=False),
    "gptq-order": Format("gptq", group=16, is_symmetric=False, has_order=True),
    "gptq-v2-8bit": Format("gptq", bits=8, group=0, adds_one=False, is_symmetric=False),
    "nf4": Format("nf4", group=32),
    "nf4-nested": Format("nf4", group=16, is_nested=True),
    "llm-int8": Format("LLM.int8()", bits=8, group=0),
    "auto-round": Format("gptq", group=16, adds_one=False, is_symmetric=False, by_auto_round=True),
    "auto-round-gptq": Format("gptq", group=16, by_auto_round=True),
    "auto-round-awq": Format("awq", group=16, is_symmetric=False, by_auto_round=True),
    "auto-round-fp8": Format("fp8", bits=8, group=0, by_auto_round=True),
    "auto-round-mxfp4": Format("mxfp4", group=32, by_auto_round=True),
    "auto-round-nvfp4": Format("nvfp4", group=16, by_auto_round=True),
}


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns int32 words along the last axis, the first code lowest."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word))
    words = torch.zeros((*padded.shape[:-1], padded.shape[-1] // per_word), dtype=torch.long)
    for i in range(per_word):
        words |= padded[..., i::per_word] << (bits * i)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def encode(
    form: Format, weight: torch.Tensor, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns the tensors after the matrix's name, and the fp32 values that they mean."""
    rows, columns = weight.shape
    if form.block:
        size = form.block
        grid = torch.nn.functional.max_pool2d(weight.abs()[None], size, ceil_mode=True)[0] / 448
        scale = grid.to(form.scale_type)
        spread = scale.float().repeat_interleave(size, 0).repeat_interleave(size, 1)
        spread = spread[:rows, :columns]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread
    if form.method == "fp8":
        scale = (weight.abs().amax(1, keepdim=True) / 448).to(form.scale_type)
        codes = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scale[:, 0] if form.by_auto_round else scale
        return {"weight": codes, "weight_scale": stored}, codes.float() * scale.float()
    if form.method in ("nvfp4", "modelopt", "mxfp4", "mxfp8"):
        return _encode_small_floats(form, weight)
    if form.by_bitsandbytes:
        return _encode_bitsandbytes(form, weight)
    group = form.group or columns
    num_groups = -(-columns // group)
    generator = torch.Generator().manual_seed(seed)
    group_of = torch.arange(columns) // group
    if form.has_order:
        group_of = group_of[torch.randperm(columns, generator=generator)]
    middle, most = 1 << form.bits - 1, (1 << form.bits) - 1
    scale = torch.empty(rows, num_groups)
    zero = torch.full((rows, num_groups), middle)
    for g in range(num_groups):
        part = weight[:, group_of == g]
        low, high = part.amin(1), part.amax(1)
        if form.is_symmetric:
            scale[:, g] = part.abs().amax(1) / (middle - 1)
        else:
            scale[:, g] = (high - low) / most
            zero[:, g] = (-low / scale[:, g]).round().clamp(0, most).int()
    if form.is_whole:
        scale = scale.amax(0, keepdim=True).expand(rows, 1)
    # What cannot be told from a scale's rounding is not at issue here.
    scale = scale.to(form.scale_type)
    codes = (weight / scale.float()[:, group_of]).round().int() + zero[:, group_of]
    codes = codes.clamp(0, most)
    values = (codes - zero[:, group_of]).double() * scale.double()[:, group_of]
    tensors = _spell(form, codes, scale, zero, group_of)
    return tensors, values.float()


def _spell(
    form: Format,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group_of: torch.Tensor,
) -> dict[str, torch.Tensor]:
    if form.is_whole:
        fixed = {"weight_scale": scale[0], "input_scale": torch.tensor([0.02])}
        return {"weight": (codes - 128).to(torch.int8), **fixed}
    if form.method == "int8":
        return {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
    if form.method == "packed":
        tensors = {
            "weight_packed": pack(codes, form.bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(codes.shape),
        }
        if not form.is_symmetric:
            tensors["weight_zero_point"] = pack(zero.T, form.bits).T.contiguous()
        return tensors
    if form.method == "awq":

        def interleave(values: torch.Tensor) -> torch.Tensor:
            octets = values.unflatten(-1, (-1, 8))
            return pack(octets[..., list(AWQ_ORDER)].flatten(-2), 4)

        return {
            "qweight": interleave(codes.T),
            "qzeros": interleave(zero.T),
            "scales": scale.T.contiguous(),
        }
    stored = (zero.T - int(form.adds_one)) % (1 << form.bits)
    return {
        "qweight": pack(codes, form.bits).T.contiguous(),
        "qzeros": pack(stored, form.bits),
        "scales": scale.T.contiguous(),
        "g_idx": group_of.int(),
    }


# Of e2m1 codes 0 to 7.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _encode_small_floats(
    form: Format, weight: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, form.group)
    peaks = grouped.abs().amax(2)
    tensors: dict[str, torch.Tensor] = {}
    if form.method in ("nvfp4", "modelopt"):
        # Near what makes the largest scale the largest e4m3 number: quotients by it are no products
        # with its reciprocal.
        whole = 0.7 * 448 * 6 / weight.abs().max()
        stored = (peaks / 6 * whole).to(torch.float8_e4m3fn)
        if form.method == "nvfp4":
            tensors["weight_global_scale"] = whole.view(1)
            tensors["input_global_scale"] = torch.tensor([3.0])
            scale = stored.float() / whole
        else:
            tensors["weight_scale_2"] = 1 / whole
            tensors["input_scale"] = torch.tensor(0.3)
            scale = stored.float() * (1 / whole)
        tensors["weight_scale"] = stored
    else:
        exponents = torch.ceil(torch.log2(peaks / (448 if form.bits == 8 else 6)))
        tensors["weight_scale"] = (exponents + 127).byte()
        scale = torch.exp2(exponents)
    scaled = grouped / scale[..., None].clamp_min(1e-30)
    if form.bits == 8:
        codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors["weight"] = codes.view(rows, columns)
        return tensors, (codes.float() * scale[..., None]).view(rows, columns)
    nearest = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    values = torch.where(scaled < 0, -_E2M1[nearest], _E2M1[nearest]) * scale[..., None]
    nibbles = (nearest + 8 * (scaled < 0)).byte().view(rows, columns)
    name = "weight" if form.method == "modelopt" else "weight_packed"
    tensors[name] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    return tensors, values.view(rows, columns)


_NF4 = """
    -1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
    -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0
    0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1
"""
_NESTED_RUN = 10


def _encode_bitsandbytes(
    form: Format, weight: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = weight.shape
    if form.bits == 8:
        peaks = weight.abs().amax(1)
        codes = (weight * 127 / peaks[:, None]).round()
        tensors = {"weight": codes.to(torch.int8), "SCB": peaks}
        tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return tensors, codes * (peaks / 127)[:, None]
    blocks = weight.reshape(-1, form.group)
    scale = blocks.abs().amax(1)
    state = {"quant_type": "nf4", "blocksize": form.group, "shape": [rows, columns]}
    tensors = {"weight.absmax": scale}
    if form.is_nested:
        offset = float(scale.mean())
        table = torch.linspace(-1, 1, 256)
        runs = (scale - offset).split(_NESTED_RUN)
        nested = torch.stack([run.abs().amax() for run in runs])
        spread = nested.repeat_interleave(_NESTED_RUN)[: len(scale)]
        stored = ((scale - offset)[:, None] / spread[:, None] - table).abs().argmin(1)
        scale = table[stored] * spread + offset
        state |= {"nested_blocksize": _NESTED_RUN, "nested_offset": offset}
        tensors = {"weight.absmax": stored.byte(), "weight.nested_absmax": nested}
        tensors["weight.nested_quant_map"] = table
    table = torch.tensor([float(value) for value in _NF4.split()])
    codes = ((blocks / scale[:, None])[..., None] - table).abs().argmin(-1)
    flat = codes.flatten().byte()
    tensors["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
    tensors["weight.quant_map"] = table
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, (table[codes] * scale[:, None]).view(rows, columns)


def write_quantised(
    form: Format, raw: dict[str, Any], state: dict[str, torch.Tensor], folder: Path
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint whose projections are quantised; returns its twin of plain values."""
    tensors: dict[str, torch.Tensor] = {}
    twin: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if ".experts." in name and value.ndim == 3:
            # transformers stacks experts; releases name them one by one.
            prefix, leaf = name.rsplit(".", 1)
            for e, matrix in enumerate(value):
                parts = (
                    {"down_proj": matrix}
                    if leaf == "down_proj"
                    else dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                )
                for part, own in parts.items():
                    _add(form, f"{prefix}.{e}.{part}.weight", own, tensors, twin)
        else:
            _add(form, name, value, tensors, twin)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**raw, "quantization_config": form.config()}
    (folder / "config.json").write_text(json.dumps(config))
    return twin


def _add(
    form: Format,
    name: str,
    value: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    twin: dict[str, torch.Tensor],
) -> None:
    is_plain = form.block and name.removesuffix(".weight").endswith(
        tuple(f".{part}" for part in _PLAIN)
    )
    if is_plain:
        tensors[name] = twin[name] = value.clone()
    elif name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")) or (
        ".in_proj_" in name
    ):
        stem = name.removesuffix("weight")
        stored, twin[name] = encode(form, value.float(), len(tensors))
        tensors.update({stem + leaf: tensor.contiguous() for leaf, tensor in stored.items()})
    else:
        tensors[name] = twin[name] = value.clone()
