"""The Ascend tree's own environment variables, read on every call so that late changes count."""

import os

from vllm.exceptions import ConfigError

REFERENCE_VARIABLE = "VLLM_ASCEND_REFERENCE"
GENERATION_VARIABLE = "VLLM_ASCEND_REFERENCE_GENERATION"
COMPRESSED_BLOCK_VARIABLE = "VLLM_ASCEND_DSV4_COMPRESSED_KV_BLOCK_SIZE"
GRAPH_VARIABLE = "VLLM_ASCEND_DECODE_GRAPHS"
NZ_VARIABLE = "VLLM_ASCEND_WEIGHT_NZ"
TRITON_VARIABLE = "VLLM_ASCEND_TRITON"
# Of no effect where this tree does not run.
DEVICE_VARIABLES = (
    COMPRESSED_BLOCK_VARIABLE,
    GENERATION_VARIABLE,
    GRAPH_VARIABLE,
    NZ_VARIABLE,
    TRITON_VARIABLE,
)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def is_reference_mode() -> bool:
    """Whether CPU tensors stand in for a device.

    Raises:
        ConfigError: The variable is no boolean.
    """
    return _read_flag(REFERENCE_VARIABLE)


def wants_decode_graphs() -> bool:
    """Whether decode steps are captured as ACL graphs. Never run on a device; off by default.

    Raises:
        ConfigError: The variable is no boolean.
    """
    return _read_flag(GRAPH_VARIABLE)


def wants_nz_weights() -> bool:
    """Whether int8 weights are kept in the device's NZ format. Never run; off by default.

    Raises:
        ConfigError: The variable is no boolean.
    """
    return _read_flag(NZ_VARIABLE)


def wants_triton() -> bool:
    """Whether ops without an npu call are the core's Triton kernels. Never run; off by default.

    Raises:
        ConfigError: The variable is no boolean.
    """
    return _read_flag(TRITON_VARIABLE)


def read_reference_generation() -> str | None:
    """Return which generation reference mode is asked to stand for, None if nothing was said."""
    return os.environ.get(GENERATION_VARIABLE, "").strip() or None


def read_compressed_block_size() -> str | None:
    """Return what the operator wrote for the C128 block, None if nothing."""
    return os.environ.get(COMPRESSED_BLOCK_VARIABLE, "").strip() or None


def _read_flag(name: str) -> bool:
    raw = os.environ.get(name, "").strip().lower()
    if raw not in _TRUE + _FALSE:
        raise ConfigError(f"{name}={raw!r} is not a boolean: use 1 or 0.")
    return raw in _TRUE
