"""Latent rows (MLA), whatever part of the context keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from vllm.exceptions import ConfigError
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import AttentionSpec, KVQuantMode

# Bytes per cached token of the packed fp8 MLA row: 512 fp8 latents, 4 fp32 scales, 64 bf16 rope
# values; DeepSeek-V4's row: 448 fp8 latents, 64 bf16 rope values, 8 bytes of scales.
_FP8_DS_MLA_ROW_BYTES = 656
_FP8_DS_MLA_V4_ROW_BYTES = 584


def check_latent_mode(mode: KVQuantMode) -> None:
    """Refuse a way of keeping keys and values that latent rows do not have.

    Raises:
        ConfigError: They are kept in int8.
    """
    if mode is not KVQuantMode.NONE:
        raise ConfigError(
            "--kv-cache-dtype int8 keeps keys and values by head, but this model's layers cache "
            "latent rows, of which all heads' are made: use float16, bfloat16 or float32."
        )


@dataclass(frozen=True, kw_only=True)
class LatentRowsSpec(AttentionSpec):
    """Latent rows, one per ``compress_ratio`` tokens: keys and values are the same row.

    Attributes:
        cache_dtype_str: The cache's own type name; "fp8_ds_mla" is a packed row.
        alignment: Pages are padded to a multiple of this many bytes.
        compress_ratio: Tokens per stored row; divides ``block_size``.
        model_version: "deepseek_v4" has its own packed row.
        is_drafter: Whether a drafter fills the rows. A role decides about no layout, so specs that
            differ in roles alone are equal.
        is_indexer: Whether they are an indexer's, which picks the entries to attend to.
        section: Which part of the model the layer belongs to. Windows of different sections share
            no group, so that a section's are blocks of their own.
        lazy_reach: Windows: above 0, the layer may leave out rows that come so many tokens before
            the first output that is read.
    """

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None
    is_drafter: bool = field(default=False, compare=False)
    is_indexer: bool = field(default=False, compare=False)
    section: int = 0
    lazy_reach: int = 0

    @property
    @override
    def serves_drafter(self) -> bool:
        return self.is_drafter

    @property
    @override
    def tokens_per_row(self) -> int:
        return self.compress_ratio

    @property
    def storage_block_size(self) -> int:
        """Rows that one block stores."""
        return self.block_size // self.compress_ratio

    @property
    @override
    def real_page_size_bytes(self) -> int:
        if self.cache_dtype_str == "fp8_ds_mla":
            is_v4 = self.model_version == "deepseek_v4"
            row = _FP8_DS_MLA_V4_ROW_BYTES if is_v4 else _FP8_DS_MLA_ROW_BYTES
        else:
            row = self.num_kv_heads * self.head_size * self.dtype.itemsize
        return self.storage_block_size * row

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, padded and aligned; an explicit padded size is taken as it is."""
        page_bytes = super().page_size_bytes
        if self.alignment is None or self.page_size_padded is not None:
            return page_bytes
        return cdiv(page_bytes, self.alignment) * self.alignment
