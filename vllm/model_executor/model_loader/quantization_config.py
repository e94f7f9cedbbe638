"""What a checkpoint says about how its matrices are quantised, in any of its spellings. Torch-free.

    compressed-tensors   config.json's quantization_config: groups of modules, each with a format
    fp8                  the same: blocks of FP8 under one scale each
    awq, gptq            the same, or a quantize_config.json, quant_config.json beside it
    modelopt             the same, or a hf_quant_config.json: NVFP4, FP8
    bitsandbytes         the same: NF4, LLM.int8()
    auto-round           the same: packed as one of those above, some modules by bits of their own

``find_scheme`` answers for one module; what is not served is refused by name and reason before a
byte of weights is read.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vllm.exceptions import ConfigError, UnsupportedFeatureError

Method = Literal[
    "compressed-tensors", "awq", "gptq", "fp8", "modelopt", "auto-round", "bitsandbytes"
]
METHODS: tuple[Method, ...] = get_args(Method)
# What people type for them; the right side is what a config.json says.
METHOD_NAMES: Mapping[str, Method] = {
    "compressed-tensors": "compressed-tensors",
    "awq": "awq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "fp8": "fp8",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "auto-round": "auto-round",
    "auto_round": "auto-round",
    "inc": "auto-round",
    "bitsandbytes": "bitsandbytes",
}
ByteInputs = Literal["bytes by row", "bytes by group"]
"""Inputs in eight bits: in 255 steps of the largest of a row, or of a row's group of weights."""
_OLD_FILES = ("quantize_config.json", "quant_config.json")
_MODELOPT_FILE = "hf_quant_config.json"
_FORMATS = ("int-quantized", "pack-quantized", "float-quantized")
_NVFP4_GROUP = 16
# Numbers by which inputs of products, keys and values would be rounded, and which a product of
# what is not rounded has no use for. The last four are older names.
_ROUNDING_SCALES = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".q_proj.output_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
# What no module's name has, but a pattern.
_PATTERN = re.compile(r"[*+?^$\\|()\[\]]")
_NOT_SERVED = "which is not served: use a release in another format, or its BF16 one."


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How one module's weight is stored.

    Attributes:
        format: "packed": words of codes of compressed-tensors; "int8", "fp8": a weight of that type
            and its scales; "awq"; "gptq"; "nvfp4", "mxfp4": e2m1 codes under e4m3 scales, which
            have one of the whole matrix, or under e8m0 ones; "mxfp8": e4m3 codes under e8m0 ones;
            "nf4", "bytes by row": bitsandbytes' of four and eight bits.
        bits: Of a code.
        group: Inputs under one scale; 0: all of a row, or of a whole block (fp8).
        is_symmetric: Whether there are no zero points.
        block: fp8: rows and columns under one scale; (0, 0): as the scale's shape says.
        adds_one: GPTQ's first layout, whose zero points are stored less one.
        inputs: What the inputs of its products are rounded to.
    """

    format: Literal[
        "packed",
        "int8",
        "fp8",
        "awq",
        "gptq",
        "nvfp4",
        "mxfp4",
        "mxfp8",
        "nf4",
        "bytes by row",
    ]
    bits: int
    group: int = 0
    is_symmetric: bool = True
    block: tuple[int, int] = (0, 0)
    adds_one: bool = False
    inputs: ByteInputs | None = None


# compressed-tensors' formats of small floats: how it says that a scale's inputs are chosen.
_SMALL_FLOATS: Mapping[str, tuple[WeightScheme, str]] = {
    "nvfp4-pack-quantized": (WeightScheme("nvfp4", 4, _NVFP4_GROUP), "tensor_group"),
    "mxfp4-pack-quantized": (WeightScheme("mxfp4", 4, 32), "group"),
    "mxfp8-quantized": (WeightScheme("mxfp8", 8, 32), "group"),
}


@dataclass(frozen=True, slots=True)
class _Rule:
    """A scheme and the modules that have it; ``scheme`` None: they are plain."""

    targets: tuple[str, ...]
    scheme: WeightScheme | None

    def takes(self, name: str) -> bool:
        return any(_matches(target, name) for target in self.targets)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How a checkpoint's matrices are stored.

    Attributes:
        method: Its spelling.
        rules: The first that takes a module's name decides; a name that none takes is plain.
        notes: What it asks for and is not done, as it costs accuracy alone: for the log.
    """

    method: Method
    rules: tuple[_Rule, ...]
    notes: tuple[str, ...] = ()

    def leaves_out(self, name: str) -> bool:
        """Return whether a tensor is of no use here: a scale of inputs, or of a KV cache."""
        return name.endswith(_ROUNDING_SCALES)

    def find_scheme(self, name: str) -> WeightScheme | None:
        """Return how a module's weight is stored; None: as plain values.

        Args:
            name: The module's name in the checkpoint, such as "model.layers.0.mlp.down_proj".
        """
        for rule in self.rules:
            if rule.takes(name):
                return rule.scheme
        return None


def read_quantization(
    raw: Mapping[str, Any], folder: str | Path | None = None
) -> QuantizationConfig | None:
    """Read a config.json's description of quantised weights.

    Args:
        raw: The parsed config.json.
        folder: Where files lie that other releases put beside it.

    Returns:
        None: The weights are plain, or described in another way (FP8 and FP4 of DeepSeek, MXFP4 of
        gpt-oss), which follows from the tensors themselves.

    Raises:
        ConfigError: A field is missing or of the wrong type.
        UnsupportedFeatureError: A format, layout or number of bits is not served.
    """
    declared = raw.get("quantization_config") or raw.get("compression_config")
    source = "config.json: 'quantization_config'"
    within = raw.get("text_config")
    if declared is None and isinstance(within, Mapping):
        # As releases with a vision part may have it.
        declared = within.get("quantization_config")
    if declared is None and folder is not None:
        for name in _OLD_FILES:
            file = Path(folder) / name
            if file.is_file():
                declared, source = _read_file(file), str(file)
                break
        if declared is None and (file := Path(folder) / _MODELOPT_FILE).is_file():
            declared, source = {"quant_method": "modelopt", **_read_object(file)}, str(file)
    if declared is None:
        return None
    if not isinstance(declared, Mapping):
        raise ConfigError(f"{source} is {declared!r}: it must be an object.")
    method = declared.get("quant_method")
    if method is None and source.endswith(_OLD_FILES):
        # AutoAWQ names its layout, GPTQ its order.
        method = "awq" if "version" in declared or "zero_point" in declared else "gptq"
    read = _READERS.get(method) if isinstance(method, str) else None
    return None if read is None else read(_Fields(declared, source))


def check_named_method(named: str, found: Method | None) -> None:
    """Hold what ``--quantization`` names against what the checkpoint says.

    Raises:
        ConfigError: They differ.
    """
    wanted = METHOD_NAMES[named]
    if found == wanted:
        return
    what = "plain weights" if found is None else f"weights quantised by {found}"
    raise ConfigError(
        f"quantization={named!r}, but the checkpoint holds {what}: leave it out, and what the "
        "checkpoint says is taken."
    )


class _Fields:
    """Typed reading of one description."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            return default
        is_number_for_bool = isinstance(value, bool) and kind is int
        if not isinstance(value, kind) or is_number_for_bool:
            raise ConfigError(f"{self.source}: {name!r} is {value!r}, of the wrong type.")
        return value

    def refuse(self, what: str) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(f"{self.source} asks for {what}, {_NOT_SERVED}")


def _read_file(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error


def _read_object(file: Path) -> Mapping[str, Any]:
    found = _read_file(file)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file} holds {found!r}: it must hold an object.")
    return found


def _matches(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    # Class names: every matrix that we keep so is a linear layer.
    return target in ("Linear", name) or name.endswith(f".{target}")


def _check_patterns(targets: Sequence[Any], fields: _Fields, name: str) -> tuple[str, ...]:
    for target in targets:
        if not isinstance(target, str):
            raise ConfigError(f"{fields.source}: {name!r} holds {target!r}, not a name.")
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                raise ConfigError(
                    f"{fields.source}: {name!r} holds {target!r}, no regular expression: {error}."
                ) from error
    return tuple(targets)


# ---- compressed-tensors ---------------------------------------------------------------------


def _read_compressed(fields: _Fields) -> QuantizationConfig:
    transforms = fields.get("transform_config", Mapping, {})
    if transforms.get("config_groups"):
        raise fields.refuse("inputs or outputs turned while it runs ('transform_config')")
    if fields.raw.get("sparsity_config"):
        sparsity = fields.get("sparsity_config", Mapping, {})
        if sparsity.get("format") not in (None, "dense"):
            raise fields.refuse(f"sparse weights ({sparsity.get('format')})")
    status = fields.get("quantization_status", str, "compressed")
    if status != "compressed":
        raise fields.refuse(f"weights of status {status!r}, where 'compressed' ones are stored")
    common = fields.get("format", str, "")
    ignored = _check_patterns(fields.get("ignore", list, []), fields, "ignore")
    rules, notes = [_Rule(ignored, None)], dict.fromkeys(_note_cache(fields))
    groups = fields.get("config_groups", Mapping, {})
    if not groups:
        raise ConfigError(f"{fields.source} has no 'config_groups': it names no weights.")
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise ConfigError(f"{fields.source}: config_groups.{name} is {group!r}, not an object.")
        own = _Fields(group, f"{fields.source}: config_groups.{name}")
        targets = _check_patterns(own.get("targets", list, ["Linear"]), own, "targets")
        spelled = own.get("format", str, common)
        scheme = _read_compressed_group(own, spelled)
        rules.append(_Rule(targets, scheme))
        if scheme is not None and scheme.inputs is None and group.get("input_activations"):
            inputs = _Fields(own.get("input_activations", Mapping, {}), own.source)
            notes[_note_inputs(inputs.get("num_bits", int, 8), inputs.get("type", str, "int"))] = (
                None
            )
    # Exact names and patterns stand before whole classes.
    rules[1:] = sorted(rules[1:], key=lambda rule: "Linear" in rule.targets)
    return QuantizationConfig("compressed-tensors", tuple(rules), tuple(notes))


def _note_inputs(bits: int, kind: str) -> str:
    what = {"float": "floats", "int": "whole numbers"}.get(kind, kind)
    return (
        f"The checkpoint asks for inputs of products rounded to {what} of {bits} bits: they are "
        "taken as they are, which is closer to the unquantised model"
    )


def _note_cache(fields: _Fields) -> tuple[str, ...]:
    """Returns what is said where keys and values are to be rounded; ours are kept as they are."""
    if not any(fields.raw.get(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo")):
        return ()
    return (
        "The checkpoint asks for a quantised KV cache: its scales are left out, and keys and "
        "values are kept in the type of the activations",
    )


def _read_compressed_group(fields: _Fields, spelled: str) -> WeightScheme | None:
    if fields.raw.get("weights") is None:
        return None
    weights = _Fields(fields.get("weights", Mapping, {}), f"{fields.source}.weights")
    kind, bits = weights.get("type", str, "int"), weights.get("num_bits", int, 8)
    strategy = weights.get("strategy", str, "tensor")
    group, is_symmetric = weights.get("group_size", int, 0), weights.get("symmetric", bool, True)
    if spelled in _SMALL_FLOATS:
        return _read_small_floats(fields, weights, spelled)
    if spelled not in _FORMATS:
        served = ", ".join((*_FORMATS, *_SMALL_FLOATS))
        raise fields.refuse(f"the format {spelled!r} (served: {served})")
    if weights.raw.get("actorder") in ("group", "dynamic"):
        raise weights.refuse(f"actorder {weights.raw['actorder']!r}")
    inputs = _read_inputs(fields, group)
    if spelled == "float-quantized":
        if kind != "float" or bits != 8 or not is_symmetric:
            raise weights.refuse(f"{bits} bits of {kind} as {spelled}")
        block = weights.get("block_structure", list, None)
        if strategy == "block" and block is not None:
            sizes = tuple(size for size in block if type(size) is int and size > 0)
            if len(sizes) != 2 or len(block) != 2:
                raise ConfigError(f"{weights.source}: 'block_structure' is {block!r}.")
            return WeightScheme("fp8", 8, block=(sizes[0], sizes[1]))
        if strategy not in ("tensor", "channel", "block"):
            raise weights.refuse(f"scales by {strategy!r} as {spelled}")
        return WeightScheme("fp8", 8)
    if kind != "int" or strategy not in ("tensor", "channel", "group"):
        raise weights.refuse(f"{kind} weights with scales by {strategy!r} as {spelled}")
    if strategy != "group":
        group = 0
    elif group <= 0 or group % 8:
        raise weights.refuse(f"groups of {group} inputs")
    if spelled == "int-quantized":
        if bits != 8 or not is_symmetric:
            raise weights.refuse(f"{'' if is_symmetric else 'asymmetric '}{bits} bits as {spelled}")
        return WeightScheme("int8", 8, group, inputs=inputs)
    if bits not in (4, 8):
        raise weights.refuse(f"{bits} bits (served: 4 and 8)")
    return WeightScheme("packed", bits, group, is_symmetric, inputs=inputs)


def _read_small_floats(fields: _Fields, weights: _Fields, spelled: str) -> WeightScheme:
    """Return the scheme of NVFP4, MXFP4 or MXFP8, of which nothing can be chosen.

    Inputs are taken as they are, whatever is asked for: rounding them would cost accuracy, and no
    kernel here multiplies such codes by each other.
    """
    scheme, strategy = _SMALL_FLOATS[spelled]
    if fields.raw.get("output_activations") is not None:
        raise fields.refuse("rounded outputs ('output_activations')")
    expected = {
        "type": "float",
        "num_bits": scheme.bits,
        "strategy": strategy,
        "group_size": scheme.group,
        "symmetric": True,
    }
    for name, value in expected.items():
        found = weights.get(name, type(value), value)
        if found != value:
            raise weights.refuse(f"{name} {found!r} as {spelled} (served: {value!r})")
    return scheme


def _read_inputs(fields: _Fields, group: int) -> ByteInputs | None:
    """Return what inputs are rounded to; None: what is asked for is coarser than what is done.

    Inputs that are to be rounded by scales fixed beforehand are taken as they are, too.

    Raises:
        UnsupportedFeatureError: Outputs are to be rounded.
    """
    if fields.raw.get("output_activations") is not None:
        raise fields.refuse("rounded outputs ('output_activations')")
    if fields.raw.get("input_activations") is None:
        return None
    own = _Fields(fields.get("input_activations", Mapping, {}), f"{fields.source}.inputs")
    is_plain_int8 = (
        own.get("type", str, "int") == "int"
        and own.get("num_bits", int, 8) == 8
        and own.get("symmetric", bool, True)
        and own.get("dynamic", (bool, str), False) is True
    )
    if not is_plain_int8:
        return None
    if own.get("strategy", str, "token") == "group":
        # Groups of other sizes than the weights' are taken whole.
        return "bytes by group" if own.get("group_size", int, 0) == group else None
    return "bytes by row"


# ---- AWQ, GPTQ ------------------------------------------------------------------------------


def _read_awq(fields: _Fields) -> QuantizationConfig:
    bits = fields.get("bits", int, fields.get("w_bit", int, 4))
    # AutoAWQ and GPTQModel name the layout differently.
    other = fields.get("checkpoint_format", str, fields.get("format", str, "gemm"))
    version = fields.get("version", str, other).lower()
    if bits != 4:
        raise fields.refuse(f"AWQ of {bits} bits (served: 4)")
    if version != "gemm":
        raise fields.refuse(f"AWQ's layout {version!r} (served: 'gemm')")
    group = _read_group(fields, fields.get("group_size", int, fields.get("q_group_size", int, 128)))
    plain = _check_patterns(fields.get("modules_to_not_convert", list, []), fields, "modules")
    left_out = tuple(f"re:.*{re.escape(name)}" for name in plain)
    every = _Rule(("Linear",), WeightScheme("awq", 4, group))
    return QuantizationConfig("awq", (_Rule((*left_out, "lm_head"), None), every))


def _read_gptq(fields: _Fields) -> QuantizationConfig:
    layout = fields.get("checkpoint_format", str, fields.get("format", str, "gptq"))
    if layout not in ("gptq", "gptq_v2"):
        raise fields.refuse(f"GPTQ's layout {layout!r} (served: gptq, gptq_v2)")
    rules = []
    bits, group = fields.get("bits", int, 4), fields.get("group_size", int, 128)

    def make_scheme(own_bits: int, own_group: int) -> WeightScheme:
        if own_bits not in (4, 8):
            raise fields.refuse(f"GPTQ of {own_bits} bits (served: 4 and 8)")
        return WeightScheme(
            "gptq",
            own_bits,
            _read_group(fields, own_group),
            is_symmetric=False,
            adds_one=layout == "gptq",
        )

    for pattern, values in fields.get("dynamic", Mapping, {}).items():
        bare = pattern.removeprefix("+:").removeprefix("-:")
        _check_patterns([f"re:{bare}"], fields, "dynamic")
        scheme = None
        if not pattern.startswith("-:"):
            own = _Fields(values if isinstance(values, Mapping) else {}, fields.source)
            scheme = make_scheme(own.get("bits", int, bits), own.get("group_size", int, group))
        rules.append(_Rule((f"re:{bare}",), scheme))
    if not fields.get("lm_head", bool, False):
        rules.append(_Rule(("lm_head",), None))
    rules.append(_Rule(("Linear",), make_scheme(bits, group)))
    return QuantizationConfig("gptq", tuple(rules))


def _read_fp8(fields: _Fields) -> QuantizationConfig:
    if fields.get("fmt", str, "e4m3") != "e4m3":
        raise fields.refuse(f"FP8 of the kind {fields.raw.get('fmt')!r} (served: e4m3)")
    sizes = _read_block(fields, fields.get("weight_block_size", list, []))
    rules = (_Rule(("Linear",), WeightScheme("fp8", 8, block=sizes)),)
    return QuantizationConfig("fp8", rules, (_note_inputs(8, "float"), *_note_cache(fields)))


# ModelOpt's algorithms, and the bits of the floats that they round inputs to.
_MODELOPT: Mapping[str, tuple[WeightScheme, int]] = {
    "NVFP4": (WeightScheme("nvfp4", 4, _NVFP4_GROUP), 4),
    "FP8": (WeightScheme("fp8", 8), 8),
    "FP8_PER_CHANNEL_PER_TOKEN": (WeightScheme("fp8", 8), 8),
}


def _read_modelopt(fields: _Fields) -> QuantizationConfig:
    """Read ModelOpt's description, flat or below 'quantization'."""
    if fields.raw.get("quantization") is not None:
        own = fields.get("quantization", Mapping, {})
        fields = _Fields(own, f"{fields.source}: 'quantization'")
    algorithm = fields.get("quant_algo", str, "unnamed")
    excluded = _check_patterns(
        [*fields.get("exclude_modules", list, []), *fields.get("ignore", list, [])],
        fields,
        "exclude_modules",
    )
    rules = [_Rule(tuple(_wildcard_pattern(name) for name in excluded), None)]
    notes = dict[str, None]()
    layers = fields.get("quantized_layers", Mapping, {}) if algorithm == "MIXED_PRECISION" else {}
    for name, layer in layers.items():
        if not isinstance(layer, Mapping):
            raise ConfigError(f"{fields.source}: quantized_layers.{name} is {layer!r}.")
        scheme, note = _read_modelopt_layer(
            _Fields(layer, f"{fields.source}: quantized_layers.{name}")
        )
        rules.append(_Rule((name,), scheme))
        notes[note] = None
    if not layers:
        scheme, note = _read_modelopt_layer(fields)
        rules.append(_Rule(("Linear",), scheme))
        notes[note] = None
    return QuantizationConfig("modelopt", tuple(rules), (*notes, *_note_cache(fields)))


def _read_modelopt_layer(fields: _Fields) -> tuple[WeightScheme, str]:
    """Return the scheme of a layer or of all, and what is to be said of its inputs."""
    algorithm = fields.get("quant_algo", str, "unnamed")
    if algorithm not in _MODELOPT:
        raise fields.refuse(f"ModelOpt's {algorithm!r} (served: {', '.join(_MODELOPT)})")
    scheme, bits = _MODELOPT[algorithm]
    group = fields.get("group_size", int, scheme.group)
    if scheme.group and group != scheme.group:
        raise fields.refuse(f"NVFP4 in groups of {group} inputs (served: {scheme.group})")
    return scheme, _note_inputs(bits, "float")


# ---- bitsandbytes ---------------------------------------------------------------------------


def _read_bitsandbytes(fields: _Fields) -> QuantizationConfig:
    if fields.get("load_in_8bit", bool, fields.get("_load_in_8bit", bool, False)):
        scheme = WeightScheme("bytes by row", 8)
        notes: tuple[str, ...] = (_note_inputs(8, "int"),)
    else:
        kind = fields.get("bnb_4bit_quant_type", str, "fp4")
        storage = fields.get("bnb_4bit_quant_storage", str, "uint8")
        if kind != "nf4":
            raise fields.refuse(f"bitsandbytes' {kind!r} (served: nf4)")
        if storage != "uint8":
            raise fields.refuse(f"bitsandbytes' codes stored as {storage} (served: uint8)")
        scheme, notes = WeightScheme("nf4", 4), ()
    # What was left out is plain in the files.
    return QuantizationConfig("bitsandbytes", (_Rule(("Linear",), scheme),), notes)


# ---- AutoRound ------------------------------------------------------------------------------


def _read_auto_round(fields: _Fields) -> QuantizationConfig:
    """Read AutoRound's description: how words are packed, and what modules differ in."""
    for name in ("rotation_config", "spinquant_config"):
        if fields.raw.get(name):
            raise fields.refuse(f"inputs turned while it runs ({name!r})")
    # Older releases call it their backend.
    packing = fields.get("packing_format", str, fields.get("backend", str, "auto_round"))
    rules = []
    own_rules = fields.get("extra_config", Mapping, {})
    for name, values in own_rules.items():
        source = f"{fields.source}: extra_config.{name}"
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source} is {values!r}, not an object.")
        _check_patterns([f"re:{name}"], fields, "extra_config")
        own = _Fields({**fields.raw, **values}, source)
        # Names may be patterns, found anywhere in a module's name.
        targets = (name, f"re:.*{name}$") if _PATTERN.search(name) else (name,)
        rules.append(_Rule(targets, _read_auto_round_scheme(own, packing)))
    if "lm_head" not in own_rules:
        rules.append(_Rule(("lm_head",), None))
    rules.append(_Rule(("Linear",), _read_auto_round_scheme(fields, packing)))
    act_bits = fields.get("act_bits", int, 16)
    rounds = act_bits < 16 and all(r.scheme is None or r.scheme.inputs is None for r in rules)
    kind = "int" if fields.get("act_data_type", str, "float").startswith("int") else "float"
    notes = (_note_inputs(act_bits, kind),) if rounds else ()
    return QuantizationConfig("auto-round", tuple(rules), notes)


def _read_auto_round_scheme(fields: _Fields, packing: str) -> WeightScheme | None:
    """Return the scheme of all modules or of one; None: it is plain."""
    bits, kind = fields.get("bits", int, 4), fields.get("data_type", str, "int")
    if bits >= 16:
        return None
    served = {"int": (4, 8), "mx_fp": (4, 8), "nv_fp": (4,), "fp": (8,)}
    if bits not in served.get(kind, ()):
        raise fields.refuse(
            f"AutoRound of {bits} bits of the kind {kind!r} "
            f"(served: {', '.join(f'{name} of {numbers}' for name, numbers in served.items())})"
        )
    sizes = fields.get("group_size", (int, list), 128)
    if kind == "nv_fp":
        return _SMALL_FLOATS["nvfp4-pack-quantized"][0]
    if kind == "mx_fp":
        return _SMALL_FLOATS[f"mxfp{bits}-{'pack-' if bits == 4 else ''}quantized"][0]
    if kind == "fp":
        block = fields.get("weight_block_size", list, sizes if isinstance(sizes, list) else [])
        return WeightScheme("fp8", 8, block=_read_block(fields, block))
    if isinstance(sizes, list):
        raise ConfigError(f"{fields.source}: 'group_size' is {sizes!r}; allowed: a number.")
    group = _read_group(fields, sizes)
    if "llm_compressor" in packing:
        if bits != 8:
            raise fields.refuse(f"AutoRound's packing {packing!r} of {bits} bits (served: 8)")
        is_rounded = fields.get("act_bits", int, 16) == 8 and fields.get("act_dynamic", bool, True)
        return WeightScheme("int8", 8, group, inputs="bytes by row" if is_rounded else None)
    if "awq" in packing:
        if bits != 4:
            raise fields.refuse(f"AWQ of {bits} bits (served: 4)")
        return WeightScheme("awq", 4, group)
    if packing.split(":")[0] not in ("auto_round", "auto_gptq", "gptq"):
        raise fields.refuse(
            f"AutoRound's packing {packing!r} (served: auto_round and its variants)"
        )
    # Its own packing is GPTQ's, with zero points as they are.
    return WeightScheme("gptq", bits, group, is_symmetric=False, adds_one="gptq" in packing)


def _read_block(fields: _Fields, block: Sequence[Any]) -> tuple[int, int]:
    """Return the rows and columns under one scale; (0, 0): as the scale's shape says."""
    if not block:
        return (0, 0)
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ConfigError(f"{fields.source}: 'weight_block_size' is {block!r}.")
    return block[0], block[1]


def _wildcard_pattern(name: str) -> str:
    """Returns the pattern of a name with stars, which stands for all below it too."""
    if name.startswith("re:"):
        return name
    return f"re:{re.escape(name).replace(re.escape('*'), '.*')}(\\..*)?$"


def _read_group(fields: _Fields, group: int) -> int:
    if group == -1:
        return 0
    if group <= 0 or group % 8:
        raise fields.refuse(f"groups of {group} inputs (served: multiples of 8, and -1 for all)")
    return group


_READERS: Mapping[str, Callable[[_Fields], QuantizationConfig]] = {
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "auto-round": _read_auto_round,
    "auto_round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
    "bitsandbytes": _read_bitsandbytes,
}


def reads_method(name: str) -> bool:
    """Return whether a config.json's ``quant_method`` is one that is read here."""
    return name in _READERS
