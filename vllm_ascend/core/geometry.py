"""DeepSeek-V4's blocks and pages on Ascend, to the byte (torch-free).

For ``--block-size`` bs (tokens of one prefix unit), head 512, index head 128:

    cache           block (tokens)  rows  A2/A3 row            A5 row
    window          bs              bs    512 bf16             640 bytes, see RowFormat
    C4, C128        4 bs, 128 bs    bs    512 bf16             640 bytes
    indexer         4 bs            bs    128 int8 + fp16      128 fp8 + fp32
    C4 state        bs / 16         same  2048 fp32            2048 fp32
    indexer state   bs / 16         same  512 fp32             512 fp32
    C128 state      bs / 4          same  1024 fp32            (bs / 8 tokens)

Kernels see state pages through the tensors of the pages they share a slot with, so a state page is
padded to the size of the row page (or, the indexer's, to that of the indexer page).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v4.kv_cache import (
    SUPPORTED_BLOCK_SIZES,
    entry_block_size,
    state_block_size,
)
from vllm_ascend import envs

C4_RATIO = 4
C128_RATIO = 128

# What kernels take (facts of the device, not of the model).
KERNEL_ROW_MULTIPLE = 16
KERNEL_MAX_ROWS = 1024

_STATE_ITEMSIZE = 4
_C4_STATE_FACTOR = 4  # c and s, two windows of each
_C128_STATE_FACTOR = 2  # c and s


class Generation(StrEnum):
    """Device generations whose page formats differ."""

    A2_A3 = "A2/A3"
    A5 = "A5"


def reference_generation() -> Generation:
    """Return the generation that reference mode stands for: A2/A3 unless the variable says A5.

    Raises:
        ConfigError: It names no generation.
    """
    raw = envs.read_reference_generation()
    if raw is None or raw.upper() in ("A2", "A3", "A2/A3"):
        return Generation.A2_A3
    if raw.upper() == "A5":
        return Generation.A5
    raise ConfigError(f"{envs.GENERATION_VARIABLE}={raw!r} must be A2, A3 or A5.")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Bytes of stored rows on a generation.

    A5's 640 bytes are 512 + 128: 448 fp8 values, the rotary part's 64 bytes free for scales, and
    behind them the 64 rotary values in bf16 (``vllm_ascend.ops.row_formats``).

    Attributes:
        row_itemsize: Bytes per value of window rows and entries.
        rope_extra_itemsize: Bytes a row carries beside its values, per rotary value.
        index_scale_bytes: Bytes of an indexer row's scale; its values take one byte each.
        c128_state_split: The C128 state block is the core's divided by this.
    """

    row_itemsize: int
    rope_extra_itemsize: int
    index_scale_bytes: int
    c128_state_split: int

    def row_bytes(self, head_dim: int, rope_dim: int) -> int:
        """Return the bytes of one window row or entry, ``rope_dim`` of its values rotary."""
        return head_dim * self.row_itemsize + rope_dim * self.rope_extra_itemsize

    def index_row_bytes(self, index_head_dim: int) -> int:
        """Return the bytes of one indexer row, its scale included."""
        return index_head_dim + self.index_scale_bytes


ROW_FORMATS: Mapping[Generation, RowFormat] = MappingProxyType(
    {
        Generation.A2_A3: RowFormat(2, 0, 2, 1),
        Generation.A5: RowFormat(1, 2, 4, 2),
    }
)


@dataclass(frozen=True, slots=True)
class V4Geometry:
    """Block sizes in tokens and page sizes in bytes for one ``--block-size``.

    Attributes:
        unit: ``--block-size``: tokens under one prefix hash, the smallest reusable prefix.
        c4_block, c128_block, window_block, c4_state_block, c128_state_block: Tokens of a block.
        row_page: Bytes of a page of window rows or entries.
        indexer_page: Bytes of a page of index keys with their scales.
        c4_state_page, indexer_state_page, c128_state_page: Bytes that state rows fill.
    """

    generation: Generation
    unit: int
    c4_block: int
    c128_block: int
    window_block: int
    c4_state_block: int
    c128_state_block: int
    row_page: int
    indexer_page: int
    c4_state_page: int
    indexer_state_page: int
    c128_state_page: int


def v4_geometry(
    block_size: int | None,
    generation: Generation = Generation.A2_A3,
    *,
    head_dim: int = 512,
    index_head_dim: int = 128,
    rope_dim: int = 64,
) -> V4Geometry:
    """Return the table's column for a ``--block-size``; None: the variable's, else 32.

    Raises:
        ConfigError: The size is not 32, 64 or 128, or the variable says another one.
    """
    unit = get_dsv4_compressed_kv_block_size(C128_RATIO, block_size)
    layout = ROW_FORMATS[generation]
    c4_state = state_block_size(C4_RATIO, unit, has_overlap=True)
    c128_state = state_block_size(C128_RATIO, unit, has_overlap=False) // layout.c128_state_split
    return V4Geometry(
        generation=generation,
        unit=unit,
        c4_block=entry_block_size(C4_RATIO, unit),
        c128_block=entry_block_size(C128_RATIO, unit),
        window_block=unit,
        c4_state_block=c4_state,
        c128_state_block=c128_state,
        row_page=unit * layout.row_bytes(head_dim, rope_dim),
        indexer_page=unit * layout.index_row_bytes(index_head_dim),
        c4_state_page=c4_state * _C4_STATE_FACTOR * head_dim * _STATE_ITEMSIZE,
        indexer_state_page=c4_state * _C4_STATE_FACTOR * index_head_dim * _STATE_ITEMSIZE,
        c128_state_page=c128_state * _C128_STATE_FACTOR * head_dim * _STATE_ITEMSIZE,
    )


def check_block_size(block_size: int | None) -> int:
    """Return the unit for a ``--block-size``; None means 32.

    Raises:
        ConfigError: It is not 32, 64 or 128.
    """
    if block_size is None:
        return SUPPORTED_BLOCK_SIZES[0]
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ConfigError(
            f"--block-size {block_size} does not fit DeepSeek-V4 on Ascend: use 32, 64 or 128, "
            f"or leave it out ({SUPPORTED_BLOCK_SIZES[0]})."
        )
    return block_size


def get_dsv4_compressed_kv_block_size(compress_ratio: int, block_size: int | None = None) -> int:
    """Return the rows that a block of compressed entries stores.

    Rows are the same at every ratio: that is what gives all row pages one size. The variable
    ``VLLM_ASCEND_DSV4_COMPRESSED_KV_BLOCK_SIZE`` is another way to write ``--block-size`` for the
    C128 entries; it is read for ratio 128 only. Where both are written they must say the same.

    Args:
        compress_ratio: Tokens per entry.
        block_size: ``--block-size``; None: it was not written, so the variable decides, else 32.

    Raises:
        ConfigError: Either value is not 32, 64 or 128, or they differ.
    """
    raw = envs.read_compressed_block_size() if compress_ratio == C128_RATIO else None
    if raw is None:
        return check_block_size(block_size)
    if not raw.isdecimal() or int(raw) not in SUPPORTED_BLOCK_SIZES:
        raise ConfigError(f"{envs.COMPRESSED_BLOCK_VARIABLE}={raw!r} must be 32, 64 or 128.")
    if block_size is not None and check_block_size(block_size) != int(raw):
        raise ConfigError(
            f"--block-size {block_size} and {envs.COMPRESSED_BLOCK_VARIABLE}={raw} disagree: "
            f"unset the variable, or give --block-size {raw}."
        )
    return int(raw)


def check_kernel_rows(rows: int) -> None:
    """Refuse pages that the device's kernels cannot address.

    Raises:
        ConfigError: The rows of a page are no multiple of 16, or above 1024.
    """
    if rows % KERNEL_ROW_MULTIPLE or not 0 < rows <= KERNEL_MAX_ROWS:
        raise ConfigError(
            f"A page of {rows} rows does not suit the NPU's kernels: they take multiples of "
            f"{KERNEL_ROW_MULTIPLE} up to {KERNEL_MAX_ROWS}. Use --block-size 32, 64 or 128."
        )
